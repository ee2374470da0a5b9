"""Specs of every family, compared with models that transformers builds from the same configs (see `record.py`)."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.models import ConfigError, read_model_config, specs_from_config
from pagecore.models.families.registry import FAMILIES
from pagecore.models.multimodal.text_fields import ANY_TEXT_MODEL
from pagecore.storage import LatentSpec
from tests.models.built import BUILT
from tests.models.published import LLAMA_4_SCOUT, PUBLISHED
from tests.together import together

ATTENDED = json.loads(Path(__file__).parents[1].joinpath("attended.json").read_text())
FORMS = {
    "published": lambda name: PUBLISHED[name],
    "to_diff_dict": lambda name: ATTENDED[name]["to_diff_dict"],
    "to_dict": lambda name: ATTENDED[name]["to_dict_adds"] | ATTENDED[name]["to_diff_dict"],
}


def layers_of(name):
    return [ATTENDED[name]["kinds"][kind] for kind in ATTENDED[name]["layers"]]


@pytest.mark.parametrize("form", FORMS)
@together("name", PUBLISHED)
def test_specs_equal_the_layers_that_transformers_builds(name, form):
    specs = specs_from_config(FORMS[form](name))
    expected = layers_of(name)
    assert len(specs) == len(expected)
    for spec, layer in zip(specs, expected, strict=True):
        assert spec.dtype == (ATTENDED[name]["dtype"] or "bfloat16")
        if "latent_dim" in layer:
            assert_latent(spec, layer)
            continue
        assert (spec.num_query_heads, spec.num_kv_heads) == (layer["num_query_heads"], layer["num_kv_heads"])
        assert (spec.head_dim, spec.v_head_dim) == (layer["head_dim"], layer.get("v_head_dim", layer["head_dim"]))
        assert spec.window == layer["window"]
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        assert scale == pytest.approx(layer["scale"], rel=1e-12)
        assert spec.softcap == layer["softcap"]
        assert (None if spec.sinks is None else len(spec.sinks)) == layer["sinks"]


def assert_latent(spec, layer):
    scale = layer["scale"]
    assert spec.scale == pytest.approx(scale, rel=1e-12)
    expected = LatentSpec(layer["latent_dim"], layer["rope_dim"], layer["num_query_heads"], scale=scale)
    assert replace(spec, scale=scale, dtype="bfloat16", index_dim=None) == expected
    assert spec.index_dim == layer["index_dim"]


@together("name", PUBLISHED)
def test_max_length_is_that_of_the_file(name):
    assert read_model_config(FORMS["to_dict"](name)).max_length == ATTENDED[name]["max_length"]
    # A missing length has no default, except in the text config of Gemma 3, which only has fields that differ.
    text = PUBLISHED[name].get("text_config", PUBLISHED[name])
    is_given = (
        text.keys() & {"max_position_embeddings", "n_positions", "max_seq_len"} or text["model_type"] == "gemma3_text"
    )
    assert read_model_config(PUBLISHED[name]).max_length == (ATTENDED[name]["max_length"] if is_given else None)


def test_every_family_is_among_the_published_configs():
    found = {read_model_config(config).model_type for config in [*PUBLISHED.values(), LLAMA_4_SCOUT]}
    # test_built compares the others with models.
    assert found == {name for name, family in FAMILIES.items() if not family.states} - BUILT


def test_windows_of_gemma_2_and_gemma_3():
    windows = [spec.window for spec in specs_from_config(PUBLISHED["gemma-2-9b"])]
    assert windows == [4096, None] * 21
    windows = [spec.window for spec in specs_from_config(PUBLISHED["gemma-3-4b"])]
    assert [layer for layer, window in enumerate(windows) if window is None] == [5, 11, 17, 23, 29]


def test_layer_types_take_precedence():
    config = PUBLISHED["gemma-3-1b"] | {"layer_types": ["full_attention"] * 25 + ["sliding_attention"]}
    assert [spec.window for spec in specs_from_config(config)] == [None] * 25 + [512]


def test_fields_with_defaults_may_be_null():
    config = PUBLISHED["llama-2-7b"] | {
        "num_key_value_heads": None,
        "head_dim": None,
        "layer_types": None,
        "dtype": None,
    }
    assert specs_from_config(config) == specs_from_config(PUBLISHED["llama-2-7b"])


@together("name", PUBLISHED)
def test_reading_does_not_change_the_config(name):
    config = copy.deepcopy(PUBLISHED[name])
    specs_from_config(config)
    assert config == PUBLISHED[name]


def test_sinks_of_gpt_oss_are_zero_until_weights_are_passed():
    config = PUBLISHED["gpt-oss-20b"]
    assert specs_from_config(config)[3].sinks == (0.0,) * 64
    weights = [[layer + head / 64 for head in range(64)] for layer in range(24)]
    specs = specs_from_config(config, sinks=weights)
    assert specs[3].sinks == tuple(weights[3])
    assert [spec.window for spec in specs] == [128, None] * 12


def test_sinks_for_a_family_without_sinks_raise():
    with pytest.raises(UnsupportedOption, match="llama has no sinks"):
        specs_from_config(PUBLISHED["llama-3-8b"], sinks=[[0.0] * 32] * 32)


def test_the_scale_of_latents_has_the_square_of_mscale():
    v3, lite = (specs_from_config(PUBLISHED[name])[0] for name in ("deepseek-v3", "deepseek-v2-lite"))
    assert v3.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2, rel=1e-12)
    assert lite.scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, rel=1e-12)
    without = PUBLISHED["deepseek-v3"] | {
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "factor": 9},
    }
    assert specs_from_config(without)[0].scale == 192**-0.5


@pytest.mark.parametrize("model_type", ["kimi_linear", "glm5_next_text"])
def test_a_model_without_a_rotary_embedding_has_no_mscale(model_type):
    rope = {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}
    config = {"model_type": model_type, "hidden_size": 2304, "num_hidden_layers": 8, "num_attention_heads": 64}
    config |= {"num_key_value_heads": 64, "linear_num_heads": 64, "rope_parameters": rope}
    scales = {spec.scale for spec in specs_from_config(config) if isinstance(spec, LatentSpec)}
    assert scales == {{"kimi_linear": 192, "glm5_next_text": 256}[model_type] ** -0.5}


def test_a_format_of_latents_is_that_of_their_rows():
    config = PUBLISHED["deepseek-v3"]
    sizes = {"nvfp4": 352, "nvfp4_ds_mla": 352, "fp8_ds_mla": 656, "float8_e4m3fn": 576, "auto": 1152, None: 1152}
    for name, size in sizes.items():
        specs = specs_from_config(config, format=name)
        assert {sum(plane.nbytes for plane in spec.planes) for spec in specs} == {size}
    asked = config | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}}
    assert specs_from_config(asked)[0].format == "float8_e4m3fn"
    with pytest.raises(UnsupportedOption, match="latents are stored as float8_e4m3fn, fp8_ds_mla, nvfp4_ds_mla"):
        specs_from_config(config, format="int8_token")
    with pytest.raises(ShapeError, match="latent_dim is 256 and rope_dim 32"):
        specs_from_config(PUBLISHED["minicpm3-4b"], format="nvfp4")


def test_null_rotary_parameters_mean_the_familys_default():
    config = PUBLISHED["the fewest fields of mistral4"]
    expected = specs_from_config(config)[0].scale
    assert specs_from_config(config | {"rope_parameters": None})[0].scale == expected
    rope = {"rope_type": "yarn", "factor": 1e300, "mscale_all_dim": 1e300}
    with pytest.raises(ConfigError, match="the rotary embedding multiplies the scores by inf"):
        specs_from_config(config | {"rope_parameters": rope})


def test_layers_with_an_indexer_store_index_keys():
    frequency = [spec.index_dim for spec in specs_from_config(PUBLISHED["glm-5 with shared indexers"])]
    assert frequency == [128, 128, 128, None, None, None, 128, None, None, None, 128, None]
    pattern = specs_from_config(PUBLISHED["glm-5 with a pattern of indexers"])
    assert [spec.index_dim for spec in pattern] == [128, 128, None, None, 128, None]
    assert {plane.name for plane in pattern[0].planes} == {"latent", "index_key", "index_scale"}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"index_topk_pattern": "SFFFFF"}, ConfigError, r"index_topk_pattern\[0\] is 'shared'.*make it 'full'"),
        ({"index_topk_pattern": "FFXFFF"}, ConfigError, r'index_topk_pattern\[2\] is "X"; expected .full. \(F\)'),
        (
            {"indexer_types": ["full"] * 5},
            ConfigError,
            "indexer_types is .* each of num_hidden_layers, 6",
        ),
        (
            {"layer_types": ["full_attention"] * 6},
            UnsupportedOption,
            "6 layers must be 'indexed_attention'",
        ),
    ],
)
def test_invalid_indexers_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        specs_from_config(PUBLISHED["glm-5 with a pattern of indexers"] | change)


def test_longcat_counts_layers_by_either_name():
    base = {"model_type": "longcat_flash", "hidden_size": 64, "num_attention_heads": 4}
    for given in ({"num_layers": 3}, {"num_hidden_layers": 6}, {"num_layers": 3, "num_hidden_layers": 6}):
        assert len(specs_from_config(base | given)) == 6
    with pytest.raises(ConfigError, match="num_hidden_layers is 5; it must be even"):
        specs_from_config(base | {"num_hidden_layers": 5})
    with pytest.raises(ConfigError, match="num_hidden_layers is 4; it must be 6, twice num_layers"):
        specs_from_config(base | {"num_layers": 3, "num_hidden_layers": 4})


def test_listed_layers_take_precedence_over_a_pattern_in_letters():
    config = PUBLISHED["k-exaone"] | {"sliding_window_pattern": "LLLG"}
    assert specs_from_config(config) == specs_from_config(PUBLISHED["k-exaone"])


@together("wrapper", ANY_TEXT_MODEL)
@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b", "the fewest fields of ministral3", "command-r7b"])
def test_a_wrapper_has_the_layers_of_its_text_model(wrapper, name):
    found = read_model_config({"model_type": wrapper, "text_config": PUBLISHED[name]})
    assert found == read_model_config(PUBLISHED[name])


def test_a_wrapper_of_an_unknown_text_model_is_refused_by_name():
    config = {"model_type": "llava", "text_config": {"model_type": "canine", "hidden_size": 8}}
    with pytest.raises(UnsupportedOption, match=r'text_config.model_type is "canine", which is unknown'):
        specs_from_config(config)
    with pytest.raises(ConfigError, match="text_config is missing"):
        specs_from_config({**PUBLISHED["llama-3-8b"], "model_type": "llava"})
    nested = {"model_type": "llava", "text_config": {"model_type": "internvl", "text_config": {}}}
    with pytest.raises(UnsupportedOption, match=r'text_config.model_type is "internvl", which is not a text model'):
        specs_from_config(nested)


def test_a_text_config_without_a_type_has_that_of_the_wrapper():
    text = {name: value for name, value in PUBLISHED["llama-3-8b"].items() if name != "model_type"}
    assert read_model_config({"model_type": "llava", "text_config": text}).model_type == "llama"


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("mimo-v2-flash", {"num_key_value_heads": 64}, ConfigError, "layer 1 has 128 key-value heads .* must divide"),
        ("mimo-v2-flash", {"v_head_dim": 0}, ConfigError, "v_head_dim is 0"),
        ("mimo-v2-flash", {"sliding_window_size": 0}, ConfigError, "sliding_window_size is 0"),
        ("gemma4 with experts", {"use_bidirectional_attention": "all"}, UnsupportedOption, 'is "all", but only causal'),
        ("gemma4 with experts", {"layer_types": ["sliding_attention"] * 6}, ConfigError, "the last layer of the model"),
        ("gemma4 with experts", {"per_layer_config": {"1": {"top_k": 1}}}, ConfigError, "per_layer_config is "),
        ("gemma4 with experts", {"per_layer_config": [1]}, ConfigError, "per_layer_config is "),
        (
            "gemma4 with experts",
            {"per_layer_config": {"1": {"num_key_value_heads": 3}}},
            ConfigError,
            "layer 1 has 3 key-value heads",
        ),
    ],
)
def test_invalid_heads_of_a_layer_are_refused(name, change, error, words):
    with pytest.raises(error, match=words):
        specs_from_config(PUBLISHED[name] | change)


def test_sinks_are_those_of_the_layers_that_have_them():
    config = PUBLISHED["the fewest fields of mimo_v2_flash"]
    slides = [spec.window is not None for spec in specs_from_config(config)]
    assert [layer for layer, each in enumerate(slides) if not each] == [0, 5, 11, 17, 23, 29]
    weights = [[layer + head / 32 for head in range(32)] for layer in range(24)]
    found = [spec.sinks for spec in specs_from_config(config, sinks=weights)]
    assert [sinks for sinks in found if sinks is not None] == [tuple(row) for row in weights]
    assert [sinks is not None for sinks in found] == slides
    with pytest.raises(ShapeError, match=r"expected 24 rows \(layers\) of 32"):
        specs_from_config(config, sinks=[[0.0] * 32] * 30)
