"""Specs of recent decoders, compared with what small models on torch's meta device pass to their attention."""

import pytest

from pagecore import UnsupportedOption
from pagecore.models import ConfigError, read_model_config, specs_from_config
from pagecore.models.layers.unsupported import UNSUPPORTED_TYPES
from tests.capabilities import require
from tests.models.meta import on_meta_device
from tests.together import together

FEWEST = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 14}
KOSMOS = {"embed_dim": 64, "attention_heads": 8, "layers": 3, "ffn_dim": 16, "vocab_size": 101}
SMALL = {"vocab_size": 101, "intermediate_size": 16, "moe_intermediate_size": 8, "pad_token_id": 0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES = {
    "beam": {**FEWEST, **SMALL, "num_experts": 4},
    "chameleon": {
        **FEWEST,
        **SMALL,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "vocabulary_map": {"<image>": 4},
    },
    "cohere_compass_text": {
        **FEWEST,
        **SMALL,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE),
    },
    "flint": {**FEWEST, **SMALL, "num_experts": 4},
    "hrm_text": {**FEWEST, **SMALL, "num_hidden_layers": 2, "L_cycles": 2, "prefix_lm": False},
    "kosmos_2_5_text_model": KOSMOS,
    "kosmos_2_text_model": KOSMOS,
    "muse_glimmer_text": {**FEWEST, **SMALL},
    "muse_spark_text": {**FEWEST, **SMALL, "num_key_value_heads": 4, "num_experts": 4, "moe_hidden_size": 16},
}


def module_class(config):
    """Return the class of the whole text model, or the shortest one that takes the config."""
    import importlib

    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    own = [
        value
        for name, value in vars(module).items()
        if isinstance(value, type) and getattr(value, "config_class", None) is type(config) and "PreTrained" not in name
    ]
    return min(own, key=lambda each: ("CausalLM" not in each.__name__, len(each.__name__)))


def attending(config):
    """Return the attention modules of the text model, in the order of the layers."""
    config._attn_implementation = "eager"
    with on_meta_device():
        model = module_class(config)._from_config(config)
    return [module for module in model.modules() if hasattr(module, "k_proj") and hasattr(module, "scaling")]


@pytest.mark.parametrize("model_type", sorted(SIZES))
def test_specs_are_those_of_small_models(model_type):
    transformers = require("transformers")
    config = transformers.AutoConfig.for_model(model_type, **SIZES[model_type])
    model = read_model_config(config.to_dict())
    modules = attending(config)
    # HRM passes through the layers of its stacks several times; the cache has a layer for each pass.
    passes = len(model.layers) // len(modules)
    assert len(model.layers) == passes * len(modules) == config.num_hidden_layers
    assert passes == (3 if model_type == "hrm_text" else 1)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(model.layers)
    for spec, module, kind in zip(model.layers, modules * passes, kinds, strict=True):
        dim = module.head_dim
        assert spec.head_dim == dim
        assert spec.num_kv_heads * dim == module.k_proj.out_features
        assert spec.num_query_heads * dim == module.q_proj.out_features
        assert (spec.scale or dim**-0.5) == pytest.approx(module.scaling)
        assert spec.window == (config.sliding_window if kind == "sliding_attention" else None)
        assert (spec.sinks is not None) == hasattr(module, "sinks")


@pytest.mark.parametrize("model_type", sorted(SIZES))
def test_defaults_are_those_of_transformers(model_type):
    transformers = require("transformers")
    written = transformers.AutoConfig.for_model(model_type).to_dict() | {"prefix_lm": False}
    names = {"embed_dim", "attention_heads", "layers"} if "kosmos" in model_type else set(FEWEST)
    fewest = {name: written[name] for name in names} | {"model_type": model_type}
    if model_type == "hrm_text":
        fewest |= {"prefix_lm": False, "num_hidden_layers": written["num_layers_per_stack"]}
    assert specs_from_config(fewest, dtype="float32") == specs_from_config(written, dtype="float32")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({}, UnsupportedOption, "prefix_lm is missing, which means true, so prompts attend to later tokens"),
        ({"prefix_lm": False, "L_cycles": 0}, ConfigError, "L_cycles is 0"),
        ({"prefix_lm": False, "num_layers_per_stack": 2}, ConfigError, "num_hidden_layers is 14; it must be 16"),
    ],
)
def test_passes_that_no_model_has(change, error, words):
    with pytest.raises(error, match=words):
        specs_from_config({"model_type": "hrm_text", **FEWEST, **change})


@together("model_type", sorted(UNSUPPORTED_TYPES))
def test_types_that_cannot_be_stored_are_refused_with_the_reason(model_type):
    with pytest.raises(UnsupportedOption, match="which has " + UNSUPPORTED_TYPES[model_type]):
        specs_from_config({"model_type": model_type, **FEWEST, "layer_types": ["hybrid"] * 14, "kv_lora_rank": 512})
