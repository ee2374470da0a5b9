"""Sequences found by their id."""

import pytest

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.errors import InvalidSequence
from pagecore.storage import AttentionSpec


@pytest.fixture
def cache():
    return PagedKVCache(AttentionSpec(1, 8), num_blocks=9, device="none")


def test_a_sequence_is_found_by_the_id_that_it_was_given_or_got(cache):
    name = object()
    named, numbered = cache.add_sequence([1, 2], name), cache.add_sequence([1, 2])
    assert cache.find_sequence(name) is named
    assert cache.find_sequence(numbered.id) is numbered
    assert cache.find_sequence("another") is None


def test_a_swapped_sequence_is_found_and_a_removed_one_is_not(cache):
    sequence = cache.add_sequence(range(20), "long")
    cache.commit(cache.prepare([sequence], 20))
    cache.swap_out(sequence, SwapSpace(cache, num_blocks=5))
    assert cache.find_sequence("long") is sequence
    cache.remove(sequence)
    assert cache.find_sequence("long") is None


def test_a_fork_is_found(cache):
    parent = cache.add_sequence([1, 2, 3])
    assert cache.find_sequence("child") is None
    assert cache.fork(parent, "child") is cache.find_sequence("child")


def test_an_id_that_cannot_be_hashed_is_refused(cache):
    with pytest.raises(InvalidSequence, match="expected a hashable id, got \\[\\]"):
        cache.find_sequence([])
