"""Caches with a quantised format: the stored bytes are the twin's, and every move of blocks keeps them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    KVLayout,
    PagedKVCache,
    Plane,
    StaticKVCache,
    SwapSpace,
    TensorParallel,
)
from pagecore.arrays.dtypes.formats import FORMATS, FOUR_OVER_SIX, as_format
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from tests.cache.caches import Planes, normal, owned_memory
from tests.ops import formats_twin as twin
from tests.ops.cases import DTYPES
from tests.reference.dense import dense_attention
from tests.thinning import interleaved
from tests.together import together

HEADS, DIM, V_DIM, BLOCK = 2, 32, 64, 4
LAYOUTS = ["layerwise", "blockwise", "LBNCHD", "LBCNHD", "BCHND", KVLayout("layerwise", heads="NHD")]


# Formats of keys and of values, where they differ.
MIXED = [("float8_e4m3fn", FOUR_OVER_SIX), (None, "int4_token"), ("mxfp8", "float8_e5m2")]
ALL = [*FORMATS, FOUR_OVER_SIX]


def spec_of(format: str | tuple[str | None, str], **options: Any) -> AttentionSpec:
    keys, values = format if isinstance(format, tuple) else (format, format)
    factors = {
        name: factor
        for name, each, factor in (("key_scale", keys, 0.5), ("value_scale", values, 0.25))
        if each is not None and as_format(each).takes_factor
    }
    stored = {"format": keys} | ({"value_format": values} if values != keys else {})
    return AttentionSpec(HEADS, DIM, V_DIM, dtype="float32", num_query_heads=4, **(stored | factors | options))


def sides(spec: Any) -> tuple[tuple[str, str | None, Any], ...]:
    """Return name, format and factor of keys and of values."""
    return ("key", spec.format, spec.key_scale), ("value", spec.value_format or spec.format, spec.value_scale)


def make(layers: Any, **options: Any) -> PagedKVCache:
    return PagedKVCache(layers, **({"block_size": BLOCK, "num_blocks": 24, "max_sequences": 4} | options))


def rows(first: int, count: int, layer: int = 0, heads: int = HEADS) -> tuple[Any, Any]:
    """Return the keys and values of token positions, which differ for each position and layer."""
    key = [normal(heads, DIM, seed=1000 * layer + i) for i in range(first, first + count)]
    value = [normal(heads, V_DIM, seed=5000 + 1000 * layer + i) for i in range(first, first + count)]
    return np.array(key, np.float32).reshape(-1, heads, DIM), np.array(value, np.float32).reshape(-1, heads, V_DIM)


def compute(cache: PagedKVCache, sequence: Any, count: int, first: int | None = None) -> None:
    """Run a step of one sequence that writes rows(first ...); `first` is the sequence's own position by default."""
    begin = sequence.num_computed_tokens if first is None else first
    batch = cache.prepare([sequence], count)
    for layer in range(cache.num_layers):
        cache.write(layer, *rows(begin, count, layer), batch)
    cache.commit(batch)


def stored(cache: PagedKVCache, sequence: Any, layer: int) -> dict[str, bytes]:
    """Return the bytes of every plane of a layer at the computed tokens of a sequence."""
    table = cache.block_table(cache.group_of(layer)).numpy()[sequence.row]
    places = np.arange(sequence.num_computed_tokens)
    return {
        plane.name: np.ascontiguousarray(
            cache.plane(plane.name, layer).numpy()[table[places // BLOCK], places % BLOCK]
        ).tobytes()
        for plane in cache.spec(layer).planes
    }


def expected(cache: PagedKVCache, layer: int, key: Any, value: Any) -> dict[str, bytes]:
    found = {}
    for (name, format, factor), x in zip(sides(cache.spec(layer)), (key, value), strict=True):
        if format is None:
            found[name] = x.tobytes()
            continue
        codes, scales = twin.quantize_row(x, format, factor)
        found[name] = codes.tobytes()
        if as_format(format).scale_dtype is not None:
            found[f"{name}_scale"] = scales.tobytes()
    return found


def check(cache: PagedKVCache, sequence: Any, positions: list[int] | None = None) -> None:
    """Compare a sequence's bytes with the twin's for these positions, by default 0, 1, 2 ..."""
    places = range(sequence.num_computed_tokens) if positions is None else positions
    for layer in range(cache.num_layers):
        pairs = [rows(place, 1, layer) for place in places]
        key, value = (np.concatenate(side) for side in zip(*pairs, strict=True))
        assert stored(cache, sequence, layer) == expected(cache, layer, key, value)


def poison(cache: PagedKVCache) -> None:
    """Overwrite every free block."""
    for pool, planes in zip(cache._parts.tables.pools, cache._parts.store.pools, strict=True):
        free = pool.ref_counts() == 0
        free[0] = False
        for plane in planes.planes():
            array = plane.numpy()
            array[free] = np.full(array.itemsize, 0xFF, np.uint8).view(array.dtype)[0]


@pytest.mark.parametrize(("format", "layout"), interleaved([*ALL, *MIXED], LAYOUTS), ids=str)
def test_steps_forks_and_swaps_keep_the_bytes_of_the_twin(format, layout):
    spec = spec_of(format)
    cache = make([spec, spec_of(format, window=64), spec], layout=layout)
    space = SwapSpace(cache, num_blocks=20)
    first = cache.add_sequence(range(40))
    for count in (6, 1, 1, 3):
        compute(cache, first, count)
    check(cache, first)
    second = cache.fork(first)
    compute(cache, first, 2)
    compute(cache, second, 3, first=100)  # copies the shared block before it writes
    check(cache, first)
    check(cache, second, [*range(11), 100, 101, 102])
    cache.swap_out([first], space)
    poison(cache)
    other = cache.add_sequence(range(200, 220))
    compute(cache, other, 9)
    cache.swap_in([first])
    check(cache, first)
    check(cache, second, [*range(11), 100, 101, 102])
    check(cache, other)
    compute(cache, first, 5)
    check(cache, first)
    cache.check_invariants()


@pytest.mark.parametrize("format", FORMATS)
def test_a_cached_prefix_has_the_bytes_of_the_twin(format):
    cache = make([spec_of(format)], prefix_cache=True)
    first = cache.add_sequence(range(30))
    compute(cache, first, 18)
    cache.remove(first)
    again = cache.add_sequence(range(30))
    assert again.num_cached_tokens == 16
    check(cache, again)
    compute(cache, again, 3)
    check(cache, again)


@pytest.mark.parametrize("format", FORMATS)
def test_a_cache_in_memory_of_the_caller(format):
    layers, options = [spec_of(format)] * 2, {"block_size": BLOCK, "num_blocks": 12, "max_sequences": 2}
    for layout in ("layerwise", "blockwise", "LBNCHD"):
        cache = PagedKVCache(layers, layout=layout, buffers=owned_memory(layers, layout, **options), **options)
        sequence = cache.add_sequence(range(20))
        compute(cache, sequence, 11)
        check(cache, sequence)


@together("format", FORMATS)
@together("dtype", ["float16", "bfloat16"])
def test_keys_of_16_bits_are_quantised_from_their_own_numbers(dtype, format):
    cache = make(spec_of(format))
    sequence = cache.add_sequence(range(8))
    batch = cache.prepare([sequence], 5)
    key, value = (array.astype(DTYPES[dtype]) for array in rows(0, 5))
    cache.write(0, key, value, batch)
    cache.commit(batch)
    assert stored(cache, sequence, 0) == expected(cache, 0, key, value)


@pytest.mark.parametrize("format", FORMATS)
def test_each_rank_stores_its_heads_of_the_whole_layer(format):
    heads = 4
    factors = {}
    if FORMATS[format].takes_factor:
        per_head = FORMATS[format].scale_dtype is None
        factors = {"key_scale": [0.5, 1.0, 2.0, 0.1], "value_scale": 0.25} if per_head else {"key_scale": 0.3}
    spec = AttentionSpec(heads, DIM, V_DIM, dtype="float32", num_query_heads=8, format=format, **factors)
    key, value = rows(0, 9, heads=heads)

    def planes(parallel: TensorParallel) -> dict[str, Any]:
        cache = make(spec, parallel=parallel)
        own = parallel.heads(heads)
        sequence = cache.add_sequence(range(9))
        batch = cache.prepare([sequence], 9)
        cache.write(0, key[:, own.start : own.stop], value[:, own.start : own.stop], batch)
        cache.commit(batch)
        table = cache.block_table(0).numpy()[sequence.row]
        places = np.arange(9)
        return {
            plane.name: cache.plane(plane.name, 0).numpy()[table[places // BLOCK], places % BLOCK].view(np.uint8)
            for plane in spec.planes
        }

    whole = planes(TensorParallel())
    ranks = [planes(TensorParallel(rank, 2)) for rank in range(2)]
    for name, of_all in whole.items():
        np.testing.assert_array_equal(np.concatenate([rank[name] for rank in ranks], 1), of_all)


def test_a_layer_with_a_format_of_its_own_is_in_a_group_of_its_own():
    cache = make([spec_of("int8_token"), spec_of("nvfp4"), spec_of("int8_token"), AttentionSpec(HEADS, DIM, V_DIM)])
    assert [cache.group_of(layer) for layer in range(4)] == [0, 1, 0, 2]
    sequence = cache.add_sequence(range(9))
    compute(cache, sequence, 7)
    for layer in range(3):
        assert stored(cache, sequence, layer) == expected(cache, layer, *rows(0, 7, layer))


def test_scales_of_4_over_6_are_another_way_to_write_nvfp4():
    specs = [
        spec_of("nvfp4"),
        spec_of(FOUR_OVER_SIX),
        spec_of((None, FOUR_OVER_SIX)),
        spec_of((FOUR_OVER_SIX, "mxfp8")),
    ]
    cache = make(specs)
    assert [cache.group_of(layer) for layer in range(4)] == [0, 0, 1, 2]
    sequence = cache.add_sequence(range(9))
    for layer in range(4):
        assert expected(cache, layer, *rows(0, 7)) != expected(cache, 0, *rows(0, 7)) or layer == 0
    compute(cache, sequence, 7)
    check(cache, sequence)
    for name, of_values in ((FOUR_OVER_SIX, "nvfp4"), ("nvfp4", FOUR_OVER_SIX)):
        with pytest.raises(UnsupportedOption, match=f"format is '{name}' and value_format '{of_values}'; a write comp"):
            AttentionSpec(HEADS, DIM, format=name, value_format=of_values)


def test_layers_of_a_group_have_their_own_factors():
    specs = [spec_of("float8_e4m3fn"), spec_of("float8_e4m3fn", key_scale=3.0), spec_of("nvfp4", value_scale=7.0)]
    cache = make(specs)
    assert cache.group_of(0) == cache.group_of(1)
    sequence = cache.add_sequence(range(9))
    compute(cache, sequence, 7)
    check(cache, sequence)


def test_bounds_of_keys_are_kept_if_only_values_have_a_format():
    cache = make(AttentionSpec(HEADS, DIM, V_DIM, dtype="float32", key_bounds=True, value_format="int8_token"))
    sequence = cache.add_sequence(range(8))
    compute(cache, sequence, 8)
    cache.compact(sequence, [0, 3, 6])
    block = cache.block_table(0).numpy()[sequence.row, 0]
    keys = np.concatenate([rows(place, 1)[0] for place in (0, 3, 6)])
    np.testing.assert_array_equal(cache.plane("key_max", 0).numpy()[block], keys.max(0))


class Formatted(Planes):
    """A user-defined spec with a format."""

    format = "mxfp8"


def planes_of(**changes: Any) -> list[Plane]:
    planes = {plane.name: plane for plane in spec_of("mxfp8").planes} | changes
    return [plane for plane in planes.values() if plane is not None]


def test_a_spec_of_the_user_may_have_a_format():
    cache = make(Formatted(*planes_of()))
    sequence = cache.add_sequence(range(9))
    compute(cache, sequence, 7)
    codes, _ = twin.quantize_row(rows(0, 7)[0], "mxfp8")
    assert stored(cache, sequence, 0)["key"] == codes.tobytes()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"key": Plane("key", (HEADS, DIM), "int8")}, UnsupportedDtype, "plane 'key' of int8; the codes of.*'mxfp8'"),
        ({"value_scale": None}, UnsupportedOption, r"'value_scale' of shape \(2, 2\).*no such plane"),
        ({"key_scale": Plane("key_scale", (HEADS, 2), "uint8")}, UnsupportedOption, r"'key_scale' of shape \(2, 1\)"),
        ({"key_scale": Plane("key_scale", (HEADS, 1), "float32")}, UnsupportedOption, "has .* of float32 per token"),
        ({"key_scale": Plane("key_scale", (HEADS, 1), "uint8", "block")}, UnsupportedOption, "per block"),
        ({"key": Plane("key", (HEADS, 24), "float8_e4m3fn")}, ShapeError, "needs a multiple of 32"),
    ],
)
def test_a_spec_whose_planes_do_not_fit_its_format_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        make(Formatted(*planes_of(**changes)))


def test_codes_without_a_format_are_refused():
    with pytest.raises(UnsupportedDtype, match="without a format"):
        make(Planes(*planes_of()))


def test_write_options_of_a_step_are_refused_before_anything_is_written():
    cache = make(spec_of("int4_token"))
    sequence = cache.add_sequence(range(9))
    batch = cache.prepare([sequence], 4)
    key, value = rows(0, 4)
    before = cache.plane("key_scale", 0).numpy().tobytes()
    with pytest.raises(ShapeError, match="head_dim of key_cache"):
        cache.write(0, key[..., :16], value, batch)
    assert cache.plane("key_scale", 0).numpy().tobytes() == before
    cache.write(0, key, value, batch)
    cache.commit(batch)
    check(cache, sequence)


def static_bytes(cache: StaticKVCache, layer: int, count: int) -> dict[str, Any]:
    """Return the bytes of each plane, ``[batch, tokens, heads, bytes]``."""
    names = [plane.name for plane in cache.spec(layer).planes]
    return {
        name: np.ascontiguousarray(cache.plane(name, layer).numpy()[:, :, :count].transpose(0, 2, 1, 3)).view(np.uint8)
        for name in names
    }


@together("heads_next", [False, True])
@together("format", [*ALL, *MIXED])
def test_a_static_cache_stores_the_bytes_of_the_twin(format, heads_next):
    specs = [spec_of(format), spec_of(format)]
    if format == "float8_e5m2":
        specs[1] = spec_of(format, key_scale=[0.5, 7.0])
    cache = StaticKVCache(specs, max_batch_size=2, max_length=16)
    key, value = (side.reshape(2, 9, HEADS, -1) for side in rows(0, 18))

    def given(x: Any) -> Any:
        """Return ``[batch, heads, tokens, dim]`` with tokens or heads first in memory."""
        moved = x.transpose(0, 2, 1, 3)
        return np.ascontiguousarray(moved) if heads_next else moved

    for begin, end in ((0, 6), (6, 7), (7, 9)):
        for layer in range(2):
            cache.update(layer, given(key[:, begin:end]), given(value[:, begin:end]), begin)
    for layer, spec in enumerate(specs):
        found = static_bytes(cache, layer, 9)
        for (name, stored, given_factor), x in zip(sides(spec), (key, value), strict=True):
            if stored is None:
                np.testing.assert_array_equal(found[name], x.view(np.uint8))
                continue
            factor = np.float32(given_factor if as_format(stored).takes_factor else 1.0)
            of_heads = x / factor[:, None] if factor.ndim else x
            codes, scales = twin.quantize_row(of_heads, stored, 1.0 if factor.ndim else float(factor))
            np.testing.assert_array_equal(found[name], codes)
            if as_format(stored).scale_dtype is not None:
                np.testing.assert_array_equal(found[f"{name}_scale"], scales)
    cache.reset()
    assert not any(plane.any() for layer in range(2) for plane in static_bytes(cache, layer, 16).values())


def test_a_static_cache_refuses_layers_of_different_formats():
    for format in ("float8_e4m3fn", "mxfp8", "int8_token"):
        with pytest.raises(UnsupportedOption, match="static"):
            StaticKVCache([spec_of("float8_token"), spec_of(format)], max_length=8)
    for pair in MIXED:
        with pytest.raises(UnsupportedOption, match="static"):
            StaticKVCache([spec_of("int8_token"), spec_of(pair)], max_length=8)
    swapped = [spec_of(("float8_e4m3fn", "mxfp8")), spec_of(("mxfp8", "float8_e4m3fn"))]
    with pytest.raises(UnsupportedOption, match="some layers store key, value, value_scale and others key, value, key"):
        StaticKVCache(swapped, max_length=8)


def test_a_static_cache_checks_the_dim_in_numbers():
    cache = StaticKVCache(spec_of("int4_token"), max_length=8)
    key, value = (side.transpose(1, 0, 2)[None] for side in rows(0, 2))
    with pytest.raises(ShapeError, match="heads of 32"):
        cache.update(0, key[..., :16], value, 0)
    mixed = StaticKVCache(spec_of((None, "int4_token")), max_length=8)
    with pytest.raises(ShapeError, match=r"value has shape .*heads of 64"):
        mixed.update(0, key, value[..., :32], 0)


@pytest.mark.parametrize("format", [*FORMATS, *MIXED])
def test_attention_reads_the_stored_numbers_after_every_move(format):
    """Mixed steps, a fork and a swap; the oracle is dense attention over the dequantised rows."""
    cache = make([spec_of(format), spec_of(format, window=6)], layout="blockwise")
    space = SwapSpace(cache, num_blocks=20)
    first = cache.add_sequence(range(40))
    compute(cache, first, 9)
    second = cache.fork(first)
    compute(cache, second, 2, first=100)
    cache.swap_out([first], space)
    poison(cache)
    cache.swap_in([first])
    places = {first: [*range(9), *range(9, 12)], second: [*range(9), 100, 101, 102]}
    batch = cache.prepare([first, second], [3, 1])
    new = [9, 10, 11, 102]
    query = normal(4, 4, DIM, seed=77)
    for layer, window in ((0, None), (1, 6)):
        pairs = [rows(place, 1, layer) for place in new]
        cache.write(layer, *(np.concatenate(side) for side in zip(*pairs, strict=True)), batch)
        found = cache.attend(layer, query, batch)
        begin = 0
        for sequence, count in ((first, 3), (second, 1)):
            keys, values = read(cache.spec(layer), layer, places[sequence])
            expected_ = dense_attention(query[begin : begin + count], keys, values, window=window)
            np.testing.assert_allclose(found[begin : begin + count], expected_, rtol=1e-4, atol=1e-4)
            begin += count
    cache.commit(batch)


def read(spec: Any, layer: int, positions: list[int]) -> list[Any]:
    """Return the keys and values of positions as the cache rounds them."""
    found = []
    pairs = [rows(place, 1, layer) for place in positions]
    for (_, format, factor), side in zip(sides(spec), zip(*pairs, strict=True), strict=True):
        x = np.concatenate(side)
        if format is None:
            found.append(x)
            continue
        codes, scales = twin.quantize_row(x, format, factor)
        found.append(twin.dequantize_row(codes, format, scales, factor))
    return found
