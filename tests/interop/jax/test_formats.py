"""Quantised caches in JAX: codes, scales and attention have the bits of pagecore's own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import AttentionSpec, PagedKVCache
from pagecore.arrays.dtypes.formats import FORMATS
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from tests.interop.jax.on_jax import laid_out, same
from tests.ops.cases import DTYPES
from tests.ops.written_cases import ALL, Stored

BLOCKS, SIZE, HEADS, QUERY_HEADS, TOKENS = 6, 4, 2, 4, 9
DIMS = 64, 32
NAMES = ("key_cache", "value_cache", "key_scale", "value_scale")  # in the order of the results
POOL = ("key", "value", "key_scale", "value_scale")
LAYOUTS = pytest.mark.parametrize("layout", ["NHD", "HND"])


def stored(format: str) -> tuple[Stored, Stored]:
    keys, values = (Stored(format, "NHD", BLOCKS, SIZE, HEADS, dim) for dim in DIMS)
    return keys, values


def step() -> tuple[list[Any], Any, dict[str, Any]]:
    """Return key, value and query, slots, and the arrays of a sequence of nine tokens."""
    rng = np.random.default_rng(5)
    heads = ((HEADS, DIMS[0]), (HEADS, DIMS[1]), (QUERY_HEADS, DIMS[0]))
    rows = [rng.standard_normal((TOKENS, *each)).astype(DTYPES["bfloat16"]) for each in heads]
    slots = np.array([8, 9, 10, 11, 20, 21, 22, 23, 0], np.int32)
    where = {"block_table": np.array([[2, 5, 0]], np.int32), "seq_lens": np.array([9], np.int32)}
    return rows, slots, where | {"cu_query_lens": np.array([0, 9], np.int32)}


def split(arguments: dict[str, Any], layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a cache, laid out, and its given factors."""
    arrays = {name: laid_out(each, layout) for name, each in arguments.items() if isinstance(each, np.ndarray)}
    return arrays, {name: each for name, each in arguments.items() if name not in arrays}


@LAYOUTS
@pytest.mark.parametrize("format", ALL)
def test_codes_scales_and_attention_have_the_bits_of_pagecore(jax, interop, format, layout):
    (key, value, query), slots, where = step()
    keys, values = stored(format)
    arguments = keys.arguments("key") | values.arguments("value")
    arrays, factors = split(arguments, layout)
    own = {"four_over_six": True} if format.endswith("4over6") else {}

    @interop.jit(caches="caches")
    def call(caches: Any, rows: Any, lens: Any) -> Any:
        written = interop.write_kv(*rows[:2], **caches, slot_mapping=slots, **factors, layout=layout, **own)
        after = dict(zip(names, written, strict=True))
        return after, interop.paged_attention(rows[2], **after, **lens, **factors, layout=layout, return_lse=True)

    names = [name for name in NAMES if name in arrays]
    caches = {name: jax.numpy.array(arrays[name], copy=True) for name in names}
    after, attended = call(caches, (key, value, query), where)
    pagecore.write_kv(key, value, slot_mapping=slots, **arguments, format=format)
    for name in names:
        assert np.asarray(after[name]).tobytes() == laid_out(arguments[name], layout).tobytes(), name
    assert same(attended, pagecore.paged_attention(query, **arguments, **where, return_lse=True))


def test_four_over_six_serves_values_of_nvfp4_next_to_other_keys(jax, interop):
    (key, value, _), slots, _ = step()
    arguments = stored("int8_token")[0].arguments("key") | stored("nvfp4")[1].arguments("value")
    arrays, factors = split(arguments, "NHD")

    @interop.jit(caches="caches")
    def call(caches: Any) -> Any:
        return interop.write_kv(key, value, **caches, slot_mapping=slots, **factors, layout="NHD", four_over_six=True)

    names = [name for name in NAMES if name in arrays]
    written = call({name: jax.numpy.array(arrays[name], copy=True) for name in names})
    pagecore.write_kv(key, value, slot_mapping=slots, **arguments, format="nvfp4_4over6")
    for name, after in zip(names, written, strict=True):
        assert np.asarray(after).tobytes() == laid_out(arguments[name], "NHD").tobytes(), name


@pytest.mark.parametrize("format", ["float8_token", "nvfp4"])
def test_a_layer_of_stacked_codes_is_written_and_read_in_place(jax, interop, format):
    (key, value, query), slots, where = step()
    pairs = [stored(format) for _ in range(3)]
    layers = [keys.arguments("key") | values.arguments("value") for keys, values in pairs]
    factors = {name: each for name, each in layers[0].items() if not isinstance(each, np.ndarray)}

    @interop.jit(caches="caches")
    def call(caches: Any, layer: Any) -> Any:
        written = interop.write_kv(key, value, **caches, slot_mapping=slots, **factors, layer=layer)
        after = dict(zip(NAMES, written, strict=True))
        return after, interop.paged_attention(query, **after, **where, **factors, layer=layer)

    caches = {name: jax.numpy.array(np.stack([layer[name] for layer in layers])) for name in NAMES}
    after, attended = call(caches, 1)
    pagecore.write_kv(key, value, slot_mapping=slots, **layers[1])
    for name in NAMES:
        assert np.asarray(after[name]).tobytes() == b"".join(layer[name].tobytes() for layer in layers)
    assert same([attended], [pagecore.paged_attention(query, **layers[1], **where)])


def test_the_planes_of_a_pool_are_read_in_place(jax, interop):
    spec = AttentionSpec(HEADS, 64, format="nvfp4", dtype="bfloat16", num_query_heads=QUERY_HEADS)
    cache = PagedKVCache(spec, num_layers=1, num_blocks=8, block_size=SIZE, device="cpu")
    sequence = cache.add_sequence(range(7))
    rng = np.random.default_rng(0)
    key, value, query = (rng.standard_normal((7, heads, 64)).astype(np.float32) for heads in (2, 2, 4))
    with cache.prepare([sequence], 7) as batch:
        cache.write(0, key, value, batch)
        expected = cache.attend(0, query, batch)
        where = {name: getattr(batch, name).numpy() for name in ("seq_lens", "rows", "cu_query_lens")}
        where["block_table"] = batch.group(0).block_table.numpy()
        planes = {
            name: interop.as_jax(cache.plane(name, 0), layout="HND")
            for name in ("key", "value", "key_scale", "value_scale")
        }
        views = planes.pop("key"), planes.pop("value")
        got = interop.paged_attention(query, *views, **where, **planes, layout="HND")
        assert same([got], [np.asarray(expected)])
        del views, planes, got
        cache.commit(batch)


def test_a_plane_whose_old_contents_are_used_raises(jax, interop):
    (key, value, _), slots, _ = step()
    keys, values = stored("int8_token")
    arguments = keys.arguments("key") | values.arguments("value")

    def call(caches: Any) -> Any:
        return interop.write_kv(key, value, **caches, slot_mapping=slots), caches["value_scale"] * 2

    caches = {name: jax.numpy.array(arguments[name], copy=True) for name in NAMES}
    with pytest.raises(jax.errors.JaxRuntimeError, match="UnsupportedOption: value_scale was copied"):
        jax.block_until_ready(jax.jit(call, donate_argnums=0)(caches))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"key_scale": None},
            UnsupportedDtype,
            "key_cache is int8 with no stored scales; use codes",
        ),
        ({"value_scale": np.ones((6, 4, 2, 1))}, UnsupportedDtype, "value_scale is a ndarray, which JAX would copy"),
        (
            {"key_scale": (6, 4, 2, 2)},
            ShapeError,
            r"key_scale has.* 2\).*\(6, 4, 2, 1\): pass the plane",
        ),
        (
            {"key_global_scale": 2.0},
            UnsupportedOption,
            "key_global_scale is 2.0 .* not nvfp4.* scales are float8_e4m3fn",
        ),
        ({"four_over_six": True}, UnsupportedOption, "four_over_six is True and key_cache is int8_token; only nvfp4"),
    ],
)
def test_refusals_name_the_plane_and_the_remedy(jax, interop, change, error, words):
    (key, value, _), slots, _ = step()
    keys, values = stored("int8_token")
    arguments = keys.arguments("key") | values.arguments("value")
    arrays = {name: jax.numpy.array(each, copy=True) for name, each in arguments.items()}
    made = {name: jax.numpy.ones(each) if isinstance(each, tuple) else each for name, each in change.items()}
    with pytest.raises(error, match=words):
        interop.write_kv(key, value, **arrays | made, slot_mapping=slots, copy=None)


def test_every_format_is_known(interop):
    from pagecore.interop.jax import caches

    assert len(caches._FORMAT_OF) == len(FORMATS)
