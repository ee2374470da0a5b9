"""The tokens at the beginning of sequences that are in the same blocks, and attention that reads them once."""

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    CrossSpec,
    InvalidSequence,
    PagedKVCache,
    ShapeError,
    SwapSpace,
    UnsupportedOption,
    merge_attention,
    paged_attention,
)

SPEC = AttentionSpec(2, 16, dtype="float32", num_query_heads=6)


def make(layers=SPEC, **options):
    return PagedKVCache(layers, **({"num_blocks": 64, "block_size": 4, "device": "none"} | options))


def computed(cache, tokens, count=None):
    sequence = cache.add_sequence(tokens)
    cache.commit(cache.prepare([sequence], (len(tokens) if count is None else count) - sequence.num_computed_tokens))
    return sequence


def expected(cache, sequences, group=0):
    """Compare the rows of the block table entry by entry."""
    table = cache.block_table(group).numpy().tolist()
    shared = 0
    while sequences and all(each.num_computed_tokens >= (shared + 1) * cache.block_size for each in sequences):
        if len({table[each.row][shared] for each in sequences}) > 1:
            break
        shared += 1
    return shared * cache.block_size


def test_sequences_with_a_cached_prefix_share_its_whole_blocks():
    cache = make()
    sequences = [computed(cache, [*range(10), end, 1, 2, 3]) for end in (100, 101, 102)]
    assert cache.shared_length(sequences) == 8 == expected(cache, sequences)
    assert cache.shared_length(sequences[:1]) == 12
    assert cache.shared_length(sequences[0]) == 12
    assert cache.shared_length([]) == 0
    assert cache.shared_length([*sequences, computed(cache, range(50, 60))]) == 0


def test_a_block_that_is_computed_twice_is_not_shared():
    cache = make()
    sequences = [cache.add_sequence(range(9)) for _ in range(2)]
    cache.commit(cache.prepare(sequences, 9))
    assert cache.shared_length(sequences) == 0


@pytest.mark.parametrize(("length", "shared"), [(0, 0), (3, 0), (4, 4), (5, 4), (8, 8)])
def test_only_whole_blocks_of_computed_tokens_count(length, shared):
    cache = make()
    parent = computed(cache, range(length))
    child = cache.fork(parent)
    assert cache.shared_length([parent, child]) == shared
    cache.append_tokens([parent, child], [[1, 2, 3], [4, 5, 6]])
    batch = cache.prepare([parent, child], 3)
    assert cache.shared_length([parent, child]) == shared
    cache.commit(batch)
    assert cache.shared_length([parent, child]) == shared


def test_a_prefix_that_one_sequence_has_not_computed_is_not_shared():
    cache = make()
    parent = computed(cache, range(12))
    child = cache.fork(parent)
    cache.truncate(child, 6)
    assert cache.shared_length([parent, child]) == 4


def test_random_forks_and_truncations_share_what_their_rows_share():
    random = np.random.default_rng(0)
    cache = make(num_blocks=400)
    sequences = [computed(cache, random.integers(0, 2, 20))]
    for _ in range(60):
        one = sequences[random.integers(len(sequences))]
        match random.integers(4):
            case 0:
                sequences.append(cache.fork(one))
            case 1:
                cache.truncate(one, random.integers(one.num_computed_tokens + 1))
            case 2:
                cache.append_tokens(one, random.integers(0, 2, 3))
                cache.commit(cache.prepare([one], one.num_tokens - one.num_computed_tokens))
            case 3:
                sequences.append(computed(cache, [*one.tokens, 5]))
        for size in (2, 3, len(sequences)):
            chosen = list(random.permutation(sequences)[:size])
            assert cache.shared_length(chosen) == expected(cache, chosen)


def test_groups_with_limits_share_nothing():
    cache = make([SPEC, AttentionSpec(2, 16, window=8), AttentionSpec(2, 16, chunk=8)], num_blocks=64)
    parent = computed(cache, range(7))
    assert [cache.shared_length([parent, cache.fork(parent)], group=group) for group in range(3)] == [4, 0, 0]


def test_what_is_refused():
    cache = make([SPEC, CrossSpec(2, 16, max_tokens=8)], num_blocks=[64, 8])
    sequence = cache.add_sequence(range(4), cross_tokens=0)
    with pytest.raises(UnsupportedOption, match="group 1 has cross-attention layers"):
        cache.shared_length([sequence], group=1)
    with pytest.raises(ShapeError, match="group"):
        cache.shared_length([sequence], group=2)
    with pytest.raises(InvalidSequence, match="listed twice"):
        cache.shared_length([sequence, sequence])
    with pytest.raises(InvalidSequence, match="belongs to another cache"):
        make().shared_length([sequence])
    own = PagedKVCache(SPEC, num_blocks=9)
    swapped = computed(own, range(4))
    own.swap_out([swapped], SwapSpace(own, num_blocks=9))
    with pytest.raises(InvalidSequence, match="is swapped out; swap it in first"):
        own.shared_length(swapped)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_shared_part_and_the_rest_merge_to_the_whole(block_size):
    random = np.random.default_rng(block_size)
    cache = PagedKVCache(SPEC, num_blocks=400, block_size=block_size)

    def numbers(tokens, heads):
        return random.normal(size=(tokens, heads, 16)).astype(np.float32)

    first = cache.add_sequence(range(50))
    sequences = [first]
    for sequence in sequences:
        with cache.prepare([sequence], sequence.num_tokens - sequence.num_computed_tokens) as batch:
            cache.write(0, numbers(batch.num_tokens, 2), numbers(batch.num_tokens, 2), batch)
            cache.commit(batch)
        if len(sequences) < 4:
            sequences.append(cache.add_sequence([*range(50), *range(100, 100 + 9 * len(sequences))]))
    cache.append_tokens(sequences, [7, 8, 9, 10])
    shared = cache.shared_length(sequences)
    assert shared == 50 // block_size * block_size

    with cache.prepare(sequences, 1) as batch:
        query = numbers(4, 6)
        cache.write(0, numbers(4, 2), numbers(4, 2), batch)
        caches, table, rows = [cache.key(0), cache.value(0)], np.asarray(cache.block_table()), np.asarray(batch.rows)
        whole = {"cu_query_lens": [0, 4], "causal": False, "return_lse": True}
        head = paged_attention(query, *caches, table, [shared], rows=rows[:1], **whole)
        rest = table[:, shared // block_size :]
        tail = paged_attention(query, *caches, rest, np.asarray(batch.seq_lens) - shared, rows=rows, return_lse=True)
        np.testing.assert_allclose(merge_attention(*head, *tail)[0], cache.attend(0, query, batch), atol=2e-6)
        cache.commit(batch)
