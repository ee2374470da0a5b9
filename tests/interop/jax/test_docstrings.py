"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest


def test_the_examples_in_docstrings_give_what_they_say(interop):
    for name in interop.__all__:
        example = doctest.DocTestParser().get_doctest(getattr(interop, name).__doc__, {}, name, None, 0)
        said: list[str] = []
        doctest.DocTestRunner(verbose=False).run(example, out=said.append)
        assert not said, "".join(said)
