"""hadamard on CUDA: the bits of the host, for arrays of any strides, in the order of a stream."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, SwapSpace, hadamard
from pagecore.arrays.tensors import results
from pagecore.cache.layers.rotated import load_rotation
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
from pagecore.ops.cuda.compilation import kernels
from tests.arrays.fake_frameworks import Streams, fake_jax, fake_torch
from tests.cuda.kit import Kit
from tests.ops.cases import DTYPES
from tests.ops.test_hadamard import numbers

DIMS = [8, 16, 24, 32, 64, 80, 96, 128, 192, 256, 384]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_bits_of_the_host(cuda: Kit, dtype):
    for dim in DIMS:
        for shape in ((3, 5, dim), (dim,), (33, dim)):
            rows = numbers(*shape, dtype=dtype)
            out = cuda.empty(shape, dtype)
            assert hadamard(cuda.put(rows), out=out) is out
            assert cuda.get(out).tobytes() == hadamard(rows).tobytes(), (dim, shape)
    assert cuda.get(hadamard(cuda.put(rows))).tobytes() == hadamard(rows).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_of_any_strides_are_read_and_written_in_place(cuda: Kit, dtype):
    held = numbers(6, 4, 9, 80, dtype=dtype)
    views = [
        held[:, 1:3, 2:7],
        held[::2, 0],
        held[0].transpose(1, 0, 2),
        held[::-1, 3],
        held[2, 2, 5],
        held[:, ::2, 1::3],
    ]
    for view in views:
        expected = hadamard(np.ascontiguousarray(view))
        place = cuda.put(view)
        assert cuda.get(hadamard(place)).tobytes() == expected.tobytes()
        assert hadamard(place, out=place) is place
        assert np.ascontiguousarray(cuda.get(place)).tobytes() == expected.tobytes()
    shifted = numbers(1 + 5 * 96, dtype=dtype)[1:].reshape(5, 96)  # no address is a multiple of a vector
    place = cuda.put(shifted)
    assert hadamard(place, out=place) is place
    assert cuda.get(place).tobytes() == hadamard(shifted).tobytes()


def test_arrays_without_rows_and_misuse(cuda: Kit):
    assert hadamard(cuda.put(np.zeros((0, 4, 64), np.float32))).shape == (0, 4, 64)
    rows = cuda.put(numbers(4, 64))
    with pytest.raises(ShapeError, match="multiple of 8"):
        hadamard(cuda.put(numbers(4, 12)))
    with pytest.raises(DeviceError, match="out is on cpu"):
        hadamard(rows, out=np.zeros((4, 64), np.float32))
    held = cuda.put(numbers(6, 64))
    with pytest.raises(UnsupportedOption, match="memory"):
        hadamard(held[:4], out=held[1:5])


def test_a_captured_transform_reads_new_rows(cuda: Kit):
    rows, out = cuda.put(numbers(7, 128)), cuda.empty((7, 128))
    hadamard(rows, out=out)
    replay = cuda.capture(lambda stream: hadamard(rows, out=out, stream=stream))
    fresh = numbers(7, 128, seed=3)
    cuda.runtime.copy(rows.pointer, fresh.ctypes.data, fresh.nbytes, 0)
    cuda.runtime.synchronize(0)
    replay()
    assert cuda.get(out).tobytes() == hadamard(fresh).tobytes()


# ---- caches

FORMATS: list[dict[str, Any]] = [
    {"format": "int4_token"},
    {"format": "float8_e4m3fn", "key_scale": [0.5, 0.25], "value_format": "int4_token"},
    {"format": "kivi4", "residual": 5, "group_size": 16, "block_size": 16},
]


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_a_cache_on_a_device_stores_what_the_host_stores(cuda: Kit, options):
    """Steps, a fork and a swap; results are arrays of pagecore, as the queries are."""
    rotations = {"key_rotation": "hadamard", "value_rotation": "hadamard"}
    spec = AttentionSpec(2, 32, 64, dtype="float32", num_query_heads=4, **options, **rotations)
    sizes = {"num_blocks": 24, "max_sequences": 4} | ({} if spec.sealing else {"block_size": 4})
    caches = [PagedKVCache(spec, num_layers=2, device=device, **sizes) for device in (cuda.device, "cpu")]
    for mine, other in zip(*(cache._parts.store.pools for cache in caches), strict=True):
        for here, there in zip(mine.planes(), other.planes(), strict=True):  # what no step writes compares equal
            cuda.runtime.fill(here.pointer, 0, here.nbytes, 0)
            there.numpy()[...] = 0
    spaces = [SwapSpace(cache, num_blocks=12) for cache in caches]
    sequences = [[cache.add_sequence(range(60))] for cache in caches]
    for i, count in enumerate((21, 1, 2, 1)):
        if i == 2:
            for cache, listed in zip(caches, sequences, strict=True):
                listed.append(cache.fork(listed[0]))
        if i == 3:
            for cache, listed, space in zip(caches, sequences, spaces, strict=True):
                cache.swap_out([listed[0]], space)
                cache.swap_in([listed[0]])
        tokens = count * len(sequences[0])
        batches = [cache.prepare(listed, count) for cache, listed in zip(caches, sequences, strict=True)]
        for layer in range(2):
            key, value, query = (
                numbers(tokens, heads, dim, seed=10 * i + layer) for heads, dim in ((2, 32), (2, 64), (4, 32))
            )
            caches[0].write(layer, cuda.put(key), cuda.put(value), batches[0])
            caches[1].write(layer, key, value, batches[1])
            found, lse = caches[0].attend(layer, cuda.put(query), batches[0], return_lse=True)
            expected, expected_lse = caches[1].attend(layer, query, batches[1], return_lse=True)
            np.testing.assert_allclose(cuda.get(found), expected, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(cuda.get(lse), expected_lse, rtol=1e-4, atol=1e-4)
        for cache, batch in zip(caches, batches, strict=True):
            cache.commit(batch)
    for mine, other in zip(*(cache._parts.store.pools for cache in caches), strict=True):
        for here, there in zip(mine.planes(), other.planes(), strict=True):
            np.testing.assert_array_equal(cuda.get(here).view(np.uint8), there.numpy().view(np.uint8))


def test_arrays_on_another_device_than_the_cache_are_refused(cuda: Kit):
    spec = AttentionSpec(2, 32, dtype="float32", num_query_heads=4, key_rotation="hadamard", value_rotation="hadamard")
    rows, query = numbers(3, 2, 32), numbers(3, 4, 32)
    for device, own, other in ((cuda.device, cuda.put, np.asarray), ("cpu", np.asarray, cuda.put)):
        cache = PagedKVCache(spec, num_blocks=4, device=device)
        with cache.prepare([cache.add_sequence(range(3))], 3) as batch:
            for key, value in ((other(rows), own(rows)), (own(rows), other(rows)), (other(rows), other(rows))):
                with pytest.raises(DeviceError, match="one device"):
                    cache.write(0, key, value, batch)
            cache.write(0, own(rows), own(rows), batch)
            with pytest.raises(DeviceError, match="one device"):
                cache.attend(0, other(query), batch)
            cache.abandon(batch)


# ---- graphs, and arrays of the caller's framework

BOTH = {"key_rotation": "hadamard", "value_rotation": "hadamard"}
ROTATIONS = {"keys": {"key_rotation": "hadamard"}, "values": {"value_rotation": "hadamard"}, "both": BOTH}


class Torch:
    """A cache with one step, and arrays of a fake torch."""

    def __init__(self, cuda: Kit, monkeypatch: pytest.MonkeyPatch, **rotations: str) -> None:
        self.cuda, streams = cuda, Streams()
        self.inputs: list[Any] = []  # alive until the device has read them
        streams.current = {0: 0}
        monkeypatch.setitem(sys.modules, "torch", fake_torch(streams))
        spec = AttentionSpec(2, 32, dtype="float32", num_query_heads=4, **rotations)
        self.cache = PagedKVCache(spec, num_blocks=12, block_size=4, device=cuda.device)
        self.batch = self.cache.make_batch(1, 12)
        self.sequence = self.cache.add_sequence(range(30))

    def put(self, *shape: int, seed: int = 0) -> Any:
        self.inputs.append(sys.modules["torch"].Tensor(self.cuda.put(numbers(*shape, seed=seed)), 0))
        return self.inputs[-1]

    def step(self, count: int, stream: int) -> tuple[Any, Any]:
        """Write a step and attend to it; return keys and values."""
        self.cache.prepare([self.sequence], count, out=self.batch)
        self.cache.write(0, self.put(count, 2, 32), self.put(count, 2, 32, seed=1), self.batch, stream=stream)
        found = self.cache.attend(0, self.put(count, 4, 32, seed=2), self.batch, return_lse=True, stream=stream)
        self.cache.commit(self.batch)
        return found


@pytest.mark.parametrize("rotations", ROTATIONS)
def test_results_and_workspace_are_of_the_callers_framework(cuda: Kit, monkeypatch, rotations):
    """A call with a selection plans its own batch, which a graph keeps only in memory of torch."""
    own = Torch(cuda, monkeypatch, **ROTATIONS[rotations])
    kind = sys.modules["torch"].Tensor
    for each in own.step(9, 0):
        assert type(each) is kind
        assert each.stream != -1  # torch allocated it
    cache, batch = own.cache, own.batch
    cache.prepare([own.sequence], 1, out=batch)
    cache.write(0, own.put(1, 2, 32), own.put(1, 2, 32, seed=1), batch)
    query, selected = own.put(1, 4, 32), {"blocks": cuda.put(np.zeros((1, 2, 1), np.int64))}
    allocate = results.new_result
    asked: list[object] = []
    pool: dict[Any, Any] = {}  # torch allocates in the pool of the graph, which the emulator does not have
    found: list[Any] = []

    def new_result(shape: Any, dtype: Any, example: object, *more: Any) -> Any:
        asked.append(example)
        if (shape, dtype) not in pool:
            pool[shape, dtype] = allocate(shape, dtype, example, *more)
        return pool[shape, dtype]

    monkeypatch.setattr(results, "new_result", new_result)
    expected = cuda.get(cache.attend(0, query, batch, **selected)).copy()
    replay = cuda.capture(lambda stream: found.append(cache.attend(0, query, batch, **selected, stream=stream)))
    assert {type(each) for each in asked} == {kind}
    replay()
    np.testing.assert_array_equal(cuda.get(found[0]), expected)
    cache.abandon(batch)


@pytest.mark.parametrize("rotations", ["values", "both"])
def test_the_producer_of_a_jax_query_is_awaited(cuda: Kit, monkeypatch, rotations):
    monkeypatch.setitem(sys.modules, "jax", fake_jax())
    spec = AttentionSpec(2, 32, dtype="float32", num_query_heads=4, **ROTATIONS[rotations])
    cache = PagedKVCache(spec, num_blocks=12, block_size=4, device=cuda.device)
    query = sys.modules["jax"].Array(cuda.put(numbers(3, 4, 32)), 0)
    with cache.prepare([cache.add_sequence(range(9))], 3) as batch:
        cache.write(0, cuda.put(numbers(3, 2, 32)), cuda.put(numbers(3, 2, 32)), batch)
        query.asked.clear()
        stream = cuda.stream()
        cuda.runtime.synchronize(0)
        found, lse = cache.attend(0, query, batch, return_lse=True, stream=stream)
        assert stream in query.asked
        assert type(found) is type(lse) is type(query)
        cuda.runtime.synchronize(stream)
        cache.abandon(batch)


def test_a_capture_needs_no_more_memory_than_the_step_before_it(cuda: Kit):
    """Rows of a batch have the size of its largest step; a batch without a warm step is refused."""
    spec = AttentionSpec(2, 32, dtype="float32", num_query_heads=4, **BOTH)
    cache = PagedKVCache(spec, num_blocks=12, block_size=4, device=cuda.device)
    batch, sequence = cache.make_batch(1, 12), cache.add_sequence(range(30))
    rows = {count: [cuda.put(numbers(count, heads, 32)) for heads in (2, 2, 4)] for count in (1, 12)}
    outs = {count: cuda.empty((count, 4, 32)) for count in rows}

    def step(count: int, batch: Any, stream: object = None) -> None:
        key, value, query = rows[count]
        cache.write(0, key, value, batch, stream=stream)
        cache.attend(0, query, batch, out=outs[count], stream=stream)

    cache.prepare([sequence], 1, out=batch)
    step(1, batch)
    cache.commit(batch)
    cache.prepare([sequence], 12, out=batch)
    held = {array.pointer for arrays in batch._scratch._free.values() for array in arrays}
    replay = cuda.capture(lambda stream: step(12, batch, stream))
    assert {array.pointer for arrays in batch._scratch._free.values() for array in arrays} == held
    replay()
    assert np.isfinite(cuda.get(outs[12])).all()
    cache.commit(batch)
    fresh = cache.make_batch(1, 12)
    cache.prepare([sequence], 1, out=fresh)
    with pytest.raises(DeviceError, match=r"captured.*12 rotated rows of key.*once with this batch"):
        cuda.capture(lambda stream: step(1, fresh, stream))
    cache.abandon(fresh)


def test_an_output_that_cannot_be_rotated_back_is_not_written(cuda: Kit, monkeypatch):
    spec = AttentionSpec(2, 32, dtype="float32", num_query_heads=4, value_rotation="hadamard")
    cache = PagedKVCache(spec, num_blocks=12, block_size=4, device=cuda.device)
    key, query, out = cuda.put(numbers(3, 2, 32)), cuda.put(numbers(3, 4, 32)), cuda.put(numbers(3, 4, 32, seed=1))
    with cache.prepare([cache.add_sequence(range(9))], 3) as batch:
        cache.write(0, key, key, batch)
        find = kernels.kernel

        def without(name: str, *more: Any) -> Any:
            if name.startswith("hadamard"):
                raise DeviceError("the kernel cannot be loaded")
            return find(name, *more)

        monkeypatch.setattr(kernels, "kernel", without)
        with pytest.raises(DeviceError, match="cannot be loaded"):
            cache.attend(0, query, batch, out=out)
        assert cuda.get(out).tobytes() == numbers(3, 4, 32, seed=1).tobytes()
        cache.abandon(batch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_of_each_dtype_is_loaded_by_its_name(cuda: Kit, monkeypatch, dtype):
    """Both modules name the kernels."""
    rows, names = cuda.put(numbers(3, 4, 32, dtype=dtype)), []
    find = kernels.kernel
    monkeypatch.setattr(kernels, "kernel", lambda name, *more: (names.append(name), find(name, *more))[1])
    hadamard(rows)
    load_rotation(rows, cuda.device, 0)
    assert len(names) == 2
    assert names[0] == names[1]
