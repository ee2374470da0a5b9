"""Sequences: growth, forks, rejected tokens, truncation and removal."""

import numpy as np
import pytest

from pagecore import (
    InvalidSequence,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from tests.cache.caches import SPEC, WINDOWED, advance, make, normal
from tests.reference.dense import dense_attention


def test_worked_example_2_sequences_take_blocks_as_they_grow():
    cache = make()
    seven = cache.add_sequence(range(7))
    advance(cache, [seven], 7)
    assert seven.capacity == 8
    assert cache.num_available == 14
    three = cache.add_sequence(range(3))
    advance(cache, [three], 3)
    assert three.capacity == 4
    advance(cache, [three], 1)
    assert three.capacity == 4
    advance(cache, [three], 1)
    assert three.capacity == 8


def test_forks_share_blocks_until_one_of_them_writes():
    cache = make()
    parent = cache.add_sequence(range(6))
    batch = cache.prepare([parent], 6)
    key = normal(6, 2, 8)
    cache.write(0, key, key, batch)
    cache.commit(batch)
    child = cache.fork(parent, id="child")
    assert cache.num_available == 14
    assert child.tokens.tolist() == parent.tokens.tolist()
    batch = cache.prepare([parent, child], 1)
    assert cache.num_available == 13
    assert cache.stats().num_copied_blocks == 1
    new = normal(2, 2, 8, seed=3)
    cache.write(0, new, new, batch)
    query = normal(2, 4, 8, seed=4)
    found = cache.attend(0, query, batch)
    for i in range(2):
        own = np.concatenate([key, new[i : i + 1]])
        np.testing.assert_allclose(found[i], dense_attention(query[i : i + 1], own, own)[0], atol=1e-5)
    cache.commit(batch)
    cache.check_invariants()


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_a_batch_lists_the_blocks_that_its_step_copies(device):
    """The owner of the bytes of a cache with device="none" must copy them."""
    cache = make(device=device)
    parent = cache.add_sequence(range(6))
    batch = cache.prepare([parent], 6)
    assert batch.copied_blocks(0).tolist() == []
    cache.commit(batch)
    child = cache.fork(parent)
    shared = cache.block_table().numpy()[parent.row, 1]
    batch = cache.make_batch(2)
    cache.prepare([parent, child], 1, out=batch)
    ((source, target),) = batch.copied_blocks(0).tolist()
    assert source == shared
    assert {source, target} == set(cache.block_table().numpy()[[parent.row, child.row], 1].tolist())
    cache.commit(batch)
    cache.prepare([parent, child], 1, out=batch)
    assert batch.copied_blocks(0).shape == (0, 2)
    with pytest.raises(ShapeError, match="layer is 7"):
        batch.copied_blocks(7)


def test_rejected_tokens_keep_their_capacity():
    cache = make()
    sequence = cache.add_sequence(range(4))
    advance(cache, [sequence], 4)
    batch = cache.prepare([sequence], 9)
    cache.commit(batch, accepted=[1])
    assert sequence.num_computed_tokens == 5
    assert sequence.capacity == 16
    free = cache.num_available
    advance(cache, [sequence], 9)
    assert cache.num_available == free


def test_an_abandoned_step_leaves_no_trace():
    cache = make([SPEC, WINDOWED])
    sequence = cache.add_sequence(range(10))
    advance(cache, [sequence], 5)
    before = (cache.stats(), sequence.capacity)
    batch = cache.prepare([sequence], 5)
    assert cache.stats() != before[0]
    cache.abandon(batch)
    assert (cache.stats(), sequence.capacity) == before
    assert sequence.num_computed_tokens == 5
    assert np.asarray(cache.prepare([sequence], 5).positions)[0] == 5


def test_a_window_releases_blocks_that_no_query_sees():
    cache = make([SPEC, WINDOWED], num_blocks=[17, 4], max_tokens_per_sequence=64)
    sequence = cache.add_sequence(range(40))
    for _ in range(40):
        advance(cache, [sequence], 1)
    stats = cache.stats()
    assert stats.num_used_blocks == 10 + 2
    table = np.asarray(cache.prepare([sequence], 0).group(1).block_table)[sequence.row]
    assert (table[:8] == 0).all()
    assert (table[8:10] > 0).all()


def test_truncate_below_a_released_window_is_refused_and_to_zero_is_not():
    cache = make([SPEC, WINDOWED])
    sequence = cache.add_sequence(range(30))
    advance(cache, [sequence], 30)
    before = cache.stats()
    with pytest.raises(UnsupportedOption, match="window of 6"):
        cache.truncate(sequence, 20)
    assert cache.stats() == before
    cache.truncate(sequence, 29)
    cache.truncate(sequence, 0)
    assert cache.stats().num_used_blocks == 0


def test_sequences_are_truncated_together_or_not_at_all():
    cache = make([SPEC, WINDOWED])
    long, short = cache.add_sequence(range(30)), cache.add_sequence(range(50, 56))
    advance(cache, [long, short], [30, 6])
    fork = cache.fork(short)
    before = cache.stats()
    for lengths, error in (
        ([20, 2, 2], UnsupportedOption),
        ([29, 7, 2], ShapeError),
        ([29, 2], ShapeError),
        (10**5000, ShapeError),
    ):
        with pytest.raises(error, match="length"):
            cache.truncate([long, short, fork], lengths)
        assert cache.stats() == before
    cache.truncate([long, short, fork], np.asarray([29, 5, 0]))
    assert [sequence.num_computed_tokens for sequence in (long, short, fork)] == [29, 5, 0]
    cache.check_invariants()
    cache.truncate([long, short, fork], np.asarray(0))
    assert cache.stats().num_used_blocks == 0


def test_computed_tokens_without_ids_are_truncated():
    cache = make()
    sequence = cache.add_sequence(())
    advance(cache, [sequence], 10)
    with pytest.raises(ShapeError, match="has 10 tokens"):
        cache.truncate(sequence, 11)
    cache.truncate(sequence, 7)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (0, 7)
    advance(cache, [sequence], 3)
    cache.check_invariants()


def test_ids_may_come_after_their_step():
    cache = make()
    sequences = [cache.add_sequence([1, 2]), cache.add_sequence([3])]
    advance(cache, sequences, [2, 1])
    batch = cache.prepare(sequences, 1)
    assert sequences[0].num_tokens == 2
    cache.append_tokens(sequences, np.array([7, 8]))
    cache.commit(batch)
    assert sequences[0].num_computed_tokens == 3
    cache.append_tokens(sequences, [[9, 10], []])
    assert sequences[0].tokens.tolist() == [1, 2, 7, 9, 10]
    assert sequences[1].tokens.tolist() == [3, 8]


def test_the_first_ids_of_each_row_of_a_table_become_known():
    cache, choice = make(), np.random.default_rng(3)
    sequences = [cache.add_sequence([number]) for number in range(4)]
    known = [[number] for number in range(4)]
    for kind in (np.int32, np.int64, np.int32):
        table, counts = choice.integers(0, 999, (4, 3)).astype(kind), choice.permutation(4)
        cache.append_tokens(sequences, table if kind == np.int64 else np.asfortranarray(table), counts)
        for ids, row, count in zip(known, table.tolist(), counts, strict=True):
            ids.extend(row[:count])
    cache.append_tokens(sequences[0], np.array([[5, 6]]), [1])
    known[0].append(5)
    assert [sequence.tokens.tolist() for sequence in sequences] == known


@pytest.mark.parametrize(
    ("ids", "counts", "error", "message"),
    [
        (np.zeros((2, 3), int), [1, 4], ShapeError, r"counts\[1\] is 4; a row has 3 ids: give 0 to 3"),
        (np.zeros((2, 3), int), [1, -1], ShapeError, r"counts\[1\] is -1"),
        (np.zeros((2, 3), int), [1], ShapeError, r"ids has shape \(2, 3\), and there are 1 counts; expected 2 rows"),
        (np.zeros((2, 3), int), 1, ShapeError, "there are 1 counts; expected 2 rows and counts"),
        (np.zeros((3, 3), int), [1, 1, 1], ShapeError, r"ids has shape \(3, 3\)"),
        (np.zeros((2, 3), int), [1.0, 2.0], UnsupportedDtype, "counts have dtype float64"),
        (np.zeros((2, 3)), [1, 2], UnsupportedDtype, "token ids have dtype float64"),
        (np.full((2, 3), 2**31), [1, 1], ShapeError, "token id 2147483648 does not fit 32 bits"),
        ([[1, 2], [3, 4]], [1, 2], ShapeError, r"ids is not an array \[2, k\]; leave counts out"),
        (np.zeros(2, int), [1, 1], ShapeError, r"ids is not an array \[2, k\]"),
    ],
)
def test_counts_that_do_not_fit_a_table_are_refused_and_nothing_becomes_known(ids, counts, error, message):
    cache = make()
    sequences = [cache.add_sequence([1, 2]), cache.add_sequence([3])]
    with pytest.raises(error, match=message):
        cache.append_tokens(sequences, ids, counts)
    assert [sequence.num_tokens for sequence in sequences] == [2, 1]


def test_reorder_makes_beams_copies_of_their_parents():
    cache = make()
    beams = [cache.add_sequence([i] * 5, id=i) for i in range(3)]
    advance(cache, beams, 5)
    cache.reorder(beams, [beams[2], beams[0], beams[0]])
    assert [beam.tokens[0] for beam in beams] == [2, 0, 0]
    assert cache.stats().num_used_blocks == 4
    cache.check_invariants()


def test_a_sequence_is_a_context_manager():
    cache = make()
    with cache.add_sequence(range(5)) as sequence:
        advance(cache, [sequence], 5)
        assert cache.num_available == 14
    assert cache.num_available == 16
    with pytest.raises(InvalidSequence, match="removed"):
        _ = sequence.capacity
    with cache.add_sequence(range(5)) as sequence:
        cache.remove(sequence)


def test_a_sequence_may_be_removed_while_its_step_is_in_flight():
    cache = make()
    stays, goes = cache.add_sequence(range(4)), cache.add_sequence(range(4))
    batch = cache.prepare([stays, goes], 4)
    cache.remove(goes)
    newcomer = cache.add_sequence(range(2))
    cache.commit(batch)
    assert stays.num_computed_tokens == 4
    assert newcomer.num_computed_tokens == 0
    cache.check_invariants()


def first_values(cache, sequence):
    """Return the first element of each computed token's value in layer 0."""
    values = cache.value(0).numpy()
    blocks = cache.make_batch().group(0).block_table.numpy()[sequence.row]
    return [values[blocks[at // 4], at % 4, 0, 0].item() for at in range(sequence.num_computed_tokens)]


def write_full(cache, batch, number):
    filled = np.full((batch.num_tokens, 2, 8), number, np.float32)
    cache.write(0, filled, filled, batch)


@pytest.mark.parametrize("layers", [SPEC, [SPEC, WINDOWED]], ids=["one group", "two groups"])
def test_a_step_writes_nothing_for_a_sequence_that_was_removed_in_flight(layers):
    cache = make(layers)
    stays, goes, last = (cache.add_sequence(range(6)) for _ in range(3))
    late = cache.prepare([stays, goes, last], [3, 5, 2])
    cache.remove(goes)
    newcomer = cache.add_sequence(range(8))
    batch = cache.prepare([newcomer], 8)
    write_full(cache, batch, 7.0)
    cache.commit(batch)
    assert np.asarray(late.group(0).slot_mapping)[3:8].tolist() == [-1] * 5
    write_full(cache, late, 1.0)
    cache.commit(late)
    assert first_values(cache, newcomer) == [7.0] * 8
    assert first_values(cache, stays) == [1.0] * 3
    assert first_values(cache, last) == [1.0] * 2


def test_a_stale_batch_is_refused_after_abandon_and_its_slots_are_padding():
    cache = make()
    failed = cache.prepare([cache.add_sequence(range(4))], 4)
    cache.abandon(failed)
    newcomer = cache.add_sequence(range(4))
    batch = cache.prepare([newcomer], 4)
    write_full(cache, batch, 7.0)
    cache.commit(batch)
    with pytest.raises(InvalidSequence, match="no step in flight"):
        write_full(cache, failed, 1.0)
    assert np.asarray(failed.group(0).slot_mapping).tolist() == [-1] * 4
    assert first_values(cache, newcomer) == [7.0] * 4


@pytest.mark.parametrize(
    "name",
    [float("nan"), (1, "a"), frozenset([1]), b"x", "", object()],
    ids=["nan", "tuple", "frozenset", "bytes", "empty", "object"],
)
def test_any_hashable_names_a_sequence(name):
    cache = make()
    with cache.add_sequence([1, 2], id=name) as sequence:
        assert sequence.id is name
        cache.check_invariants()
        with pytest.raises(InvalidSequence, match="is already in the cache"):
            cache.add_sequence([1], id=name)
    assert cache.num_sequences == 0


@pytest.mark.parametrize("name", [[1], {}, np.zeros(2)], ids=repr)
def test_an_unhashable_id_is_refused_and_takes_no_row(name):
    cache = make(max_sequences=2)
    sequence = cache.add_sequence([1])
    for call in (lambda: cache.add_sequence([1], id=name), lambda: cache.fork(sequence, id=name)):
        with pytest.raises(InvalidSequence, match="hashed"):
            call()
    assert cache.num_sequences == 1
    cache.add_sequence([2])


def test_sequences_may_come_from_an_iterator():
    cache = make()
    beams = [cache.add_sequence([i] * 5) for i in range(2)]
    assert cache.shortage(iter(beams), 5) == 0
    cache.commit(cache.prepare(iter(beams), 5))
    cache.reorder(iter(beams), reversed(beams))
    assert [beam.tokens[0] for beam in beams] == [1, 0]
    for use in (lambda: cache.prepare(beams[:1] * 2, 1), lambda: cache.reorder(beams[:1] * 2, beams)):
        with pytest.raises(InvalidSequence, match="sequence 0 is listed twice"):
            use()
