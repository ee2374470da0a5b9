"""Counts of parameters of small models with encoders, and of Inkling, compared with `encoders.json`."""

import json
from pathlib import Path

import pytest

from pagecore.models import ConfigError, read_model_config
from pagecore.models.parameters import count_parameters

CASES = json.loads(Path(__file__).parents[1].joinpath("encoders.json").read_text())
NAMES = [f"{number}-{case['config']['model_type']}" for number, case in enumerate(CASES)]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_counts_equal_those_of_transformers(case):
    assert count_parameters(case["config"]).total == case["parameters"]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_stages_have_all_layers_once_and_a_copy_of_a_tied_head(case):
    config = case["config"]
    layers = read_model_config(config).num_layers
    stages = [count_parameters(config, layers=range(n, n + 1)).total for n in range(layers)]
    copied = sum(stages) - case["parameters"]
    hidden = {text.get("hidden_size", text.get("embed_dim")) for text in texts(config)}
    assert copied == 0 or copied in {101 * size for size in hidden if size} | {81 * size for size in hidden if size}


def texts(config):
    """Yield a config and all objects in it."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from texts(value)


@pytest.mark.parametrize(
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
@pytest.mark.parametrize("value", ["wide", 3.5, -1, {"a": 1}])
def test_fields_of_a_formula_are_checked(name, path, field, value):
    config = json.loads(json.dumps(next(case["config"] for case in CASES if case["config"]["model_type"] == name)))
    part = config
    for inner in path:
        part = part[inner]
    part[field] = value
    with pytest.raises(ConfigError, match=field):
        count_parameters(config)
