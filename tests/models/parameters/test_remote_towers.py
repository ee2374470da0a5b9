"""Counts of models with vision towers whose code is published with their weights.

Published checkpoints and modules of transformers with the same layers are the references.
"""

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import ConfigError
from pagecore.models.parameters import count_parameters, vision_tower
from tests.capabilities import require
from tests.models.parameters.test_sweep import built

QWEN_2 = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN_2 |= {"intermediate_size": 18944, "tie_word_embeddings": False}
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14}
INTERN = {"model_type": "intern_vit_6b", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
INTERN |= {"image_size": 448, "patch_size": 14, "norm_type": "layer_norm", "qkv_bias": True, "qk_normalization": False}
INTERN_VL_3 = {"model_type": "internvl_chat", "downsample_ratio": 0.5, "vision_config": INTERN}
INTERN_VL_3 |= {"llm_config": QWEN_2 | {"model_type": "qwen2", "vocab_size": 151674}}
MINICPM_V = {"model_type": "minicpmv", "version": 2.6, "query_num": 64, "vocab_size": 151666, **QWEN_2}
MINICPM_V |= {"vision_config": SIGLIP | {"model_type": "siglip_vision_model", "image_size": 980}}
DEEPSEEK_OCR = {
    "model_type": "deepseek_vl_v2",
    "language_config": {
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 1280,
        "intermediate_size": 6848,
        "moe_intermediate_size": 896,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 10,
        "num_hidden_layers": 12,
        "num_key_value_heads": 10,
        "use_mla": False,
        "vocab_size": 129280,
    },
    "projector_config": {"input_dim": 2048, "n_embed": 1280, "projector_type": "linear"},
    "vision_config": {"image_size": 1024, "mlp_ratio": 3.7362, "model_name": "deeplip_b_l", "model_type": "vision"},
}
PHI_3_V = {"model_type": "phi3_v", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32}
PHI_3_V |= {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (INTERN_VL_3, 7_944_373_760),
        (MINICPM_V, 8_099_175_152),
        (DEEPSEEK_OCR, 3_336_106_240),
        (DEEPSEEK_OCR | {"model_type": "unlimited_ocr"}, 3_336_106_240),
        (PHI_3_V, 4_146_621_440),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_of_published_checkpoints(config, expected):
    assert count_parameters(config).total == expected


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("model_type", ["internvl_chat", "h2ovl_chat", "skywork_chat", "interns1"])
def test_models_with_the_tower_of_internvl(model_type, has_norms):
    transformers = require("transformers")
    text = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 101, "tie_word_embeddings": False}
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"image_size": [56, 56], "patch_size": [14, 14], "norm_type": "rms_norm" if has_norms else "layer_norm"}
    flags = {"attention_bias": not has_norms, "use_qk_norm": has_norms}
    same = transformers.AutoConfig.for_model(
        "internvl", text_config=text, vision_config=sizes | flags, downsample_ratio=0.5, tie_word_embeddings=False
    )
    tower = sizes | flags | {"model_type": "interns1_vision"}
    if model_type != "interns1":
        tower = sizes | {"qkv_bias": not has_norms, "qk_normalization": has_norms, "model_type": "intern_vit_6b"}
    config = {"model_type": model_type, "vision_config": tower, "downsample_ratio": 0.5}
    config["text_config" if model_type == "interns1" else "llm_config"] = text
    assert count_parameters(config).total == built(same)


def test_tokens_of_an_image():
    assert vision_tower(PHI_3_V).tokens(336) == 144
    assert vision_tower(INTERN_VL_3).tokens(448) == 256
    assert vision_tower(DEEPSEEK_OCR).tokens(1024) == 256


def test_minicpm_v_may_drop_the_last_layer_of_its_tower():
    layer = 4 * 1152 * 1153 + 4304 * 1153 + 1152 * 4305 + 4 * 1152
    dropped = count_parameters(MINICPM_V | {"drop_vision_last_layer": True}).total
    assert count_parameters(MINICPM_V).total - dropped == layer
    assert vision_tower(MINICPM_V | {"drop_vision_last_layer": True}).layers == 26
    whisper = {"model_type": "whisper", "d_model": 8, "encoder_ffn_dim": 32, "encoder_layers": 1, "num_mel_bins": 4}
    omni = MINICPM_V | {"model_type": "minicpmo", "audio_config": whisper}
    encoder = 3 * 4 * 8 + 3 * 8 * 8 + 2 * 8 + 1500 * 8 + 4 * 64 + 3 * 8 + 2 * 8 * 32 + 32 + 8 + 6 * 8
    projector = (8 + 1) * 3584 + (3584 + 1) * 3584
    assert count_parameters(omni).total == count_parameters(MINICPM_V).total + encoder + projector


def test_deepseek_vl_2_has_one_tower_and_an_mlp():
    sizes = {"layers": 27, "width": 1152, "patch_size": 14, "mlp_ratio": 3.7362, "model_type": "vision"}
    vision = sizes | {"model_name": "siglip_so400m_patch14_384"}
    config = DEEPSEEK_OCR | {"vision_config": vision, "projector_config": {"input_dim": 1152, "n_embed": 1280}}
    siglip = 428_225_600  # as transformers builds SigLIP-SO400M
    mlp = (4 * 1152 + 1) * 2560 + (2560 + 1) * 1280 + 2 * 1280
    text = count_parameters(config["language_config"] | {"model_type": "deepseek"}).total
    assert count_parameters(config).total == text + siglip + mlp
    with pytest.raises(ConfigError, match=r'projector_type is "identity"; expected linear or downsample_mlp_gelu'):
        count_parameters(config | {"projector_config": {"input_dim": 8, "n_embed": 8, "projector_type": "identity"}})
    with pytest.raises(
        UnsupportedOption, match=r"vision_config.model_type is .vision., a vision tower that is unknown"
    ):
        count_parameters(config | {"vision_config": vision | {"model_name": "other"}})


@pytest.mark.parametrize(("model_type", "normed"), [("Keye", 1152), ("KeyeVL1_5", 4 * 1152)])
@pytest.mark.parametrize("named", [True, False])
def test_keye_has_two_tables_of_positions(model_type, normed, named):
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "tie_word_embeddings": False}
    vision = SIGLIP | {"image_size": 384, "num_attention_heads": 16} | ({"model_type": model_type} if named else {})
    config = text | {"model_type": model_type, "vision_config": vision}
    layers = 27 * (4 * 1152 * 1153 + 4304 * 1153 + 1152 * 4305 + 4 * 1152)
    tower = (3 * 14 * 14 + 1) * 1152 + (27 * 27 + 32768) * 1152 + layers + 2 * 1152
    projector = 2 * normed + 4608 * 4609 + 64 * 4609
    whole = count_parameters(config).total
    assert whole == count_parameters(text | {"model_type": "qwen3"}).total + tower + projector
    assert vision_tower(config).tokens(448) == 256


def test_glm_4v_has_the_tower_of_eva():
    text = {"model_type": "chatglm", "hidden_size": 64, "num_layers": 2, "num_attention_heads": 8, "kv_channels": 8}
    text |= {"multi_query_attention": True, "multi_query_group_num": 2, "ffn_hidden_size": 96}
    text |= {"padded_vocab_size": 101, "add_qkv_bias": True, "tie_word_embeddings": False}
    vision = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 40, "num_positions": 17, "patch_size": 14}
    tower = 3 * (4 * 32 * 33 + 32 * 41 + 40 * 33 + 4 * 32) + (3 * 14 * 14 + 1) * 32 + 18 * 32
    projector = 4 * 32 * 64 + 64 + 64 * 64 + 2 * 64 + 3 * 64 * 96 + 2 * 64
    assert count_parameters(text | {"vision_config": vision}).total == count_parameters(text).total + tower + projector


def test_phi_4_multimodal_is_counted_as_the_same_model_of_transformers():
    text = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 24}
    text |= {"num_key_value_heads": 8, "vocab_size": 200064, "tie_word_embeddings": True}
    same = require("transformers").AutoConfig.for_model("phi4_multimodal", **text)
    assert count_parameters(text | {"model_type": "phi4mm"}).total == built(same)


def test_a_published_ovis_2_is_counted_as_the_same_model_of_transformers():
    text = QWEN_2 | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
    text |= {"model_type": "qwen2", "vocab_size": 101}
    sizes = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"image_size": 56, "patch_size": 14, "qkv_bias": False}
    words = {"hidden_stride": 2, "vocab_size": 50}
    same = require("transformers").AutoConfig.for_model(
        "ovis2",
        text_config=text | {"tie_word_embeddings": True},
        vision_config=sizes | words | {"num_visual_indicator_tokens": 5},
        hidden_size=64,
    )
    backbone = sizes | {"model_type": "aimv2", "use_bias": False}
    tokenizer = words | {"model_type": "aimv2_visual_tokenizer", "backbone_config": backbone}
    config = {"model_type": "ovis", "hidden_size": 64, "llm_config": text, "visual_tokenizer_config": tokenizer}
    assert count_parameters(config).total == built(same) + 101 * 64
    assert vision_tower(config).tokens(56) == vision_tower(same.to_dict()).tokens(56) == 4
    other = config | {"visual_tokenizer_config": tokenizer | {"backbone_config": {"model_type": "siglip"}}}
    with pytest.raises(UnsupportedOption, match=r"backbone_config.model_type is .siglip.*expected aimv2 or siglip_v"):
        count_parameters(other)
