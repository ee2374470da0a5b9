"""Arrays that share memory: refused, without a write, if results would be wrong; accepted if elements are disjoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import pagecore
from pagecore import ops
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage import AttentionSpec, KVPool
from tests.ops.cases import Shape, make_case, random_mask, snapshot
from tests.ops.instruction_sets import on_every_isa
from tests.together import together

MIXED = Shape(seq_lens=(300, 77, 5, 0, 1200), query_lens=(40, 77, 1, 0, 2), heads=(8, 2), dims=(64, 64), padding=7)


def numbers(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# ---- paged_attention


@pytest.mark.slow
@together("num_threads", [1, 3])
@together("batch_invariant", [None, False, True])
@together("dtype", ["float32", "bfloat16"])
@together("masked", [False, True])
@on_every_isa
def test_out_may_be_the_query_itself(num_threads, batch_invariant, dtype, masked):
    options = {"mask": random_mask(MIXED)} if masked else {}
    for shape in (MIXED,) if masked else (MIXED, Shape(seq_lens=(5000, 3, 900), heads=(8, 2), dims=(64, 64))):
        case = make_case(replace(shape, query_dtype=dtype, cache_dtype=dtype), **options)
        plan = None
        if batch_invariant is not None:
            plan = ops.plan_attention(
                case.options.get("cu_query_lens"), case.seq_lens, num_query_heads=8, num_kv_heads=2,
                batch_invariant=batch_invariant, num_workers=num_threads,
            )  # fmt: skip
        threads = pagecore.num_threads()
        try:
            pagecore.set_num_threads(num_threads)
            expected, lse = ops.paged_attention(*case.arrays, **case.options, plan=plan, return_lse=True)
            query = case.query.copy()
            out, own = ops.paged_attention(
                query, *case.arrays[1:], **case.options, plan=plan, out=query, return_lse=True
            )
        finally:
            pagecore.set_num_threads(threads)
        assert out is query
        np.testing.assert_array_equal(query.view(np.uint8), expected.view(np.uint8))
        np.testing.assert_array_equal(own, lse)


def attention() -> dict[str, Any]:
    memory = numbers(4, 8, 2, 8)
    return {
        "query": numbers(5, 4, 8),
        "key_cache": memory,
        "value_cache": numbers(4, 8, 2, 8),
        "block_table": np.array([[1, 2], [3, 0]], np.int32),
        "seq_lens": np.array([12, 5], np.int32),
        "rows": np.array([0, 1], np.int32),
        "cu_query_lens": np.array([0, 3, 5], np.int32),
        "sinks": numbers(4),
        "alibi_slopes": numbers(4),
        "mask": np.ones(3 * 12 + 2 * 5, np.bool_),
        "key_scale": np.ones(2, np.float32),
        "value_scale": np.ones(2, np.float32),
    }


@together(
    "turn", [lambda q: q[::-1], lambda q: q[:, ::-1], lambda q: q.transpose(1, 0, 2)[:, :4].transpose(1, 0, 2)[::-1]]
)
def test_out_in_another_order_than_the_query_is_refused(turn):
    given = attention()
    given["out"] = turn(given["query"])
    if given["out"].shape != given["query"].shape:
        given["query"] = given["query"][:4]
        given["cu_query_lens"] = np.array([0, 2, 4], np.int32)
        given["mask"] = given["mask"][: 2 * 12 + 2 * 5]
    unchanged = snapshot(given["query"])
    with pytest.raises(UnsupportedOption, match="out shares memory with query and is not that array; pass query"):
        ops.paged_attention(**given)
    assert unchanged()


def test_out_shifted_against_the_query_is_refused():
    memory, given = numbers(6, 4, 8), attention()
    for shift in (0, 1):
        given |= {"query": memory[shift : shift + 5], "out": memory[1 - shift : 6 - shift]}
        with pytest.raises(UnsupportedOption, match="out shares memory with query"):
            ops.paged_attention(**given)


@together("name", [name for name in attention() if name != "query"])
def test_out_in_the_memory_of_an_input_is_refused(name):
    given = attention()
    memory = np.zeros(2**15, np.uint8)
    array = given[name]
    given[name] = np.ndarray(array.shape, array.dtype, memory, 64)
    given[name][...] = array
    given["out"] = np.ndarray((5, 4, 8), np.float32, memory, 64 + array.nbytes - 4)
    if array.dtype == np.bool_:
        given["out"] = np.ndarray((5, 4, 8), np.float32, memory, 64)
    unchanged = snapshot(memory)
    with pytest.raises(UnsupportedOption, match=f"out shares memory with {name}; pass arrays that do not overlap"):
        ops.paged_attention(**given)
    assert unchanged()


@together("strides", [(0, 32, 4), (4, 32, 4), (128, 16, 4)])
def test_an_out_with_overlapping_elements_is_refused(strides):
    given = attention()
    with pytest.raises(ShapeError, match=r"out has strides .*elements share memory"):
        ops.paged_attention(**given, out=as_strided(np.zeros(2000, np.float32), (5, 4, 8), strides))


def test_out_that_interleaves_with_an_input_is_served():
    given = attention()
    expected = ops.paged_attention(**given)
    memory = np.zeros((5, 2, 4, 8), np.float32)
    memory[:, 0] = given["query"]
    given |= {"query": memory[:, 0], "out": memory[::-1, 1]}
    np.testing.assert_array_equal(ops.paged_attention(**given), expected)


# ---- write_kv


def writing() -> dict[str, Any]:
    return {
        "key": numbers(3, 2, 8),
        "value": numbers(3, 2, 8),
        "key_cache": np.zeros((4, 8, 2, 8), np.float32),
        "value_cache": np.zeros((4, 8, 2, 8), np.float32),
        "slot_mapping": np.array([3, 9, 10], np.int32),
        "key_scale": np.ones(2, np.float32),
        "value_scale": np.ones(2, np.float32),
    }


@together("cache", ["key_cache", "value_cache"])
@together("name", ["key", "value", "slot_mapping", "key_scale", "value_scale"])
def test_written_arrays_must_not_overlap_inputs(cache, name):
    given = writing()
    array = given[name]
    memory = given[cache].reshape(-1)[70 : 70 + array.size].view(array.dtype)
    memory[...] = array.reshape(-1)
    given[name] = memory.reshape(array.shape)
    unchanged = snapshot(given["key_cache"], given["value_cache"])
    with pytest.raises(UnsupportedOption, match=f"{cache} shares memory with {name}; pass arrays that do not overlap"):
        ops.write_kv(**given)
    assert unchanged()


def test_the_two_caches_are_apart():
    given = writing()
    with pytest.raises(UnsupportedOption, match="key_cache shares memory with value_cache"):
        ops.write_kv(**given | {"value_cache": given["key_cache"]})
    wide = np.zeros((4, 8, 2, 12), np.float32)
    with pytest.raises(UnsupportedOption, match="key_cache shares memory with value_cache"):
        ops.write_kv(**given | {"key_cache": wide[..., :8], "value_cache": wide[..., 4:]})
    for zeroed in ("key_cache", "value_cache"):
        flat = as_strided(np.zeros(600, np.float32), (4, 8, 2, 8), (512, 64, 8, 4))
        with pytest.raises(ShapeError, match=f"{zeroed} has strides .*elements share memory"):
            ops.write_kv(**given | {zeroed: flat})


@together("layout", ["blockwise", "layerwise", "BNCLHD", "LBHCND"])
def test_planes_of_one_pool_are_written(layout):
    pool = KVPool(AttentionSpec(num_kv_heads=2, head_dim=8, dtype="float32"), 3, 4, 8, layout, "cpu")
    given = writing()
    for layer in range(3):
        caches = {"key_cache": pool.plane("key", layer), "value_cache": pool.plane("value", layer)}
        ops.write_kv(**given | caches)
        for name in ("key", "value"):
            stored = caches[f"{name}_cache"].numpy().reshape(32, 2, 8)
            np.testing.assert_array_equal(stored[[3, 9, 10]], given[name])


# ---- merge_attention


def merging() -> dict[str, Any]:
    out, lse = numbers(6, 4, 8), numbers(6, 4)
    return {"out_a": out, "lse_a": lse, "out_b": out + 1, "lse_b": lse / 2}


@together("out", ["out_a", "out_b"])
@together("lse", ["lse_a", "lse_b"])
def test_a_merge_may_go_into_either_part(out, lse):
    given = merging()
    expected = ops.merge_attention(**given)
    got = ops.merge_attention(**given, out=given[out], lse=given[lse])
    assert got == (given[out], given[lse]) or (got[0] is given[out] and got[1] is given[lse])
    for array, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(array, other)


def test_a_merge_into_memory_that_it_reads_otherwise_is_refused():
    given, memory = merging(), numbers(8, 4, 8)
    lines = np.zeros((6, 4, 9), np.float32)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"out": given["out_a"][::-1]}, "out shares memory with out_a and is not that array; pass out_a itself"),
        ({"out": given["out_b"][:, ::-1]}, "out shares memory with out_b and is not"),
        ({"out_a": memory[:6], "out": memory[2:]}, "out shares memory with out_a"),
        ({"lse": given["lse_a"][::-1]}, "lse shares memory with lse_a and is not"),
        ({"lse": given["lse_b"][:, ::-1]}, "lse shares memory with lse_b and is not"),
        ({"lse": given["out_a"][:, :, 3]}, "lse shares memory with out_a; pass"),
        ({"lse": given["out_b"][:, :, 3]}, "lse shares memory with out_b; pass"),
        ({"lse_a": memory[:6, :, 0], "out": memory[:6]}, "out shares memory with lse_a; pass"),
        ({"lse_b": memory[:6, :, 0], "out": memory[:6]}, "out shares memory with lse_b; pass"),
        ({"out": lines[..., :8], "lse": lines[..., 7]}, "lse shares memory with out; pass"),
    ]
    unchanged = snapshot(*given.values())
    for changed, message in refused:
        with pytest.raises(UnsupportedOption, match=message):
            ops.merge_attention(**given | changed)
    assert unchanged()
    ops.merge_attention(**given, out=lines[..., :8], lse=lines[..., 8])
    expected = ops.merge_attention(**given)
    np.testing.assert_array_equal(lines[..., :8], expected[0])
    np.testing.assert_array_equal(lines[..., 8], expected[1])


# ---- blocks


def test_blocks_are_copied_in_caches_that_share_nothing():
    cache = numbers(6, 4, 2)
    unchanged = snapshot(cache)
    for caches in ([cache, cache], [cache, cache[:, 2:]], [cache[:, :3], cache[:, 1:]]):
        with pytest.raises(UnsupportedOption, match=r"caches\[0\] shares memory with caches\[1\]"):
            ops.copy_blocks(caches, [(1, 2)])
    for strides in ((0, 8, 4), (8, 8, 4), (64, 8, 0)):
        with pytest.raises(ShapeError, match=r"caches has strides .*elements share memory"):
            ops.copy_blocks(as_strided(cache, (2, 3, 2), strides), [(1, 0)])
    assert unchanged()
    expected = cache.copy()
    expected[2] = expected[1]
    ops.copy_blocks([cache[:, :2], cache[:, 2:]], [(1, 2)])
    np.testing.assert_array_equal(cache, expected)


def test_written_lists_of_arrays_share_nothing_among_themselves():
    cache, values = numbers(6, 4, 2), numbers(8, 2)
    batch = {"block_table": [[1, 2]], "seq_lens": [8]}
    for out in ([values, values], [values, values[::-1]]):
        with pytest.raises(UnsupportedOption, match=r"out\[0\] shares memory with out\[1\]"):
            ops.gather_blocks([cache, cache], **batch, out=out)
    ops.gather_blocks([cache, cache], **batch, out=[values, np.empty_like(values)])  # a source may be read twice
    with pytest.raises(UnsupportedOption, match=r"cache\[0\] shares memory with cache\[1\]"):
        ops.scatter_blocks([values, values], [cache, cache], **batch)
    with pytest.raises(UnsupportedOption, match=r"target_caches\[0\] shares memory with target_caches\[2\]"):
        ops.transfer_blocks([cache, cache, cache], [target := numbers(6, 4, 2), numbers(6, 4, 2), target], [(1, 2)])


def test_written_arrays_must_not_overlap_indices():
    cache, out = numbers(6, 4, 2), numbers(8, 2)
    given: dict[str, Any] = {
        "block_table": np.array([[1, 2]], np.int32),
        "seq_lens": np.array([8]),
        "rows": np.array([0]),
    }
    pairs = np.array([[1, 2]], np.int32)
    for name, indices in given.items():
        for written, call in (
            (out, lambda memory, **more: ops.gather_blocks(cache, **more, out=memory)),
            (cache, lambda memory, **more: ops.scatter_blocks(out + 1, memory, **more)),
        ):
            inside = written.reshape(-1).view(indices.dtype)[1 : 1 + indices.size].reshape(indices.shape)
            inside[...] = indices
            with pytest.raises(UnsupportedOption, match=f"shares memory with {name}"):
                call(written, **given | {name: inside})
    inside = cache.reshape(-1).view(np.int32)[3:5].reshape(1, 2)
    inside[...] = pairs
    unchanged = snapshot(cache)
    with pytest.raises(UnsupportedOption, match=r"caches\[1\] shares memory with pairs"):
        ops.copy_blocks([numbers(6, 4, 2), cache], inside)
    with pytest.raises(UnsupportedOption, match="target_caches shares memory with pairs"):
        ops.transfer_blocks(numbers(6, 4, 2), cache, inside)
    assert unchanged()


def test_a_static_cache_accepts_views_of_its_own_memory():
    cache = pagecore.StaticKVCache(AttentionSpec(2, 4, dtype="float32"), 1, 2, 8)
    cache.update(0, numbers(2, 2, 6, 4), numbers(2, 2, 6, 4) + 1, 0)
    before = cache.key(0).numpy().copy(), cache.value(0).numpy().copy()
    for key, value in ((cache.key(0), cache.value(0)), (cache.value(0), cache.key(0))):
        planes = [plane.numpy() for plane in (key, value)]
        moved = [plane.transpose(0, 1, 2, 3)[:, :, 5::-1] for plane in planes]
        expected = [plane.copy() for plane in moved]
        cache.update(0, moved[0], moved[1], 2)
        np.testing.assert_array_equal(cache.key(0).numpy()[:, :, 2:8], expected[0])
        np.testing.assert_array_equal(cache.value(0).numpy()[:, :, 2:8], expected[1])
        cache.key(0).numpy()[...], cache.value(0).numpy()[...] = before


def test_a_static_cache_accepts_views_of_its_own_scales():
    cache, other = (pagecore.StaticKVCache(AttentionSpec(2, 4, format="int8_token"), 1, 1, 8) for _ in range(2))
    for each in (cache, other):
        each.update(0, numbers(1, 2, 8, 4), numbers(1, 2, 8, 4) + 1, 0)
    given = [cache.plane(name, 0).numpy().reshape(1, 2, 2, 4)[:, ::-1] for name in ("key_scale", "value_scale")]
    other.update(0, *(array.copy() for array in given), 0)
    cache.update(0, *given, 0)
    for name in ("key", "value", "key_scale", "value_scale"):
        np.testing.assert_array_equal(cache.plane(name, 0).numpy(), other.plane(name, 0).numpy())
