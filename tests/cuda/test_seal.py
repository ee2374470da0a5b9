"""seal_kv on a CUDA device: the bytes of the host, and no other byte changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import SealedBlocks, errors, seal_kv, unseal_kv
from tests.cuda.kit import Kit
from tests.cuda.memory import assert_same_memory, calls_of
from tests.ops.cases import DTYPES, LAYOUTS, empty_cache
from tests.ops.sealed_cases import empty_sealed
from tests.ops.written_cases import hard_numbers
from tests.thinning import in_turn

PAIRS = np.array([(3, 2), (1, 5), (4, 1)])
HEADS = 3


def caches(dtypes: tuple[str, str], size: int, dims: tuple[int, int], layout: str = "NHD") -> list[Any]:
    """Return keys and values with infinities, NaN, subnormals and the largest numbers, which differ by token."""
    made = []
    for i, (dtype, dim) in enumerate(zip(dtypes, dims, strict=True)):
        cache = empty_cache(layout, (5, size, HEADS, dim), DTYPES[dtype])
        numbers = np.random.default_rng(i).normal(size=cache.shape).astype(DTYPES[dtype])
        rows = 2 * size * HEADS
        numbers[3:] = hard_numbers(max(rows, 80), dim, dtype)[:rows].reshape(2, size, HEADS, dim)
        numbers[1, :, 0], numbers[1, :, 1] = 0.1, np.where(np.arange(dim) % 2, -0.0, 0.0)  # constant groups
        cache[...] = numbers
        made.append(cache)
    return made


def put(cuda: Kit, sealed: SealedBlocks) -> SealedBlocks:
    return SealedBlocks(*(cuda.put(plane) for plane in sealed[:4]))


def check(cuda: Kit, arrays: list[Any], sealed: SealedBlocks, pairs: Any = PAIRS) -> None:
    """Seal poisoned blocks on the device and on the host, and compare all of their bytes."""
    there = put(cuda, sealed)
    seal_kv(*map(cuda.put, arrays), there, pairs)
    seal_kv(*arrays, sealed, PAIRS)
    for got, expected in zip(there[:4], sealed[:4], strict=True):
        assert_same_memory(cuda.get(got), expected)


SHAPES = [
    ((4, 4), (32, 32), 32, (64, 96)),
    ((2, 2), (32, 32), 32, (128, 128)),
    ((2, 4), (4, 16), 16, (64, 48)),  # four groups of tokens in a word
    ((4, 2), (48, 96), 48, (16, 96)),  # a stretch of six words; groups of twelve chunks
    ((2, 2), (24, 48), 48, (80, 48)),  # words that two groups share
    ((4, 4), (1, 512), 8, (32, 512)),  # groups of one token; lanes with two chunks
]


@pytest.mark.parametrize(
    ("shape", "dtype", "scale_dtype"), in_turn(SHAPES, over=[DTYPES, ["float32", "float16", "bfloat16"]]), ids=str
)
def test_every_group_has_the_bytes_of_the_host(cuda, shape, dtype, scale_dtype):
    bits, groups, size, dims = shape
    other = list(DTYPES)[(list(DTYPES).index(dtype) + 1) % 3]
    for dtypes in ((dtype, dtype), (other, dtype)):
        sealed = empty_sealed(7, (size, HEADS, *dims), bits, groups, DTYPES[scale_dtype])
        check(cuda, caches(dtypes, size, dims), sealed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_of_any_layout(cuda, layout):
    for dtype in ("bfloat16", "float32"):
        sealed = empty_sealed(7, (32, HEADS, 64, 96), (4, 2), (32, 32), DTYPES[dtype])
        check(cuda, caches((dtype, dtype), 32, (64, 96), layout), sealed)


def test_planes_of_any_strides(cuda):
    shape = (32, HEADS, 64, 96)
    for dtype in ("float32", "float16"):
        sealed = empty_sealed(7, shape, (4, 2), (8, 32), DTYPES[dtype])
        turned = SealedBlocks(
            key=np.full((HEADS, 7, 4, 64), -1, np.int32).transpose(1, 0, 2, 3),
            value=np.full((7, HEADS, 32, 7), -1, np.int32)[..., 1:].transpose(0, 2, 1, 3),
            key_scale=np.full((4, 7, HEADS, 2, 65), np.nan, sealed.key_scale.dtype)[..., 1:].transpose(1, 2, 0, 3, 4),
            value_scale=np.asfortranarray(sealed.value_scale),
        )
        check(cuda, caches((dtype, dtype), 32, (64, 96)), turned)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_pairs_on_the_device_and_those_of_no_block(cuda, dtype):
    """Pairs in device memory are not checked: those with a block outside of its cache are skipped."""
    arrays, shape = caches(("float16", "float16"), 32, (64, 64)), (32, HEADS, 64, 64)
    outside = [[5, 3], [1, 7], [0, 3], [-1, 4], [1, 0]]
    pairs = np.zeros((len(PAIRS) + len(outside), 3), dtype)[:, :2]
    pairs[...] = np.concatenate([PAIRS, outside])
    check(cuda, arrays, empty_sealed(7, shape), cuda.put(pairs))


def test_many_pairs_and_none(cuda):
    numbers = np.random.default_rng(0).normal(size=(2, 20, 16, 1, 16)).astype(np.float32)
    pairs = np.array([(1 + i % 19, 1 + i) for i in range(150)])
    sealed = empty_sealed(151, (16, 1, 16, 16), (2, 4), (16, 16))
    there = put(cuda, sealed)
    arrays = [cuda.put(each) for each in numbers]
    seal_kv(*arrays, there, [])
    seal_kv(*arrays, there, np.zeros((0, 2), np.int32))
    seal_kv(*arrays, there, pairs)
    seal_kv(*numbers, sealed, pairs)
    for got, expected in zip(there[:4], sealed[:4], strict=True):
        assert_same_memory(cuda.get(got), expected)


@pytest.mark.parametrize(("dtype", "layout"), in_turn(DTYPES, over=[LAYOUTS]))
def test_restored_numbers_are_those_of_the_host(cuda, dtype, layout):
    """Pairs on the host, and on the device, where those with a block outside are skipped; every group is its own."""
    for bits, groups, size, dims in (((4, 2), (16, 32), 32, (64, 96)), ((2, 2), (4, 48), 16, (32, 48))):
        sealed = empty_sealed(7, (size, HEADS, *dims), bits, groups, DTYPES["float16"])
        seal_kv(*caches((dtype, dtype), size, dims), sealed, PAIRS)
        plain = [empty_cache(layout, (5, size, HEADS, dim), DTYPES[dtype]) for dim in dims]
        empty = [each.copy() for each in plain]
        pairs = PAIRS[:, ::-1]
        unseal_kv(sealed, *plain, pairs)
        outside = np.concatenate([pairs, [[7, 2], [2, 5], [0, 2]]])
        for given in (pairs, cuda.put(outside)):
            restored = [cuda.put(each) for each in empty]
            unseal_kv(put(cuda, sealed), *restored, given)
            for got, expected in zip(restored, plain, strict=True):
                found = cuda.get(got)
                np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


def test_a_call_is_one_launch(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    arrays = [cuda.put(each) for each in caches(("float16", "float16"), 32, (64, 64))]
    there = put(cuda, empty_sealed(7, (32, HEADS, 64, 64)))
    assert calls_of(cuda, lambda: seal_kv(*arrays, there, [(1, 2), (3, 4)])) == {"launches": 1}
    assert calls_of(cuda, lambda: unseal_kv(there, *arrays, [(2, 1), (4, 3)])) == {"launches": 1}


def test_block_0_of_caches_without_a_null_block(cuda):
    arrays = caches(("float32", "float32"), 16, (32, 32))
    sealed = empty_sealed(3, (16, HEADS, 32, 32))
    there = put(cuda, sealed)
    seal_kv(*map(cuda.put, arrays), there, cuda.put(np.array([(0, 0)])), null_block=False)
    seal_kv(*arrays, sealed, [(0, 0)], null_block=False)
    for got, expected in zip(there[:4], sealed[:4], strict=True):
        assert_same_memory(cuda.get(got), expected)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [([(5, 1)], "source of pair 0 is 5"), ([(1, 7)], "target of pair 0 is 7"), ([(1, 2), (3, 2)], "block 2 twice")],
)
def test_pairs_are_checked_on_the_host_and_under_debug(cuda, pairs, message):
    arrays = [cuda.put(each) for each in caches(("float16", "float16"), 32, (64, 64))]
    sealed = empty_sealed(7, (32, HEADS, 64, 64))
    there = put(cuda, sealed)
    with pytest.raises(errors.InvalidBlock, match=message):
        seal_kv(*arrays, there, pairs)
    valid = cuda.put(PAIRS)
    pagecore.debug(True)
    try:
        with pytest.raises(errors.InvalidBlock, match=message):
            seal_kv(*arrays, there, cuda.put(np.array(pairs)))
        seal_kv(*arrays, there, cuda.put(np.zeros((0, 2), np.int32)))
        with pytest.raises(errors.UnsupportedOption, match="captured"):
            cuda.capture(lambda stream: seal_kv(*arrays, there, valid, stream=stream))
    finally:
        pagecore.debug(None)
    for got, expected in zip(there[:4], sealed[:4], strict=True):
        assert_same_memory(cuda.get(got), expected)


def test_arrays_on_the_host_are_refused(cuda):
    key, value = caches(("float16", "float16"), 32, (64, 64))
    sealed = empty_sealed(7, (32, HEADS, 64, 64))
    with pytest.raises(errors.DeviceError, match="sealed key is on cpu"):
        seal_kv(cuda.put(key), cuda.put(value), sealed, PAIRS)
    with pytest.raises(errors.DeviceError, match="value_cache is on cpu"):
        seal_kv(cuda.put(key), value, put(cuda, sealed), PAIRS)
