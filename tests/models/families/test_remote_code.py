"""Specs of families whose code is published with their weights, from published configs cut to what decides them."""

import numpy as np
import pytest

from pagecore import Alias, AttentionSpec, LatentSpec, PagedKVCache, StateSpec, TensorParallel, UnsupportedOption
from pagecore.models import ConfigError, read_model_config, specs_from_config
from pagecore.serving.planner import plan_model
from tests.together import together

HUNYUAN_LARGE = {
    "model_type": "hunyuan",
    "attention_head_dim": 80,
    "cla_share_factor": 2,
    "hidden_size": 6400,
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "use_cla": True,
}
RING_MINI = {
    "model_type": "bailing_moe_linear",
    "group_norm_size": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "layer_group_size": 5,
    "max_position_embeddings": 131072,
    "num_attention_heads": 16,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
}
MIMO_V2_PRO = {
    "model_type": "mimo_v2",
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "head_dim": 192,
    "hidden_size": 6144,
    "hybrid_layer_pattern": [0, 1],
    "num_attention_heads": 128,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 128,
    "swa_num_key_value_heads": 4,
    "swa_v_head_dim": 128,
    "v_head_dim": 128,
}
PLAMO_2 = {"model_type": "plamo2", "hidden_size": 4096, "hidden_size_per_head": 128, "num_hidden_layers": 32}
PLAMO_2 |= {"mamba_num_heads": 64, "num_attention_heads": 32, "num_key_value_heads": 4, "full_attention_idx": [1]}
PLAMO_3 = {"model_type": "plamo3", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 16}
PHI_3_SMALL = {"model_type": "phi3small", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
LOOP = {"model_type": "iquestloopcoder", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 80}
SOLAR = {"model_type": "solar_open2", "hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 48}
LING = {"model_type": "bailing_hybrid", "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 8}
LING |= {"layer_group_size": 4, "num_key_value_heads": 8, "head_dim": 128}


def of_kind(specs, kind):
    return [spec for spec in specs if isinstance(spec, kind)]


@together(
    ("config", "heads"),
    [
        ({"model_type": "aquila", "num_hidden_layers": 40}, (40, 32, 32, 128)),
        ({"model_type": "bailing_moe_v2", "num_hidden_layers": 32, "num_key_value_heads": 4}, (32, 32, 4, 128)),
        ({"model_type": "internlm", "num_hidden_layers": 32}, (32, 32, 32, 128)),
        ({"model_type": "jais", "n_embd": 5120, "n_head": 40, "n_layer": 40}, (40, 40, 40, 128)),
        (
            {"model_type": "molmo", "num_hidden_layers": 28, "num_attention_heads": 64, "num_key_value_heads": 8},
            (28, 64, 8, 64),
        ),
        ({"model_type": "orion", "num_hidden_layers": 40}, (40, 32, 32, 128)),
        ({"model_type": "ouro", "num_hidden_layers": 24, "num_attention_heads": 16}, (96, 16, 16, 256)),
        ({"model_type": "PanguEmbedded", "num_hidden_layers": 34, "num_key_value_heads": 8}, (34, 32, 8, 128)),
        (
            {"model_type": "sarvam_moe", "num_hidden_layers": 19, "head_dim": 64, "num_attention_heads": 64},
            (19, 64, 64, 64),
        ),
        ({"model_type": "skywork", "num_hidden_layers": 52}, (52, 32, 32, 128)),
        (
            {"model_type": "solar", "num_hidden_layers": 64, "num_key_value_heads": 8, "sliding_window": 2047},
            (64, 32, 8, 128),
        ),
        ({"model_type": "step1", "num_hidden_layers": 32, "num_attention_groups": 8}, (32, 32, 8, 128)),
        ({"model_type": "step1", "num_hidden_layers": 32, "num_key_value_heads": 4}, (32, 32, 4, 128)),
        ({"model_type": "step1", "num_hidden_layers": 32}, (32, 32, 1, 128)),
        ({"model_type": "telechat", "n_layer": 30, "n_head": 32, "num_key_value_heads": None}, (30, 32, 32, 128)),
        ({"model_type": "telechat3", "num_hidden_layers": 64, "num_key_value_heads": 8}, (64, 32, 8, 128)),
        ({"model_type": "xverse", "num_hidden_layers": 40}, (40, 32, 32, 128)),
        ({"model_type": "Yi", "num_hidden_layers": 60, "num_key_value_heads": 8}, (60, 32, 8, 128)),
    ],
)
def test_layers_like_those_of_llama(config, heads):
    own = {} if config["model_type"] in ("jais", "telechat") else {"num_attention_heads": 32}
    specs = specs_from_config(
        {"hidden_size": 4096, **own, **config} | ({"hidden_size": 5120} if "n_embd" in config else {})
    )
    assert (len(specs), specs[0].num_query_heads, specs[0].num_kv_heads, specs[0].head_dim) == heads
    assert {(spec.window, spec.scale) for spec in specs} == {(None, None)}


@pytest.mark.parametrize("model_type", ["hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe"])
def test_layers_of_hunyuan_share_keys_in_groups(model_type):
    config = HUNYUAN_LARGE | {"model_type": model_type}
    specs = specs_from_config(config)
    assert [spec.layer if isinstance(spec, Alias) else layer for layer, spec in enumerate(specs)] == [
        layer - layer % 2 for layer in range(64)
    ]
    assert (specs[0].num_kv_heads, specs[0].head_dim) == (8, 80)
    thirds = specs_from_config(config | {"cla_share_factor": 3})
    assert thirds[3:6] == [specs[0], Alias(3), Alias(3)]
    for change in ({"use_cla": False}, {"cla_share_factor": 1}):
        assert specs_from_config(config | change) == [specs[0]] * 64
    plan = plan_model(config, memory="1GiB", context=4096)
    assert [group.num_layers for group in plan.memory.groups] == [32]


def test_a_cache_of_hunyuan_stores_half_of_its_layers():
    specs = specs_from_config(HUNYUAN_LARGE | {"num_hidden_layers": 4})
    cache = PagedKVCache(layers=specs, num_blocks=4, block_size=16)
    assert np.shares_memory(cache.key(3), cache.key(2))
    assert not np.shares_memory(cache.key(2), cache.key(1))
    with pytest.raises(UnsupportedOption, match="layer 3 reads the keys and values of layer 2, which is in another"):
        read_model_config(HUNYUAN_LARGE | {"num_hidden_layers": 4}).specs_of_stage(range(3, 4))


def test_lightning_attention_of_ring():
    model = read_model_config(RING_MINI)
    assert [isinstance(spec, StateSpec) for spec in model.layers] == ([True] * 4 + [False]) * 4
    assert [(plane.name, plane.shape) for plane in model.layers[0].planes] == [("temporal", (16, 128, 128))]
    assert (model.layers[0].chunk, model.layers[0].interval, model.max_length) == (256, 256, 131072)
    assert {(spec.num_kv_heads, spec.head_dim) for spec in of_kind(model.layers, AttentionSpec)} == {(4, 128)}


def test_ling_2_5_has_lightning_attention_and_ling_3_kimi_delta_attention():
    older = specs_from_config(LING | {"group_norm_size": 4})
    newer = specs_from_config(LING | {"group_norm_size": 1, "short_conv_kernel_size": 4})
    assert newer == specs_from_config(LING)
    assert [[plane.name for plane in specs[0].planes] for specs in (older, newer)] == [
        ["temporal"],
        ["conv", "temporal"],
    ]
    assert [specs[0].chunk for specs in (older, newer)] == [256, 64]
    assert [isinstance(spec, LatentSpec) for spec in older] == [layer % 4 == 3 for layer in range(8)]
    listed = specs_from_config(LING | {"layer_group_size": [1, 1, 0, 1, 1, 1, 1, 0]})
    assert [layer for layer, spec in enumerate(listed) if isinstance(spec, LatentSpec)] == [2, 7]
    plain = specs_from_config(LING | {"use_mla_nope": True})[3]
    assert (plain.rope_dim, plain.scale) == (0, 128**-0.5)
    with pytest.raises(ConfigError, match=r"layer_group_size is .*; it must be a number, or list one for each layer"):
        specs_from_config(LING | {"layer_group_size": [1, 0]})


def test_mamba_and_windows_of_plamo_2():
    specs = specs_from_config(PLAMO_2)
    assert [isinstance(spec, StateSpec) for spec in specs] == [True, False] * 16
    assert [(plane.name, plane.shape) for plane in specs[0].planes] == [
        ("conv", (8192, 3)),
        ("temporal", (64, 128, 64)),
    ]
    assert [spec.window for spec in specs[1::2]] == [None] + [2048] * 15
    half = TensorParallel(0, 2).shard(specs[0])
    assert [plane.shape for plane in half.planes] == [(4096, 3), (32, 128, 64)]
    assert [isinstance(spec, StateSpec) for spec in specs_from_config(PLAMO_2 | {"mamba_step": 4})[:4]] == [
        True,
        True,
        False,
        True,
    ]
    assert isinstance(specs_from_config(PLAMO_2 | {"mamba_step": 64})[-1], AttentionSpec)
    assert not of_kind(specs_from_config(PLAMO_2 | {"mamba_enabled": False}), StateSpec)


@pytest.mark.parametrize("field", ["sliding_window", "interleaved_sliding_window"])
def test_windows_of_plamo_3(field):
    expected = ([2048] * 7 + [None]) * 2
    for config in (PLAMO_3, PLAMO_3 | {field: expected}):
        assert [spec.window for spec in specs_from_config(config)] == expected
    assert specs_from_config(PLAMO_3 | {"window_size": 64})[0].window == 64
    with pytest.raises(ConfigError, match="it must list null and one number of tokens"):
        specs_from_config(PLAMO_3 | {"sliding_window": [64, 32]})


def test_solar_open_2_numbers_its_layers_in_three_ways():
    specs = specs_from_config(SOLAR)
    assert [layer for layer, spec in enumerate(specs) if isinstance(spec, AttentionSpec)] == list(range(0, 48, 4))
    assert [plane.shape for plane in specs[1].planes] == [(3 * 64 * 128, 3), (64, 128, 128)]
    listed = [layer for layer, spec in enumerate(specs_from_config(SOLAR | {"gqa_layers": [3, 9]})) if spec == specs[0]]
    assert listed == [3, 9]
    own = {"short_conv_kernel_size": 3, "head_dim": 64, "num_heads": 32}
    assert [plane.shape for plane in specs_from_config(SOLAR | {"linear_attn_config": own})[1].planes] == [
        (3 * 32 * 64, 2),
        (32, 64, 64),
    ]
    with pytest.raises(ConfigError, match=r"linear_attn_config.num_kv_heads is 8; it must equal num_heads, 32"):
        specs_from_config(SOLAR | {"linear_attn_config": own | {"num_kv_heads": 8}})


def test_heads_and_sinks_of_mimo_v2():
    full, slides = specs_from_config(MIMO_V2_PRO)
    assert (full.num_kv_heads, full.head_dim, full.v_head_dim, full.window, full.sinks) == (8, 192, 128, None, None)
    # The size counts preceding tokens, without the token itself.
    assert (slides.num_kv_heads, slides.window, len(slides.sinks)) == (4, 129, 128)
    both = specs_from_config(MIMO_V2_PRO | {"add_full_attention_sink_bias": True}, sinks=[[0.5] * 128] * 2)
    assert [spec.sinks[0] for spec in both] == [0.5, 0.5]
    with pytest.raises(ConfigError, match=r"hybrid_layer_pattern is .*; it must list 0 or 1 for each of 2 layers"):
        specs_from_config(MIMO_V2_PRO | {"hybrid_layer_pattern": [0, 2]})
    with pytest.raises(ConfigError, match=r"layer 1 has 3 key-value heads .swa_num_key_value_heads is 3"):
        specs_from_config(MIMO_V2_PRO | {"swa_num_key_value_heads": 3})


def test_scales_of_phi_3_small_and_jais():
    assert {(spec.num_kv_heads, spec.scale) for spec in specs_from_config(PHI_3_SMALL)} == {(8, 1 / 128)}
    assert specs_from_config(PHI_3_SMALL | {"mup_use_scaling": False})[0].scale is None
    assert specs_from_config(PHI_3_SMALL | {"mup_attn_multiplier": 2})[0].scale == 2 / 128
    jais = {"model_type": "jais", "n_embd": 5120, "n_head": 40, "n_layer": 2, "mup_scale_qk_dot_by_d": True}
    assert specs_from_config(jais)[0].scale == 1 / 128


def test_later_passes_of_a_looped_model_have_windows():
    specs = specs_from_config(LOOP | {"num_key_value_heads": 8})
    assert [spec.window for spec in specs] == [None] * 80 + [64] * 80
    longer = specs_from_config(LOOP | {"loop_num": 3, "loop_window_size": 32})
    assert [spec.window for spec in longer] == [None] * 80 + [32] * 160
    with pytest.raises(ConfigError, match="loop_num is 1000000000"):
        specs_from_config(LOOP | {"loop_num": 10**9})


def test_latents_of_sarvam():
    config = {"model_type": "sarvam_mla", "hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 32}
    spec = specs_from_config(config)[0]
    assert (spec.latent_dim, spec.rope_dim, spec.num_query_heads, spec.scale) == (512, 64, 64, 192**-0.5)
    rope = {"rope_type": "deepseek_yarn", "factor": 40, "mscale_all_dim": 1.0}
    assert specs_from_config(config | {"rope_parameters": rope})[0].scale > spec.scale


def test_latents_of_pangu_by_its_own_names():
    config = {"model_type": "pangu_ultra_moe", "hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 3}
    config |= {"attention_kv_lora_dim": 256, "attention_qk_dim": 96, "attention_qk_rope_dim": 32}
    config |= {"num_key_value_heads": 8}
    spec = specs_from_config(config)[2]
    assert (spec.latent_dim, spec.rope_dim, spec.num_query_heads, spec.scale) == (256, 32, 8, 128**-0.5)
    with pytest.raises(ConfigError, match="attention_kv_lora_dim is -1; it must be an integer"):
        specs_from_config(config | {"attention_kv_lora_dim": -1})


# -- models of text and images -----------------------------------------------------------------------------------------

FLAT = {"hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4}


@together(
    ("wrapper", "text"),
    [
        ({"model_type": "llava_llama"}, "llama"),
        ({"model_type": "llava_qwen", "sliding_window": 32768, "use_sliding_window": False}, "qwen2"),
        ({"model_type": "llava_mistral", "sliding_window": None}, "mistral"),
        ({"model_type": "phi3_v"}, "phi3"),
        ({"model_type": "KeyeVL1_5", "head_dim": 128}, "qwen3"),
        ({"model_type": "minicpmv", "version": 2.6}, "qwen2"),
        ({"model_type": "minicpmv", "version": "4.5", "head_dim": 128}, "qwen3"),
        ({"model_type": "minicpmv", "version": 4.0}, "llama"),
        ({"model_type": "minicpmv"}, "llama"),
        ({"model_type": "minicpmo", "version": "2.6"}, "qwen2"),
        ({"model_type": "minicpmo"}, "qwen2"),
        ({"model_type": "minicpmo", "version": 4.5, "head_dim": 128}, "qwen3"),
    ],
)
def test_models_of_images_with_the_text_model_at_the_top_level(wrapper, text):
    model = read_model_config(FLAT | wrapper)
    assert (model.model_type, len(model.layers)) == (text, 28)
    assert {(spec.num_query_heads, spec.num_kv_heads, spec.head_dim) for spec in model.layers} == {(28, 4, 128)}


def test_the_first_minicpm_v_has_no_version():
    config = {"model_type": "minicpmv", "hidden_size": 2304, "num_attention_heads": 36, "num_hidden_layers": 40}
    assert read_model_config(config).model_type == "minicpm"
    for version in ("new", -1, True, [2.6], float("nan")):
        with pytest.raises(ConfigError, match=r"version is .*; it must be the version of the model, such as 4.5"):
            specs_from_config(config | {"version": version})


@together("field", ["text_config", "llm_config", "language_config", "llm_cfg"])
@together("model_type", ["NVLM_D", "llava_llama", "multi_modality"])
def test_text_models_in_other_fields(field, model_type):
    text = FLAT | {"model_type": "llama"}
    assert specs_from_config({"model_type": model_type, field: text}) == specs_from_config(text)
