"""Errors of paged_attention and write_kv in JAX: shapes while tracing, numbers while running."""

from __future__ import annotations

import numpy as np
import pytest

import pagecore
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from tests.interop.jax.on_jax import random_write
from tests.ops.cases import Shape, make_case
from tests.ops.test_fuzz import attempt, foreign_values, names

SHAPE = Shape(seq_lens=(37, 5), query_lens=(3, 2))
NARROW = np.ones(3, np.float32)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


ATTENTION = [
    ({"query": zeros(5, 4)}, ShapeError, r"query has shape \(5, 4\); it must have 3 axes"),
    ({"query": zeros(5, 0, 64)}, ShapeError, "axis 1 must have at least 1 element"),
    ({"query": zeros(5, 4, 32)}, ShapeError, "axis 2 must have length 64"),
    ({"query": zeros(5, 3, 64)}, ShapeError, "query has 3 heads and key_cache 2"),
    ({"query": zeros(5, 4, 64, dtype=np.int32)}, UnsupportedDtype, "query is int32; float32, float16 and bfloat16"),
    ({"key_cache": zeros(9, 16, 64)}, ShapeError, "key_cache has shape .* it must have 4 axes"),
    ({"key_cache": zeros(9, 16, 3, 64)}, ShapeError, "only their last axes, head_dim, may differ"),
    ({"value_cache": zeros(7, 16, 2, 64, dtype=np.int8)}, UnsupportedDtype, "value_cache is int8"),
    ({"layer": 0}, ShapeError, "it must have 5 axes"),
    ({"layout": "DNH"}, UnsupportedOption, "layout is 'DNH'; it must be 'NHD' or 'HND'"),
    ({"seq_lens": zeros(2)}, UnsupportedDtype, "seq_lens holds float32"),
    ({"seq_lens": [[1]]}, ShapeError, "seq_lens has shape"),
    ({"seq_lens": [1]}, ShapeError, "block_table has shape .* axis 0 must have length 1"),
    ({"block_table": [1, 2]}, ShapeError, "block_table has shape"),
    ({"block_table": [[1], [2, 3]]}, ShapeError, "block_table is not an array of integers"),
    ({"block_table": zeros(2, 4, dtype=np.uint32)}, None, ""),
    ({"block_table": np.full((2, 4), 2**40)}, ShapeError, "JAX would truncate to int32; set jax_enable_x64"),
    ({"rows": [0]}, ShapeError, "rows has shape"),
    ({"cu_query_lens": None}, ShapeError, "one query for each of seq_lens, or pass cu_query_lens="),
    ({"cu_query_lens": [0, 5]}, ShapeError, "one more than seq_lens"),
    ({"scale": "much"}, UnsupportedOption, "scale is 'much'; it must be a number"),
    ({"scale": np.inf}, UnsupportedOption, "scale is inf; it must be finite"),
    ({"scale": True}, UnsupportedOption, "scale is True; it must be a number"),
    ({"key_scale": True}, UnsupportedOption, "key_scale is True; it must be a number"),
    ({"causal": "no"}, UnsupportedOption, "causal is 'no'; it must be True or False"),
    ({"causal": np.zeros(1)}, UnsupportedOption, "it must be True or False"),
    ({"return_lse": 2}, UnsupportedOption, "return_lse is 2; it must be True or False"),
    ({"softcap": -1.0}, UnsupportedOption, "softcap is -1.0; it must be at least"),
    ({"softcap": 1e-35}, UnsupportedOption, "or 0 for no cap"),
    ({"window": 0}, UnsupportedOption, "window is 0; it must be at least 1"),
    ({"chunk": 0}, UnsupportedOption, "chunk is 0; it must be at least 1"),
    ({"sink_tokens": 3}, UnsupportedOption, "sink_tokens is 3 and the window is unbounded"),
    ({"window": (1, 2, 3)}, UnsupportedOption, r"it must be a number of keys, or \(left, right\)"),
    ({"sinks": NARROW}, ShapeError, r"sinks has shape \(3,\); it must be \[4\], one number for each head"),
    ({"alibi_slopes": zeros(4, dtype=bool)}, UnsupportedDtype, "alibi_slopes holds bool"),
    ({"mask": zeros(10)}, UnsupportedDtype, "mask is float32; it must be bool"),
    ({"mask": zeros(2, 5, dtype=bool)}, ShapeError, "mask has shape"),
    ({"key_scale": NARROW}, ShapeError, r"key_scale has shape \(3,\); it must be \[2\]"),
    ({"value_scale": np.nan}, UnsupportedOption, "value_scale is nan; it must be finite"),
]


@pytest.mark.parametrize(("change", "error", "message"), ATTENTION, ids=[next(iter(c[0])) for c in ATTENTION])
def test_attention_raises_for_invalid_arguments_while_tracing(jax, interop, change, error, message):
    case = make_case(SHAPE)
    names = ("query", "key_cache", "value_cache", "block_table", "seq_lens")
    arguments = dict(zip(names, case.arrays, strict=True)) | case.options | change
    caches = [jax.numpy.array(arguments.pop(name)) for name in names[1:3]]
    query, table, lens = (arguments.pop(name) for name in ("query", "block_table", "seq_lens"))

    def trace():
        return jax.eval_shape(
            lambda *caches: interop.paged_attention(query, *caches, table, lens, **arguments), *caches
        )

    if error is None:
        assert trace().shape == (5, 4, 64)
    else:
        with pytest.raises(error, match=message):
            trace()


WRITE = [
    ({"key": zeros(9, 2)}, ShapeError, "key has shape"),
    ({"value": zeros(8, 2, 24)}, ShapeError, "value has shape .* axis 0 must have length 9: the tokens of key"),
    ({"key": zeros(9, 3, 16)}, ShapeError, "axis 1 must have length 2: the heads of key_cache"),
    ({"value": zeros(9, 2, 16)}, ShapeError, "axis 2 must have length 24: the head_dim of value_cache"),
    ({"slot_mapping": np.arange(10)}, ShapeError, "slot_mapping has 10 slots; it must have at most 9"),
    ({"slot_mapping": zeros(9)}, UnsupportedDtype, "slot_mapping holds float32"),
    ({"key_scale": 0.0}, UnsupportedOption, "finite and not 0 as a float32"),
    ({"key_scale": 1e-60}, UnsupportedOption, "finite and not 0 as a float32"),
    ({"layer": 1}, ShapeError, "it must have 5 axes"),
    ({"copy": True}, UnsupportedOption, "copy is True; it must be False, or None"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRITE, ids=[next(iter(c[0])) for c in WRITE])
def test_write_raises_for_invalid_arguments_while_tracing(jax, interop, change, error, message):
    rows, caches, slots = random_write()
    arguments = {"key": rows[0], "value": rows[1], "slot_mapping": slots} | change
    key, value, slots = (arguments.pop(name) for name in ("key", "value", "slot_mapping"))
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda *caches: interop.write_kv(key, value, *caches, slots, **arguments), *caches)


def test_traced_options_raise(jax, interop):
    case = make_case(SHAPE)
    with pytest.raises(UnsupportedOption, match="scale is traced; it must be known when the function is compiled"):
        jax.jit(lambda scale: interop.paged_attention(*map(jax.numpy.array, case.arrays), scale=scale, **case.options))(
            0.1
        )
    with pytest.raises(UnsupportedOption, match=r"causal is traced; it must be known .*: True or False"):
        jax.jit(lambda on: interop.paged_attention(*map(jax.numpy.array, case.arrays), causal=on, **case.options))(True)


def test_caches_that_jax_would_copy_raise(jax, interop):
    case = make_case(SHAPE)
    query, _, _, table, lens = case.arrays
    for cache in (case.key_cache, pagecore.as_tensor(case.key_cache)):
        with pytest.raises(UnsupportedDtype, match=r"key_cache is a \w+, which JAX would copy; .* as_jax"):
            interop.paged_attention(query, cache, cache, table, lens, **case.options)


def test_slots_past_int32_raise_without_x64(jax, interop):
    rows = [jax.ShapeDtypeStruct((1, 1, 1), np.float32)] * 2
    caches = [jax.ShapeDtypeStruct((2**27, 16, 1, 1), np.float32)] * 2
    slots = jax.ShapeDtypeStruct((1,), np.int32)
    assert jax.eval_shape(interop.write_kv, *rows, *caches, slots)[0].shape == (2**27, 16, 1, 1)
    caches = [jax.ShapeDtypeStruct((2**27 + 1, 16, 1, 1), np.float32)] * 2
    with pytest.raises(UnsupportedOption, match="2147483664 slots, more than int32 can index; set jax_enable_x64"):
        jax.eval_shape(interop.write_kv, *rows, *caches, slots)
    with jax.enable_x64(True):
        slots = jax.ShapeDtypeStruct((1,), np.int64)
        assert jax.eval_shape(interop.write_kv, *rows, *caches, slots)[0].shape == (2**27 + 1, 16, 1, 1)


RUN = {
    "a slot past the cache": ("write", {"slots": [24]}, r"InvalidBlock: slot_mapping\[0\] is 24 and the cache has 24"),
    "a layer past the stack": ("write", {"layer": 3}, "ShapeError: layer is 3 and the caches hold 3 layers"),
    "a negative layer": ("write", {"layer": -1}, "ShapeError: layer is -1 and the caches hold 3 layers"),
    "a scale of 0": ("write", {"key_scale": 0.0}, "UnsupportedOption: key_scale holds 0; .* not 0 to be divided by"),
    "a scale of nan": ("attend", {"value_scale": np.nan}, "UnsupportedOption: value_scale holds nan; .* be finite"),
    "a block past the cache": ("attend", {"table": [[6]]}, r"InvalidBlock: block_table\[0, 0\] is 6"),
    "a row past the table": ("attend", {"rows": [1]}, "InvalidSequence: sequence 0 is row 1 of a block table of 1"),
    "a long sequence": ("attend", {"lens": [5]}, r"ShapeError: seq_lens\[0\] is 5, which is more than 1 blocks"),
    "queries past the query": ("attend", {"cu": [0, 2]}, r"ShapeError: cu_query_lens\[1\] is 2 and query has 1 rows"),
}


@pytest.mark.parametrize(("which", "change", "message"), RUN.values(), ids=RUN)
def test_a_run_raises_for_invalid_numbers_by_name(jax, interop, which, change, message):
    _, caches, _ = random_write()
    stacks = [np.stack([cache] * 3) for cache in caches]
    numbers = {"slots": [1], "layer": 1, "key_scale": 1.0, "value_scale": 1.0, "table": [[1]], "rows": [0]}
    numbers = numbers | {"lens": [4], "cu": [0, 1]} | change
    numbers = {name: np.asarray(n, np.float32 if "scale" in name else np.int32) for name, n in numbers.items()}

    @jax.jit
    def write(keys, values, slots, layer, key_scale, value_scale, **_):
        rows = jax.numpy.ones((1, 2, 16)), jax.numpy.ones((1, 2, 24))
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        return interop.write_kv(*rows, keys, values, slots, layer=layer, **scales)

    @jax.jit
    def attend(keys, values, layer, key_scale, value_scale, table, rows, lens, cu, **_):
        options = {"rows": rows, "cu_query_lens": cu, "key_scale": key_scale, "value_scale": value_scale}
        return interop.paged_attention(jax.numpy.ones((1, 2, 16)), keys, values, table, lens, layer=layer, **options)

    call = write if which == "write" else attend
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(call(*stacks, **numbers))


def test_a_run_raises_for_factors_whose_product_overflows(jax, interop):
    query, cache = jax.numpy.ones((1, 2, 16)), jax.numpy.ones((2, 4, 2, 16))
    call = jax.jit(
        lambda scales: interop.paged_attention(query, cache, cache, [[1]], [4], scale=1e20, key_scale=scales)
    )
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"product of scale and key_scale is .* head 1"):
        jax.block_until_ready(call(np.array([1, 1e20], np.float32)))


def test_gradients_raise_except_through_stop_gradient(jax, interop):
    case = make_case(Shape(seq_lens=(20,)))
    query, *rest = map(jax.numpy.array, case.arrays)

    def loss(weight, stop):
        return interop.paged_attention(stop(query * weight), *rest).sum() * weight

    with pytest.raises(UnsupportedOption, match=r"paged_attention has no gradients; put jax\.lax\.stop_gradient"):
        jax.grad(loss)(1.0, lambda x: x)
    assert np.isclose(
        jax.jit(jax.grad(loss), static_argnums=1)(1.0, jax.lax.stop_gradient), case.run().sum(), rtol=1e-5
    )

    rows, caches, slots = random_write()
    caches = [jax.numpy.array(cache) for cache in caches]
    with pytest.raises(UnsupportedOption, match="write_kv has no gradients"):
        jax.jit(jax.grad(lambda key: interop.write_kv(key, rows[1], *caches, slots, copy=None)[0].sum()))(rows[0])


def test_vmap_raises_and_map_works(jax, interop):
    case = make_case(Shape(seq_lens=(20,)))
    query, *rest = map(jax.numpy.array, case.arrays)
    many = jax.numpy.stack([query, query * 2])
    with pytest.raises(UnsupportedOption, match=r"paged_attention does not support jax\.vmap; one call serves"):
        jax.vmap(lambda query: interop.paged_attention(query, *rest))(many)
    out = jax.jit(lambda many: jax.lax.map(lambda query: interop.paged_attention(query, *rest), many))(many)
    assert np.asarray(out[0]).tobytes() == case.run().tobytes()
    rows, caches, slots = random_write()
    with pytest.raises(UnsupportedOption, match=r"write_kv does not support jax\.vmap"):
        jax.vmap(lambda keys, values: interop.write_kv(*rows, keys, values, slots))(*(cache[None] for cache in caches))


def test_other_functions_of_pagecore_raise_for_traced_arrays_and_name_interop_jax(jax, interop):
    """A traced array has no memory to read or write."""
    cache = np.zeros((3, 4, 2, 8), np.float32)
    spec = pagecore.AttentionSpec(2, 8, dtype="float32", num_query_heads=2)
    paged = pagecore.PagedKVCache(spec, num_layers=1, num_blocks=4)
    batch = paged.prepare([paged.add_sequence(range(2))], 2)
    static = pagecore.StaticKVCache(spec, 1, 1, 8)
    calls = {
        "write_kv": lambda new: pagecore.write_kv(new, new, cache, cache.copy(), [4, 5]),
        "paged_attention": lambda new: pagecore.paged_attention(new, cache, cache, [[1], [2]], [1, 2]),
        "write": lambda new: paged.write(0, new, new, batch),
        "attend": lambda new: paged.attend(0, new, batch),
        "update": lambda new: static.update(0, new[None], new[None], 0),
        "merge_attention": lambda new: pagecore.merge_attention(new, new[..., 0], new, new[..., 0]),
        "merge_attention_parts": lambda new: pagecore.merge_attention_parts(new, new[..., 0], [0, 1]),
        "copy_blocks": lambda new: pagecore.copy_blocks(new, [(1, 1)]),
    }
    for call in calls.values():
        with pytest.raises(
            UnsupportedOption, match=r"(query|key|out_a|outs|caches): .* traced .* pagecore\.interop\.jax"
        ):
            jax.jit(call)(jax.numpy.zeros((2, 2, 8), np.float32))
    with pytest.raises(UnsupportedOption, match=r"position is traced by JAX .*static_argnames"):
        jax.jit(lambda at: static.update(0, cache[:1, :2, :1], cache[:1, :2, :1], at))(3)


def test_one_array_as_both_caches_gives_two_results_or_raises(jax, interop):
    """XLA cannot donate an array twice, so it copies the array: the results do not alias each other."""
    cache, new = jax.numpy.zeros((3, 4, 2, 8)), jax.numpy.ones((2, 2, 8))
    slots = jax.numpy.array([4, 5])
    write = interop.jit(
        lambda keys, values: interop.write_kv(new, 2 * new, keys, values, slots), caches=("keys", "values")
    )
    with pytest.raises((UnsupportedOption, jax.errors.JaxRuntimeError, ValueError)):
        write(cache, cache)
    cache = jax.numpy.zeros((3, 4, 2, 8))
    keys, values = jax.jit(lambda both: interop.write_kv(new, 2 * new, both, both, slots, copy=None))(cache)
    assert (np.asarray(keys)[1, 0] == 1).all()
    assert (np.asarray(values)[1, 0] == 2).all()
    assert not np.asarray(cache).any()


@pytest.mark.filterwarnings("ignore")  # JAX warns about some foreign values
@pytest.mark.parametrize("operation", ["paged_attention", "write_kv"])
def test_foreign_arguments_raise_by_name_while_tracing(jax, interop, operation):
    ones, ids = jax.numpy.ones, jax.numpy.array
    caches = {"key_cache": ones((6, 4, 2, 8)), "value_cache": ones((6, 4, 2, 8)), "layer": None, "layout": "NHD"}
    caches |= {"key_scale": 1.0, "value_scale": ones(2)}
    attention = {"query": ones((3, 4, 8)), "block_table": ids([[1, 2], [3, 4]]), "seq_lens": ids([5, 2])}
    attention |= {"rows": ids([0, 1]), "cu_query_lens": ids([0, 2, 3]), "scale": 1.0, "causal": True, "window": 3}
    attention |= {
        "softcap": 0.0,
        "sinks": ones(4),
        "alibi_slopes": ones(4),
        "mask": ones(12, bool),
        "return_lse": False,
    }
    writing = {"key": ones((3, 2, 8)), "value": ones((3, 2, 8)), "slot_mapping": ids([4, 5, -1]), "copy": None}
    good = caches | (attention if operation == "paged_attention" else writing)
    for name in good:
        for value in foreign_values(np.random.default_rng(3)):
            given = good | {name: value}
            trace = lambda given=given: jax.eval_shape(lambda: getattr(interop, operation)(**given))  # noqa: E731
            error = attempt(operation, trace, {}, [])
            assert error is None or names(error, name), (name, str(error))
