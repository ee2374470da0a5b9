"""Specs of families that vLLM or SGLang serve and transformers does not have, from configs as data.

The expected numbers are those of the engines' model code: heads, dims and windows that it passes to attention, and the
shapes of its states.
"""

import pytest

from pagecore import AttentionSpec, LatentSpec, StateSpec
from pagecore.errors import UnsupportedOption
from pagecore.models import ConfigError, read_model_config, specs_from_config
from pagecore.models.layers.unsupported import unsupported_layers
from pagecore.models.parameters import count_parameters
from tests.together import together

SMALL = {"hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 8, "num_key_value_heads": 2}
JET_PARTS = {"swa": {"window_size": 1152}, "jet": {"num_heads": 6, "head_dim": 256, "expand_v": 2.0, "conv_size": 4}}
DELTA = {"linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128}
DELTA |= {"linear_value_head_dim": 128}
BLOCKS = [{"block_type": "mamba"}, {"block_type": "moe", "n_routed_experts": 8}, {"block_type": "attention"}]
ISAAC = {"model_type": "isaac", "head_dim": 128, "vision_config": {"model_type": "pixel_shuffle_siglip2"}}
ASR = {"model_type": "qwen3_asr_thinker", "text_config": SMALL}
OCR = {"model_type": "deepseek_v2", "hidden_size": 1280, "num_attention_heads": 10, "num_hidden_layers": 12}
OCR |= {"kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0}
OCR |= {"num_key_value_heads": 10, "use_mla": False}
GEMMA = {
    "use_bidirectional_attention": True,
    "hidden_size": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
}

FULL = ("attention", 2, 128, None)
CONFIGS = {
    "alpamayo2_super": ({"vlm_config": {"model_type": "qwen3_vl", "text_config": SMALL}}, [FULL] * 8),
    "alice_ai": (
        {**SMALL, **DELTA, "head_dim": 256, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        [("state", (6144, 3), (16, 128, 128))] * 3 + [("attention", 2, 256, None)],
    ),
    "deepseek_vl_v2": ({"language_config": OCR}, [("attention", 10, 128, None)] * 12),
    "domyn_edge": (
        {**SMALL, "window_sizes": [[511, 0]] * 4 + [[-1, -1]] * 4, "per_layer_config": {"07": {"head_dim": 64}}},
        [("attention", 2, 128, 512)] * 4 + [FULL] * 3 + [("attention", 2, 64, None)],
    ),
    "gigachat3_5": (
        {**SMALL, "num_key_value_heads": 8, "head_dim": 64, "full_attention_layers": [0, 7]},
        [("latent", 512, 64, None), *[("state", (4096, 3), (16, 128, 128))] * 6, ("latent", 512, 64, None)],
    ),
    "interns1_pro": ({"text_config": SMALL | {"model_type": "interns1_pro_text"}}, [FULL] * 8),
    "iquest_q1": (
        {**SMALL, "num_hybrid_layers_block": 1},
        [FULL, FULL, *[("attention", 2, 128, 4096)] * 3, *[FULL] * 3],
    ),
    "isaac": ({**SMALL, **ISAAC}, [FULL] * 8),
    "jet_nemotron": (
        {**SMALL, "layer_types": ["jet", "attn", "jet", "swa"] * 2, "efficient_attention_config": JET_PARTS},
        [
            ("state", (3072, 3), (6, 512, 256)),
            FULL,
            ("state", (3072, 3), (6, 512, 256)),
            ("attention", 2, 128, 1152),
        ]
        * 2,
    ),
    "k2_horizon": (SMALL, [FULL] * 8),
    "kimi_audio": ({**SMALL, "use_sliding_window": False, "max_window_layers": 28}, [FULL] * 8),
    "longcat_flash_ngram": (
        {"hidden_size": 1024, "num_attention_heads": 8, "num_layers": 2},
        [("latent", 512, 64, None)] * 4,
    ),
    "minicpm_sala": (
        {**SMALL, "mixer_types": ["minicpm4", "lightning-attn"], "lightning_nh": 16, "lightning_head_dim": 128},
        [FULL, ("state", (16, 128, 128))] * 4,
    ),
    "moondream3": ({"config": {}}, [("attention", 32, 64, None)] * 24),
    "nanbeige": ({**SMALL, "num_loops": 3}, [FULL] * 24),
    "nemotron_h_puzzle": (
        {"hidden_size": 1024, "num_attention_heads": 8, "block_configs": BLOCKS},
        [("state", (10240, 3), (128, 64, 128)), ("attention", 8, 128, None)],
    ),
    "paligemma": ({"text_config": GEMMA}, [("attention", 1, 256, None)] * 18),
    "qwen3_asr": ({"thinker_config": ASR}, [FULL] * 8),
    "spark2_5": (
        {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
        [*[("attention", 2, 256, 512)] * 3, ("attention", 2, 256, None)] * 2,
    ),
}


def summary(spec):
    if isinstance(spec, StateSpec):
        return ("state", *(plane.shape for plane in spec.planes))
    if isinstance(spec, LatentSpec):
        return ("latent", spec.latent_dim, spec.rope_dim, spec.window)
    assert isinstance(spec, AttentionSpec)
    return ("attention", spec.num_kv_heads, spec.head_dim, spec.window)


@together("model_type", CONFIGS)
def test_specs_are_those_of_the_engines(model_type):
    config, expected = CONFIGS[model_type]
    if model_type == "alice_ai":
        config = config | {"num_hidden_layers": 4}
    assert [summary(spec) for spec in specs_from_config({"model_type": model_type, **config})] == expected


@pytest.mark.parametrize(
    ("mode", "stored"), [("per_loop", [0, 2, 3, 4, 3, 4, 3, 4, 6]), ("last_loop", [0, 2, 3, 4, 6])]
)
def test_layers_of_dory_that_are_passed_several_times(mode, stored):
    kinds = ["full_attention", "mlp", "sliding_attention", "full_attention", "sliding_attention", "mlp"]
    config = {"model_type": "dory", **SMALL, "num_hidden_layers": 7, "layer_types": [*kinds, "full_attention"]}
    config |= {"n_input_layers": 3, "n_output_layers": 2, "n_recurrent_loops": 3, "recurrent_kv_cache_mode": mode}
    model = read_model_config(config)
    slides = {2, 4}
    assert [spec.window for spec in model.layers] == [1024 if layer in slides else None for layer in stored]
    assert {spec.head_dim for spec in model.layers} == {256}
    assert specs_from_config(config | {"layer_types": ["mlp"] * 7}) == []


def test_experts_of_a_model_without_latents_are_counted():
    config = OCR | {"vocab_size": 129280, "intermediate_size": 6848, "moe_intermediate_size": 896}
    config |= {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1}
    attention, experts = 4 * 1280**2, 66 * 3 * 1280 * 896 + 64 * 1280
    expected = 2 * 129280 * 1280 + 1280 + 12 * (attention + 2 * 1280) + 11 * experts + 3 * 1280 * 6848
    assert count_parameters(config).total == expected
    zeros = {name: value for name, value in config.items() if name != "use_mla"}
    assert count_parameters(zeros).total == expected


@together(
    ("model_type", "changes", "reason"),
    [
        ("alice_ai", {}, "layer_types is missing; add the kind of each of the 8 layers"),
        ("alice_ai", {"layer_types": ["linear_attention"] * 8}, "linear_num_key_heads is missing"),
        ("domyn_edge", {"window_sizes": [[511, 0]]}, "must list a pair for each of 8 layers"),
        ("domyn_edge", {"window_sizes": [511] * 8}, "it must list pairs of integers"),
        ("dory", {"n_input_layers": 9}, "n_input_layers is 9, n_recurrent_layers is missing"),
        ("dory", {"layer_types": ["full"] * 8}, "it must list full_attention, sliding_attention, mlp for each of 8"),
        ("dory", {"n_recurrent_loops": 10**4}, "n_recurrent_loops is 10000"),
        ("dory", {"recurrent_kv_cache_mode": "none"}, "it must be per_loop or last_loop"),
        ("gigachat3_5", {"num_key_value_heads": 8, "full_attention_layers": [8]}, "layers are numbered from 0"),
        ("iquest_q1", {}, "describe 88 layers; they must name 'full_attention' or 'sliding_attention' for each"),
        ("jet_nemotron", {"layer_types": ["swa"] * 8}, "efficient_attention_config.swa.window_size is missing"),
        ("jet_nemotron", {}, "layer_types is missing"),
        ("minicpm_sala", {"mixer_types": ["mamba"]}, 'mixer_types[0] is "mamba"; expected '),
        ("minicpm_sala", {"mixer_types": ["attn"] * 9}, "it must list kinds of at most 8 layers"),
        ("nemotron_h_puzzle", {"block_configs": [{}]}, "block_configs[0].block_type is null; expected"),
        ("nemotron_h_puzzle", {"block_configs": BLOCKS}, "block_configs lists 3 layers; expected those of num_hidden"),
        (
            "nemotron_h_puzzle",
            {"num_hidden_layers": 1, "block_configs": [{"block_type": "attention", "num_key_value_heads": 4}]},
            "block_configs[0].num_key_value_heads is 4; it must be 2, that of all layers",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_named(model_type, changes, reason):
    with pytest.raises(ConfigError) as refused:
        specs_from_config({"model_type": model_type, **SMALL, **changes})
    assert reason in str(refused.value)


def test_layers_of_another_kind_are_refused():
    with pytest.raises(UnsupportedOption, match=r"layer_types\[0\] is \"mamba\".*expected 'attn' or 'swa' or 'jet'"):
        specs_from_config({"model_type": "jet_nemotron", **SMALL, "layer_types": ["mamba"] * 8})


@pytest.mark.parametrize(
    "model_type", ["Dream", "diffllama", "doge", "git", "idefics", "moondream3", "paligemma", "sdar"]
)
def test_layers_that_are_stored_may_have_an_attention_that_no_spec_describes(model_type):
    assert unsupported_layers(model_type, lambda _name: None)
    if model_type not in ("moondream3", "paligemma"):
        heads = SMALL if model_type in ("Dream", "diffllama", "doge", "sdar") else SMALL | {"num_key_value_heads": 8}
        assert len(specs_from_config({"model_type": model_type, **heads})) == 8
