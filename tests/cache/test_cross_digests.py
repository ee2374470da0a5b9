"""Digests of encoder outputs: which sequences share an output, and whose blocks are published."""

import numpy as np
import pytest

from pagecore import CrossSpec, InvalidSequence, ShapeError, SwapSpace, UnsupportedDtype
from tests.cache.caches import SPEC
from tests.cache.cross_caches import encode, expect_seen, make


def test_a_sequence_with_the_digest_of_another_does_not_write_again():
    cache = make()
    first = cache.add_sequence(range(6), cross_tokens=10, cross_digest=b"a")
    stored = encode(cache, first, 6, 1)
    second = cache.add_sequence(range(6), cross_tokens=10, cross_digest=b"a")
    assert second.is_cross_written
    assert second.num_cached_tokens == 4
    other = cache.add_sequence(range(6), cross_tokens=10, cross_digest=b"b")
    assert not other.is_cross_written
    assert other.num_cached_tokens == 0, "the decoder's keys depend on the encoder output"
    cache.remove(first)
    expect_seen(cache, [second], [stored], count=2)
    cache.remove(second)
    third = cache.add_sequence(range(6), cross_tokens=10, cross_digest=b"a")
    assert not third.is_cross_written, "freed with its last holder"
    assert third.num_cached_tokens == 4, "the prefix of the decoder is cached"
    assert cache.match_length(range(6), cross_digest=b"a") == 4
    assert cache.match_length(range(6), cross_digest=b"b") == cache.match_length(range(6)) == 0
    cache.check_invariants()


@pytest.mark.parametrize("digest", [True, 1.5, "a", [1]])
def test_a_digest_of_a_wrong_type_finds_and_evicts_no_prefix(digest):
    cache = make()
    for call in (cache.match_length, cache.evict_prefix):
        with pytest.raises(UnsupportedDtype, match=r"cross_digest is a .*; expected bytes or an int"):
            call(range(6), cross_digest=digest)


def test_digests_of_other_namespaces_and_types_are_others():
    cache = make(num_blocks=[17, 30], max_sequences=8)
    sequences = [
        cache.add_sequence(range(3), cross_tokens=5, cross_digest=digest, namespace=namespace)
        for digest, namespace in ((1, None), (b"1", None), (1, "adapter"), (1, None), (1, "adapter"))
    ]
    batch = cache.prepare(sequences, 3)
    assert np.asarray(batch.cross.new_lens).tolist() == [5, 5, 5, 0, 0]
    assert batch.cross.num_tokens == 15
    rows = np.asarray(batch.cross.rows).tolist()
    assert rows[0] == rows[3]
    assert rows[2] == rows[4]
    assert len(set(rows)) == 3
    cache.commit(batch)
    cache.check_invariants()


def test_without_a_digest_nothing_is_reused_or_published():
    cache = make()
    first = cache.add_sequence(range(9), cross_tokens=5)
    encode(cache, first, 9, 1)
    cache.remove(first)
    assert cache.add_sequence(range(9), cross_tokens=5).num_cached_tokens == 0
    assert cache.stats().num_cached_blocks == 0


@pytest.mark.parametrize("copied", [False, True])
def test_without_a_digest_nothing_is_published_after_all_tokens_were_forgotten(copied):
    cache = make()
    sequence = cache.add_sequence(range(9), cross_tokens=5)
    encode(cache, sequence, 9, seed=1)
    if copied:
        sequence = cache.fork(sequence)
    cache.truncate(sequence, 0)
    cache.append_tokens([sequence], [range(9)])
    cache.commit(cache.prepare([sequence], 9))
    cache.remove(sequence)
    assert cache.match_length(range(9)) == 0  # as prompts without an encoder's input would find it
    cache.check_invariants()


def test_encoder_tokens_can_be_set_after_the_sequence_was_added():
    cache = make()
    sequence = cache.add_sequence(range(5))
    assert sequence.num_cross_tokens is None
    before = cache.stats()
    with pytest.raises(ShapeError, match=r"no number of encoder tokens.*set_cross_tokens"):
        cache.prepare([sequence], 5)
    assert cache.stats() == before
    cache.set_cross_tokens(sequence, 7)
    stored = encode(cache, sequence, 4, 1)
    expect_seen(cache, [sequence], [stored])
    with pytest.raises(ShapeError, match="has 7 encoder tokens, which are set once"):
        cache.set_cross_tokens(sequence, 7)


@pytest.mark.parametrize("swapped", ["bfloat16", None])
@pytest.mark.parametrize("is_truncated", [False, True])
def test_what_is_computed_from_a_rounded_output_is_not_published(swapped, is_truncated):
    """The output is in the space of the last sequence that was swapped out."""
    cache = make()
    exact, rounding = SwapSpace(cache, num_blocks=9), SwapSpace(cache, num_blocks=9, dtype=swapped)
    first, second = (cache.add_sequence(range(6), cross_tokens=5, cross_digest=b"a") for _ in range(2))
    encode(cache, first, 6, seed=1)
    cache.commit(cache.prepare([second], 6))
    cache.swap_out(first, exact)
    cache.swap_out(second, rounding)
    cache.clear_prefix_cache()
    for sequence in (first, second):
        cache.swap_in(sequence)
        if is_truncated:
            cache.truncate(sequence, 0)
            cache.append_tokens([sequence], [range(6)])
        cache.append_tokens([sequence], [range(6, 12)])
        cache.commit(cache.prepare([sequence], sequence.num_tokens - sequence.num_computed_tokens))
    cache.check_invariants()
    assert cache.match_length(range(12), cross_digest=b"a") == (0 if swapped else 8)


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}])
@pytest.mark.parametrize("heir", ["itself", "fork", "reorder"])
def test_an_output_that_is_set_later_belongs_to_the_namespace_of_its_sequence(options, heir):
    cache = make(**options)
    sequence = cache.add_sequence(range(3), namespace="adapter")
    if heir == "fork":
        sequence = cache.fork(sequence)
    elif heir == "reorder":
        parent, sequence = sequence, cache.add_sequence(range(3))
        cache.reorder([sequence], [parent])
    cache.set_cross_tokens(sequence, 5, digest=1)
    encode(cache, sequence, 3, seed=1)
    for namespace, is_shared in ((None, False), ("adapter", True)):
        with cache.add_sequence(range(3), cross_tokens=5, cross_digest=1, namespace=namespace) as other:
            assert other.is_cross_written == is_shared
        late = cache.add_sequence(range(3), namespace=namespace)
        cache.set_cross_tokens(late, 5, digest=1)
        assert late.is_cross_written == is_shared
        cache.remove(late)


def test_prompts_without_an_encoder_input_share_their_prefixes_with_one_another_alone():
    cache = make([SPEC, CrossSpec(2, 8, dtype="float32", num_query_heads=4, max_tokens=8)], num_blocks=[33, 9])
    for options in ({"cross_tokens": 0}, {"cross_tokens": 5}, {"cross_tokens": 6, "cross_digest": b"a"}):
        with cache.add_sequence(range(9), **options) as sequence:
            cache.commit(cache.prepare([sequence], 9))
    child = cache.fork(cache.add_sequence(range(9), cross_tokens=0))
    late = cache.add_sequence(range(9))
    cache.set_cross_tokens(late, 0)
    assert (child.num_cached_tokens, late.num_cached_tokens) == (8, 0)
    assert cache.match_length(range(9)) == cache.match_length(range(9), cross_digest=b"a") == 8
    assert cache.match_length(range(9), namespace=1) == 0
    for options, length in (
        ({"cross_tokens": 0, "namespace": 1}, 0),
        ({"cross_tokens": 5}, 0),
        ({"cross_tokens": 0, "max_tokens": 4}, 4),
    ):
        with cache.add_sequence(range(9), **options) as sequence:
            assert sequence.num_cached_tokens == length
    space = SwapSpace(cache, num_blocks=[9, 9])
    cache.swap_out([child], space)
    cache.swap_in([child])
    cache.commit(cache.prepare([child, late], [1, 9]))
    assert cache.evict_prefix(range(9)) == 0
    cache.check_invariants()


def test_a_content_is_written_by_one_step_at_a_time():
    cache = make()
    first, second = (cache.add_sequence(range(3), cross_tokens=5, cross_digest=7) for _ in range(2))
    batch = cache.prepare([first], 3)
    with pytest.raises(InvalidSequence, match="being written by a step in flight"):
        cache.prepare([second], 3)
    with pytest.raises(InvalidSequence, match="being written by a step in flight"):
        cache.reorder([second], [second])
    cache.remove(first)
    cache.check_invariants()
    assert np.asarray(batch.group(1).slot_mapping).tolist() != [-1] * 5, "the second sequence holds the output"
    cache.remove(second)
    assert np.asarray(batch.group(1).slot_mapping).tolist() == [-1] * 5, "its blocks may have new owners"
    cache.commit(batch)
    cache.check_invariants()
    assert cache.stats().num_used_blocks == 0
