"""PagedKVCache on CUDA: writes and attention of steps, against models that keep every key and value in lists."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pagecore import Alias, AttentionSpec, PagedKVCache, as_dtype
from pagecore.errors import DeviceError, InvalidSequence, ShapeError
from tests.cache.caches import owned_memory
from tests.cache.test_paged_machine import CacheMachine
from tests.cache.test_prefix_machine import PrefixMachine
from tests.cuda.caches import on_host, requests_of, run_machine
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.reference.dense import dense_attention, limits_of

FULL = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)
WINDOWED = AttentionSpec(2, 8, dtype="float32", num_query_heads=4, window=6)
CHUNKED = AttentionSpec(2, 8, dtype="float32", num_query_heads=4, chunk=6)
SINKED = AttentionSpec(2, 8, dtype="float32", num_query_heads=4, window=5, sink_tokens=3)
ROTATED = [replace(spec, key_rotation="hadamard", value_rotation="hadamard") for spec in (FULL, WINDOWED)]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.slow
def test_a_cache_on_a_device_behaves_as_its_model(cuda):
    run_machine(CacheMachine, cuda, *cases((20, 30), (200, 50)))


@pytest.mark.slow
def test_a_cache_on_a_device_reuses_prefixes_as_its_model(cuda):
    run_machine(PrefixMachine, cuda, *cases((40, 30), (300, 50)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(["CBNHD"], ["CBNHD", "BNHD", "blockwise"]))
@pytest.mark.parametrize("model", [CacheMachine, PrefixMachine])
def test_a_cache_in_device_memory_of_the_caller_behaves_as_its_model(cuda, model, layout):
    def in_owned_memory(layers, **options):
        return {"layout": layout, "buffers": owned_memory(layers, layout, cuda.put, **options)}

    run_machine(model, cuda, *cases((6, 25), (50, 50)), in_owned_memory)


@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(["layerwise"], ["layerwise", "blockwise", "BNCHD"]))
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float16", 3e-3), ("bfloat16", 2e-2)])
def test_prefill_in_chunks_then_decode_equals_dense_attention(cuda, dtype, bound, layout):
    """A head dim of 64, which the matrix kernels serve; a window, sinks and a layer that aliases another."""
    spec = AttentionSpec(2, 64, dtype=dtype, num_query_heads=8, sinks=range(8))
    windowed = AttentionSpec(2, 64, dtype=dtype, num_query_heads=8, window=40, softcap=5.0)
    layers = [spec, windowed, Alias(0)]
    cache = PagedKVCache(layers, block_size=16, num_blocks=12, max_sequences=3, layout=layout, device=cuda.device)
    sequence, other = cache.add_sequence(range(90)), cache.add_sequence(range(100, 120))
    floats = as_dtype(dtype).numpy
    key, value = (normal(2, 2, 90, 2, 64, seed=seed).astype(floats) for seed in (0, 1))  # [layer, sequence, token ...]
    query = normal(2, 90, 8, 64, seed=2).astype(floats)
    batch, done = cache.make_batch(3, 70), np.zeros(2, int)

    def packed(array, spans):
        """Return the rows of a step, padded with NaN to the size of the batch."""
        rows = np.concatenate([array[i, span] for i, span in enumerate(spans)])
        return cuda.put(np.concatenate([rows, np.full((70 - len(rows), *rows.shape[1:]), np.nan, rows.dtype)]))

    for counts in ([53, 17], [30, 1], [1, 1], [1, 0]):
        cache.prepare([sequence, other], counts, batch)
        spans = [slice(start, start + count) for start, count in zip(done, counts, strict=True)]
        for layer, of in ((0, spec), (1, windowed), (2, spec)):
            if layer < 2:
                cache.write(layer, packed(key[layer], spans), packed(value[layer], spans), batch)
            found = cuda.get(cache.attend(layer, packed(query, spans), batch)).astype(np.float64)
            first = 0
            for i, (span, count) in enumerate(zip(spans, counts, strict=True)):
                stored = [side[layer % 2, i, : span.stop].astype(np.float64) for side in (key, value)]
                options = {"window": of.window, "softcap": of.softcap, "sinks": of.sinks}
                expected = dense_attention(query[i, span].astype(np.float64), *stored, **options)
                error = np.linalg.norm(found[first : first + count] - expected)
                assert error <= bound * np.linalg.norm(expected)
                first += count
            assert not found[first:].any(), "padding gives 0"
        cache.commit(batch)
        done += counts


class Step:
    """Keys, values, queries and outputs of one step, at fixed addresses."""

    def __init__(self, cuda: Kit, num_layers: int, rows: int) -> None:
        self.cuda = cuda
        shapes = [(num_layers, rows, heads, 8) for heads in (2, 2, 4, 4)]
        self.key, self.value, self.query, self.out = (cuda.empty(shape, "float32") for shape in shapes)

    def fill(self, seed):
        """Copy random numbers to the device; return them as host arrays."""
        arrays = [normal(*side.shape, seed=(seed, i)) for i, side in enumerate((self.key, self.value, self.query))]
        for side, array in zip((self.key, self.value, self.query), arrays, strict=True):
            self.cuda.runtime.copy(side.pointer, array.ctypes.data, array.nbytes, 0)
        self.cuda.runtime.synchronize(0)
        return arrays

    def run(self, cache, batch, stream=None):
        for layer in range(len(self.key)):
            cache.write(layer, self.key[layer], self.value[layer], batch, stream=stream)
            cache.attend(layer, self.query[layer], batch, out=self.out[layer], stream=stream)


def expect_attention(found, layers, query, stored, sequences, counts):
    """Assert that each row of a step equals dense attention to all stored tokens of its sequence."""
    for layer, spec in enumerate(layers):
        first = 0
        for sequence, count in zip(sequences, counts, strict=True):
            keys, values = (np.concatenate(side) for side in stored[sequence, layer])
            expected = dense_attention(query[layer, first : first + count], keys, values, **limits_of(spec))
            np.testing.assert_allclose(found[layer, first : first + count], expected, rtol=0, atol=2e-5)
            first += count


def record(stored, layers, sequences, counts, key, value):
    for layer in range(len(layers)):
        first = 0
        for sequence, count in zip(sequences, counts, strict=True):
            keys, values = stored.setdefault((sequence, layer), ([], []))
            keys.append(key[layer, first : first + count])
            values.append(value[layer, first : first + count])
            first += count


def reorder(stored, sequences, parents):
    """Give each sequence the stored tokens that its parent had before."""
    before = {key: ([*keys], [*values]) for key, (keys, values) in stored.items()}
    for sequence, parent in zip(sequences, parents, strict=True):
        for layer in range(2):
            stored[sequence, layer] = tuple([*side] for side in before[parent, layer])


@pytest.mark.parametrize(
    "layers", [[FULL, WINDOWED], [CHUNKED, SINKED], ROTATED], ids=["window", "chunk and sinks", "rotations"]
)
def test_one_graph_serves_every_step_of_a_batch(cuda, layers):
    """Replays of one captured step serve other lengths and sequences, copy-on-write and blocks freed by windows."""
    cache = PagedKVCache(layers, block_size=4, num_blocks=30, max_sequences=4, device=cuda.device)
    first, second = cache.add_sequence(range(40)), cache.add_sequence(range(50, 90))
    batch, step, stored = cache.make_batch(3, 16), Step(cuda, 2, 16), {}
    replay = None
    for i, of_both in enumerate(([5, 3], [1, 1], [4, 0], [1, 1], [6, 5], [1, 1])):
        sequences, counts = [first, second], of_both
        if i == 3:
            first_too = cache.fork(first)
            reorder(stored, [first_too], [first])
        if i >= 3:
            sequences, counts = [first_too, first, second], [1 + i % 3, *of_both]
        cache.prepare(sequences, counts, batch)
        key, value, query = step.fill(i)
        if i == 0:
            step.run(cache, batch)
        else:
            replay = replay or cuda.capture(lambda stream: step.run(cache, batch, stream))
            cuda.runtime.synchronize(0)
            replay()
        record(stored, layers, sequences, counts, key, value)
        expect_attention(cuda.get(step.out), layers, query, stored, sequences, counts)
        assert not cuda.get(step.out)[:, sum(counts) :].any()
        cache.commit(batch)
    assert cache.stats().num_copied_blocks > 0


@pytest.mark.parametrize("layers", [[FULL, WINDOWED], ROTATED], ids=["plain", "rotations"])
def test_a_warm_step_allocates_nothing_and_waits_for_nothing(cuda, layers):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    cache = PagedKVCache(layers, block_size=4, num_blocks=40, max_sequences=4, device=cuda.device)
    sequences = [cache.add_sequence(range(40)) for _ in range(3)]
    batch, step = cache.make_batch(4, 20), Step(cuda, 2, 20)
    step.fill(0)
    for i, counts in enumerate([[9, 3, 1], [1, 1, 1], [1, 4, 1], [1, 1, 1], [2, 2, 2]]):

        def run(counts=counts):
            cache.prepare(sequences, counts, batch)
            step.run(cache, batch)
            cache.commit(batch)

        spent = requests_of(cuda, run)
        if i > 0:
            assert set(spent) <= {"copies", "records", "launches", "event_synchronizes"}
            assert spent["copies"] == 1


@pytest.mark.parametrize("stream", ["the default", "its own"])
def test_beams_share_blocks_and_diverge_on_any_stream(cuda, stream):
    """Beams are forked and reordered; a shared block is copied before a beam writes to it."""
    layers = [FULL, WINDOWED]
    cache = PagedKVCache(layers, block_size=4, num_blocks=40, max_sequences=4, device=cuda.device)
    handle = cuda.stream() if stream == "its own" else 0
    beams = [cache.add_sequence(range(50))]
    batch, step, stored = cache.make_batch(4, 12), Step(cuda, 2, 12), {}
    for i, counts in enumerate(([6], [3, 1], [1, 1, 1, 2], [1, 2, 1, 1], [4, 1, 2, 2])):
        while len(beams) < len(counts):
            beams.append(cache.fork(beams[0]))
            reorder(stored, [beams[-1]], [beams[0]])
        if i == 3:
            parents = [beams[2], beams[0], beams[2], beams[1]]
            cache.reorder(beams, parents)
            reorder(stored, beams, parents)
        key, value, query = step.fill(i)
        cache.prepare(beams, counts, batch, stream=handle)
        step.run(cache, batch, handle)
        cache.commit(batch)
        cuda.runtime.synchronize(handle)
        record(stored, layers, beams, counts, key, value)
        expect_attention(cuda.get(step.out), layers, query, stored, beams, counts)
    assert cache.stats().num_copied_blocks >= 4


def test_every_row_of_a_large_step_may_copy_a_block_of_each_group(cuda):
    cache = PagedKVCache([FULL, WINDOWED], block_size=4, num_blocks=100, max_sequences=70, device=cuda.device)
    sequences, batch, step = [cache.add_sequence(range(50))], cache.make_batch(70, 70), Step(cuda, 2, 70)
    stored = {}
    for i, count in enumerate((6, 1)):
        if i == 1:
            sequences += [cache.fork(sequences[0]) for _ in range(69)]
            reorder(stored, sequences[1:], sequences[:1] * 69)
        key, value, query = step.fill(i)
        cache.prepare(sequences, count, batch)
        step.run(cache, batch)
        cache.commit(batch)
        record(stored, [FULL, WINDOWED], sequences, [count] * len(sequences), key, value)
    assert [len(batch.copied_blocks(layer)) for layer in range(2)] == [69, 69]
    expect_attention(cuda.get(step.out), [FULL, WINDOWED], query, stored, sequences, [1] * 70)


def test_a_step_writes_nothing_for_a_removed_sequence_and_a_stale_batch_is_refused(cuda):
    cache = PagedKVCache(FULL, block_size=4, num_blocks=30, max_sequences=4, device=cuda.device)
    stays, goes = cache.add_sequence(range(9)), cache.add_sequence(range(50, 57))
    batch, step = cache.make_batch(3, 12), Step(cuda, 1, 12)
    step.fill(0)
    cache.prepare([goes, stays], [7, 5], batch)
    slots = batch.host.slot_mappings[0].numpy().copy()
    cache.remove(goes)
    before = [plane.numpy().copy() for plane in on_host(cuda, cache._parts.store.pools[0]).planes()]
    step.run(cache, batch)
    after = [plane.numpy() for plane in on_host(cuda, cache._parts.store.pools[0]).planes()]
    for old, new in zip(before, after, strict=True):
        changed = (old != new).any(axis=(2, 3)).ravel().nonzero()[0]
        assert changed.tolist() == sorted(slots[7:12].tolist())
    cache.commit(batch)

    cache.prepare([stays], 4, batch)
    cache.abandon(batch)
    assert (cuda.get(batch.group(0).slot_mapping) == -1).all()
    with pytest.raises(InvalidSequence, match="no step in flight"):
        step.run(cache, batch)
    for old, new in zip(after, on_host(cuda, cache._parts.store.pools[0]).planes(), strict=True):
        np.testing.assert_array_equal(old, new.numpy())


def test_arrays_on_another_device_than_the_cache_are_refused(cuda):
    cache = PagedKVCache(FULL, block_size=4, num_blocks=30, device=cuda.device)
    batch = cache.prepare([cache.add_sequence(range(3))], 3)
    on_device, there = cuda.put(normal(3, 2, 8)), normal(3, 2, 8)
    for key, value in ((there, there), (there, on_device), (on_device, there)):
        with pytest.raises(DeviceError, match="cuda:0"):
            cache.write(0, key, value, batch)
    with pytest.raises(DeviceError, match="cuda:0"):
        cache.attend(0, normal(3, 4, 8), batch)
    with pytest.raises(ShapeError, match="the step has 3"):
        cache.write(0, on_device[:2], on_device[:2], batch)
    other = PagedKVCache(FULL, block_size=4, num_blocks=30, device=cuda.device)
    with pytest.raises(InvalidSequence, match="batch of this cache"):
        other.write(0, on_device, on_device, batch)
    on_host = PagedKVCache(FULL, block_size=4, num_blocks=30)
    host_batch = on_host.prepare([on_host.add_sequence(range(3))], 3)
    with pytest.raises(DeviceError, match="cuda:0"):
        on_host.write(0, on_device, on_device, host_batch)


def test_the_index_of_a_cache_on_a_device_equals_that_of_a_host_cache(cuda):
    def life(device):
        cache = PagedKVCache([FULL, WINDOWED], block_size=4, num_blocks=30, max_sequences=4, device=device)
        sequences = [cache.add_sequence(range(20)), cache.add_sequence(range(9))]
        cache.commit(cache.prepare(sequences, [13, 9]))
        cache.fork(sequences[1])
        cache.commit(cache.prepare(sequences, 2))
        cache.check_invariants()
        maps = [cache.block_map(group) for group in range(2)]
        return cache.stats(), [(one.sequences, one.tokens) for one in maps] if hasattr(maps[0], "tokens") else maps

    on_device, expected = life(cuda.device), life("cpu")
    assert on_device[0] == expected[0]
    assert repr(on_device[1]) == repr(expected[1])


@pytest.mark.parametrize(
    "options", cases([{"format": "float8_e4m3fn", "value_format": "nvfp4"}], [{"value_format": "int4_token"}])
)
def test_values_in_a_format_of_their_own_are_those_of_a_host_cache(cuda, options):
    spec = AttentionSpec(2, 32, 16, dtype="bfloat16", num_query_heads=4, **options)
    key, value, query = normal(9, 2, 32), normal(9, 2, 16, seed=1), normal(9, 4, 32, seed=2)

    def attended(device, put, get):
        cache = PagedKVCache(spec, block_size=4, num_blocks=9, device=device)
        batch = cache.prepare([cache.add_sequence(range(9))], 9)
        cache.write(0, put(key), put(value), batch)
        written = [get(cache.plane(plane.name, 0))[1:3] for plane in spec.planes]  # two full blocks
        return [get(cache.attend(0, put(query), batch)), *written]

    expected = attended("cpu", np.asarray, np.asarray)
    for array, of_host in zip(attended(cuda.device, cuda.put, cuda.get), expected, strict=True):
        np.testing.assert_allclose(array.astype(np.float32), of_host.astype(np.float32), atol=1e-5)


def test_a_received_sequence_keeps_only_the_blocks_of_its_windows(cuda):
    """The pool of the window is smaller than the sequence; first with a new batch, then with one that is reused."""
    ids, window = range(40), 6
    key, value = (normal(2, 42, 2, 8, seed=seed) for seed in (0, 1))  # [layer, token ...]
    query = normal(2, 42, 4, 8, seed=2)
    options = {"num_blocks": [26, 6], "max_sequences": 3, "max_tokens_per_sequence": 48}
    cache = PagedKVCache([FULL, WINDOWED], block_size=4, device=cuda.device, **options)
    for out in (None, cache.make_batch(2, 40)):
        sequence = cache.add_sequence(ids)
        batch = cache.prepare_arrival(sequence, 40, out)
        slots = cuda.get(batch.group(1).slot_mapping)
        table = cuda.get(cache.block_table(1))[sequence.row]
        assert (slots[:32] == -1).all()
        assert slots[32:40].tolist() == [table[8 + i // 4] * 4 + i % 4 for i in range(8)]
        assert (table[:8] == 0).all()
        for layer in range(2):
            arrived = np.stack([key[layer, :40], value[layer, :40]])
            arrived[:, : 32 * layer] = np.nan
            cache.write(layer, cuda.put(arrived[0]), cuda.put(arrived[1]), batch)
        cache.commit(batch)
        assert (cache.held_from(sequence, 0), cache.held_from(sequence, 1)) == (0, 32)
        for end in (41, 42):
            step = cache.prepare([sequence], 1)
            for layer in range(2):
                new = [cuda.put(array[layer, end - 1 : end]) for array in (key, value, query)]
                cache.write(layer, new[0], new[1], step)
                found = cuda.get(cache.attend(layer, new[2], step))
                expected = dense_attention(
                    query[layer, end - 1 : end], key[layer, :end], value[layer, :end], window=window if layer else None
                )
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
            cache.commit(step)
        cache.check_invariants()
        cache.remove(sequence)
        cache.clear_prefix_cache()


@pytest.mark.parametrize("reuses_batch", [True, False])
def test_the_ids_of_drafts_are_on_the_device_with_the_other_ids(cuda, reuses_batch):
    cache = PagedKVCache(FULL, block_size=4, num_blocks=20, device=cuda.device)
    batch = cache.make_batch(2, 16) if reuses_batch else None
    sequences = [cache.add_sequence([1, 2, 3, 4, 5]), cache.add_sequence([7])]
    cache.commit(cache.prepare(sequences, [4, 0]))
    with cache.prepare(sequences, [3, 2], batch, draft_ids=[[11, 12], None]) as step:
        assert cuda.get(step.token_ids)[:5].tolist() == [5, 11, 12, 7, -1]
        cache.commit(step, [2, 1])
    assert [each.num_tokens for each in sequences] == [5, 1]
