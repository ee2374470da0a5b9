"""Counts of parameters of small models of every family, compared with modules that transformers builds now.

Models are built on torch's meta device, so they have no weights. Sizes are random, and flags that add or remove
parameters are switched.
"""

import importlib
import random

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import ConfigError
from pagecore.models.encoders.bart_t5 import ENCODER_DECODERS
from pagecore.models.encoders.cross_attention import COMPOSED
from pagecore.models.encoders.mllama import MLLAMA
from pagecore.models.families.registry import FAMILIES
from pagecore.models.multimodal.text_fields import ANY_TEXT_MODEL, TEXT_FIELDS, TEXT_MODELS
from pagecore.models.parameters import Kind, count_parameters, vision_tower
from pagecore.models.parameters.encoders.cross_attention import COUNTED_CROSS_DECODERS
from pagecore.models.parameters.structures.registry import STRUCTURES
from tests.capabilities import require
from tests.models.built import COUNTED_ELSEWHERE
from tests.models.meta import config_for, on_meta_device

# Sizes of all families; those of a family come last.
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
SPARSE = {**LATENT, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 8}
OF_FAMILY = {
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "n_inner": 120},
    "longcat_flash": {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 40, **LATENT},
    "gemma4_text": {
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "global_head_dim": 32,
        "head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_global_key_value_heads": 1,
        "top_k_experts": 2,
        "vocab_size_per_layer_input": 50,
    },
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 2},
    "olmo_hybrid": {"linear_key_head_dim": 12, "layer_types": ["linear_attention", "full_attention"] * 2},
    "lara_mini": {"layer_types": ["linear_attention", "sliding_attention", "full_attention", "linear_attention"]},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"], "sliding_window": 16},
    "lfm2": {"block_auto_adjust_ff_dim": True, "full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "nemotron_h": {"hybrid_override_pattern": "M-*-", "layers_block_type": None},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_mem_blocks": 2,
        "mamba_ngroups": 1,
        "adapter_rank": 8,
    },
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 8},
    "kimi_linear": {**LATENT, "q_lora_rank": None, "head_dim": 12},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "shared_intermediate_size": 48},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 16},
    "diffllama": {"num_key_value_heads": 2},
    "deepseek_v4": {
        "head_dim": 16,
        "index_head_dim": 8,
        "index_n_heads": 3,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            *["heavily_compressed_attention"] * 2,
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 10,
    },
    "qwen4_exp_text": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "head_dim": 16,
        "indexer_head_dim": 16,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 3,
    },
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE,
    "mistral_large4": SPARSE | {"q_lora_rank": None},
    "cohere2_moe": {"first_k_dense_replace": 2, "num_shared_experts": 1, "prefix_dense_intermediate_size": 56},
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 2},
    "granitemoe_swa": {"shared_intermediate_size": 48},
    "jetmoe": {"num_attention_heads": 8, "num_key_value_heads": 4, "kv_channels": 12},
    "laguna": {"num_attention_heads_per_layer": [8, 16, 8, 24], "mlp_layer_types": ["sparse", "dense"] * 2},
    "mellum": {"mlp_layer_types": ["sparse", "dense"] * 2},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "minimax_m3_vl_text": {"dense_intermediate_size": 56, "moe_layer_freq": [0, 1, 1, 0]},
}
LATENT_TYPES = {name for name, family in FAMILIES.items() if family.stores_latents}
# Families without groups of queries, and those whose default head_dim suits only their own sizes.
MULTI_HEAD = {*LATENT_TYPES, "git", "gpt2", "gpt_neox", "mistral_large4", "persimmon"}
OF_WIDTH = {"helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"}
# Text models that transformers builds as a part of another model only.
WHOLES = ("dots3_note", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "glm4v", "glm5_next", "kimi_k25")
WHOLES += ("llama4", "mistral_large4", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
WRAPPED = {TEXT_MODELS[whole]: whole for whole in (*WHOLES, "qwen4_exp", "step3p7")}
# transformers serves kimi_k2 as deepseek_v3, and has minimax alone of the three.
TYPES = sorted(STRUCTURES.keys() - COUNTED_ELSEWHERE - {"kimi_k2", "minimax_m1", "minimax_text_01"})
CLIP = {"model_type": "clip_vision_model", "image_size": 42, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
SIGLIP_2 = {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 14}
# Types of the text models of towers that any text model may follow.
TEXT_OF = {"glm46v": "glm4v_text", "glm4v_moe": "glm4v_moe_text", "glm_ocr": "glm_ocr_text", "lfm2_vl": "lfm2"}
TEXT_OF |= {"lighton_ocr": "qwen3", "llava_next_video": "llama", "ovis2": "qwen2", "video_llama_3": "qwen2"}
TEXT_OF |= {"paddleocr_vl": "paddleocr_vl_text"}
TOWER = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4}
QWEN = {"depth": 3, "hidden_size": 32, "num_heads": 4, "intermediate_size": 72, "out_hidden_size": 64}
VISION = {
    "aya_vision": [(SIGLIP, {"downsample_factor": 2}), (SIGLIP, {"alignment_intermediate_size": 48})],
    "cohere2_vision": [(SIGLIP, {"alignment_intermediate_size": 48})],
    "gemma3": [(SIGLIP, {"mm_tokens_per_image": 4}), (SIGLIP | {"vision_use_head": False}, {})],
    "idefics3": [({"image_size": 56, "patch_size": 14}, {"scale_factor": 2, "tie_word_embeddings": True})],
    "smolvlm": [({"image_size": 56, "patch_size": 14}, {"scale_factor": 4})],
    "internvl": [
        ({"image_size": 56, "patch_size": 14}, {}),
        ({"image_size": [28, 28], "patch_size": [14, 14], "attention_bias": True, "use_qk_norm": True}, {}),
        ({"norm_type": "rms_norm", "use_mean_pooling": False, "use_mask_token": True}, {"downsample_ratio": 0.25}),
        ({"use_absolute_position_embeddings": False}, {"tie_word_embeddings": False}),
    ],
    "llava": [
        (CLIP, {}),
        (SIGLIP, {"vision_feature_layer": [-2, -1]}),
        ({"model_type": "pixtral", "patch_size": 14}, {"multimodal_projector_bias": False}),
    ],
    "llava_next": [(CLIP, {})],
    "llava_onevision": [(SIGLIP | {"vision_use_head": False}, {"tie_word_embeddings": True})],
    "vipllava": [(CLIP, {"vision_feature_layer": [-1, -2, 1]})],
    "mistral3": [({"model_type": "pixtral", "patch_size": 14}, {"spatial_merge_size": 2})],
    "mistral_large4": [({"model_type": "pixtral", "patch_size": 14}, {"spatial_merge_size": 2})],
    "qwen2_vl": [({"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}, {})],
    "qwen2_5_vl": [(QWEN, {})],
    "qwen3_vl": [(QWEN | {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 16}, {})],
    "qwen3_vl_moe": [(QWEN | {"deepstack_visual_indexes": [1], "num_position_embeddings": 16}, {})],
    "glm4v": [(QWEN | {"image_size": 56, "patch_size": 14}, {})],
    "glm46v": [(QWEN | {"image_size": 56, "patch_size": 14, "attention_bias": True}, {})],
    "glm4v_moe": [(QWEN | {"image_size": 56, "patch_size": 14}, {})],
    "glm_ocr": [(QWEN | {"patch_size": 14, "attention_bias": bias}, {}) for bias in (True, False)]
    + [(QWEN | {"patch_size": 14, "in_channels": 4}, {})],
    "lfm2_vl": [
        (SIGLIP_2, {"projector_hidden_size": 40}),
        (SIGLIP_2 | {"vision_use_head": False}, {"projector_use_layernorm": False, "projector_bias": False}),
    ],
    "lighton_ocr": [({"model_type": "pixtral", "patch_size": 14}, {"spatial_merge_size": 2})],
    "llava_next_video": [(CLIP, {})],
    "ovis2": [
        ({"image_size": 56, "patch_size": 14, "vocab_size": 50}, {"hidden_size": 64}),
        (
            {"image_size": 56, "patch_size": 14, "vocab_size": 50, "qkv_bias": True, "mlp_bias": True},
            {"hidden_size": 64},
        ),
    ],
    "paddleocr_vl": [({"image_size": 56, "patch_size": 14}, {})],
    "video_llama_3": [({"patch_size": 14}, {})],
    "llama4": [
        (
            {"image_size": 56, "patch_size": 14, "projector_input_dim": 48, "projector_output_dim": 40}
            | {"vision_output_dim": 40, "pixel_shuffle_ratio": 0.5, "intermediate_size": 128},
            {},
        )
    ],
}


def general(chosen, model_type):
    """Return random sizes of a small model."""
    heads = chosen.choice((4, 8))
    sizes = {
        "vocab_size": chosen.randrange(100, 300),
        "hidden_size": 64,
        "intermediate_size": chosen.randrange(40, 200),
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if model_type in MULTI_HEAD else chosen.choice((1, 2, heads)),
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_local_experts": 6,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": chosen.random() < 0.5,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    sizes |= {"head_dim": 64 // heads} if model_type in OF_WIDTH else {}
    return sizes | (LATENT if model_type in LATENT_TYPES else {}) | OF_FAMILY.get(model_type, {})


# Flags and sizes that few published models set.
FLAGS = {
    "afmoe": {"attention_bias": True},
    "beam": {"attention_bias": True},
    "deepseek_v2": {"mlp_bias": True, **LATENT},
    "ernie4_5_moe": {"use_bias": True, "moe_num_experts": 4},
    "falcon_h1": {"mamba_proj_bias": True, "mlp_bias": True, **OF_FAMILY["falcon_h1"]},
    "deepseek_v4": {"mlp_bias": True, **OF_FAMILY["deepseek_v4"]},
    "flint": {"attention_bias": True, "mlp_only_layers": [3]},
    "minicpm3": {"mlp_bias": True, **LATENT},
    "nemotron_h": {"hybrid_override_pattern": "ME*E", "moe_latent_size": 12, "mlp_bias": True, "attention_bias": True},
    "phi": {"qk_layernorm": True},
    "stablelm": {"use_parallel_residual": True},
    "zamba2": {"use_conv_bias": False, "add_bias_linear": True, **OF_FAMILY["zamba2"]},
    "whisper": {"tie_word_embeddings": False, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
}


def built(config):
    """Return the parameters of the model that transformers builds."""
    from tests.models.record_parameters import count

    return count(config)


def text_config(model_type, seed):
    sizes = general(random.Random(f"{model_type} {seed}"), model_type)
    if model_type in WRAPPED and not model_type.startswith(("gemma3", "gemma4", "llama4")):
        whole = WRAPPED[model_type]
        vision = VISION.get(whole, [({}, {})])[0][0]
        return config_for(whole, text_config=sizes, **({"vision_config": vision} if vision else {}))
    return config_for(model_type, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model_type", TYPES)
def test_small_models_of_every_family(model_type, seed):
    require("torch")
    config = text_config(model_type, seed)
    expected = built(config)
    if model_type == "longcat_flash":
        # transformers gives the experts that return their input the weights of a gate; checkpoints do not.
        expected -= 2 * config.zero_expert_num * 2 * config.expert_ffn_hidden_size * config.hidden_size
    assert count_parameters(config.to_dict()).total == expected


@pytest.mark.parametrize("model_type", sorted(FLAGS))
def test_flags_that_few_models_set(model_type):
    transformers = require("transformers")
    require("torch")
    sizes = general(random.Random(model_type), model_type)
    if model_type == "nemotron_h":
        sizes = {"layers_block_type": None, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1} | sizes
    config = transformers.AutoConfig.for_model(model_type, **(sizes | FLAGS[model_type]))
    assert count_parameters(config.to_dict()).total == built(config)


@pytest.mark.parametrize("model_type", ["audioflamingo3", "llama4"])
def test_heads_that_the_config_of_the_whole_does_not_tie(model_type):
    transformers = require("transformers")
    require("torch")
    text = general(random.Random(model_type), "llama") | {"tie_word_embeddings": model_type == "audioflamingo3"}
    text["model_type"] = "qwen2" if model_type == "audioflamingo3" else "llama4_text"
    whole = {"tie_word_embeddings": True} if model_type == "llama4" else {}
    config = transformers.AutoConfig.for_model(model_type, text_config=text, **whole)
    assert count_parameters(config.to_dict()).total == built(config)


SMALL = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
BARK = {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "block_size": 30}
BIASED = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(
    ("module", "name", "model", "sizes"),
    [
        ("bark", "BarkSemantic", "BarkSemanticModel", BARK),
        ("bark", "BarkCoarse", "BarkCoarseModel", BARK | {"bias": False, "input_vocab_size": 70}),
        ("csm", "CsmDepthDecoder", "CsmDepthDecoderForCausalLM", SMALL),
        (
            "csm",
            "CsmDepthDecoder",
            "CsmDepthDecoderForCausalLM",
            SMALL | BIASED | {"num_codebooks": 5, "vocab_size": 33, "backbone_hidden_size": 40},
        ),
        ("higgs_audio_v2", "HiggsAudioV2", "HiggsAudioV2ForConditionalGeneration", SMALL | {"head_dim": 10}),
        (
            "higgs_audio_v2",
            "HiggsAudioV2",
            "HiggsAudioV2ForConditionalGeneration",
            SMALL | BIASED | {"num_codebooks": 3, "codebook_size": 9},
        ),
    ],
)
def test_small_models_that_speak(module, name, model, sizes):
    require("transformers")
    path = f"transformers.models.{module}"
    config = getattr(importlib.import_module(f"{path}.configuration_{module}"), f"{name}Config")(**sizes)
    with on_meta_device():
        built_now = getattr(importlib.import_module(f"{path}.modeling_{module}"), model)(config)
    assert count_parameters(config.to_dict()).total == sum(each.numel() for each in built_now.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "case"), [(name, n) for name, cases in VISION.items() for n in range(len(cases))]
)
def test_small_models_with_a_vision_tower(model_type, case):
    transformers = require("transformers")
    vision, whole = VISION[model_type][case]
    text = general(random.Random(f"{model_type} {case}"), model_type)
    text.pop("tie_word_embeddings")
    text["model_type"] = {**ANY_TEXT_MODEL, **TEXT_MODELS, **TEXT_OF}[model_type]
    tower = vision if "depth" in vision else TOWER | vision
    config = transformers.AutoConfig.for_model(model_type, text_config=text, vision_config=tower, **whole)
    counted = count_parameters(config.to_dict())
    assert counted.total == built(config)
    assert counted.of_kind(Kind.VISION) > 0
    assert vision_tower(config.to_dict()).text_hidden == 64


def test_families_that_are_not_read_are_refused_by_name():
    transformers = require("transformers")
    auto = transformers.models.auto.modeling_auto
    names = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    unread = names - {
        *FAMILIES,
        *ANY_TEXT_MODEL,
        *TEXT_FIELDS,
        *TEXT_MODELS,
        *ENCODER_DECODERS,
        *MLLAMA,
        *COUNTED_CROSS_DECODERS,
        *COMPOSED,
    }
    assert unread
    for name in sorted(unread):
        with pytest.raises((UnsupportedOption, ConfigError), match=name):
            count_parameters({"model_type": name})


@pytest.mark.parametrize("name", ["image_size", "patch_size", "num_hidden_layers", "intermediate_size", "hidden_size"])
def test_a_size_that_a_tower_lacks_is_named(name):
    text = {"model_type": "llama", "vocab_size": 99, "intermediate_size": 72, "hidden_size": 64}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    tower = {key: value for key, value in (TOWER | CLIP).items() if key != name}
    with pytest.raises(ConfigError, match=f"vision_config.{name} is missing; add it"):
        count_parameters({"model_type": "llava", "text_config": text, "vision_config": tower})
    with pytest.raises(ConfigError, match=r"image_size is \[28, 56\]; it must be an integer, or two equal ones"):
        count_parameters(
            {"model_type": "llava", "text_config": text, "vision_config": TOWER | CLIP | {"image_size": [28, 56]}}
        )
