"""LatentSpec: planes, bytes, layouts, ranks, and errors."""

import pickle

import numpy as np
import pytest

from pagecore import KVLayout, KVPool, LatentSpec, PagedKVCache, Plane, StaticKVCache, TensorParallel
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.serving.planner import plan_memory
from tests.together import together

SCALE = 192**-0.5
# Bytes of a token and layer, and blocks of 64 tokens in 10 GiB for the 61 layers of DeepSeek-V3.
STORED = {None: (1152, 2387), "float8_e4m3fn": (576, 4774), "fp8_ds_mla": (656, 4192), "nvfp4_ds_mla": (352, 7813)}


def spec(**options):
    return LatentSpec(**{"num_query_heads": 128, "scale": SCALE} | options)


def shapes(given):
    return {plane.name: (plane.shape, str(plane.dtype)) for plane in given.planes}


@pytest.mark.parametrize("name", STORED)
def test_worked_example_variants_a1_bytes_of_a_token_and_blocks_of_deepseek_v3(name):
    size, blocks = STORED[name]
    given = spec(format=name)
    assert sum(plane.nbytes for plane in given.planes) == size
    plan = plan_memory([given] * 61, "10GiB", block_size=64)
    assert (plan.num_blocks, plan.bytes_per_token) == (blocks, 61 * size)
    cache = PagedKVCache([given] * 61, memory="10GiB", block_size=64, device="none")
    assert cache.num_blocks == (blocks,)


def test_worked_example_variants_a1_index_planes_add_132_bytes():
    given = spec(index_dim=128)
    assert sum(plane.nbytes for plane in given.planes) == 1152 + 132
    assert shapes(given) == {
        "latent": ((576,), "bfloat16"),
        "index_key": ((128,), "float8_e4m3fn"),
        "index_scale": ((1,), "float32"),
    }


def test_planes_of_each_way_to_store():
    assert shapes(spec(dtype="float32")) == {"latent": ((576,), "float32")}
    assert shapes(spec(joint=False, latent_dim=6, rope_dim=2)) == {
        "latent": ((6,), "bfloat16"),
        "rope": ((2,), "bfloat16"),
    }
    for joint in (True, False):
        assert shapes(spec(joint=joint, latent_dim=6, rope_dim=0)) == {"latent": ((6,), "bfloat16")}
    assert shapes(spec(format="float8_e4m3fn", latent_dim=6, rope_dim=0)) == {"latent": ((6,), "float8_e4m3fn")}
    assert shapes(spec(format="float8_e4m3fn", latent_dim=6, rope_dim=2)) == {"latent": ((8,), "float8_e4m3fn")}
    assert shapes(spec(format="fp8_ds_mla")) == {"latent": ((656,), "uint8")}
    assert shapes(spec(format="nvfp4_ds_mla")) == {"latent": ((352,), "uint8")}


def test_worked_example_variants_a2_row_of_three_planes():
    """FlashMLA's row: 512 e4m3, 4 float32 scales, 64 bfloat16."""
    sizes = {"num_layers": 2, "num_blocks": 5, "block_size": 64}
    parts = (
        Plane("latent", (512,), "float8_e4m3fn"),
        Plane("scale", (4,), "float32"),
        Plane("rope", (64,), "bfloat16"),
    )
    apart = KVLayout("LBNCHD", planes=parts, **sizes)
    whole = KVLayout("LBNCHD", planes=spec(format="fp8_ds_mla").planes, **sizes)
    assert whole.block_stride == apart.block_stride == 64 * 656 == 41_984
    assert whole.layer_stride == apart.layer_stride

    class Parts:
        planes, window = parts, None

    pools = [KVPool(each, 2, 5, 64, layout="LBNCHD") for each in (Parts(), spec(format="fp8_ds_mla"))]
    first = pools[0].plane("latent", 1)
    offsets = [pools[0].plane(name, 1).pointer - first.pointer for name in ("latent", "scale", "rope")]
    assert offsets == [0, 512, 528]
    row = pools[1].plane("latent", 1)
    assert row.strides == (41_984, 656, 1)
    assert row.pointer - pools[1].buffers[0].pointer == first.pointer - pools[0].buffers[0].pointer


def test_worked_example_variants_a2_page_of_deep_gemm():
    class Index:
        planes, window = spec(index_dim=128).planes[1:], None

    pool = KVPool(Index(), 1, 3, 64, layout="LBCNHD")
    key, scale = pool.plane("index_key"), pool.plane("index_scale")
    assert scale.pointer - key.pointer == 8192
    assert pool.layout.block_stride == 8448


@together("layout", ["layerwise", "blockwise", "LBNCHD", "LBCNHD", "BNHD"])
@together("options", [{}, {"joint": False}, {"index_dim": 128}, {"format": "fp8_ds_mla"}])
def test_planes_do_not_overlap(layout, options):
    pool = KVPool(spec(**options), 2, 3, 16, layout=layout)
    views = [plane.numpy().view(np.uint8) for plane in pool.planes()]
    for number, view in enumerate(views):
        view[...] = number
    assert [np.unique(view).tolist() for view in views] == [[number] for number in range(len(views))]


def test_a_rank_has_all_planes_and_its_query_heads():
    whole = spec(format="nvfp4_ds_mla")
    for rank in range(8):
        part = TensorParallel(rank, 8).shard(whole)
        assert (part.num_query_heads, part.planes, part.scale) == (16, whole.planes, whole.scale)
    assert TensorParallel(3, 8).shard(spec(num_query_heads=None)) == spec(num_query_heads=None)
    with pytest.raises(ShapeError, match="num_query_heads is 128, which 3 ranks"):
        TensorParallel(0, 3).shard(whole)
    assert plan_memory([whole] * 61, "10GiB", block_size=64, ranks=8).num_blocks == STORED["nvfp4_ds_mla"][1]


def test_specs_are_values_with_other_dtypes_and_formats():
    given = spec(format="float8_e4m3fn", key_scale=np.float32(0.5), window=7)
    assert pickle.loads(pickle.dumps(given)) == given
    assert hash(given) != hash(given.with_format(None))
    assert given.with_format("fp8_ds_mla") == spec(format="fp8_ds_mla", window=7)
    assert given.with_format("nvfp4").format == "nvfp4_ds_mla"
    assert given.with_format(None).with_dtype("float16").planes[0].nbytes == 1152
    assert given.with_dtype("float32").planes == given.planes
    assert given.row_dim == 576


@together(
    ("options", "error", "message"),
    [
        ({"scale": None}, ShapeError, r"scale is None; a latent layer has no default: give qk_head_dim \*\* -0.5"),
        ({"scale": float("nan")}, ShapeError, "scale is nan"),
        ({"scale": "1"}, ShapeError, "scale is '1'"),
        ({"latent_dim": 0}, ShapeError, "latent_dim is 0"),
        ({"rope_dim": 6.5}, ShapeError, "rope_dim is 6.5"),
        ({"rope_dim": -1}, ShapeError, "rope_dim is -1"),
        ({"latent_dim": 1, "rope_dim": 0}, ShapeError, "latent_dim is 1 and rope_dim 0; a row has 2 numbers"),
        ({"format": "fp8_ds_mla", "rope_dim": 0}, ShapeError, "latent_dim is 512 and rope_dim 0; rows of 'fp8_ds"),
        ({"num_query_heads": -1}, ShapeError, "num_query_heads is -1"),
        ({"window": 0}, ShapeError, "window is 0"),
        ({"index_dim": 0}, ShapeError, "index_dim is 0"),
        ({"dtype": "int8"}, UnsupportedDtype, "dtype is int8"),
        ({"joint": 1}, UnsupportedOption, "joint is 1"),
        (
            {"format": "int8_token"},
            UnsupportedOption,
            "format is 'int8_token'; latents are stored as float8_e4m3fn",
        ),
        ({"format": ["fp8"]}, UnsupportedOption, r"format is \['fp8'\]"),
        ({"format": "fp8_ds_mla", "joint": False}, UnsupportedOption, "joint is False"),
        ({"format": "fp8_ds_mla", "latent_dim": 256}, ShapeError, "latent_dim is 256 and rope_dim 64; rows of 'fp8_ds"),
        ({"format": "nvfp4_ds_mla", "rope_dim": 32}, ShapeError, "latent_dim is 512 and rope_dim 32"),
        ({"key_scale": 2.0}, UnsupportedOption, "key_scale is 2.0, but a spec without a format"),
        ({"key_scale": 2.0, "format": "fp8_ds_mla"}, UnsupportedOption, "which has its own, takes none"),
        (
            {"key_scale": 0.0, "format": "float8_e4m3fn"},
            ShapeError,
            "key_scale is 0.0; expected a number that is finite",
        ),
        ({"key_scale": (1.0,), "format": "float8_e4m3fn"}, ShapeError, "key_scale is"),
    ],
)
def test_invalid_specs_raise(options, error, message):
    with pytest.raises(error, match=message):
        spec(**options)


def test_a_static_cache_refuses_latents():
    with pytest.raises(UnsupportedOption, match="a LatentSpec stores latent; a static cache"):
        StaticKVCache(spec(), max_length=8)
