"""Doctests of pagecore.interop.jax."""

from __future__ import annotations

import doctest


def test_examples_in_docstrings(interop):
    for name in interop.__all__:
        example = doctest.DocTestParser().get_doctest(getattr(interop, name).__doc__, {}, name, None, 0)
        output: list[str] = []
        doctest.DocTestRunner(verbose=False).run(example, out=output.append)
        assert not output, "".join(output)
