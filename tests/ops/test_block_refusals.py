"""Invalid arguments of gather, scatter and transfer raise a typed error that names them; nothing is written."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagecore import errors, ops
from tests.ops.cases import snapshot
from tests.ops.test_refusals import BLOCK, DTYPE, OPTION, SEQUENCE, SHAPE, OnCuda, f32, read_only
from tests.together import together

DEVICE = (errors.DeviceError, BufferError)

BATCH: dict[str, Any] = {
    "cache": f32(6, 4, 2, 8) * 7,
    "block_table": np.asarray([[1, 2, 3], [4, 5, 0]], np.int32),
    "seq_lens": np.asarray([10, 7], np.int32),
}

BAD_BATCHES: list[tuple[dict[str, Any], Any, str]] = [
    ({"cache": np.ones((6, 4, 2, 8))}, DTYPE, "cache.*float64"),
    ({"cache": None}, DTYPE, "cache"),
    ({"cache": f32(24)}, SHAPE, r"cache has shape \(24,\); it must have at least 2 axes"),
    ({"cache": np.float32(1)}, (DTYPE, SHAPE), "cache"),
    ({"cache": f32(6, 0, 2, 8)}, SHAPE, "block_size must be at least 1"),
    ({"cache": OnCuda()}, DEVICE, "cache"),
    ({"block_table": f32(2, 3)}, DTYPE, "block_table holds float32"),
    ({"block_table": [1, 2, 3]}, SHAPE, "block_table"),
    ({"block_table": [[1, 2, 3], [4]]}, SHAPE, "block_table"),
    ({"block_table": np.zeros((2, 0), np.int32)}, SHAPE, "more than 0 blocks"),
    ({"block_table": []}, SHAPE, "block_table"),
    ({"block_table": None}, (DTYPE, SHAPE), "block_table"),
    ({"block_table": [[1, 6, 3], [4, 5, 0]]}, BLOCK, r"block_table\[0, 1\] is 6 and the cache has 6 blocks"),
    ({"block_table": [[1, 2, 3], [-1, 5, 0]]}, BLOCK, r"block_table\[1, 0\] is -1"),
    ({"block_table": [[1, 2, 2**40], [4, 5, 0]]}, BLOCK, str(2**40)),
    ({"block_table": [[1, 2, 2**70], [4, 5, 0]]}, DTYPE, "block_table"),
    ({"block_table": [[1, 2, 2**64 - 1], [4, 5, 0]]}, (SHAPE, DTYPE), "block_table"),
    ({"seq_lens": [10.0, 7.0]}, DTYPE, "seq_lens holds float64"),
    ({"seq_lens": [True, False]}, DTYPE, "seq_lens holds bool"),
    ({"seq_lens": None}, (DTYPE, SHAPE), "seq_lens"),
    ({"seq_lens": 10}, SHAPE, "seq_lens"),
    ({"seq_lens": [[10, 7]]}, SHAPE, "seq_lens"),
    ({"seq_lens": [10]}, SHAPE, "block_table.*one row for each of seq_lens"),
    ({"seq_lens": [10, 7, 3]}, SHAPE, "block_table"),
    ({"seq_lens": [10, -1]}, SHAPE, r"seq_lens\[1\] is -1"),
    ({"seq_lens": [13, 7]}, SHAPE, r"seq_lens\[0\] is 13, which is more than 3 blocks of 4"),
    ({"seq_lens": [10, 2**31]}, SHAPE, "2147483648"),
    ({"seq_lens": [2**62, 7]}, SHAPE, str(2**62)),
    ({"rows": [0]}, SHAPE, "rows"),
    ({"rows": [[0, 1]]}, SHAPE, "rows"),
    ({"rows": ["a", "b"]}, DTYPE, "rows"),
    ({"rows": [0, 2]}, SEQUENCE, "sequence 1 is row 2"),
    ({"rows": [-1, 0]}, SEQUENCE, "sequence 0 is row -1"),
    ({"rows": [0, 2**40]}, SEQUENCE, str(2**40)),
    ({"stream": 0}, OPTION, "stream"),
]

BAD_PACKED: list[tuple[Any, Any, str]] = [
    (f32(16, 2, 8), SHAPE, "axis 0 must have length 17: the sum of seq_lens"),
    (f32(18, 2, 8), SHAPE, "axis 0 must have length 17: the sum of seq_lens"),
    (f32(17, 2, 9), SHAPE, r"\(17, 2, 9\) and cache \(6, 4, 2, 8\)"),
    (f32(17, 8, 2), SHAPE, r"must have 3 axes, the last of which are \(2, 8\)"),
    (f32(17, 16), SHAPE, "must have 3 axes"),
    (f32(1, 17, 2, 8), SHAPE, "must have 3 axes"),
    (np.float32(1), (SHAPE, DTYPE), ""),
    (np.ones((17, 2, 8)), DTYPE, "float64"),
    (np.ones((17, 2, 8), np.int8), DTYPE, "is int8 and cache float32; only float32, float16 and bfloat16"),
    (np.zeros((17, 2, 8), ml_dtypes.float8_e5m2), DTYPE, "is float8_e5m2 and cache float32"),
    ([f32(17, 2, 8)], SHAPE, "is a list; for one array as .* it must be one array"),
    ((), SHAPE, "is a tuple; for one array"),
    ("packed", DTYPE, ""),
    (OnCuda(), DEVICE, ""),
]


def good_out() -> Any:
    return f32(17, 2, 8) * 7


@together(("change", "error", "message"), BAD_BATCHES)
def test_gather_and_scatter_refuse_a_bad_batch(change, error, message):
    arguments = {**BATCH, "cache": BATCH["cache"].copy()} | change
    out, values = good_out(), f32(17, 2, 8) * 3
    arrays = [out, *(array for array in arguments.values() if isinstance(array, np.ndarray))]
    unchanged = snapshot(*arrays)
    with pytest.raises(error, match=message):
        ops.gather_blocks(**arguments, out=out)
    with pytest.raises(error, match=message):
        ops.gather_blocks(**arguments)
    with pytest.raises(error, match=message):
        ops.scatter_blocks(values, **arguments)
    assert unchanged()


@together(("packed", "error", "message"), BAD_PACKED)
def test_gather_and_scatter_refuse_a_bad_packed_array(packed, error, message):
    cache = BATCH["cache"].copy()
    unchanged = snapshot(cache)
    with pytest.raises(error, match=f"out.*{message}"):
        ops.gather_blocks(**BATCH, out=packed)
    if packed is not None:
        with pytest.raises(error, match=f"values.*{message}"):
            ops.scatter_blocks(packed, **{**BATCH, "cache": cache})
    assert unchanged()


def test_written_arrays_must_be_writable_and_without_overlapping_elements():
    batch = {name: BATCH[name] for name in ("block_table", "seq_lens")}
    shared = np.lib.stride_tricks.as_strided(good_out(), (17, 2, 8), (64, 0, 4))
    with pytest.raises(OPTION, match="out is read-only"):
        ops.gather_blocks(**BATCH, out=read_only(good_out()))
    with pytest.raises(SHAPE, match=r"out has strides.*overwrite each other"):
        ops.gather_blocks(**BATCH, out=shared)
    with pytest.raises(OPTION, match="cache is read-only"):
        ops.scatter_blocks(good_out(), read_only(f32(6, 4, 2, 8)), **batch)
    repeated = np.lib.stride_tricks.as_strided(f32(6, 4, 2, 8), (6, 4, 2, 8), (0, 64, 32, 4))
    with pytest.raises(SHAPE, match=r"cache has strides.*overwrite each other"):
        ops.scatter_blocks(good_out(), repeated, **batch)
    with pytest.raises(SHAPE, match=r"target_caches has strides.*overwrite each other"):
        ops.transfer_blocks(f32(6, 4, 2, 8), repeated, [(1, 2)])
    ops.scatter_blocks(read_only(shared), f32(6, 4, 2, 8), **batch)


def test_lists_must_go_together():
    batch = {name: BATCH[name] for name in ("block_table", "seq_lens")}
    caches = [f32(6, 4, 2, 8), np.ones((6, 4), np.int8)]
    packed = [good_out(), np.ones(17, np.int8)]
    unchanged = snapshot(*caches, *packed)
    for bad in (packed[:1], [*packed, packed[0]], []):
        with pytest.raises(SHAPE, match=f"out has {len(bad)} arrays for 2 caches"):
            ops.gather_blocks(caches, **batch, out=bad)
        with pytest.raises(SHAPE, match=f"values has {len(bad)} arrays for 2 caches"):
            ops.scatter_blocks(bad, caches, **batch)
    with pytest.raises(SHAPE, match="out is a ndarray; for a list of caches it must be a list"):
        ops.gather_blocks(caches, **batch, out=packed[0])
    with pytest.raises(SHAPE, match=r"cache\[1\] has blocks of 5 tokens and cache\[0\] of 4"):
        ops.gather_blocks([caches[0], f32(6, 5)], **batch)
    with pytest.raises(SHAPE, match=r"out\[1\] has shape \(16,\); axis 0 must have length 17"):
        ops.gather_blocks(caches, **batch, out=[packed[0], packed[1][:16]])
    with pytest.raises(DTYPE, match=r"values\[1\] is float32 and cache\[1\] int8"):
        ops.scatter_blocks([packed[0], f32(17)], caches, **batch)
    inside = caches[0].reshape(-1)[: 17 * 16].reshape(17, 2, 8)
    with pytest.raises(OPTION, match=r"out\[0\] shares memory with cache\[1\]"):
        ops.gather_blocks([f32(6, 4, 2, 8), caches[0]], **batch, out=[inside, packed[0]])
    with pytest.raises(BLOCK, match="the cache has 5 blocks"):
        ops.scatter_blocks(packed, [caches[0], caches[1][:5]], **batch)
    assert unchanged()


BAD_TRANSFERS: list[tuple[dict[str, Any], Any, str]] = [
    ({"source_caches": f32(24)}, SHAPE, "source_caches has shape .* at least 2 axes"),
    ({"target_caches": f32(24)}, SHAPE, "target_caches has shape .* at least 2 axes"),
    ({"source_caches": None}, DTYPE, "source_caches"),
    ({"target_caches": None}, DTYPE, "target_caches"),
    ({"target_caches": f32(5, 3, 2, 8)}, SHAPE, r"target_caches has shape \(5, 3, 2, 8\) and source_caches"),
    ({"target_caches": f32(5, 4, 16)}, SHAPE, "must have 4 axes"),
    ({"target_caches": f32(5, 4, 8, 2)}, SHAPE, r"the last of which are \(4, 2, 8\)"),
    ({"target_caches": f32(5, 4, 1, 8)}, SHAPE, "target_caches"),
    ({"target_caches": np.ones((5, 4, 2, 8), np.uint8)}, DTYPE, "target_caches is uint8 and source_caches float32"),
    ({"target_caches": np.ones((5, 4, 2, 8))}, DTYPE, "float64"),
    ({"target_caches": read_only(f32(5, 4, 2, 8))}, OPTION, "target_caches is read-only"),
    ({"target_caches": [f32(5, 4, 2, 8)]}, SHAPE, "target_caches is a list"),
    ({"source_caches": [f32(6, 4, 2, 8)]}, SHAPE, "target_caches is a ndarray; for a list of source_caches"),
    ({"source_caches": [f32(6, 4, 2, 8)], "target_caches": []}, SHAPE, "target_caches has 0 arrays for 1"),
    ({"source_caches": OnCuda()}, DEVICE, "source_caches"),
    ({"target_caches": OnCuda()}, DEVICE, "target_caches"),
    ({"pairs": [1, 2]}, SHAPE, "pairs"),
    ({"pairs": [(1, 2, 3)]}, SHAPE, "axis 1 must have length 2"),
    ({"pairs": [(1.0, 2.0)]}, DTYPE, "pairs"),
    ({"pairs": None}, (DTYPE, SHAPE), "pairs"),
    ({"pairs": 3}, SHAPE, "pairs"),
    (
        {"pairs": [(1, 5)]},
        BLOCK,
        "the target of pair 0 is 5 and the smallest target cache has 5 blocks; expected 1 to 4",
    ),
    ({"pairs": [(1, 2), (6, 1)]}, BLOCK, "the source of pair 1 is 6"),
    ({"pairs": [(0, 1)]}, BLOCK, "null block; null_block=False copies it"),
    ({"pairs": [(1, 0)]}, BLOCK, "null block; null_block=False copies it"),
    ({"null_block": None}, OPTION, "null_block is None; it must be True or False"),
    ({"stream": 1}, OPTION, "stream"),
]


@together(("change", "error", "message"), BAD_TRANSFERS)
def test_transfer_refuses(change, error, message):
    target = f32(5, 4, 2, 8) * 7
    arguments = {"source_caches": f32(6, 4, 2, 8), "target_caches": target, "pairs": [(1, 2)]} | change
    unchanged = snapshot(target)
    with pytest.raises(error, match=message):
        ops.transfer_blocks(**arguments)
    assert unchanged()


@pytest.mark.parametrize("function", [ops.gather_blocks, ops.scatter_blocks, ops.transfer_blocks])
def test_required_arguments_are_required_and_options_are_keywords(function):
    with pytest.raises(TypeError):
        function()
    with pytest.raises(TypeError):
        function(*[f32(2, 2)] * 6)


def test_more_tokens_than_any_memory_holds_are_refused_by_the_table_first():
    cache = np.lib.stride_tricks.as_strided(f32(1), (2, 2**31 - 1, 2**20), (0, 0, 0))
    with pytest.raises(SHAPE, match="too narrow"):
        ops.gather_blocks(cache, np.zeros((1, 0), np.int32), [2**31 - 1])
    with pytest.raises((errors.NotEnoughMemory, SHAPE)):
        ops.gather_blocks(cache, np.ones((64, 1), np.int32), [2**31 - 1] * 64)
