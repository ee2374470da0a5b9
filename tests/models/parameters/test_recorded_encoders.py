"""Counts of parameters of small models with encoders, and of Inkling, compared with `encoders.json`."""

import json
from pathlib import Path

import pytest

from pagecore import UnsupportedOption
from pagecore.models import ConfigError, read_model_config
from pagecore.models.parameters import count_parameters, vision_tower
from tests.together import together

CASES = json.loads(Path(__file__).parents[1].joinpath("encoders.json").read_text())
NAMES = [f"{number}-{case['config']['model_type']}" for number, case in enumerate(CASES)]


@together("case", CASES)
def test_counts_equal_those_of_transformers(case):
    assert count_parameters(case["config"]).total == case["parameters"]


@together("case", CASES)
def test_stages_have_all_layers_once_and_a_copy_of_a_tied_head(case):
    config = case["config"]
    layers = read_model_config(config).num_layers
    stages = [count_parameters(config, layers=range(n, n + 1)).total for n in range(layers)]
    # The text models have 48 or 24 features, and 101 or 81 tokens.
    assert sum(stages) - case["parameters"] in {0, 48 * 101, 24 * 101, 48 * 81}


@together(
    ("name", "path", "field"),
    [
        ("canary", ("encoder_config",), "subsampling_conv_channels"),
        ("fun_asr_nano", ("adaptor_config",), "projector_hidden_size"),
        ("granite_docling", ("vision_config",), "deepstack_visual_indexes"),
        ("granite_speech", ("encoder_config",), "dim_head"),
        ("granite_speech", (), "downsample_rate"),
        ("lfm3_vl", ("vision_config",), "layer_types"),
        ("speecht5", (), "conv_dim"),
        ("voxtral_realtime", (), "downsample_factor"),
    ],
)
@together("value", ["wide", 3.5, -1, {"a": 1}, None])
def test_fields_of_a_formula_are_checked(name, path, field, value):
    config = json.loads(json.dumps(next(case["config"] for case in CASES if case["config"]["model_type"] == name)))
    part = config
    for inner in path:
        part = part[inner]
    part[field] = value
    with pytest.raises(ConfigError, match=field):
        count_parameters(config)


@pytest.mark.parametrize(
    ("name", "part", "field"),
    [
        ("canary", "encoder_config", "subsampling_factor"),
        ("lfm3_vl", "vision_config", "num_attention_heads"),
        ("speecht5", None, "num_conv_pos_embedding_groups"),
    ],
)
def test_a_divisor_of_0_is_refused_by_name(name, part, field):
    config = json.loads(json.dumps(next(case["config"] for case in CASES if case["config"]["model_type"] == name)))
    (config[part] if part else config)[field] = 0
    with pytest.raises(ConfigError, match=f"{field} is 0; it must be"):
        count_parameters(config)


@pytest.mark.parametrize(
    ("name", "part", "change", "reason"),
    [
        ("florence2", "vision_config", {"depths": [1]}, "depths is .*; embed_dim, patch_size and patch_prenorm must"),
        ("florence2", "vision_config", {"patch_prenorm": [1, 0]}, "patch_prenorm is .*; it must be a list of true and"),
        ("speecht5", None, {"conv_kernel": [3]}, "conv_kernel is .*; it must list 7 integers, like conv_dim"),
        ("udop", None, {"relative_bias_args": "1d"}, "relative_bias_args is .*; it must be a list of objects"),
    ],
)
def test_lists_that_contradict_each_other_are_refused(name, part, change, reason):
    config = json.loads(json.dumps(next(case["config"] for case in CASES if case["config"]["model_type"] == name)))
    (config[part] if part else config).update(change)
    with pytest.raises(ConfigError, match=reason):
        count_parameters(config)


def test_another_encoder_or_decoder_of_a_reader_is_refused():
    config = next(case["config"] for case in CASES if case["config"]["model_type"] == "vision-encoder-decoder")
    for change, reason in (
        ({"encoder": config["encoder"] | {"model_type": "dinov2"}}, 'encoder.model_type is "dinov2".*expected bert, '),
        ({"decoder": config["decoder"] | {"model_type": "pegasus"}}, 'decoder.model_type is "pegasus".*expected trocr'),
    ):
        with pytest.raises(UnsupportedOption, match=reason):
            count_parameters(config | change)


def test_queries_of_kosmos_are_the_tokens_of_an_image():
    for name, queries in (("kosmos-2", 64), ("kosmos-2.5", 2048)):
        config = next(case["config"] for case in CASES if case["config"]["model_type"] == name)
        assert vision_tower(config).tokens(224) == config["latent_query_num"] == 7
        assert vision_tower(config | {"latent_query_num": None}).tokens(224) == queries
