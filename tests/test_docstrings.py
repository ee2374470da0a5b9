"""The examples in docstrings of public names give what they say."""

import doctest

import pytest

import pagecore

NAMES = [name for name in pagecore.__all__ if ">>>" in (getattr(pagecore, name).__doc__ or "")]


def test_the_ways_in_have_an_example():
    assert {"BlockPool", "BlockTables", "write_kv", "paged_attention", "plan_attention"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_example_gives_what_it_says(name):
    text = getattr(pagecore, name).__doc__
    example = doctest.DocTestParser().get_doctest(text, dict(vars(pagecore)), name, None, 0)
    said = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)
