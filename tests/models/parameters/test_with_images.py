"""Counts of parameters of Chameleon, DeepSeek-OCR 2, ERNIE 4.5 VL, GIT and Phi-4-multimodal.

Modules that transformers builds on the meta device are the reference.
"""

import json

import pytest

from pagecore.models import ConfigError
from pagecore.models.parameters import Kind, count_parameters, vision_tower
from tests.capabilities import require
from tests.models.parameters.test_sweep import built

TEXT = {"hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 8}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 101, "pad_token_id": 0}
SAM = {"hidden_size": 32, "mlp_dim": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "global_attn_indexes": [1]}
SAM |= {"image_size": 64, "patch_size": 8, "window_size": 3, "output_channels": 6, "downsample_channels": [10, 12]}
ENCODER = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3}
ENCODER |= {"num_key_value_heads": 1}
OCR = TEXT | {"moe_intermediate_size": 24, "n_routed_experts": 6, "n_shared_experts": 2}
OCR |= {"mlp_layer_types": ["dense", "sparse", "sparse"]}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
ERNIE = TEXT | {"moe_intermediate_size": [24, 16], "moe_num_experts": 5, "rope_parameters": ROPE}
VISION = {"depth": 3, "hidden_size": 32, "intermediate_size": 72, "num_heads": 4, "patch_size": 6}
VISION |= {"spatial_merge_size": 2, "temporal_merge_size": 3}
CHAMELEON = TEXT | {"vocabulary_map": {"<image>": 5}}
VQ = {"base_channels": 32, "channel_multiplier": [1, 2, 3]}
PHI = TEXT | {"bos_token_id": 1, "eos_token_id": 2}
PHI["vision_config"] = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4}
PHI["vision_config"] |= {"image_size": 56, "patch_size": 14}
PHI["audio_config"] = {"hidden_size": 28, "intermediate_size": 40, "num_blocks": 3, "num_attention_heads": 4}
GIT = {"hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 101}
GIT |= {"max_position_embeddings": 30, "vision_config": PHI["vision_config"]}
CASES = [
    ("git", GIT),
    ("git", GIT | {"num_image_with_embedding": 6, "tie_word_embeddings": True}),
    ("phi4_multimodal", PHI),
    (
        "phi4_multimodal",
        PHI
        | {
            "audio_config": PHI["audio_config"]
            | {"bias_symmetric": True, "kernel_size": 5, "input_size": 50, "time_reduction": 4}
            | {"nemo_conv_channels": 24, "downsample_rate": 2, "bias_max_distance": 30}
            | {"ext_pw_out_channel": 18, "depthwise_separable_out_channel": 28, "depthwise_multiplier": 2}
        },
    ),
    ("chameleon", CHAMELEON),
    (
        "chameleon",
        CHAMELEON
        | {"mlp_bias": True, "attention_bias": True}
        | {"vq_config": VQ | {"attn_resolutions": [256, 64], "double_latent": True, "num_res_blocks": 3}},
    ),
    ("chameleon", CHAMELEON | {"vq_config": VQ | {"attn_type": "none", "attn_resolutions": [256]}}),
    ("deepseek_ocr2", {"text_config": OCR, "vision_config": {"sam_config": SAM, "encoder_config": ENCODER}}),
    (
        "deepseek_ocr2",
        {
            "text_config": OCR | {"mlp_layer_types": ["sparse", "dense", "dense"], "attention_bias": True},
            "vision_config": {"sam_config": SAM | {"qkv_bias": False}, "encoder_config": ENCODER},
        },
    ),
    (
        "unlimited_ocr",
        {
            "text_config": OCR | {"num_key_value_heads": 8},
            "vision_config": {
                "sam_config": SAM,
                "encoder_config": {"hidden_size": 20, "intermediate_size": 36, "num_hidden_layers": 2}
                | {"num_attention_heads": 2, "image_size": 42, "patch_size": 14},
            },
        },
    ),
    ("ernie4_5_vl_moe", {"text_config": ERNIE, "vision_config": VISION}),
    ("ernie4_5_vl_moe", {"text_config": ERNIE | {"use_bias": True, "moe_num_shared_experts": 1}, "vision_config": {}}),
    (
        "ernie4_5_vl_moe",
        {
            "text_config": ERNIE | {"mlp_layer_types": ["sparse", "dense", "sparse"], "tie_word_embeddings": False},
            "vision_config": VISION,
            "tie_word_embeddings": False,
        },
    ),
]


def written(model_type, sizes):
    config = require("transformers").AutoConfig.for_model(model_type, **sizes)
    return config, json.loads(json.dumps(config.to_dict()))


@pytest.mark.parametrize(("model_type", "sizes"), CASES, ids=[f"{one[0]}-{n}" for n, one in enumerate(CASES)])
def test_small_models(model_type, sizes):
    require("torch")
    config, values = written(model_type, sizes)
    counted = count_parameters(values)
    assert counted.total == built(config)
    assert all(count >= 0 for count in counted.counts.values())
    assert counted.of_kind(Kind.VISION) > 0
    stages = sum(count_parameters(values, layers=range(n, n + 1)).total for n in range(3))
    is_tied = sizes.get("tie_word_embeddings", model_type.startswith("ernie"))
    assert stages - counted.total == (101 * 64 if is_tied else 0)


def test_the_published_file_of_ernie_4_5_vl_28b():
    require("torch")
    config, values = written("ernie4_5_vl_moe", {})
    assert count_parameters(values).total == built(config) == 29_399_294_336
    published = {"model_type": "ernie4_5_moe_vl", "hidden_size": 2560, "intermediate_size": 12288, "use_bias": False}
    published |= {"num_attention_heads": 20, "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 103424}
    published |= {"moe_num_experts": [64, 64], "moe_intermediate_size": [1536, 512], "moe_num_shared_experts": 2}
    published |= {"moe_layer_start_index": [1, 1], "tie_word_embeddings": True, "temporal_conv_size": 2}
    tower = {"model_type": "DFNRope_vision_transformer", "depth": 32, "embed_dim": 1280, "mlp_ratio": 4}
    tower |= {"num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "in_channels": 3}
    published["vision_config"] = tower
    assert count_parameters(published).total == 29_399_294_336
    assert vision_tower(published).tokens(448) == 256
    for last in ([27, 28], [-1, 5], -1, 30):
        assert count_parameters(published | {"moe_layer_end_index": last}).total == 29_399_294_336
    dense, routers = 3 * 2560 * 12288, 2 * 64 * (2560 + 1)
    experts = 3 * 2560 * (64 * (1536 + 512) + 2 * 1536)
    cut = count_parameters(published | {"moe_layer_end_index": [20, 24]})
    assert cut.total == 29_399_294_336 - 3 * (experts + routers - dense)
    for bad, reason in (
        ({"moe_num_experts": [64, 32]}, "the experts of text and of images must have the same number"),
        ({"moe_intermediate_size": [1536]}, "it must be a list of two integers"),
        ({"moe_intermediate_size": [1536, 0]}, "it must be a list of two integers between 1 and"),
        ({"moe_layer_end_index": [-2, 3]}, "it must have layer numbers, or -1 for the last layer"),
        ({"moe_layer_end_index": "last"}, "it must be an integer or a list of integers"),
        ({"moe_layer_start_index": [1, "1"]}, "it must be a list of two integers between 1 and"),
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(bad))} is .*{reason}"):
            count_parameters(published | bad)


def test_the_tokens_of_an_image_of_deepseek_ocr_2():
    parts = {"vision_config": {"model_type": "deepseek_ocr2_vision", "sam_config": {}, "encoder_config": ENCODER}}
    values = {"model_type": "deepseek_ocr2", "text_config": OCR, **parts}
    tower = vision_tower(values)
    assert (tower.patch, tower.image_size, tower.tokens(1024), tower.text_hidden) == (16, 1024, 256, 64)


@pytest.mark.parametrize(
    ("part", "bad", "reason"),
    [
        ("sam_config", {"downsample_channels": [512]}, "downsample_channels is .*; it must be a list of two integers"),
        ("sam_config", {"downsample_channels": [512, 0]}, "downsample_channels is .*; they must be above 0"),
        ("encoder_config", {"num_attention_heads": 5}, "num_attention_heads is 5, which does not divide hidden_size"),
        ("encoder_config", {"hidden_size": None}, "encoder_config.hidden_size"),
    ],
)
def test_wrong_fields_of_deepseek_ocr_2_are_named(part, bad, reason):
    parts = {"sam_config": SAM, "encoder_config": ENCODER}
    parts[part] = parts[part] | bad
    values = {"model_type": "deepseek_ocr2", "text_config": OCR, "vision_config": parts}
    with pytest.raises(ConfigError, match=reason):
        count_parameters(values)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"attn_resolutions": 16}, "vq_config.attn_resolutions is 16; it must be a list of integers"),
        ({"channel_multiplier": []}, "vq_config.channel_multiplier is .*; it must be a list"),
        ({"base_channels": 0}, "vq_config.base_channels is 0"),
    ],
)
def test_wrong_fields_of_chameleon_are_named(bad, reason):
    with pytest.raises(ConfigError, match=reason):
        count_parameters(CHAMELEON | {"model_type": "chameleon", "vq_config": VQ | bad})
    with pytest.raises(ConfigError, match="vq_config is 3; it must be an object"):
        count_parameters(CHAMELEON | {"model_type": "chameleon", "vq_config": 3})
