"""Rows, planes and dtypes that layers with rotations refuse before anything is written, and float8 that they serve."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagecore import AttentionSpec, LatentSpec, PagedKVCache, Plane, StaticKVCache
from pagecore.errors import PagecoreError, ShapeError, UnsupportedOption
from tests.cache.caches import Planes, normal
from tests.cache.rotated import DIM, HEADS, SIDES, V_DIM, Pair, rotated, spec_of


def test_rows_that_do_not_fit_are_refused_before_anything_is_written():
    cache = PagedKVCache(rotated(spec_of(format="int8_token"), "both"), num_blocks=9, block_size=4)
    key, value = normal(3, HEADS, DIM), normal(3, HEADS, V_DIM)
    planes = {plane.name: cache.plane(plane.name, 0) for plane in cache._parts.layers[0].spec.planes}
    for plane in planes.values():
        plane.numpy().view(np.uint8)[...] = 0
    with cache.prepare([cache.add_sequence(range(3))], 3) as batch:
        refused = {
            "key has 2 tokens": (key[:2], value),
            "heads": (key[:, :1], value),
            r"key has shape \(3, 2, 64\); expected \[tokens, heads, 32\]": (value, key),
            r"key has shape \(2, 32\)": (key[0], value[0]),
            r"value has shape \(3, 2, 32\); expected \[tokens, heads, 64\]": (key, key),
            "key is int64": (key.astype(int), value),
        }
        for message, bad in refused.items():
            with pytest.raises(PagecoreError, match=message):
                cache.write(0, *bad, batch)
        for name, plane in planes.items():
            assert not plane.numpy().view(np.uint8).any(), name
        cache.write(0, key, value, batch)
        for query in (normal(3, 4, DIM + 8), normal(3, 3, DIM), normal(3, DIM), normal(2, 4, DIM)):
            with pytest.raises(ShapeError, match="query"):
                cache.attend(0, query, batch)
        with pytest.raises(UnsupportedOption, match="stream"):
            cache.attend(0, normal(3, 4, DIM), batch, stream=0)
        cache.commit(batch)


def test_rows_that_the_operators_below_would_accept_are_refused_here():
    """Rows that no transform has read must not reach an operator, whatever that operator accepts."""
    cache = PagedKVCache(rotated(spec_of(), "both"), num_blocks=9)
    with cache.prepare([cache.add_sequence(range(3))], 3) as batch:
        cache._parts.ops_of(0)._inner = Accepting()
        for key, value in ((normal(3, DIM), normal(3, HEADS, V_DIM)), (normal(3, HEADS, DIM), normal(3, HEADS, DIM))):
            with pytest.raises(ShapeError, match=r"expected \[tokens, heads"):
                cache.write(0, key, value, batch)
        with pytest.raises(ShapeError, match="query has shape"):
            cache.attend(0, normal(3, DIM), batch)
        cache.abandon(batch)


class Accepting:
    def write(self, *_: Any) -> None:
        raise AssertionError("rows that are not rotated were written")

    attend = write


@pytest.mark.parametrize("name", ["latent", "rows"])
def test_rotations_of_other_planes_are_refused(name):
    class Rotated(Planes):
        key_rotation = "hadamard"

    class RotatedLatents(LatentSpec):
        value_rotation = "hadamard"

    spec = (
        Rotated(Plane("rows", (4, 16), "float32"))
        if name == "rows"
        else RotatedLatents(64, 16, num_query_heads=4, scale=0.1)
    )
    with pytest.raises(UnsupportedOption, match=rf"{type(spec).__name__} has a key_rotation or .* stores .*{name}"):
        PagedKVCache(spec, num_blocks=4)


# ---- results and queries of other dtypes

CODES = np.dtype(ml_dtypes.float8_e4m3fn)


FLOAT8: dict[str, dict[str, Any]] = {
    "float8 query": {"query": CODES},
    "float8 query, out in float32": {"query": CODES, "out": np.float32},
    "float8 query and out": {"query": CODES, "out": CODES},
    "out in float8": {"out": CODES},
    "output_scale": {"output_scale": 0.5},
    "out in float8 with output_scale": {"out": CODES, "output_scale": 0.5},
}


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("name", FLOAT8)
def test_float8_is_served_where_no_rotation_reads_or_writes_it(name, sides):
    """Otherwise the error names the rotation and the remedy."""
    pair = Pair(spec_of(format="int8_token"), sides, layers=1)
    asked = FLOAT8[name]
    sequences = pair.both("add_sequence", range(9))
    batches = [cache.prepare([sequences[i]], 9) for i, cache in enumerate((pair.own, pair.twin))]
    key, value = pair.new(9, HEADS, DIM), pair.new(9, HEADS, V_DIM)
    pair.own.write(0, key, value, batches[0])
    pair.twin.write(0, pair.turn(key, pair.keys), pair.turn(value, pair.values), batches[1])
    query = normal(9, 4, DIM).astype(asked.get("query", np.float32))
    options = [{k: v for k, v in asked.items() if k == "output_scale"} for _ in batches]
    if "out" in asked:
        for each in options:
            each["out"] = np.zeros((9, 4, V_DIM), asked["out"])
    narrow = asked.get("out") == CODES or "output_scale" in asked
    if pair.keys and "query" in asked:
        with pytest.raises(UnsupportedOption, match=r"query is float8_e4m3fn.*key_rotation.*pass the query in one"):
            pair.own.attend(0, query, batches[0], **options[0])
    elif pair.values and narrow:
        with pytest.raises(UnsupportedOption, match=r"(out is float8|output_scale is).*value_rotation.*quantize the"):
            pair.own.attend(0, query, batches[0], **options[0])
        assert not options[0].get("out", np.zeros(1)).view(np.uint8).any()
    else:
        found = pair.own.attend(0, query, batches[0], **options[0])
        assert found is options[0].get("out", found)
        expected = pair.twin.attend(0, pair.turn(query, pair.keys), batches[1], **options[1])
        assert found.dtype == expected.dtype
        assert found.tobytes() == pair.turn(expected, pair.values).tobytes()
    for cache, batch in zip((pair.own, pair.twin), batches, strict=True):
        cache.abandon(batch)


@pytest.mark.parametrize("sides", SIDES)
def test_an_output_that_overlaps_the_query_is_refused_with_each_rotation(sides):
    pair = Pair(AttentionSpec(HEADS, DIM, dtype="float32", num_query_heads=4), sides, layers=1)
    with pair.own.prepare([pair.own.add_sequence(range(9))], 9) as batch:
        pair.own.write(0, pair.new(9, HEADS, DIM), pair.new(9, HEADS, DIM), batch)
        held = pair.new(10, 4, DIM)
        before = held.copy()
        with pytest.raises(UnsupportedOption, match=r"out.*query"):
            pair.own.attend(0, held[:9], batch, out=held[1:])
        np.testing.assert_array_equal(held, before)
        pair.own.abandon(batch)


def test_caches_whose_attention_is_the_callers_refuse_rotations():
    with pytest.raises(UnsupportedOption, match=r"layer 0 has a rotation.*hadamard\(key\).*PagedKVCache"):
        StaticKVCache(rotated(spec_of(), "keys"), max_length=8)
    with pytest.raises(TypeError, match="key_rotation"):
        LatentSpec(64, 16, 4, scale=0.1, key_rotation="hadamard")
