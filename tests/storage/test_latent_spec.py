"""LatentSpec: planes and bytes of published caches, ranks, refusals."""

from __future__ import annotations

import pytest

from pagecore import KVLayout, KVPool, LatentSpec, TensorParallel, errors

SCALE = 192**-0.5


@pytest.mark.parametrize(
    ("options", "planes"),
    [
        ({}, [("latent", (576,), "bfloat16")]),
        ({"joint": False}, [("latent", (512,), "bfloat16"), ("rope", (64,), "bfloat16")]),
        ({"format": "float8_e4m3fn"}, [("latent", (576,), "float8_e4m3fn")]),
        ({"format": "fp8_ds_mla"}, [("latent", (656,), "uint8")]),
        ({"format": "nvfp4_ds_mla"}, [("latent", (352,), "uint8")]),
        (
            {"index_dim": 128},
            [("latent", (576,), "bfloat16"), ("index_key", (128,), "float8_e4m3fn"), ("index_scale", (1,), "float32")],
        ),
    ],
)
def test_planes(options, planes):
    spec = LatentSpec(scale=SCALE, **options)
    assert [(plane.name, plane.shape, plane.dtype) for plane in spec.planes] == planes


@pytest.mark.parametrize(
    ("format", "num_bytes", "blocks"),
    [(None, 1152, 2387), ("float8_e4m3fn", 576, 4774), ("fp8_ds_mla", 656, 4192), ("nvfp4_ds_mla", 352, 7813)],
)
def test_bytes_of_deepseek_v3(format, num_bytes, blocks):
    spec = LatentSpec(num_query_heads=128, scale=SCALE, format=format)
    assert sum(plane.nbytes for plane in spec.planes) == num_bytes
    assert 10 * 2**30 // (61 * 64 * num_bytes) == blocks
    index = LatentSpec(scale=SCALE, index_dim=128).planes[1:]
    assert sum(plane.nbytes for plane in index) == 132


def test_rows_of_a_packed_format_are_those_of_flash_mla_in_every_layout():
    for layout in ("LBNCHD", "LBCNHD", "layerwise"):
        pool = KVPool(LatentSpec(scale=SCALE, format="fp8_ds_mla"), 2, 3, 64, layout)
        assert pool.plane("latent", 1).strides[1:] == (656, 1), layout


def test_a_rank_holds_the_latent_and_its_query_heads():
    spec = LatentSpec(num_query_heads=128, scale=SCALE)
    part = TensorParallel(3, 8).shard(spec)
    assert isinstance(part, LatentSpec)
    assert part.planes == spec.planes
    assert part.num_query_heads == 16
    assert TensorParallel(3, 8).shard(LatentSpec(scale=SCALE)) == LatentSpec(scale=SCALE)


def test_other_dtypes_and_formats():
    spec = LatentSpec(scale=SCALE, format="float8_e4m3fn", latent_scale=0.5)
    assert spec.with_dtype("float32").format == "float8_e4m3fn"
    assert spec.with_format("fp8_ds_mla") == LatentSpec(scale=SCALE, format="fp8_ds_mla")
    assert hash(spec) != hash(spec.with_format(None))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, errors.UnsupportedOption, "scale is missing"),
        ({"scale": float("inf")}, errors.ShapeError, "scale is inf"),
        ({"scale": 1, "format": "fp8"}, errors.UnsupportedOption, "use one of float8_e4m3fn"),
        ({"scale": 1, "format": "fp8_ds_mla", "latent_dim": 256}, errors.ShapeError, "stores 512 and 64"),
        ({"scale": 1, "format": "fp8_ds_mla", "joint": False}, errors.UnsupportedOption, "joint is False"),
        ({"scale": 1, "latent_scale": 2}, errors.UnsupportedOption, "takes no factor"),
        ({"scale": 1, "format": "float8_e4m3fn", "latent_scale": 0}, errors.ShapeError, "above 0"),
        ({"scale": 1, "dtype": "int8"}, errors.UnsupportedDtype, "dtype is int8"),
        ({"scale": 1, "rope_dim": 0}, errors.ShapeError, "rope_dim is 0"),
        ({"scale": 1, "window": 0}, errors.ShapeError, "window is 0"),
    ],
)
def test_refusals(options, error, words):
    with pytest.raises(error) as raised:
        LatentSpec(**options)
    assert words in str(raised.value)


def test_index_pages_are_those_of_deep_gemm():
    pool = KVPool(LatentSpec(scale=SCALE, index_dim=128), 1, 2, 64, KVLayout("LBCNHD"))
    key, scale = pool.plane("index_key", 0), pool.plane("index_scale", 0)
    assert key.strides[1:] == (128, 1)
    assert scale.strides[1] == 4
