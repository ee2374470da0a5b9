"""Arrays with strides beyond 32-bit offsets along any axis, for every op on CUDA arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore.arrays import Tensor, strided
from tests.cuda.attention_cases import DeviceCase, compare
from tests.cuda.kit import Kit
from tests.cuda.memory import require_memory
from tests.ops.block_cases import random_numbers
from tests.ops.cases import DTYPES, Shape, make_case

NUM_BYTES = 2**34
GAP_BYTES = 2**20  # between arrays; no entry is larger
AXES = pytest.mark.parametrize("axis", [0, 1, 2])


class Expanse:
    """A large allocation that arrays share: each begins near its front and extends to its end along one axis.

    The emulator commits only the pages that are touched.
    """

    def __init__(self, cuda: Kit) -> None:
        require_memory(cuda, NUM_BYTES)
        self.cuda, self.count = cuda, 0
        self.memory = cuda.empty((NUM_BYTES,), "uint8")

    def empty(self, shape: tuple[int, ...], dtype: Any, axis: int) -> Tensor:
        dtype = np.dtype(dtype)
        entry = [n for i, n in enumerate(shape) if i != axis]
        strides = [dtype.itemsize * int(np.prod(entry[i + 1 :])) for i in range(len(entry))]
        strides.insert(axis, (NUM_BYTES - 32 * GAP_BYTES) // (shape[axis] - 1) // 256 * 256)
        assert int(np.prod(entry)) * dtype.itemsize <= GAP_BYTES
        self.count += 1
        assert self.count < 32
        return strided(self.memory, shape, tuple(strides), self.count * GAP_BYTES, dtype)

    def put(self, array: Any, axis: int) -> Tensor:
        tensor = self.empty(array.shape, array.dtype, axis)
        for i in range(array.shape[axis]):
            entry = np.ascontiguousarray(array.take(i, axis))
            self.cuda.runtime.copy(tensor.pointer + i * tensor.strides[axis], entry.ctypes.data, entry.nbytes, 0)
            self.cuda.runtime.synchronize(0)
        return tensor

    def get(self, tensor: Tensor, axis: int) -> Any:
        entries = [(*[slice(None)] * axis, i) for i in range(tensor.shape[axis])]
        return np.stack([self.cuda.get(tensor[entry]) for entry in entries], axis)


@pytest.mark.parametrize("axis", [0, 1], ids=["blocks", "tokens"])
@pytest.mark.parametrize("query_lens", [(1, 1), (50, 1)], ids=["decode", "prompts"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_reaches_every_entry(cuda, dtype, query_lens, axis):
    """The axes are those of queries, heads, blocks, tokens of a block, rows of the table and blocks of a row."""
    shape = Shape(seq_lens=(70, 33), query_lens=query_lens, heads=(8, 2), query_dtype=dtype, cache_dtype=dtype)
    case = make_case(replace(shape, shuffle_rows=True), seed=1)
    assert case.options["rows"].max() >= 3
    expanse, there = Expanse(cuda), DeviceCase(cuda, case)
    there.arrays["query"] = expanse.put(case.query, axis)
    there.arrays["key_cache"] = expanse.put(case.key_cache, axis)
    there.arrays["value_cache"] = expanse.put(case.value_cache, axis)
    # The tokens of a row exceed 32 bits; the memory after the last row is not mapped.
    tables = Expanse(cuda)  # a separate one: its long rows would overlap the other arrays
    table = tables.put(np.pad(case.block_table, ((0, 1), (0, 0))), 0)
    offset = table.pointer - tables.memory.pointer
    wide = (len(case.block_table), 2**28)
    there.arrays["block_table"] = strided(tables.memory, wide, table.strides, offset, table.dtype)
    out = expanse.empty(there.shape, case.query.dtype, axis)
    _, lse = pagecore.paged_attention(**there.arrays, out=out, return_lse=True)
    compare(case, (expanse.get(out, axis), cuda.get(lse)))


@AXES
def test_a_write_reaches_every_entry(cuda, axis):
    expanse = Expanse(cuda)
    key, value = (random_numbers((6, 8, 64), "bfloat16", seed) for seed in (0, 1))
    caches = [np.zeros((5, 4, 8, 64), DTYPES["bfloat16"]) for _ in range(2)]
    slots = np.asarray([19, 0, 7, 14, 5, 10])
    device = [expanse.put(array, min(axis, 1)) for array in (key, value)]
    device += [expanse.put(array, axis) for array in caches]
    pagecore.write_kv(*device, cuda.put(slots))
    pagecore.write_kv(key, value, *caches, slots)
    for got, expected in zip(device[2:], caches, strict=True):
        np.testing.assert_array_equal(expanse.get(got, axis), expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_merge_reaches_every_entry(cuda, axis):
    expanse = Expanse(cuda)
    outs = [random_numbers((5, 4, 32), "float32", seed) for seed in (0, 1)]
    lses = [random_numbers((5, 4), "float32", seed) for seed in (2, 3)]
    parts = [expanse.put(array, axis) for pair in zip(outs, lses, strict=True) for array in pair]
    out, lse = expanse.empty((5, 4, 32), "float32", axis), expanse.empty((5, 4), "float32", axis)
    pagecore.merge_attention(*parts, out=out, lse=lse)
    expected = pagecore.merge_attention(outs[0], lses[0], outs[1], lses[1])
    np.testing.assert_allclose(expanse.get(out, axis), expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(expanse.get(lse, axis), expected[1], rtol=1e-5, atol=1e-6)


@AXES
def test_copies_and_transfers_of_blocks_reach_every_entry(cuda, axis):
    expanse, pairs = Expanse(cuda), [(4, 1), (2, 3)]
    cache, other = random_numbers((5, 4, 6, 16), "float32"), np.zeros((5, 4, 6, 16), np.float16)
    here, there = expanse.put(cache, axis), expanse.put(other, axis)
    pagecore.copy_blocks(here, pairs)
    pagecore.transfer_blocks(here, there, pairs)
    pagecore.copy_blocks(cache, pairs)
    pagecore.transfer_blocks(cache, other, pairs)
    np.testing.assert_array_equal(expanse.get(here, axis), cache)
    np.testing.assert_array_equal(expanse.get(there, axis), other)


@AXES
def test_gathered_and_scattered_sequences_reach_every_entry(cuda, axis):
    expanse = Expanse(cuda)
    cache, table = (
        random_numbers((5, 4, 6, 16), "float32"),
        np.asarray([[0, 0], [9, 9], [9, 9], [4, 2], [3, 1]], np.int32),
    )
    lens, rows = np.asarray([7, 5]), np.asarray([3, 4])
    values = pagecore.gather_blocks(cache, table, lens, rows=rows)
    device, ids = expanse.put(cache, axis), expanse.put(table, 0)
    packed = expanse.empty(values.shape, "float32", min(axis, 1))
    pagecore.gather_blocks(device, ids, cuda.put(lens), rows=cuda.put(rows), out=packed)
    np.testing.assert_array_equal(expanse.get(packed, min(axis, 1)), values)
    blank = expanse.put(np.zeros_like(cache), axis)
    pagecore.scatter_blocks(packed, blank, ids, cuda.put(lens), rows=cuda.put(rows))
    pagecore.scatter_blocks(values, expected := np.zeros_like(cache), table, lens, rows=rows)
    np.testing.assert_array_equal(expanse.get(blank, axis), expected)


@pytest.mark.slow
def test_sequences_begin_after_lengths_whose_sum_exceeds_32_bits(cuda):
    """The packed array has only a few tokens: a sequence that begins after them gets none."""
    table = np.zeros((2, 2**23), np.int32)  # the second row holds only holes
    table[0, 0] = 1
    cache, packed = random_numbers((2, 256), "float32"), cuda.empty((5,), "float32")
    each, picked = np.zeros(19, np.int64), np.zeros(19, np.int32)
    each[[1, 17, 18]] = 2**31, 2**31, 3  # two lanes each add one of the large lengths before a third lane adds them up
    picked[18] = 1
    lens, rows = cuda.put(each), cuda.put(picked)
    values = random_numbers((5,), "float32", 1)
    pagecore.gather_blocks(cuda.put(cache), cuda.put(table), lens, rows=rows, out=packed)
    np.testing.assert_array_equal(cuda.get(packed), cache[1, :5])
    there = cuda.put(cache)
    pagecore.scatter_blocks(cuda.put(values), there, cuda.put(table), lens, rows=rows)
    np.testing.assert_array_equal(cuda.get(there), np.stack([cache[0], [*values, *cache[1, 5:]]]))
