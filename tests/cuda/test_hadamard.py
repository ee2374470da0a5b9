"""hadamard on CUDA: the bits of the host, for arrays of any strides, in the order of a stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, SwapSpace, hadamard
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
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
        assert cuda.get(hadamard(cuda.put(view))).tobytes() == hadamard(view.copy()).tobytes()
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
