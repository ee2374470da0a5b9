"""Lookup of sequences by id."""

import pytest

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.storage import AttentionSpec


@pytest.fixture
def cache():
    return PagedKVCache(AttentionSpec(1, 8), num_blocks=9, device="none")


def test_a_sequence_is_found_by_its_given_or_default_id(cache):
    name = object()
    named, numbered = cache.add_sequence([1, 2], name), cache.add_sequence([1, 2])
    assert cache.sequences.get(name) is named
    assert cache.sequences[numbered.id] is numbered
    assert cache.sequences.get("another") is None
    assert list(cache.sequences) == [name, numbered.id]


def test_a_swapped_sequence_is_found_and_a_removed_one_is_not(cache):
    sequence = cache.add_sequence(range(20), "long")
    cache.commit(cache.prepare([sequence], 20))
    cache.swap_out(sequence, SwapSpace(cache, num_blocks=5))
    assert cache.sequences["long"] is sequence
    cache.remove(sequence)
    assert "long" not in cache.sequences
    assert len(cache.sequences) == 0


def test_a_fork_is_found(cache):
    parent = cache.add_sequence([1, 2, 3])
    assert cache.sequences.get("child") is None
    assert cache.fork(parent, "child") is cache.sequences["child"]


def test_the_mapping_is_read_only(cache):
    with pytest.raises(TypeError):
        cache.sequences["mine"] = cache.add_sequence([1])
