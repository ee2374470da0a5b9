"""StateSpec, and the planes of published recurrent layers."""

import pytest

from pagecore import KVPool, PagedKVCache, Plane, StateSpec, TensorParallel
from pagecore.errors import PagecoreError, ShapeError, UnsupportedOption
from pagecore.storage.state_shapes import (
    delta_planes,
    lightning_planes,
    mamba1_planes,
    mamba2_planes,
    short_conv_planes,
)
from tests.together import together

CONV = Plane("conv", (8, 3), "bfloat16", per="sequence")
TEMPORAL = Plane("temporal", (2, 4, 4), "float32", per="sequence")


def shapes(planes):
    return [(plane.name, plane.shape) for plane in planes]


def test_worked_example_d1_shapes_of_a_gated_delta_rule():
    planes = delta_planes(16, 32, 128, 128)  # Qwen3-Next-80B
    assert shapes(planes) == [("conv", (8192, 3)), ("temporal", (32, 128, 128))]
    assert [plane.nbytes for plane in planes] == [49_152, 2_097_152]
    assert StateSpec(planes).nbytes == 2_146_304
    assert 36 * StateSpec(planes).nbytes == 77_266_944
    assert shapes(delta_planes(16, 32, 128, 128, ranks=2)) == [("conv", (4096, 3)), ("temporal", (16, 128, 128))]
    assert shapes(delta_planes(32, 32, 128, 128)) == [("conv", (12288, 3)), ("temporal", (32, 128, 128))]  # Kimi Linear


@pytest.mark.parametrize(
    ("sizes", "ranks", "conv", "temporal"),
    [
        ((4096, 16, 32, 128, 128), 1, (8192, 3), (32, 128, 128)),
        ((8192, 8, 128, 64, 128), 1, (10240, 3), (128, 64, 128)),
        ((8192, 8, 128, 64, 128), 4, (2560, 3), (32, 64, 128)),
        ((8192, 8, 128, 64, 128), 16, (768, 3), (8, 64, 128)),  # 16 groups
        ((4096, 1, 64, 64, 128), 4, (1280, 3), (16, 64, 128)),
    ],
)
def test_worked_example_d1_shapes_of_mamba_2(sizes, ranks, conv, temporal):
    assert shapes(mamba2_planes(*sizes, ranks=ranks)) == [("conv", conv), ("temporal", temporal)]


def test_worked_example_d1_shapes_of_other_layers():
    assert shapes(mamba1_planes(8192, 16)) == [("conv", (8192, 3)), ("temporal", (8192, 16))]  # Falcon-Mamba-7B
    assert shapes(short_conv_planes(2048, 3)) == [("conv", (2048, 2))]  # LFM2
    assert shapes(lightning_planes(64, 128)) == [("temporal", (64, 128, 128))]
    assert shapes(lightning_planes(64, 128, ranks=4)) == [("temporal", (16, 128, 128))]
    assert mamba1_planes(8, 4, dtype="float16", state_dtype="bfloat16")[1].dtype == "bfloat16"


@pytest.mark.parametrize(
    "call",
    [
        lambda: mamba1_planes(8, 4, ranks=3),
        lambda: mamba1_planes(0, 4),
        lambda: mamba1_planes(8, 4, kernel=1),
        lambda: mamba2_planes(8, 3, 4, 2, 4, ranks=2),
        lambda: mamba2_planes(8, 2, 3, 2, 4, ranks=2),
        lambda: delta_planes(3, 4, 8, 8, ranks=2),
        lambda: lightning_planes(4, 8, ranks=0),
        lambda: short_conv_planes(9, ranks=2),
    ],
)
def test_layers_that_ranks_cannot_split_are_refused(call):
    with pytest.raises(ShapeError):
        call()


def test_a_spec_is_a_value():
    spec = StateSpec([CONV, TEMPORAL], chunk=16, interval=64)
    assert spec == StateSpec((CONV, TEMPORAL), chunk=16, interval=64)
    assert hash(spec) == hash(StateSpec((CONV, TEMPORAL), chunk=16, interval=64))
    assert (spec.window, spec.nbytes) == (None, 48 + 128)
    two = Plane("conv_q", (8, 3), "bfloat16", per="sequence"), Plane("conv_k", (8, 3), "bfloat16", per="sequence")
    assert StateSpec((*two, TEMPORAL)).planes == (*two, TEMPORAL)


def test_worked_example_d3_grids():
    assert StateSpec((CONV,), chunk=64).prefill_grid(16) == 64
    assert StateSpec((CONV,), chunk=64).prefill_grid(128) == 128
    assert StateSpec((CONV,), chunk=64, interval=256).decode_grid(16) == 256


@together(
    ("arguments", "options", "error", "match"),
    [
        ((), {"interval": 100}, ShapeError, "not a multiple of the chunk of 64 tokens; use 64 or 128"),
        ((), {"interval": 32}, ShapeError, "tokens; use 64$"),
        ((), {"chunk": 0}, ShapeError, "chunk is 0"),
        ((), {"interval": 0}, ShapeError, "interval is 0"),
        ((), {"draft_tokens": -1}, ShapeError, "draft_tokens is -1"),
        ((), {"draft_tokens": 5000}, ShapeError, "at most 1023"),
        ((), {"in_place": "yes"}, UnsupportedOption, "in_place"),
        (((),), {}, UnsupportedOption, "at least one plane"),
        ((CONV,), {}, UnsupportedOption, "one Plane"),
        (((CONV, "temporal"),), {}, UnsupportedOption, "expected a Plane"),
        (((CONV, CONV),), {}, UnsupportedOption, "two planes named 'conv'"),
        (((Plane("key", (2, 4), "float32"),),), {}, UnsupportedOption, "per token"),
        (((Plane("state", (), "float32", per="sequence"),),), {}, ShapeError, "at least one axis"),
        ((7,), {}, ShapeError, "a tuple of Plane"),
    ],
)
def test_bad_specs_are_refused(arguments, options, error, match):
    with pytest.raises(error, match=match) as raised:
        StateSpec(*(arguments or ((CONV,),)), **options)
    assert isinstance(raised.value, PagecoreError)


def test_block_pools_and_caches_name_the_pool_for_states():
    for call in (lambda: KVPool(StateSpec((CONV,)), 1, 4, 4), lambda: PagedKVCache(StateSpec((CONV,)), num_blocks=4)):
        with pytest.raises(UnsupportedOption, match=r"'conv' per sequence|every layer keeps a state"):
            call()


def test_a_spec_is_the_part_of_one_rank():
    spec = StateSpec((CONV,), ranks=2)
    assert spec.shard(TensorParallel(1, 2)) is spec
    with pytest.raises(UnsupportedOption, match=r"one of 2 ranks.* ranks=4"):
        spec.shard(TensorParallel(0, 4))
    with pytest.raises(ShapeError, match="ranks is 0"):
        StateSpec((CONV,), ranks=0)
