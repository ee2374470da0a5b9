"""Sequences that leave for a swap space: what comes back, what is given up, what is refused."""

import gc
import itertools
import weakref

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    InvalidSequence,
    KVLayout,
    NotEnoughMemory,
    OutOfBlocks,
    OutOfRows,
    Plane,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.cache import PagedKVCache, SwapSpace, swapping
from tests.cache.caches import SPEC, WINDOWED, advance, make, normal
from tests.reference.dense import dense_attention

POISON = 777.0


def fill(cache, sequences, counts, seed=0):
    """A step that writes random key and value in every layer."""
    batch = cache.prepare(sequences, counts)
    for layer in range(cache.num_layers):
        key, value = (
            normal(batch.num_tokens, *side.shape[2:], seed=(seed, layer, part))
            for part, side in enumerate((cache.key(layer), cache.value(layer)))
        )
        cache.write(layer, key, value, batch)
    cache.commit(batch)


def content(cache, sequence):
    """The bytes of each block of a sequence, in each plane of each layer; None for a hole."""
    tables = [cache.make_batch().group(layer).block_table.numpy() for layer in range(cache.num_layers)]
    count = -(-sequence.num_computed_tokens // cache.block_size)
    return [
        [plane.numpy()[block].tobytes() if block else None for block in table[sequence.row, :count]]
        for layer, table in enumerate(tables)
        for plane in (cache.key(layer), cache.value(layer))
    ]


def poison(cache):
    """Overwrite every block that nobody holds."""
    for pools, kv_pools in ((cache._block_pools, cache._store.pools), *spaces(cache)):
        for pool, kv_pool in zip(pools, kv_pools, strict=True):
            free = pool.ref_counts() == 0
            free[0] = False
            for plane in kv_pool.planes():
                plane.numpy()[free] = np.asarray(POISON).astype(plane.numpy().dtype)


def spaces(cache):
    return [(space._block_pools, space._kv_pools) for space in cache._swap_spaces]


def occupied(cache):
    """As make, with some blocks taken, so that ids are not those of a fresh pool."""
    sequence = cache.add_sequence(range(9))
    advance(cache, [sequence], 9)
    return sequence


LAYOUTS = ["layerwise", "blockwise", KVLayout("layerwise", heads="NHD"), "BNCHD"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_comes_back_is_the_same_to_the_bit(layout, dtype):
    spec = AttentionSpec(2, 8, dtype=dtype)
    cache = make([spec, AttentionSpec(2, 8, dtype=dtype, window=6), spec], num_blocks=[30, 17])
    space = SwapSpace(cache, num_blocks=20, layout=layout)
    occupied(cache)
    sequences = [cache.add_sequence(range(64)) for _ in range(2)]
    for length in (3, 4, 5, 13):
        fill(cache, sequences, length, seed=length)
    before = [content(cache, sequence) for sequence in sequences]
    cache.swap_out(sequences, space)
    cache.check_invariants()
    poison(cache)
    other = cache.add_sequence(range(30))
    fill(cache, [other], 30, seed=99)
    cache.swap_in(sequences[::-1])
    poison(cache)
    assert [content(cache, sequence) for sequence in sequences] == before
    assert space.num_used_blocks == 0
    cache.check_invariants()


def test_nans_with_a_payload_and_negative_zeros_come_back():
    cache = make(AttentionSpec(1, 4, dtype="float32"))
    space = SwapSpace(cache, num_blocks=17)
    sequence = cache.add_sequence(range(8))
    advance(cache, [sequence], 8)
    bits = np.random.default_rng(0).integers(0, 2**32, cache.key(0).shape, dtype=np.uint32)
    bits[1, 0, 0] = 0x7FA00001, 0xFFC12345, 0x80000000, 0x00000001
    cache.key(0).numpy().view(np.uint32)[:] = bits
    before = content(cache, sequence)
    cache.swap_out([sequence], space)
    poison(cache)
    cache.swap_in([sequence])
    assert content(cache, sequence) == before


def test_attention_goes_on_as_if_nothing_had_been():
    cache = make([SPEC, WINDOWED])
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(64))
    stored = []
    for step in range(8):
        batch = cache.prepare([sequence], 3)
        key, query = normal(3, 2, 8, seed=step), normal(3, 4, 8, seed=step + 100)
        stored.append(key)
        for layer, window in ((0, None), (1, 6)):
            cache.write(layer, key, 2 * key, batch)
            keys = np.concatenate(stored)
            expected = dense_attention(query, keys, 2 * keys, window=window)
            np.testing.assert_allclose(cache.attend(layer, query, batch), expected, atol=1e-5)
        cache.commit(batch)
        cache.swap_out([sequence], space)
        poison(cache)
        cache.swap_in([sequence])
        poison(cache)


def test_a_swapped_sequence_keeps_what_it_knows_and_gives_up_what_it_holds():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(20), id="long")
    cache.commit(cache.prepare([sequence], 20), accepted=[6])
    assert sequence.capacity == 20
    cache.swap_out([sequence], space)
    assert (cache.num_available, space.num_available) == (16, 6)
    assert (sequence.is_swapped, sequence.swap_space, sequence.row, sequence.capacity) == (True, space, -1, 0)
    assert (sequence.id, sequence.num_tokens, sequence.num_computed_tokens) == ("long", 20, 6)
    assert sequence.tokens.tolist() == list(range(20))
    assert "swapped out" in repr(sequence)
    cache.append_tokens([sequence], [20])
    cache.swap_in([sequence])
    assert (sequence.is_swapped, sequence.swap_space, sequence.capacity) == (False, None, 8)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (21, 6)
    advance(cache, [sequence], 15)
    cache.check_invariants()


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8])
def test_any_length_goes_and_comes(length):
    cache = make([SPEC, WINDOWED])
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(12))
    fill(cache, [sequence], length)
    before = content(cache, sequence)
    cache.swap_out(sequence, space)
    assert space.num_sequences == 1
    poison(cache)
    cache.swap_in(sequence)
    assert content(cache, sequence) == before
    assert sequence.num_computed_tokens == length
    fill(cache, [sequence], 12 - length)
    cache.check_invariants()


def test_holes_of_a_window_stay_holes_and_take_no_block():
    cache = make([SPEC, WINDOWED], num_blocks=[17, 5], max_tokens_per_sequence=64)
    space = SwapSpace(cache, num_blocks=[17, 3])
    sequence = cache.add_sequence(range(40))
    for _ in range(20):
        advance(cache, [sequence], 2)
    assert cache.stats().num_used_blocks == 10 + 2
    cache.swap_out([sequence], space)
    assert space.num_used_blocks == 12
    assert space.num_available == 0
    cache.swap_in([sequence])
    table = cache.make_batch().group(1).block_table.numpy()[sequence.row]
    assert (table[:8] == 0).all()
    assert (table[8:10] > 0).all()
    with pytest.raises(UnsupportedOption, match="window of 6"):
        cache.truncate(sequence, 20)


def test_blocks_shared_among_the_listed_are_stored_once_and_shared_again():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = cache.add_sequence(range(10))
    fill(cache, [parent], 10)
    forks = [parent, cache.fork(parent), cache.fork(parent)]
    before = content(cache, parent)
    cache.swap_out(forks, space)
    assert (cache.num_available, space.num_used_blocks) == (16, 3)
    cache.check_invariants()
    poison(cache)
    cache.swap_in(forks)
    assert cache.num_available == 13
    assert [content(cache, one) for one in forks] == [before] * 3
    fill(cache, forks, 1)  # each writes a block of its own
    assert cache.num_available == 11
    assert len({content(cache, one)[0][2] for one in forks}) == 3
    cache.check_invariants()


def test_a_fork_leaves_alone_and_its_siblings_keep_what_they_shared():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = cache.add_sequence(range(10))
    fill(cache, [parent], 10)
    child = cache.fork(parent)
    before = content(cache, parent)
    cache.swap_out([child], space)
    assert (cache.num_available, space.num_used_blocks) == (13, 3)
    poison(cache)
    assert content(cache, parent) == before
    fill(cache, [parent], 1)  # into the block that the child no longer shares
    assert cache.stats().num_copied_blocks == 0
    cache.swap_in([child])
    assert content(cache, child) == before
    assert cache.num_available == 10


def test_those_that_left_together_may_come_back_one_by_one():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = cache.add_sequence(range(10))
    fill(cache, [parent], 10)
    child = cache.fork(parent)
    before = content(cache, parent)
    cache.swap_out([parent, child], space)
    for back, rest in ((parent, 3), (child, 0)):
        cache.swap_in([back])
        poison(cache)
        assert content(cache, back) == before
        assert space.num_used_blocks == rest
        cache.check_invariants()


def test_two_spaces_serve_one_cache_and_one_call_empties_both():
    cache = make()
    small, large = SwapSpace(cache, num_blocks=3), SwapSpace(cache, num_blocks=9)
    sequences = [cache.add_sequence(range(10)) for _ in range(3)]
    for seed, sequence in enumerate(sequences):
        fill(cache, [sequence], 8 if seed == 0 else 10, seed=seed)
    before = [content(cache, sequence) for sequence in sequences]
    cache.swap_out(sequences[:1], small)
    cache.swap_out(sequences[1:], large)
    assert (small.num_used_blocks, large.num_used_blocks) == (2, 6)
    assert cache.stats().num_swapped_blocks == 8
    cache.check_invariants()
    poison(cache)
    cache.swap_in([sequences[2], sequences[0], sequences[1]])
    assert [content(cache, sequence) for sequence in sequences] == before
    assert small.num_used_blocks == large.num_used_blocks == 0


def test_removing_a_swapped_sequence_gives_its_stored_blocks_back():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = cache.add_sequence(range(10))
    fill(cache, [parent], 10)
    child = cache.fork(parent)
    before = content(cache, child)
    cache.swap_out([parent, child], space)
    cache.remove(parent)
    assert (space.num_used_blocks, space.num_sequences, cache.num_sequences) == (3, 1, 1)
    with pytest.raises(InvalidSequence, match="removed"):
        cache.swap_in([parent])
    assert not parent.is_swapped
    cache.swap_in([child])
    assert content(cache, child) == before
    with child:
        cache.swap_out([child], space)
    assert (space.num_used_blocks, cache.num_sequences) == (0, 0)
    cache.check_invariants()


def test_a_full_space_refuses_and_nothing_is_changed():
    cache = make([SPEC, WINDOWED])
    space = SwapSpace(cache, num_blocks=[9, 2])
    sequences = [cache.add_sequence(range(20)) for _ in range(2)]
    fill(cache, sequences, [4, 5])
    before = (cache.stats(), [content(cache, sequence) for sequence in sequences])
    with pytest.raises(OutOfBlocks, match="3 blocks are needed and 1 are free in group 1 of the swap space") as short:
        cache.swap_out(sequences, space)
    assert (short.value.requested, short.value.available) == ((3, 3), (8, 1))
    assert cache.try_swap_out(sequences, space) is False
    assert (cache.stats(), [content(cache, sequence) for sequence in sequences]) == before
    assert (space.num_used_blocks, space.num_sequences) == (0, 0)
    cache.check_invariants()
    assert cache.try_swap_out(sequences[:1], space) is True


def test_a_full_cache_refuses_and_nothing_is_changed():
    cache = make(num_blocks=6)
    space = SwapSpace(cache, num_blocks=9)
    sequences = [cache.add_sequence(range(12)) for _ in range(2)]
    cache.commit(cache.prepare(sequences[:1], 12))
    cache.swap_out(sequences[:1], space)
    advance(cache, sequences[1:], 12)
    before = (cache.stats(), space.num_used_blocks)
    with pytest.raises(OutOfBlocks, match="3 blocks are needed and 2 are free; remove") as short:
        cache.swap_in(sequences[:1])
    assert (short.value.requested, short.value.available) == (3, 2)
    assert cache.try_swap_in(sequences[:1]) is False
    assert (cache.stats(), space.num_used_blocks) == before
    cache.check_invariants()
    cache.remove(sequences[1])
    assert cache.try_swap_in(sequences[:1]) is True


def test_a_sequence_without_a_row_to_come_back_to_waits():
    cache = make(max_sequences=2)
    space = SwapSpace(cache, num_blocks=9)
    first, second = (cache.add_sequence(range(5)) for _ in range(2))
    advance(cache, [first, second], 5)
    cache.swap_out([first], space)
    third = cache.add_sequence([1])
    with pytest.raises(OutOfRows, match="1 rows are needed and 0 of 2 are free"):
        cache.swap_in([first])
    assert cache.try_swap_in([first]) is False
    assert first.is_swapped
    assert cache.num_sequences == 3
    cache.check_invariants()
    cache.remove(third)
    cache.swap_in([first])


@pytest.mark.parametrize("failing", [1, 2])
def test_a_copy_that_fails_leaves_everything_as_it_was(monkeypatch, failing):
    cache = make([SPEC, WINDOWED])
    space = SwapSpace(cache, num_blocks=9)
    sequences = [cache.add_sequence(range(8)) for _ in range(2)]
    fill(cache, sequences, 8)
    transfer, calls = swapping._transfer, itertools.count(1)

    def fail(*arguments):
        if next(calls) == failing:
            raise MemoryError("planted")
        transfer(*arguments)

    def attempt(call):
        nonlocal calls
        calls = itertools.count(1)
        before = (cache.stats(), space.num_used_blocks)
        with monkeypatch.context() as patched:
            patched.setattr(swapping, "_transfer", fail)
            with pytest.raises(MemoryError, match="planted"):
                call()
        assert (cache.stats(), space.num_used_blocks) == before
        cache.check_invariants()

    attempt(lambda: cache.swap_out(sequences, space))
    before = [content(cache, sequence) for sequence in sequences]
    cache.swap_out(sequences, space)
    attempt(lambda: cache.swap_in(sequences))
    cache.swap_in(sequences)
    assert [content(cache, sequence) for sequence in sequences] == before


class Failing:
    """Block tables of which one method fails, at the call after `calls` that go well."""

    def __init__(self, tables, method, calls=0):
        self.tables, self.method, self.calls = tables, method, calls

    def __getattr__(self, name):
        if name == self.method:
            self.calls -= 1
            if self.calls < 0:
                raise MemoryError("planted")
        return getattr(self.tables, name)


def test_rows_that_cannot_be_given_up_keep_their_blocks():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(8))
    fill(cache, [sequence], 7)
    before, stats, tables = content(cache, sequence), cache.stats(), cache._tables
    cache._tables = Failing(tables, "remove")
    with pytest.raises(MemoryError, match="planted"):
        cache.swap_out([sequence], space)
    cache._tables = tables
    assert cache.stats() == stats
    assert content(cache, sequence) == before
    cache.check_invariants()


@pytest.mark.parametrize(("failing", "calls"), [("add", 1), ("truncate", 0)])
def test_rows_that_cannot_be_filled_are_given_up_again(failing, calls):
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    sequences = [cache.add_sequence(range(8)) for _ in range(2)]
    fill(cache, sequences, 7)
    before = [content(cache, sequence) for sequence in sequences]
    cache.swap_out(sequences, space)
    tables, stats = cache._tables, cache.stats()
    cache._tables = Failing(tables, failing, calls)
    with pytest.raises(MemoryError, match="planted"):
        cache.swap_in(sequences)
    cache._tables = tables
    assert cache.stats() == stats
    assert tables.num_rows == 0
    cache.check_invariants()
    cache.swap_in(sequences)
    assert [content(cache, sequence) for sequence in sequences] == before


def test_a_space_lies_in_memory_as_the_cache_does_or_as_it_is_told():
    cache = make(layout="blockwise")
    orders = [SwapSpace(cache, num_blocks=9, layout=layout)._kv_pools[0].layout.order for layout in (None, "layerwise")]
    assert orders == ["blockwise", "layerwise"]


def test_what_a_swapped_sequence_cannot_do_is_refused_by_name():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    out, here = (cache.add_sequence(range(8), id=name) for name in ("out", "here"))
    advance(cache, [out, here], 6)
    cache.swap_out([out], space)
    batch = cache.make_batch()
    before = cache.stats()
    for call in (
        lambda: cache.prepare([out], 1),
        lambda: cache.prepare([here, out], 1, out=batch),
        lambda: cache.try_prepare([out], 1),
        lambda: cache.fork(out),
        lambda: cache.truncate(out, 2),
        lambda: cache.reorder([out], [here]),
        lambda: cache.reorder([here], [out]),
        lambda: cache.swap_out([out], space),
        lambda: cache.swap_out([here, out], space),
    ):
        with pytest.raises(InvalidSequence, match="sequence 'out' is swapped out; swap it in first"):
            call()
        assert cache.stats() == before
        assert not batch.in_flight
        cache.check_invariants()
    with pytest.raises(InvalidSequence, match="sequence 'here' is not swapped out"):
        cache.swap_in([out, here])
    assert out.is_swapped


def test_what_is_in_flight_is_not_swapped_and_its_neighbours_are():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = cache.add_sequence(range(10))
    fill(cache, [parent], 6)
    child = cache.fork(parent)
    before = content(cache, child)
    batch = cache.prepare([parent], 3)
    with pytest.raises(InvalidSequence, match="in flight; commit or abandon"):
        cache.swap_out([child, parent], space)
    assert not child.is_swapped
    cache.swap_out([child], space)
    cache.write(0, normal(3, 2, 8), normal(3, 2, 8), batch)
    cache.commit(batch)
    cache.swap_out([parent], space)
    cache.swap_in([child, parent])
    assert content(cache, child) == before
    cache.check_invariants()


@pytest.mark.parametrize("junk", [None, 5, [None], ["x"], [[1]], 2.5])
def test_what_is_no_sequence_is_refused(junk):
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    for call in (cache.swap_out, cache.try_swap_out):
        with pytest.raises(InvalidSequence):
            call(junk, space)
    for call in (cache.swap_in, cache.try_swap_in):
        with pytest.raises(InvalidSequence):
            call(junk)


def test_foreign_removed_and_repeated_sequences_are_refused():
    cache, other = make(), make()
    space, foreign_space = SwapSpace(cache, num_blocks=9), SwapSpace(other, num_blocks=9)
    mine, foreign, gone = cache.add_sequence([1]), other.add_sequence([1]), cache.add_sequence([1])
    cache.remove(gone)
    for sequences in ([mine, foreign], [mine, gone], [mine, mine]):
        with pytest.raises(InvalidSequence):
            cache.swap_out(sequences, space)
    for wrong in (foreign_space, None, cache, "space"):
        with pytest.raises(InvalidSequence, match="no swap space of this cache"):
            cache.swap_out([mine], wrong)
    cache.swap_out([mine], space)
    for sequences in ([mine, mine], [foreign]):
        with pytest.raises(InvalidSequence):
            cache.swap_in(sequences)
    with pytest.raises(InvalidSequence):
        other.swap_in([mine])
    assert mine.is_swapped


def test_nobody_is_swapped_by_an_empty_list():
    cache = make()
    space = SwapSpace(cache, num_blocks=2)
    cache.swap_out([], space)
    cache.swap_in(iter([]))
    assert cache.try_swap_out((), space)
    assert cache.try_swap_in(())


def test_a_cache_without_bytes_swaps_ids_only():
    cache = make([SPEC, WINDOWED], device="none")
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(20))
    advance(cache, [sequence], 20)
    used = cache.stats().num_used_blocks
    cache.swap_out([sequence], space)
    assert (space.nbytes, space.num_used_blocks, cache.num_available) == (0, used, 16)
    cache.swap_in([sequence])
    assert cache.stats().num_used_blocks == used
    cache.check_invariants()


def test_statistics_tell_those_that_are_out_from_those_that_are_in():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    first, second = (cache.add_sequence(range(10)) for _ in range(2))
    advance(cache, [first, second], [7, 4])
    cache.swap_out([first], space)
    stats = cache.stats()
    assert (stats.num_sequences, stats.num_tokens, stats.num_used_blocks) == (2, 4, 1)
    assert (stats.num_swapped_sequences, stats.num_swapped_tokens, stats.num_swapped_blocks) == (1, 7, 2)
    assert stats.fragmentation == 0.0
    assert cache.num_sequences == 2
    assert repr(space) == "SwapSpace(1 sequences, 2 of 8 blocks used)"


def test_the_size_of_a_space_is_blocks_or_memory():
    cache = make([SPEC, WINDOWED])
    one = 4 * 2 * 8 * 4 * 2  # a block's key and value in one layer
    assert SwapSpace(cache, num_blocks=[5, 3]).num_blocks == (5, 3)
    assert SwapSpace(cache, num_blocks=np.int64(5)).num_blocks == (5, 5)
    space = SwapSpace(cache, memory=one * 14 + 1)
    assert (space.num_blocks, space.nbytes, space.num_available) == ((7, 7), one * 14, 6)
    halved = SwapSpace(cache, memory=one * 14, dtype="bfloat16")
    assert (halved.num_blocks, halved.nbytes) == ((14, 14), one * 14)


def test_a_space_may_store_a_narrower_dtype():
    cache = make()
    space = SwapSpace(cache, num_blocks=9, dtype="bfloat16")
    sequence = cache.add_sequence(range(8))
    fill(cache, [sequence], 8)
    expected = cache.key(0).numpy()[1:3].astype(space._kv_pools[0].key(0).numpy().dtype).astype(np.float32)
    cache.swap_out([sequence], space)
    poison(cache)
    cache.swap_in([sequence])
    blocks = cache.make_batch().group(0).block_table.numpy()[sequence.row, :2]
    assert (cache.key(0).numpy()[blocks] == expected).all()


class Latent:
    """A spec of the user's own: one plane a token, one a block."""

    planes = (Plane("latent", (6,), "int8"), Plane("scale", (3,), "float32", per="block"))
    window = None


def test_planes_of_any_kind_go_and_come():
    cache = PagedKVCache(Latent(), num_layers=2, block_size=4, num_blocks=9)
    space = SwapSpace(cache, num_blocks=5, layout="LBNHD")
    random = np.random.default_rng(0)
    for plane in cache._store.pools[0].planes():
        array = plane.numpy()
        array.view(np.uint8)[:] = random.integers(0, 256, array.view(np.uint8).shape)
    occupied(cache)
    sequence = cache.add_sequence(range(7))
    advance(cache, [sequence], 7)

    def stored():
        blocks = cache.make_batch().group(0).block_table.numpy()[sequence.row, :2]
        return [plane.numpy()[blocks].tobytes() for plane in cache._store.pools[0].planes()]

    before = stored()
    cache.swap_out([sequence], space)
    for plane in cache._store.pools[0].planes():
        plane.numpy()[4:] = 3
    cache.swap_in([sequence])
    assert stored() == before


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, ShapeError),
        ({"num_blocks": 5, "memory": "1MiB"}, ShapeError),
        ({"num_blocks": 1}, ShapeError),
        ({"num_blocks": [5, 5]}, ShapeError),
        ({"num_blocks": "many"}, ShapeError),
        ({"num_blocks": 2**31}, ShapeError),
        ({"memory": 100}, NotEnoughMemory),
        ({"memory": -1}, ShapeError),
        ({"num_blocks": 5, "layout": "rowwise"}, UnsupportedOption),
        ({"num_blocks": 5, "layout": 7}, UnsupportedOption),
        ({"num_blocks": 5, "dtype": "int8"}, UnsupportedDtype),
        ({"num_blocks": 5, "dtype": "float99"}, UnsupportedDtype),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "none"])
def test_a_space_that_cannot_be_is_refused(options, error, device):
    with pytest.raises(error):
        SwapSpace(make(device=device), **options)


def test_a_space_serves_a_cache_and_converts_floats_only():
    for junk in (None, "cache", SPEC):
        with pytest.raises(UnsupportedOption, match="serves a PagedKVCache"):
            SwapSpace(junk, num_blocks=5)
    with pytest.raises(UnsupportedDtype, match="plane 'latent' is int8"):
        SwapSpace(PagedKVCache(Latent(), block_size=4, num_blocks=9), num_blocks=5, dtype="float16")


def test_shortage_counts_what_coming_back_and_the_step_take():
    cache = make([SPEC, WINDOWED], num_blocks=[17, 9], max_tokens_per_sequence=64)
    space = SwapSpace(cache, num_blocks=17)
    out, here = (cache.add_sequence(range(40)) for _ in range(2))
    advance(cache, [out, here], [11, 14])
    cache.swap_out([out], space)
    # The group of the window is the scarcest: 8 blocks, and the two that `here` still sees are taken.
    assert cache.num_available == 6
    before = cache.stats()
    assert cache.shortage([out], 0) == 0
    assert cache.shortage([out, here], [1, 2]) == 0  # two blocks come back; no more are needed
    assert cache.shortage([out, here], [9, 10]) == 0  # two come back; two more each
    assert cache.shortage([out, here], [10, 11]) == 2  # three more each
    assert cache.shortage([here, out], [19, 30]) == 9
    assert cache.stats() == before
    cache.check_invariants()


def test_shortage_of_nothing_that_can_be_is_refused():
    cache = make()
    space = SwapSpace(cache, num_blocks=17)
    out, here = (cache.add_sequence(range(8)) for _ in range(2))
    advance(cache, [out, here], 8)
    cache.swap_out([out], space)
    for sequences, counts, error in (
        ([out, out], 1, InvalidSequence),
        ([out, here, here], 1, InvalidSequence),
        ([out, None], 1, InvalidSequence),
        ([out], -1, ShapeError),
        ([out], [1, 1], ShapeError),
        ([out], 57, ShapeError),
        ([out], 2**40, ShapeError),
        ([out, here], [1, 57], ShapeError),
        ([out], 1.5, UnsupportedDtype),
    ):
        with pytest.raises(error):
            cache.shortage(sequences, counts)
        cache.check_invariants()


@pytest.mark.parametrize("seed", range(40))
def test_shortage_is_exactly_what_coming_back_together_lacks(seed):
    """Forks, truncated at random, so that blocks are shared in every way; then all come back and write."""
    random = np.random.default_rng(seed)
    cache = make([SPEC, AttentionSpec(2, 8, dtype="float32", window=500)], num_blocks=40, max_sequences=12)
    spaces_ = [SwapSpace(cache, num_blocks=60) for _ in range(2)]
    sequences = [cache.add_sequence(range(60)) for _ in range(2)]
    advance(cache, sequences, random.integers(1, 14, 2))
    while len(sequences) < 7:
        child = cache.fork(sequences[random.integers(len(sequences))])
        cache.truncate(child, random.integers(child.num_computed_tokens // 2, child.num_computed_tokens + 1))
        cache.append_tokens([child], [list(range(60 - child.num_tokens))])
        sequences.append(child)
    out = random.permutation(sequences)[: random.integers(1, 7)].tolist()
    half = len(out) // 2
    cache.swap_out(out[:half], spaces_[0])
    cache.swap_out(out[half:], spaces_[1])
    counts = random.integers(0, 6, len(sequences))
    filler = cache.add_sequence(range(156))
    advance(cache, [filler], 4 * cache.num_available)
    lacking = cache.shortage(sequences, counts)
    given = max(0, lacking - int(random.integers(2)))
    cache.truncate(filler, filler.num_computed_tokens - 4 * given)
    before = cache.stats()
    assert cache.shortage(sequences, counts) == lacking - given
    assert cache.stats() == before
    suffices = cache.try_swap_in(out) and cache.try_prepare(sequences, counts) is not None
    assert suffices == (given == lacking)


def test_a_space_lives_as_long_as_somebody_holds_it_or_is_in_it():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(8))
    fill(cache, [sequence], 8)
    before = content(cache, sequence)
    cache.swap_out([sequence], space)
    alive = weakref.ref(space)
    del space
    gc.collect()
    assert alive() is not None
    cache.check_invariants()
    cache.swap_in([sequence])
    assert content(cache, sequence) == before
    gc.collect()
    assert alive() is None
    assert cache.stats().num_swapped_blocks == 0


def test_a_stored_block_that_is_counted_wrongly_is_found():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(8))
    advance(cache, [sequence], 8)
    cache.swap_out([sequence], space)
    space._block_pools[0].allocate(1)
    with pytest.raises(Exception, match="counted otherwise"):
        cache.check_invariants()
