"""Results are in the framework of the query, and arrays of every framework are used in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagecore import errors, ops
from pagecore.arrays import Tensor, as_tensor
from tests.capabilities import require
from tests.ops.cases import DTYPES, Shape, assert_lse_close, assert_output_close, make_case

SHAPE = {"seq_lens": (70, 33, 1), "query_lens": (5, 1, 1)}


def to_numpy(array: Any) -> Any:
    return as_tensor(array).numpy()


def to_torch(array: Any) -> Any:
    torch = require("torch")
    bits = np.array(array, copy=True)
    return torch.from_dlpack(as_tensor(bits))


def to_jax(array: Any) -> Any:
    jax = require("jax")
    return jax.numpy.asarray(array)


def to_tensor(array: Any) -> Any:
    return as_tensor(np.array(array, copy=True))


def is_torch(array: Any) -> bool:
    return isinstance(array, require("torch").Tensor)


def is_jax(array: Any) -> bool:
    return isinstance(array, require("jax").Array)


FRAMEWORKS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool]]] = {
    "numpy": (np.asarray, lambda array: type(array) is np.ndarray),
    "Tensor": (to_tensor, lambda array: type(array) is Tensor),
    "torch": (to_torch, is_torch),
    "jax": (to_jax, is_jax),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_attention_answers_in_the_framework_and_dtype_of_the_query(framework, dtype):
    convert, belongs = FRAMEWORKS[framework]
    case = make_case(Shape(query_dtype=dtype, cache_dtype=dtype, **SHAPE), sinks=np.ones(4, np.float32))
    expected = case.expect()
    out, lse = ops.paged_attention(
        *(convert(array) for array in case.arrays),
        **{name: convert(value) for name, value in case.options.items()},
        return_lse=True,
    )
    assert belongs(out)
    assert belongs(lse)
    assert str(as_tensor(out).dtype) == dtype
    assert_output_close(to_numpy(out), expected[0])
    assert_lse_close(to_numpy(lse), expected[1], dtype)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_only_the_query_decides_the_framework(framework):
    convert, belongs = FRAMEWORKS[framework]
    case = make_case(Shape(**SHAPE))
    expected = case.expect()[0]
    case.query = convert(case.query)
    case.key_cache = as_tensor(case.key_cache)
    out = case.run()
    assert belongs(out)
    assert_output_close(to_numpy(out), expected)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_merge_answers_in_the_framework_of_the_first_output(framework):
    convert, belongs = FRAMEWORKS[framework]
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((2, 3, 4, 8)).astype(np.float32), rng.standard_normal((2, 3, 4)).astype(np.float32)
    expected = ops.merge_attention(outs[0], lses[0], outs[1], lses[1])
    result = ops.merge_attention(convert(outs[0]), lses[0], outs[1], convert(lses[1]))
    of_parts = ops.merge_attention_parts(convert(outs.swapaxes(0, 1)), lses.swapaxes(0, 1))
    for got, parts, want in zip(result, of_parts, expected, strict=True):
        assert belongs(got)
        assert belongs(parts)
        np.testing.assert_array_equal(to_numpy(got), want)
        np.testing.assert_array_equal(to_numpy(parts), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("framework", ["Tensor", "torch"])
def test_writes_and_copies_reach_the_memory_of_the_framework(framework, dtype):
    convert, _ = FRAMEWORKS[framework]
    new = np.random.default_rng(0).standard_normal((3, 2, 8)).astype(DTYPES[dtype])
    cache = convert(np.zeros((2, 4, 4, 2, 8), DTYPES[dtype]))
    ops.write_kv(convert(new), new, cache[0], cache[1], convert(np.asarray([4, 5, -1])))
    ops.copy_blocks([cache[0], cache[1]], convert(np.asarray([[1, 3]], np.int32)))
    for plane in (0, 1):
        for block in (1, 3):
            np.testing.assert_array_equal(to_numpy(cache)[plane, block, :2], new[:2])
        assert (to_numpy(cache)[plane, [0, 2]] == 0).all()


def test_out_of_torch_is_written_and_returned_as_it_is():
    case = make_case(Shape(**SHAPE))
    out = to_torch(np.full(case.query.shape, np.nan, np.float32))
    assert case.run(out=out) is out
    assert_output_close(to_numpy(out), case.expect()[0])


def test_results_of_torch_can_be_written_by_torch():
    case = make_case(Shape(**SHAPE))
    expected = case.expect()[0]
    case.query = to_torch(case.query)
    out = case.run()
    out.mul_(2)
    assert_output_close(to_numpy(out), 2 * expected)


def test_a_result_handed_to_jax_is_never_written_again():
    case = make_case(Shape(**SHAPE))
    expected = case.expect()[0]
    case.query = to_jax(case.query)
    first = case.run()
    before = np.array(first)
    for seed in range(5):
        other = make_case(Shape(**SHAPE), seed=seed)
        other.query = to_jax(other.query)
        other.run()
    np.testing.assert_array_equal(np.asarray(first), before)
    assert_output_close(before, expected)


@pytest.mark.parametrize("target", ["key_cache", "value_cache"])
def test_arrays_of_jax_are_not_written(target):
    """JAX arrays are immutable: a cache or an output of JAX is refused by name."""
    new = np.ones((1, 2, 8), np.float32)
    caches = {name: np.zeros((2, 4, 2, 8), np.float32) for name in ("key_cache", "value_cache")}
    caches[target] = to_jax(caches[target])
    with pytest.raises(errors.UnsupportedOption, match=f"{target} is read-only"):
        ops.write_kv(new, new, **caches, slot_mapping=[1])
    assert (np.asarray(caches[target]) == 0).all()


def test_dtypes_of_torch_that_are_stored_codes_are_refused_with_the_view_to_pass():
    torch = require("torch")
    query, codes = torch.ones(1, 2, 64), torch.ones(2, 16, 2, 32, dtype=torch.uint8)
    scales = torch.full((2, 16, 2, 4), 127, dtype=torch.uint8)
    table, lens = [[1]], [5]
    bare = ops.paged_attention(query, codes, codes, table, lens, key_scale=scales, value_scale=scales)
    assert torch.isfinite(bare).all()
    powers, pairs = scales.view(torch.float8_e8m0fnu), codes.view(torch.float4_e2m1fn_x2)
    with pytest.raises(errors.UnsupportedDtype, match="value_scale is float8_e8m0fnu; pass it viewed as uint8"):
        ops.paged_attention(query, codes, codes, table, lens, key_scale=scales, value_scale=powers)
    with pytest.raises(errors.UnsupportedDtype, match="key_cache is float4_e2m1fn_x2; pass it viewed as uint8"):
        ops.paged_attention(query, pairs, codes, table, lens, key_scale=scales, value_scale=scales)
    with pytest.raises(errors.UnsupportedDtype, match="key_scale is float8_e8m0fnu"):
        ops.write_kv(query, query, codes, codes, [3], key_scale=powers, value_scale=scales)


def test_a_cache_of_another_float8_is_refused_with_the_dtypes_of_a_cache():
    torch = require("torch")
    new, cache = torch.ones(1, 2, 64), torch.ones(2, 16, 2, 64)
    other = cache.to(torch.float8_e4m3fnuz)
    expected = "cache is float8_e4m3fnuz; a cache is float32, .* in float8_e4m3fn, float8_e5m2, int8 or uint8"
    with pytest.raises(errors.UnsupportedDtype, match="key_" + expected):
        ops.paged_attention(new, other, cache, [[1]], [5])
    with pytest.raises(errors.UnsupportedDtype, match="value_" + expected):
        ops.write_kv(new, new, cache, other, [3])


def test_a_tensor_of_torch_that_requires_grad_is_refused_by_name():
    case = make_case(Shape(**SHAPE))
    case.query = to_torch(case.query).requires_grad_()
    with pytest.raises((errors.PagecoreError, BufferError), match=r"query.*grad"):
        case.run()


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_a_result_outlives_its_inputs(framework):
    convert, _ = FRAMEWORKS[framework]
    case = make_case(Shape(**SHAPE))
    expected = case.expect()[0]
    case.query = convert(case.query)
    out = case.run()
    del case
    filler = [np.ones((7, 4, 64), np.float32) for _ in range(50)]
    assert_output_close(to_numpy(out), expected)
    del filler


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gathered_sequences_are_arrays_of_the_framework_of_their_cache(framework, dtype):
    convert, belongs = FRAMEWORKS[framework]
    cache = np.random.default_rng(0).standard_normal((4, 4, 2, 8)).astype(DTYPES[dtype])
    other = np.arange(16, dtype=np.int32).reshape(4, 4)
    table, lens = convert(np.asarray([[3, 1]], np.int32)), convert(np.asarray([6], np.int32))
    got = ops.gather_blocks(convert(cache), table, lens)
    assert belongs(got)
    assert to_numpy(got).tobytes() == np.concatenate([cache[3], cache[1, :2]]).tobytes()
    first, second = ops.gather_blocks([other, convert(cache)], table, lens)
    assert type(first) is np.ndarray
    assert first.tolist() == [12, 13, 14, 15, 4, 5]
    assert belongs(second)
    assert to_numpy(second).tobytes() == to_numpy(got).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("framework", ["Tensor", "torch"])
def test_scatters_and_transfers_reach_the_memory_of_the_framework(framework, dtype):
    convert, _ = FRAMEWORKS[framework]
    values = np.random.default_rng(0).standard_normal((6, 2, 8)).astype(DTYPES[dtype])
    cache, other = convert(np.zeros((4, 4, 2, 8), DTYPES[dtype])), convert(np.zeros((3, 4, 2, 8), np.float32))
    ops.scatter_blocks(convert(values), cache, [[3, 1]], [6])
    ops.transfer_blocks(cache, other, convert(np.asarray([[3, 2]], np.int32)))
    assert to_numpy(cache)[3].tobytes() == values[:4].tobytes()
    np.testing.assert_array_equal(to_numpy(other)[2], values[:4].astype(np.float32))
    out = convert(np.zeros((6, 2, 8), np.float32))
    assert ops.gather_blocks(cache, [[3, 1]], [6], out=out) is out
    np.testing.assert_array_equal(to_numpy(out), values.astype(np.float32))


def test_a_cache_of_jax_is_read_and_never_written():
    cache = to_jax(np.ones((4, 4, 2, 8), np.float32))
    values = np.zeros((4, 2, 8), np.float32)
    for write in (
        lambda: ops.scatter_blocks(values, cache, [[1]], [4]),
        lambda: ops.transfer_blocks(values.reshape(1, 4, 2, 8).repeat(4, 0), cache, [(1, 2)]),
        lambda: ops.gather_blocks(values.reshape(1, 4, 2, 8).repeat(4, 0), [[1]], [4], out=cache[0]),
    ):
        with pytest.raises(errors.UnsupportedOption, match="read-only"):
            write()
    assert (to_numpy(cache) == 1).all()
