"""The examples in docstrings of public names give the shown output."""

import doctest

import pytest

import pagecore

NAMES = [name for name in pagecore.__all__ if ">>>" in (getattr(pagecore, name).__doc__ or "")]


def test_the_main_entry_points_have_an_example():
    assert {"BlockPool", "BlockTables", "write_kv", "paged_attention", "plan_attention"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_example_gives_the_shown_output(name):
    text = getattr(pagecore, name).__doc__
    example = doctest.DocTestParser().get_doctest(text, dict(vars(pagecore)), name, None, 0)
    said = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)
