"""Specs of models with recurrent states, compared with models that transformers builds (see `record_states.py`)."""

import copy
import json
import pickle
from pathlib import Path

import pytest

from pagecore.errors import PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.models import ConfigError, read_model_config, specs_from_config
from pagecore.models.families.registry import FAMILIES
from pagecore.storage import AttentionSpec, LatentSpec, StateSpec, TensorParallel
from tests.models.built import BUILT
from tests.models.hybrids import HYBRIDS, QWEN_3_NEXT
from tests.together import together

STORED = json.loads(Path(__file__).parents[1].joinpath("stored.json").read_text())
FORMS = {
    "published": lambda name: HYBRIDS[name],
    "to_diff_dict": lambda name: STORED[name]["to_diff_dict"],
    "to_dict": lambda name: STORED[name]["to_dict_adds"] | STORED[name]["to_diff_dict"],
}
VALUES = (None, True, -1, 0, 3, 2**70, 1.5, float("nan"), "x", b"x", [], [None], {}, object())


def planes_of(spec):
    return {plane.name: plane.shape for plane in spec.planes}


@together("form", FORMS)
@together("name", HYBRIDS)
def test_specs_equal_the_layers_that_transformers_builds(name, form):
    model = read_model_config(FORMS[form](name))
    expected = [STORED[name]["kinds"][kind] for kind in STORED[name]["layers"]]
    assert model.num_layers == len(model.specs_by_layer) == len(expected)
    assert sorted(number for numbers in model.specs_by_layer for number in numbers) == list(range(len(model.layers)))
    for numbers, (attention, state) in zip(model.specs_by_layer, expected, strict=True):
        specs = [model.layers[number] for number in numbers]
        assert [isinstance(spec, StateSpec) for spec in specs] == [False] * bool(attention) + [True] * bool(state)
        if attention:
            assert_attention(specs[0], attention)
            assert specs[0].dtype == (STORED[name]["dtype"] or "bfloat16")
        if state:
            channels, kernel = state["conv"]
            temporal = {} if state["temporal"] is None else {"temporal": tuple(state["temporal"])}
            assert planes_of(specs[-1]) == {"conv": (channels, kernel - 1)} | temporal
            dtypes = [str(plane.dtype) for plane in specs[-1].planes]
            assert dtypes == [STORED[name]["dtype"] or "bfloat16", "float32"][: len(dtypes)]


def assert_attention(spec, layer):
    if "latent_dim" in layer:
        assert spec == LatentSpec(
            layer["latent_dim"], layer["rope_dim"], layer["num_query_heads"], scale=spec.scale, dtype=spec.dtype
        )
    else:
        heads = (layer["num_query_heads"], layer["num_kv_heads"], layer["head_dim"])
        assert (spec.num_query_heads, spec.num_kv_heads, spec.head_dim) == heads
        assert (spec.window, spec.chunk, spec.sinks, spec.softcap) == (layer.get("window"), None, None, 0.0)
    assert (spec.head_dim**-0.5 if spec.scale is None else spec.scale) == pytest.approx(layer["scale"], rel=1e-12)


def test_every_family_is_among_the_published_configs():
    assert {read_model_config(config).model_type for config in HYBRIDS.values()} == {
        name for name, family in FAMILIES.items() if family.states
    } - BUILT


@together("name", HYBRIDS)
def test_reading_does_not_change_the_config(name):
    config = copy.deepcopy(HYBRIDS[name])
    specs_from_config(config)
    assert config == HYBRIDS[name]


# -- worked example D1 ---------------------------------------------------------------------------------------------


def state_of(config):
    return next(spec for spec in specs_from_config(config) if isinstance(spec, StateSpec))


def shard(config, ranks):
    return planes_of(TensorParallel(0, ranks).shard(state_of(config)))


def test_worked_example_d1_bytes_of_qwen3_next():
    specs = specs_from_config(QWEN_3_NEXT)
    states = [spec for spec in specs if isinstance(spec, StateSpec)]
    assert [plane.nbytes for plane in states[0].planes] == [49_152, 2_097_152]
    assert (len(states), states[0].nbytes, sum(spec.nbytes for spec in states)) == (36, 2_146_304, 77_266_944)
    assert [isinstance(spec, StateSpec) for spec in specs] == [True, True, True, False] * 12
    assert shard(QWEN_3_NEXT, 2) == {"conv": (4096, 3), "temporal": (16, 128, 128)}
    assert (states[0].chunk, states[0].interval) == (64, 256)


@pytest.mark.parametrize(
    ("groups", "heads", "ranks", "conv", "temporal"),
    [
        (8, 128, 1, (10240, 3), (128, 64, 128)),
        (8, 128, 4, (2560, 3), (32, 64, 128)),
        (8, 128, 16, (768, 3), (8, 64, 128)),
        (1, 64, 4, (1280, 3), (16, 64, 128)),
    ],
)
def test_worked_example_d1_ranks_of_mamba_2(groups, heads, ranks, conv, temporal):
    config = HYBRIDS["nemotron-h-8b"] | {"n_groups": groups, "mamba_num_heads": heads}
    assert shard(config, ranks) == {"conv": conv, "temporal": temporal}


def test_worked_example_d1_other_models():
    expected = {
        "falcon-mamba-7b": {"conv": (8192, 3), "temporal": (8192, 16)},
        "kimi-linear-48b-a3b": {"conv": (12288, 3), "temporal": (32, 128, 128)},
        "lfm2-1.2b": {"conv": (2048, 2)},
    }
    for name, planes in expected.items():
        assert planes_of(state_of(HYBRIDS[name])) == planes


@together("name", HYBRIDS)
def test_two_ranks_hold_half_of_the_states(name):
    for spec in specs_from_config(HYBRIDS[name]):
        if isinstance(spec, StateSpec):
            # A group of Mamba-2 is replicated.
            part = TensorParallel(1, 2).shard(spec)
            assert spec.nbytes <= 2 * part.nbytes < 1.1 * spec.nbytes
            assert (part.chunk, part.interval, part.ranks, part.split) == (spec.chunk, spec.interval, 2, None)
            assert TensorParallel(1, 2).shard(part) is part


def test_ranks_that_cannot_split_a_state_raise():
    with pytest.raises(ShapeError, match="key_heads is 16, which 3 ranks cannot split"):
        shard(QWEN_3_NEXT, 3)
    whole = StateSpec(state_of(QWEN_3_NEXT).planes)
    assert whole == state_of(QWEN_3_NEXT)
    assert hash(whole) == hash(state_of(QWEN_3_NEXT))
    assert TensorParallel().shard(whole) is whole
    with pytest.raises(UnsupportedOption, match="planes of one of 1 ranks, and the cache is one of 2; make"):
        TensorParallel(0, 2).shard(whole)


def test_a_split_that_is_not_a_function_is_refused():
    with pytest.raises(UnsupportedOption, match="split is 2; give a function of ranks"):
        StateSpec(state_of(QWEN_3_NEXT).planes, split=2)


def test_a_spec_with_split_is_pickled():
    spec = pickle.loads(pickle.dumps(state_of(QWEN_3_NEXT)))
    assert TensorParallel(0, 2).shard(spec) == TensorParallel(0, 2).shard(state_of(QWEN_3_NEXT))


# -- fields --------------------------------------------------------------------------------------------------------


def test_a_layer_with_both_has_its_attention_first():
    model = read_model_config(HYBRIDS["falcon-h1-7b"])
    assert (model.num_layers, len(model.layers), model.specs_by_layer[:2]) == (44, 88, ((0, 1), (2, 3)))
    assert isinstance(model.layers[0], AttentionSpec)
    nemotron = read_model_config(HYBRIDS["nemotron-h-8b"])
    assert (nemotron.num_layers, nemotron.specs_by_layer[:4]) == (52, ((0,), (), (1,), ()))
    zamba = read_model_config(HYBRIDS["zamba2-2.7b"])
    assert zamba.specs_by_layer[5:8] == ((5,), (6, 7), (8,))


@pytest.mark.parametrize(
    ("name", "chunk", "interval"),
    [("kimi-linear-48b-a3b", 64, 256), ("nemotron-h-8b", 128, 256), ("bamba-9b", 256, 256), ("lfm2-1.2b", 1, 256),
     ("mamba-2.8b", 1, 256)],
)  # fmt: skip
def test_the_chunk_is_that_of_the_kernel(name, chunk, interval):
    spec = state_of(HYBRIDS[name])
    assert (spec.chunk, spec.interval) == (chunk, interval)


def test_the_interval_is_a_multiple_of_the_chunk():
    for chunk, interval in ((100, 300), (512, 512), (257, 257)):
        spec = state_of(HYBRIDS["bamba-9b"] | {"mamba_chunk_size": chunk})
        assert (spec.chunk, spec.interval) == (chunk, interval)


def test_dtypes_of_states():
    conv, temporal = state_of(HYBRIDS["nemotron-h-8b"] | {"mamba_ssm_cache_dtype": "torch.bfloat16"}).planes
    assert (conv.dtype, temporal.dtype) == ("bfloat16", "bfloat16")
    conv, temporal = next(
        spec.planes for spec in specs_from_config(QWEN_3_NEXT, dtype="float16") if isinstance(spec, StateSpec)
    )
    assert (conv.dtype, temporal.dtype) == ("float16", "float32")
    with pytest.raises(UnsupportedDtype, match='mamba_ssm_dtype is "int8"; a recurrent state is one of'):
        specs_from_config(QWEN_3_NEXT | {"mamba_ssm_dtype": "int8"})


def test_a_format_concerns_attention_alone():
    specs = specs_from_config(QWEN_3_NEXT, format="float8_e4m3fn")
    assert {spec.format for spec in specs if isinstance(spec, AttentionSpec)} == {"float8_e4m3fn"}
    assert [spec for spec in specs if isinstance(spec, StateSpec)] == [state_of(QWEN_3_NEXT)] * 36


def test_lfm2_lists_its_layers_in_two_ways():
    listed = ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)]
    config = HYBRIDS["lfm2-1.2b"] | {"layer_types": listed}
    assert specs_from_config(config) == specs_from_config(HYBRIDS["lfm2-1.2b"])


@together(
    ("name", "changes", "error", "words"),
    [
        ("qwen3-next-80b-a3b", {"layer_types": ["full_attention"] * 47}, ConfigError, "lists 47 layers, but"),
        ("qwen3-next-80b-a3b", {"layer_types": ["conv"] * 48}, UnsupportedOption, r'layer_types\[0\] is "conv"'),
        ("qwen3-next-80b-a3b", {"layer_types": "all"}, ConfigError, "one entry for each layer"),
        ("qwen3-next-80b-a3b", {"full_attention_interval": 0}, ConfigError, "full_attention_interval is 0"),
        ("qwen3-next-80b-a3b", {"linear_conv_kernel_dim": 1}, ConfigError, "linear_conv_kernel_dim is 1"),
        ("qwen3-next-80b-a3b", {"linear_key_head_dim": 2**31 - 1}, ConfigError, "the state of a layer cannot be"),
        ("qwen3-next-80b-a3b", {"mamba_d_state": 16}, UnsupportedOption, r"recurrent states \(mamba_d_state = 16\)"),
        ("qwen3-next-80b-a3b", {"sliding_window": 5}, UnsupportedOption, "sliding_window is 5, but qwen3_next attends"),
        ("kimi-linear-48b-a3b", {"linear_attn_config": [1]}, ConfigError, r"linear_attn_config is \[1\]; it must be"),
        (
            "kimi-linear-48b-a3b",
            {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}},
            ConfigError,
            "linear_attn_config.full_attn_layers and linear_attn_config.kda_layers must list each .* 1 to 27",
        ),
        (
            "kimi-linear-48b-a3b",
            {"linear_attn_config": {"full_attn_layers": [4]}},
            ConfigError,
            "linear_attn_config.kda_layers is missing.* list of integers",
        ),
        ("nemotron-h-8b", {"num_hidden_layers": 51}, ConfigError, "num_hidden_layers is 51, but 52 layers are listed"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "MX"}, ConfigError, "must spell each layer as M"),
        ("nemotron-h-8b", {"hybrid_override_pattern": None}, ConfigError, "hybrid_override_pattern is null"),
        ("granite-4.0-h-small", {"mamba_n_heads": 100}, ConfigError, "mamba_n_heads is 100 and mamba_d_head is 64"),
        ("granite-4.0-h-small", {"layer_types": ["conv"] * 40}, UnsupportedOption, r'layer_types\[0\] is "conv"'),
        ("falcon-h1-7b", {"mamba_d_ssm": 3000}, ConfigError, "mamba_n_heads is 24 and mamba_d_head is 128"),
        ("jamba-v0.1", {"attn_layer_offset": 8}, ConfigError, "attn_layer_offset is 8; it must be below"),
        ("bamba-9b", {"attn_layer_indices": [32]}, ConfigError, r"attn_layer_indices is \[32\]; layers are numbered"),
        ("bamba-9b", {"attn_layer_indices": ["9"]}, ConfigError, "it must be a list of integers"),
        ("zamba2-2.7b", {"layers_block_type": None}, ConfigError, "layers_block_type is missing; add the kind"),
        ("lfm2-1.2b", {"conv_L_cache": 1}, ConfigError, "conv_L_cache is 1"),
        ("codestral-mamba-7b", {"num_heads": 64}, ConfigError, "num_heads is 64 and head_dim is 64"),
        ("mamba-2.8b", {"intermediate_size": 0}, ConfigError, "intermediate_size is 0"),
        ("mamba-2.8b", {"kv_lora_rank": 512}, UnsupportedOption, "latent attention"),
    ],
)
def test_invalid_fields_are_named(name, changes, error, words):
    with pytest.raises(error, match=words):
        specs_from_config(HYBRIDS[name] | changes)


def test_sinks_for_a_hybrid_raise():
    for name in ("qwen3-next-80b-a3b", "mamba-2.8b"):
        with pytest.raises(UnsupportedOption, match="has no sinks; leave sinks out"):
            specs_from_config(HYBRIDS[name], sinks=[[0.0] * 16] * 12)


@pytest.mark.parametrize("name", HYBRIDS)
def test_any_value_of_any_field_is_valid_or_raises_a_typed_error(name):
    for field in [*HYBRIDS[name], "dtype", "layer_types", "head_dim", "sliding_window", "mamba_d_head", "expand"]:
        for value in VALUES:
            reason = refusal(HYBRIDS[name] | {field: value})
            assert reason is None or field in reason or field in ("model_type", "text_config")


def refusal(config):
    try:
        specs_from_config(config)
    except PagecoreError as error:
        return str(error)
    return None
