"""Formats of specs: their planes, their factors, and the parts of ranks."""

import pickle

import numpy as np
import pytest

from pagecore.arrays.dtypes.formats import FORMATS, as_format
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage import AttentionSpec, TensorParallel
from tests.together import together

# Bytes of key and value of one token: 4 heads of 64 and 32.
BYTES = {
    "float8_e4m3fn": 384,
    "float8_e5m2": 384,
    "float8_token": 384 + 32,
    "int8_token": 384 + 32,
    "int4_token": 192 + 32,
    "fp4_block16": 192 + 24,
    "nvfp4": 192 + 24,
    "mxfp8": 384 + 12,
}


def spec(**options):
    return AttentionSpec(4, 64, 32, num_query_heads=8, **options)


@pytest.mark.parametrize("name", FORMATS)
def test_planes_hold_codes_and_scales(name):
    planes = {plane.name: plane for plane in spec(format=name).planes}
    stored = as_format(name)
    assert sum(plane.nbytes for plane in planes.values()) == BYTES[name]
    assert [*planes] == ["key", "value"] + (["key_scale", "value_scale"] if stored.scale_dtype else [])
    assert {plane.shape[0] for plane in planes.values()} == {4}
    assert planes["key"].dtype == planes["value"].dtype == stored.dtype


@pytest.mark.parametrize(
    ("options", "names", "nbytes"),
    [
        ({"format": "float8_e4m3fn", "value_format": "nvfp4"}, ["key", "value", "value_scale"], 4 * (64 + 18)),
        ({"format": "mxfp8", "value_format": "float8_e5m2"}, ["key", "value", "key_scale"], 4 * (66 + 32)),
        ({"value_format": "int4_token"}, ["key", "value", "value_scale"], 4 * (128 + 20)),
        (
            {"format": "int8_token", "value_format": "int4_token"},
            ["key", "value", "key_scale", "value_scale"],
            4 * (68 + 20),
        ),
    ],
)
def test_values_may_have_a_format_of_their_own(options, names, nbytes):
    mixed = spec(**options)
    assert [plane.name for plane in mixed.planes] == names
    assert sum(plane.nbytes for plane in mixed.planes) == nbytes
    assert mixed.shard(TensorParallel(1, 2)).value_format == options["value_format"]
    assert pickle.loads(pickle.dumps(mixed)) == mixed
    assert mixed.with_format("mxfp8") == spec(format="mxfp8")


def test_a_format_of_values_that_is_that_of_keys_is_the_same_spec():
    assert spec(format="nvfp4", value_format="nvfp4") == spec(format="nvfp4")


def test_each_side_takes_the_factors_of_its_format():
    mixed = spec(format="float8_e5m2", key_scale=[1.0, 2.0, 3.0, 4.0], value_format="nvfp4", value_scale=0.5)
    assert (mixed.key_scale, mixed.value_scale) == ((1.0, 2.0, 3.0, 4.0), 0.5)
    assert spec(value_format="float8_e4m3fn", value_scale=2.0).value_scale == 2.0


def test_equal_factors_of_all_heads_are_one_number():
    one = spec(format="float8_e4m3fn", key_scale=0.5, value_scale=2.0)
    for listed in ([0.5] * 4, (0.5,), np.full(4, 0.5)):
        assert spec(format="float8_e4m3fn", key_scale=listed, value_scale=[2, 2.0, 2, 2]) == one
    halves = spec(format="float8_e4m3fn", key_scale=[0.5, 0.5, 3.0, 3.0], value_scale=2.0)
    assert [halves.shard(TensorParallel(rank, 2)).key_scale for rank in range(2)] == [0.5, 3.0]
    assert spec(format="nvfp4", key_scale=[0.5] * 4) == spec(format="nvfp4", key_scale=0.5)


@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_has_its_heads_of_every_plane(name):
    part = spec(format=name).shard(TensorParallel(1, 2))
    assert (part.num_kv_heads, part.num_query_heads, part.format) == (2, 4, name)
    assert {plane.shape[0] for plane in part.planes} == {2}


def test_factors_are_those_of_the_rank_heads():
    whole = spec(format="float8_e4m3fn", key_scale=np.array([1.0, 2.0, 3.0, 4.0]), value_scale=0.5)
    assert (whole.key_scale, whole.value_scale) == ((1.0, 2.0, 3.0, 4.0), 0.5)
    assert whole.shard(TensorParallel(1, 2)).key_scale == (3.0, 4.0)
    assert spec(format="float8_e4m3fn", key_scale=np.array([0.5])).key_scale == 0.5
    assert whole.shard(TensorParallel(1, 2)).value_scale == 0.5
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert hash(whole) != hash(whole.with_format(None))
    assert whole.with_format("nvfp4").key_scale == 1.0


@together(
    ("options", "error", "message"),
    [
        ({"format": "fp8"}, UnsupportedOption, "format is 'fp8'; use one of float8_e4m3fn, float8_e5m2"),
        ({"format": 8}, UnsupportedOption, "format is 8; use one of"),
        ({"format": "int8_token", "key_scale": 2.0}, UnsupportedOption, "key_scale is 2.0, but format 'int8_token'"),
        ({"value_scale": 2.0}, UnsupportedOption, "value_scale is 2.0, but values without a format take none"),
        ({"format": "nvfp4", "key_scale": (1.0, 2.0, 1.0, 1.0)}, UnsupportedOption, "global scale of 'nvfp4' is one"),
        ({"format": "float8_e5m2", "key_scale": (1.0, 2.0)}, ShapeError, "key_scale has 2 entries; .* one per .* 4"),
        (
            {"format": "int8_token", "key_scale": [2.0]},
            UnsupportedOption,
            "key_scale is .2.0., but format 'int8_token'",
        ),
        ({"value_scale": [2.0]}, UnsupportedOption, "value_scale is .2.0., but values without a format take none"),
        ({"format": "float8_e5m2", "key_scale": True}, ShapeError, "key_scale is True; expected a number"),
        ({"format": "float8_e5m2", "value_scale": np.True_}, ShapeError, "value_scale is .*True.*; expected a number"),
        (
            {"format": "float8_e5m2", "key_scale": [1.0, True, 1, 1]},
            ShapeError,
            "an entry of key_scale is True",
        ),
        (
            {"format": "float8_e5m2", "key_scale": np.array(True)},
            ShapeError,
            "key_scale is .*True.*; expected a number",
        ),
        ({"format": "float8_e5m2", "key_scale": [np.array(True), 1, 1, 1]}, ShapeError, "an entry of key_scale is"),
        ({"scale": np.array(True)}, ShapeError, "scale is .*True.*; expected a number"),
        ({"scale": True}, ShapeError, "scale is True; expected a number"),
        ({"softcap": True}, ShapeError, "softcap is True; expected a number"),
        ({"format": "float8_e5m2", "key_scale": 0.0}, ShapeError, "key_scale is 0.0; expected a number that is finite"),
        ({"format": "float8_e5m2", "key_scale": 1e-50}, ShapeError, "key_scale is 1e-50; .* as a float32"),
        ({"format": "float8_e5m2", "key_scale": [1e300, 1, 1, 1]}, ShapeError, "an entry of key_scale is 1e.300"),
        ({"format": "float8_e5m2", "key_scale": float("nan")}, ShapeError, "key_scale is nan"),
        ({"format": "float8_e5m2", "value_scale": "1"}, ShapeError, "value_scale is '1'; expected a number"),
        ({"value_format": "fp8"}, UnsupportedOption, "value_format is 'fp8'; use one of float8_e4m3fn"),
        ({"value_format": "nvfp4", "key_scale": 2.0}, UnsupportedOption, "key_scale is 2.0, but keys without a format"),
        (
            {"format": "float8_e5m2", "value_format": "mxfp8", "value_scale": 2.0},
            UnsupportedOption,
            "value_scale is 2.0, but format 'mxfp8'",
        ),
    ],
)
def test_invalid_formats_and_factors_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        spec(**options)


@pytest.mark.parametrize(
    ("name", "dim", "unit"), [("int4_token", 63, 2), ("fp4_block16", 40, 16), ("nvfp4", 72, 16), ("mxfp8", 80, 32)]
)
def test_a_head_dim_that_groups_do_not_divide_is_refused(name, dim, unit):
    with pytest.raises(ShapeError, match=f"head_dim is {dim}; format '{name}' needs a multiple of {unit}"):
        AttentionSpec(1, dim, format=name)
    with pytest.raises(ShapeError, match=f"v_head_dim is {dim}"):
        AttentionSpec(1, 64, dim, format=name)
    with pytest.raises(ShapeError, match=f"v_head_dim is {dim}"):
        AttentionSpec(1, 64, dim, value_format=name)
