"""Invalid arguments of an operation raise a typed error that names them; nothing is written."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagecore import errors, ops
from tests.ops.cases import snapshot
from tests.together import together


def f32(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def misaligned(*shape: int) -> Any:
    memory = np.zeros(int(np.prod(shape)) * 4 + 1, np.uint8)
    return memory[1:].view(np.float32).reshape(shape)


def odd_strides(*shape: int) -> Any:
    """Return an array whose strides are not multiples of 4: each row has one float and one byte."""
    memory = np.zeros((int(np.prod(shape[:-1])), shape[-1] * 4 + 1), np.uint8)
    return np.ndarray(shape, np.float32, memory, strides=[*odd_prefix(shape), 4])


def odd_prefix(shape: tuple[int, ...]) -> list[int]:
    row = shape[-1] * 4 + 1
    return [row * int(np.prod(shape[i + 1 : -1])) for i in range(len(shape) - 1)]


class OnCuda:
    """A DLPack producer on a GPU; its memory must not be requested."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("no GPU here")


ATTENTION: dict[str, Any] = {
    "query": f32(3, 4, 8),
    "key_cache": f32(6, 4, 2, 8),
    "value_cache": f32(6, 4, 2, 8),
    "block_table": np.asarray([[1, 2, 3], [4, 5, 0]], np.int32),
    "seq_lens": np.asarray([10, 7], np.int32),
    "cu_query_lens": np.asarray([0, 2, 3], np.int32),
}
F8 = np.zeros((6, 4, 2, 8), ml_dtypes.float8_e4m3fn)
SHAPE, DTYPE, OPTION = errors.ShapeError, errors.UnsupportedDtype, errors.UnsupportedOption
BLOCK, SEQUENCE = errors.InvalidBlock, errors.InvalidSequence

BAD_ATTENTION: list[tuple[dict[str, Any], type[Exception], str]] = [
    # dtypes
    ({"query": np.ones((3, 4, 8))}, DTYPE, "query.*float64"),
    ({"query": np.ones((3, 4, 8), np.int32)}, DTYPE, "query is int32"),
    ({"query": np.zeros((3, 4, 8), np.int8)}, DTYPE, "query is int8"),
    ({"query": [[[1.0]]]}, DTYPE, "query"),
    ({"query": None}, DTYPE, "query"),
    ({"key_cache": F8.view(np.int16)}, DTYPE, "key_cache is int16; a cache is float32, float16 or bfloat16"),
    ({"value_cache": F8.view(np.int8)}, OPTION, "value_cache is int8.*float32 for int8_token"),
    ({"block_table": f32(2, 3)}, DTYPE, "block_table holds float32"),
    ({"seq_lens": [10.0, 7.0]}, DTYPE, "seq_lens holds float64"),
    ({"seq_lens": [True, False]}, DTYPE, "seq_lens holds bool"),
    ({"seq_lens": [10, 2**70]}, DTYPE, "seq_lens"),
    ({"seq_lens": [2**64 - 1, 2**63]}, SHAPE, "seq_lens holds 18446744073709551615"),
    ({"seq_lens": "ab"}, DTYPE, "seq_lens"),
    ({"seq_lens": [[1], [2, 3]]}, SHAPE, "seq_lens"),
    ({"rows": ["a", "b"]}, DTYPE, "rows"),
    ({"cu_query_lens": [0, None, 3]}, DTYPE, "cu_query_lens"),
    # ranks and shapes
    ({"query": f32(4, 8)}, SHAPE, r"query has shape \(4, 8\).*num_tokens, num_query_heads, head_dim"),
    ({"query": np.float32(1)}, (DTYPE, SHAPE), "query"),
    ({"query": np.asarray(1, np.float32)}, SHAPE, "query"),
    ({"key_cache": f32(6, 4, 16)}, SHAPE, "key_cache"),
    ({"key_cache": f32(1, 6, 4, 2, 8)}, SHAPE, "key_cache"),
    ({"query": f32(3, 4, 16)}, SHAPE, "key_cache.*16: the head_dim of query"),
    ({"query": f32(3, 5, 8)}, SHAPE, "query has 5 heads and key_cache 2"),
    ({"query": f32(3, 1, 8)}, SHAPE, "query has 1 heads and key_cache 2"),
    ({"query": f32(3, 0, 8)}, SHAPE, "query"),
    ({"query": f32(3, 4, 0), "key_cache": f32(6, 4, 2, 0)}, SHAPE, "at least 1"),
    ({"key_cache": f32(6, 4, 0, 8), "value_cache": f32(6, 4, 0, 8)}, SHAPE, "at least 1"),
    ({"key_cache": f32(6, 0, 2, 8), "value_cache": f32(6, 0, 2, 8)}, SHAPE, "at least 1"),
    ({"value_cache": f32(6, 4, 2, 0)}, SHAPE, "at least 1"),
    ({"value_cache": f32(5, 4, 2, 8)}, SHAPE, "value_cache"),
    ({"value_cache": f32(6, 5, 2, 8)}, SHAPE, "value_cache"),
    ({"value_cache": f32(6, 4, 1, 8)}, SHAPE, "value_cache"),
    ({"seq_lens": 10}, SHAPE, "seq_lens"),
    ({"seq_lens": [[10, 7]]}, SHAPE, "seq_lens"),
    ({"seq_lens": [10]}, SHAPE, "block_table"),
    ({"seq_lens": [10, 7, 3]}, SHAPE, "block_table"),
    ({"block_table": [1, 2, 3]}, SHAPE, "block_table"),
    ({"rows": [0]}, SHAPE, "rows"),
    ({"rows": [[0, 1]]}, SHAPE, "rows"),
    ({"cu_query_lens": None}, SHAPE, "query.*cu_query_lens="),
    ({"cu_query_lens": [0, 3]}, SHAPE, "cu_query_lens"),
    ({"cu_query_lens": []}, SHAPE, "cu_query_lens"),
    # strides and alignment
    ({"query": f32(3, 8, 4).transpose(0, 2, 1)}, SHAPE, "query.*last axis must be contiguous"),
    ({"query": f32(3, 4, 16)[..., ::2]}, SHAPE, "query.*last axis"),
    ({"query": f32(3, 4, 8)[..., ::-1]}, SHAPE, "query.*last axis"),
    ({"key_cache": f32(6, 4, 8, 2).swapaxes(2, 3)}, SHAPE, "key_cache.*last axis"),
    ({"value_cache": np.broadcast_to(f32(6, 4, 2, 1), (6, 4, 2, 8))}, SHAPE, "value_cache.*last axis"),
    ({"query": misaligned(3, 4, 8)}, SHAPE, "query.*multiples of 4"),
    ({"key_cache": odd_strides(6, 4, 2, 8)}, SHAPE, "key_cache.*multiples of 4"),
    # lengths and ids
    ({"seq_lens": [10, -1]}, SHAPE, "-1"),
    ({"seq_lens": [13, 7]}, SHAPE, "13"),
    ({"seq_lens": [2**31, 7]}, SHAPE, "2147483648"),
    ({"seq_lens": [2**62, 7]}, SHAPE, str(2**62)),
    ({"cu_query_lens": [1, 2, 3]}, SHAPE, "cu_query_lens"),
    ({"cu_query_lens": [0, 3, 2]}, SHAPE, "cu_query_lens"),
    ({"cu_query_lens": [0, 2, 4]}, SHAPE, "cu_query_lens"),
    ({"cu_query_lens": [0, 2, 2**40]}, SHAPE, "cu_query_lens"),
    ({"cu_query_lens": [0, -(2**40), 2]}, SHAPE, "cu_query_lens"),
    ({"rows": [0, 2]}, (SEQUENCE, SHAPE), "2"),
    ({"rows": [-1, 0]}, (SEQUENCE, SHAPE), "-1"),
    ({"rows": [0, 2**40]}, (SEQUENCE, SHAPE), str(2**40)),
    ({"block_table": [[1, 6, 3], [4, 5, 0]]}, BLOCK, "6"),
    ({"block_table": [[1, 2, 3], [-1, 5, 0]]}, BLOCK, "-1"),
    ({"block_table": [[1, 2, 2**31 - 1], [4, 5, 0]]}, BLOCK, "2147483647"),
    ({"block_table": [[1, 2, 2**40], [4, 5, 0]]}, BLOCK, str(2**40)),
    ({"block_table": np.zeros((2, 0), np.int32)}, SHAPE, "block table"),
    # options
    ({"scale": np.nan}, OPTION, "scale is nan"),
    ({"scale": True}, OPTION, "scale is True; it must be a number, not a bool"),
    ({"softcap": np.True_}, OPTION, "softcap is .*True.*; it must be a number, not a bool"),
    ({"key_scale": True}, OPTION, "key_scale is True; it must be a number"),
    ({"value_scale": np.array(True)}, OPTION, "value_scale is .*True.*; it must be a number"),
    ({"key_scale": [1.0, True]}, DTYPE, "key_scale must be numbers that float32 can hold: .*a bool is not a number"),
    ({"key_scale": [np.True_, 0.5]}, DTYPE, "key_scale must be numbers that float32 can hold: .*a bool is not"),
    ({"sinks": [np.array(True), 1, 1, 1]}, DTYPE, "sinks must be numbers that float32 can hold: .*a bool is not"),
    ({"key_global_scale": True}, OPTION, "key_global_scale is True; it must be a number"),
    ({"scale": "big"}, OPTION, "scale is 'big'"),
    ({"scale": 10**400}, OPTION, "scale"),
    ({"softcap": -1.0}, OPTION, "softcap is -1.0"),
    ({"softcap": np.inf}, OPTION, "softcap is inf"),
    ({"softcap": None}, OPTION, "softcap is None"),
    ({"softcap": 1e-300}, OPTION, "softcap is 1e-300; it must be at least 1e-30"),
    ({"softcap": 1e300}, OPTION, r"softcap is 1e\+300"),
    ({"scale": 1e300}, OPTION, r"scale is 1e\+300"),
    ({"window": 0}, OPTION, "window is 0"),
    ({"window": "a"}, OPTION, r"window is 'a'; it counts keys and must be an integer, \(left, right\) or None"),
    ({"window": (1, "a")}, OPTION, r"window is \(1, 'a'\); it counts keys and must hold integers or None"),
    ({"window": -1}, OPTION, "window is -1"),
    ({"window": (-2, 0)}, OPTION, "window"),
    ({"window": (1, 2, 3)}, OPTION, "window"),
    ({"window": 2.5}, OPTION, "window"),
    ({"window": (2.5, 1)}, OPTION, "window"),
    ({"window": -(2**70)}, OPTION, "window"),
    ({"window": "wide"}, OPTION, "window"),
    ({"window": np.zeros((2, 2), int)}, OPTION, "window"),
    ({"window": (np.zeros(3, int), 0)}, OPTION, "window"),
    ({"sinks": f32(2)}, SHAPE, "sinks.*4"),
    ({"sinks": f32(4, 1)}, SHAPE, "sinks"),
    ({"sinks": 1.0}, SHAPE, "sinks"),
    ({"sinks": ["a"] * 4}, DTYPE, "sinks"),
    ({"sinks": [1j] * 4}, DTYPE, "sinks"),
    ({"alibi_slopes": f32(5)}, SHAPE, "alibi_slopes.*4"),
    ({"alibi_slopes": np.ones((2, 4))}, SHAPE, "alibi_slopes"),
    ({"sinks": [0.0, 1e300, 0.0, 0.0]}, OPTION, r"sinks holds 1e\+300; it must be finite"),
    ({"alibi_slopes": np.array([0.0, 1.0, 0.0, -1e300])}, OPTION, r"alibi_slopes holds -1e\+300; it must be finite"),
    ({"key_scale": f32(4)}, SHAPE, "key_scale.*2"),
    ({"key_scale": np.nan}, OPTION, "key_scale"),
    ({"value_scale": [1.0, np.inf]}, OPTION, "value_scale"),
    ({"value_scale": "one"}, DTYPE, "value_scale"),
    ({"value_scale": 1e300}, OPTION, "value_scale"),
    ({"key_scale": [1e300]}, OPTION, "key_scale.*finite as a float32"),
    ({"key_scale": [1.0, 1e300]}, OPTION, "key_scale.*finite"),
    ({"mask": np.ones(27, np.uint8)}, DTYPE, "mask is uint8"),
    ({"mask": f32(27)}, DTYPE, "mask is float32"),
    ({"mask": np.ones(26, bool)}, SHAPE, "27"),
    ({"mask": np.ones(28, bool)}, SHAPE, "27"),
    ({"mask": np.ones((1, 27), bool)}, SHAPE, "mask"),
    ({"mask": np.ones(54, bool)[::2]}, SHAPE, "mask"),
    ({"mask": []}, SHAPE, "mask has 0 entries"),
    ({"mask": [[True], [True, False]]}, SHAPE, "mask"),
    ({"stream": 0}, OPTION, "stream"),
    ({"plan": "fast"}, OPTION, "plan"),
    # out
    ({"out": f32(2, 4, 8)}, SHAPE, r"out has shape \(2, 4, 8\); it must be \(3, 4, 8\)"),
    ({"out": f32(3, 4, 4)}, SHAPE, "out"),
    ({"out": f32(96)}, SHAPE, "out"),
    ({"out": np.ones((3, 4, 8), np.float16)}, DTYPE, "out is float16; it must be float32"),
    ({"out": read_only(f32(3, 4, 8))}, OPTION, "out is read-only"),
    ({"out": f32(3, 4, 16)[..., ::2]}, SHAPE, "out"),
    ({"out": np.lib.stride_tricks.as_strided(f32(8), (3, 4, 8), (0, 0, 4))}, SHAPE, "out"),
    ({"out": misaligned(3, 4, 8)}, SHAPE, "out"),
    ({"out": [0.0]}, DTYPE, "out"),
    # devices
    ({"query": OnCuda()}, (errors.DeviceError, BufferError), "query"),
    ({"key_cache": OnCuda()}, (errors.DeviceError, BufferError), "key_cache"),
]


@together(("change", "error", "message"), BAD_ATTENTION)
def test_attention_refuses(change, error, message):
    out = f32(3, 4, 8)
    arguments = ATTENTION | {"out": out} | change
    ops.paged_attention(**ATTENTION, out=out)
    unchanged = snapshot(out)
    with pytest.raises(error, match=message):
        ops.paged_attention(**arguments)
    assert unchanged()


def test_a_refusal_is_an_error_of_pagecore_and_of_python():
    for error, builtin in ((SHAPE, ValueError), (DTYPE, TypeError), (OPTION, ValueError), (BLOCK, IndexError)):
        assert issubclass(error, builtin)
        assert issubclass(error, errors.PagecoreError)


@pytest.mark.parametrize("name", ["query", "key_cache", "seq_lens", "block_table"])
def test_options_are_keywords_and_required_arguments_are_required(name):
    with pytest.raises(TypeError):
        ops.paged_attention(**{key: value for key, value in ATTENTION.items() if key != name})
    with pytest.raises(TypeError):
        ops.paged_attention(*ATTENTION.values())


WRITE: dict[str, Any] = {
    "key": f32(3, 2, 8),
    "value": f32(3, 2, 8),
    "key_cache": f32(6, 4, 2, 8) * 7,
    "value_cache": f32(6, 4, 2, 8) * 7,
    "slot_mapping": np.asarray([4, 5, 23]),
}

BAD_WRITE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"key": np.ones((3, 2, 8))}, DTYPE, "key.*float64"),
    ({"value": np.ones((3, 2, 8), np.int8)}, DTYPE, "value is int8"),
    ({"key_cache": np.zeros((6, 4, 2, 8), np.int32)}, DTYPE, "key_cache is int32; a cache is float32"),
    ({"key_cache": np.zeros((6, 4, 2, 8))}, DTYPE, "key_cache is float64; a cache is float32, float16 or bfloat16"),
    ({"value_cache": np.zeros((6, 4, 2, 8), np.int8)}, OPTION, "value_cache is int8.*float32 for int8_token"),
    ({"slot_mapping": [4.0, 5.0]}, DTYPE, "slot_mapping"),
    ({"key": f32(3, 16)}, SHAPE, "key"),
    ({"key": f32(2, 2, 8)}, SHAPE, "value.*tokens of key"),
    ({"key": f32(3, 3, 8)}, SHAPE, "heads of key_cache"),
    ({"value": f32(3, 1, 8)}, SHAPE, "heads of value_cache"),
    ({"key": f32(3, 2, 4)}, SHAPE, "head_dim of key_cache"),
    ({"value": f32(3, 2, 16)}, SHAPE, "head_dim of value_cache"),
    ({"key_cache": f32(6, 8, 8)}, SHAPE, "key_cache"),
    ({"value_cache": f32(5, 4, 2, 8)}, SHAPE, "value_cache"),
    ({"value_cache": f32(6, 3, 2, 8)}, SHAPE, "value_cache"),
    ({"key": f32(3, 8, 2).swapaxes(1, 2)}, SHAPE, "key.*last axis"),
    ({"key_cache": f32(6, 4, 8, 2).swapaxes(2, 3)}, SHAPE, "key_cache.*last axis"),
    ({"key_cache": misaligned(6, 4, 2, 8)}, SHAPE, "key_cache.*multiples of 4"),
    ({"slot_mapping": [1, 2, 3, 4]}, SHAPE, "4 slots for 3 tokens"),
    ({"slot_mapping": [[1, 2, 3]]}, SHAPE, "slot_mapping"),
    ({"slot_mapping": 3}, SHAPE, "slot_mapping"),
    ({"slot_mapping": [4, 24, 5]}, BLOCK, "24"),
    ({"slot_mapping": [4, 5, 2**62]}, BLOCK, str(2**62)),
    ({"key_cache": read_only(f32(6, 4, 2, 8))}, OPTION, "key_cache is read-only"),
    ({"value_cache": read_only(f32(6, 4, 2, 8))}, OPTION, "value_cache is read-only"),
    ({"key_scale": 0.0}, OPTION, "key_scale holds 0.0"),
    ({"key_scale": True}, OPTION, "key_scale is True; it must be a number, not a bool"),
    ({"key_scale": [np.True_, 0.5]}, DTYPE, "key_scale must be numbers that float32 can hold: .*a bool is not"),
    ({"value_scale": False}, OPTION, "value_scale is False; it must be a number"),
    ({"value_global_scale": True}, OPTION, "value_global_scale is True; it must be a number"),
    ({"key_scale": 1e-300}, OPTION, "key_scale"),
    ({"key_scale": [1.0, 1e300]}, OPTION, "key_scale"),
    ({"value_scale": np.array([1e300])}, OPTION, "value_scale"),
    ({"value_scale": [1.0, np.nan]}, OPTION, "value_scale"),
    ({"value_scale": [1.0, 1.0, 1.0]}, SHAPE, "value_scale"),
    ({"stream": 0}, OPTION, "stream"),
    ({"key": OnCuda()}, (errors.DeviceError, BufferError), "key"),
]


@together(("change", "error", "message"), BAD_WRITE)
def test_write_kv_refuses(change, error, message):
    arguments = WRITE | change
    caches = [arguments["key_cache"], arguments["value_cache"]]
    unchanged = snapshot(*caches)
    with pytest.raises(error, match=message):
        ops.write_kv(**arguments)
    assert unchanged()


BAD_COPIES: list[tuple[Any, Any, type[Exception], str]] = [
    ([f32(4, 2)], [1, 2], SHAPE, "pairs"),
    ([f32(4, 2)], [(1, 2, 3)], SHAPE, "pairs.*axis 1 must have length 2"),
    ([f32(4, 2)], [(1.0, 2.0)], DTYPE, "pairs"),
    ([f32(4, 2), f32(3, 2)], [(1, 3)], BLOCK, "3"),
    ([f32(4, 2), np.asarray(1, np.float32)], [(1, 2)], SHAPE, r"caches\[1\] has no axes"),
    ([f32(4, 2), read_only(f32(4, 2))], [(1, 2)], OPTION, r"caches\[1\] is read-only"),
    ([f32(4, 2), "cache"], [(1, 2)], DTYPE, r"caches\[1\]"),
    ([f32(4, 2), OnCuda()], [(1, 2)], (errors.DeviceError, BufferError), r"caches\[1\]"),
    (None, [(1, 2)], DTYPE, "caches"),
    (np.ones((4, 2)), [(1, 2)], DTYPE, "float64"),
]


@together(("caches", "pairs", "error", "message"), BAD_COPIES)
def test_copy_blocks_refuses(caches, pairs, error, message):
    arrays = [cache for cache in (caches if isinstance(caches, list) else ()) if isinstance(cache, np.ndarray)]
    for array in arrays:
        if array.flags.writeable:
            array[...] = np.arange(array.size).reshape(array.shape)
    unchanged = snapshot(*arrays)
    with pytest.raises(error, match=message):
        ops.copy_blocks(caches, pairs)
    assert unchanged()


MERGE: dict[str, Any] = {"out_a": f32(3, 4, 8), "lse_a": f32(3, 4), "out_b": f32(3, 4, 8), "lse_b": f32(3, 4)}

BAD_MERGES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"out_a": f32(3, 4, 8).astype(np.float16)}, DTYPE, "out_a is float16 and out_b float32"),
    ({"out_b": np.ones((3, 4, 8))}, DTYPE, "out_b"),
    ({"out_b": f32(3, 4, 9)}, SHAPE, "out_b"),
    ({"out_b": f32(2, 4, 8)}, SHAPE, "out_b"),
    ({"out_a": f32(3, 32)}, SHAPE, "out_a"),
    ({"lse_a": f32(3, 4).astype(np.float16)}, DTYPE, "lse_a is float16; it must be float32"),
    ({"lse_a": np.ones((3, 4))}, DTYPE, "lse_a is float64; it must be float32, as returned by paged_attention"),
    ({"lse_a": f32(4, 3)}, SHAPE, "lse_a"),
    ({"lse_b": f32(3, 5)}, SHAPE, "lse_b"),
    ({"lse_b": f32(3, 4, 1)}, SHAPE, "lse_b"),
    ({"out": f32(3, 4, 9)}, SHAPE, "out"),
    ({"out": f32(3, 4, 8).astype(np.float16)}, DTYPE, "out is float16"),
    ({"out": read_only(f32(3, 4, 8))}, OPTION, "out is read-only"),
    ({"lse": f32(3, 4).astype(np.float16)}, DTYPE, "lse is float16"),
    ({"lse": np.ones((3, 4))}, DTYPE, "lse is float64; it must be float32"),
    ({"lse": f32(3, 5)}, SHAPE, "lse"),
    ({"lse": read_only(f32(3, 4))}, OPTION, "lse is read-only"),
    ({"stream": 1}, OPTION, "stream"),
    ({"out_a": OnCuda()}, (errors.DeviceError, BufferError), "out_a"),
]


@together(("change", "error", "message"), BAD_MERGES)
def test_merge_attention_refuses(change, error, message):
    arguments = MERGE | {"out": f32(3, 4, 8) * 7, "lse": f32(3, 4) * 7} | change
    unchanged = snapshot(arguments["out"], arguments["lse"])
    with pytest.raises(error, match=message):
        ops.merge_attention(**arguments)
    assert unchanged()


def test_tricks_with_subclasses_do_not_crash():
    class Lying(np.ndarray):
        shape = property(lambda self: (3, 4, 8))  # type: ignore[assignment]
        strides = property(lambda self: (1 << 40, 1 << 40, 4))  # type: ignore[assignment]

    class Number(float):
        def __float__(self) -> float:
            raise RuntimeError("not today")

    class Index:
        def __index__(self) -> int:
            raise MemoryError("not today")

    expected = ops.paged_attention(**ATTENTION)
    np.testing.assert_array_equal(
        ops.paged_attention(**ATTENTION | {"query": ATTENTION["query"].view(Lying)}), expected
    )
    with pytest.raises((errors.PagecoreError, RuntimeError)):
        ops.paged_attention(**ATTENTION, scale=type("Odd", (), {"__float__": Number.__float__})())
    with pytest.raises(MemoryError):
        ops.paged_attention(**ATTENTION, window=Index())
