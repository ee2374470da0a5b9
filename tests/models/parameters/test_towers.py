"""Counts of parameters of towers with parts of their own, compared with modules that transformers builds now."""

import random

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import ConfigError
from pagecore.models.multimodal.text_fields import ANY_TEXT_MODEL, TEXT_MODELS
from pagecore.models.parameters import Kind, count_parameters, vision_tower
from pagecore.serving.planner import DeviceOptions, plan_model
from tests.capabilities import require
from tests.models.meta import config_for
from tests.models.parameters.test_sweep import CLIP, QWEN, SIGLIP, TOWER, built, general
from tests.models.record_encoders import INKLING

TEXT_OF = {
    **ANY_TEXT_MODEL,
    **TEXT_MODELS,
    "aria": "aria_text",
    "blip-2": "opt",
    "cosmos3_edge": "cosmos3_edge_text",
    "deepseek_vl": "llama",
    "exaone4_5": "exaone4",
    "got_ocr2": "qwen2",
    "hunyuan_vl": "hunyuan_vl_text",
    "hyperclovax_vision_v2": "hyperclovax",
    "idefics2": "mistral",
    "instructblip": "llama",
    "instructblipvideo": "llama",
    "janus": "llama",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "molmo2": "molmo2_text",
    "muse_spark": "muse_spark_text",
    "pp_chart2table": "qwen2",
    "qianfan_ocr": "qwen3",
}
Q_FORMER = {"hidden_size": 24, "num_hidden_layers": 5, "intermediate_size": 40, "num_attention_heads": 3}
Q_FORMER |= {"cross_attention_frequency": 3, "vocab_size": 70, "max_position_embeddings": 30, "encoder_hidden_size": 32}
SAM = {"hidden_size": 32, "mlp_dim": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "output_channels": 6}
SAM |= {"image_size": 64, "patch_size": 8, "window_size": 3, "global_attn_indexes": [1]}
VQ = {"embed_dim": 5, "num_embeddings": 40, "latent_channels": 12, "base_channels": 32, "channel_multiplier": [1, 2, 3]}
VQ |= {"num_res_blocks": 3, "projection_dim": 28, "image_token_embed_dim": 22, "num_hidden_layers": 3}
MOLMO = TOWER | {"num_position_embeddings": 9, "patch_size": 14, "head_dim": 8, "num_key_value_heads": 4}
ADAPTER = {
    "vision_feature_layer": [-1, 0],
    "hidden_size": 32,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "text_hidden_size": 64,
}
IMAGE = {"image_size": 56, "patch_size": 14}
MINICPM = TOWER | IMAGE | {"insert_layer_id": 1}
TIED = {"tie_word_embeddings": True}
GRANITE = {"downsample_rate": "2/4", "deepstack_layer_map": [[-1, 0], [-2, 1]]}
GRANITE["qformer_config"] = {"model_type": "blip_2_qformer", "num_hidden_layers": 2, "intermediate_size": 40}
CASES = [
    ("aria", TOWER | IMAGE, {"projector_patch_to_query_dict": {"16": 5, "4": 9}}),
    ("blip-2", TOWER | IMAGE, {"qformer_config": Q_FORMER, "num_query_tokens": 7}),
    ("blip-2", TOWER | IMAGE | {"qkv_bias": False}, {"qformer_config": Q_FORMER | {"use_qformer_text_input": True}}),
    ("instructblip", TOWER | IMAGE, {"qformer_config": Q_FORMER, "num_query_tokens": 3}),
    ("instructblipvideo", TOWER | IMAGE, {"qformer_config": Q_FORMER}),
    (
        "idefics2",
        TOWER | IMAGE,
        {
            "perceiver_config": {
                "hidden_size": 64,
                "resampler_n_latents": 6,
                "resampler_depth": 2,
                "resampler_n_heads": 6,
            }
        },
    ),
    ("janus", TOWER | IMAGE | {"mlp_ratio": 2.25, "projection_dim": 64, "depth": 3}, {"vq_config": VQ}),
    (
        "janus",
        TOWER | IMAGE | {"mlp_ratio": 3, "projection_dim": 64, "attention_bias": False, "use_qk_norm": True},
        {"vq_config": VQ | {"double_latent": True}},
    ),
    ("got_ocr2", SAM, {}),
    ("got_ocr2", SAM | {"qkv_bias": False, "use_rel_pos": False}, {}),
    ("pp_chart2table", SAM | {"use_abs_pos": False, "global_attn_indexes": []}, {}),
    ("molmo2", MOLMO, {"adapter_config": ADAPTER | {"vision_feature_layer": [-1, -2, -3]}}),
    (
        "molmo2",
        MOLMO | {"num_attention_heads": 6, "num_key_value_heads": 2, "attention_bias": False},
        {"adapter_config": ADAPTER | {"num_key_value_heads": 1, "attention_bias": False, "mlp_bias": True}},
    ),
    ("minicpmv4_6", MINICPM, {}),
    ("minicpmv4_6", MINICPM, {"drop_vision_last_layer": True}),
    ("minicpmv4_7", MINICPM, {"merger_times": 3}),
    ("exaone4_5", QWEN | {"num_key_value_heads": 2, "out_hidden_size": 64}, {}),
    ("glm5_next", QWEN | {"patch_size": 14, "projection_intermediate_size": 44}, {}),
    ("cosmos3_edge", TOWER | {"patch_size": 8, "num_patches": 25}, {"projector_hidden_size": 36}),
    ("cosmos3_edge", TOWER | {"patch_size": 8, "num_patches": 25}, {"projector_hidden_size": 8} | TIED),
    ("molmo2", MOLMO, {"adapter_config": ADAPTER} | TIED),
    ("minimax_m3_vl", TOWER | IMAGE, {"projector_hidden_size": 36}),
    ("deepseek_vl", TOWER | SIGLIP, {}),
    ("qianfan_ocr", TOWER | {"image_size": [56, 56], "patch_size": [14, 14]}, {}),
    ("hyperclovax_vision_v2", QWEN | {"model_type": "qwen2_5_vl_vision", "out_hidden_size": 40}, {}),
    ("cohere_compass", QWEN | {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 16}, {}),
    ("cosmos3_omni", QWEN | {"deepstack_visual_indexes": [1], "num_position_embeddings": 16}, {}),
    ("granite4_vision", TOWER | CLIP | {"hidden_size": 128}, GRANITE),
    ("granite4_vision", TOWER | SIGLIP | {"hidden_size": 64}, GRANITE | {"deepstack_layer_map": []}),
    ("step3p7", TOWER | IMAGE, {}),
    ("step3p7", TOWER | IMAGE, {"projector_bias": True}),
    (
        "hunyuan_vl",
        TOWER | {"max_image_size": 100, "patch_size": 16, "text_hidden_size": 64, "spatial_merge_size": 2},
        {},
    ),
]


MUSE = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4}
MUSE |= {"patch_size": 14, "pos_emb_height": 3, "pos_emb_width": 5, "merge_size": 2, "patch_temporal": 2}
LEVELS = {"patch_sizes": [5, 3, 2], "hidden_sizes": [8, 12, 20], "depths": [1, 3, 2], "num_hidden_layers": 3}
LEVELS |= {"mlp_ratio": 2.5, "conv_kernel_size": 5, "out_hidden_size": 64, "model_type": "muse_spark_audio"}


def test_a_small_muse_spark_with_images_and_sound():
    require("torch")
    whole = {"audio_config": LEVELS, "projector_hidden_size": 28, "out_hidden_size": 128}
    config = made("muse_spark", MUSE, whole)
    written = config.to_dict()
    assert count_parameters(written).total == built(config)
    tower = vision_tower(written)
    assert (tower.frames, tower.merge, tower.tokens(56)) == (2, 2, 4)
    for bad, reason in (
        ({"depths": [1]}, "they must have one number for each level"),
        ({"patch_sizes": [0, 1, 2]}, "it must be a list of integers above 0"),
    ):
        with pytest.raises(ConfigError, match=f"audio_config.{next(iter(bad))} is .*{reason}"):
            count_parameters(written | {"audio_config": LEVELS | bad})


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("model_type", "own"),
    [
        ("inkling2", {}),
        ("inkling2_loop", {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2}),
    ],
)
def test_a_small_inkling_2_with_images(model_type, own, has_bias):
    tower = TOWER | {"patch_size": 10, "posemb_grid_size": 5, "projection_hidden_dim": 28, "text_hidden_size": 48}
    text = INKLING | {"unpadded_vocab_size": INKLING["vocab_size"]} | own
    config = config_for(model_type, text_config=text, vision_config=tower | {"projector_bias": has_bias})
    assert count_parameters(config.to_dict()).total == built(config)
    assert vision_tower(config.to_dict()).tokens(100) == 25


def made(model_type, tower, whole):
    transformers = require("transformers")
    text = general(random.Random(f"{model_type} {len(tower)}"), model_type) | {"model_type": TEXT_OF[model_type]}
    text.pop("tie_word_embeddings")
    text |= {"opt": {"ffn_dim": 80, "word_embed_proj_dim": 64}, "hunyuan_vl_text": {"head_dim": 16}}.get(
        text["model_type"], {}
    )
    if model_type == "cohere_compass":
        text["rope_parameters"] = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    if model_type == "glm5_next":
        text["num_key_value_heads"] = text["num_attention_heads"]
    if model_type == "hyperclovax_vision_v2":
        text["head_dim"] = 64 // text["num_attention_heads"]
    return transformers.AutoConfig.for_model(model_type, text_config=text, vision_config=tower, **whole)


@pytest.mark.parametrize(
    ("model_type", "tower", "whole"), CASES, ids=[f"{one[0]}-{number}" for number, one in enumerate(CASES)]
)
def test_small_models_with_towers_of_their_own(model_type, tower, whole):
    require("torch")
    config = made(model_type, tower, whole)
    counted = count_parameters(config.to_dict())
    assert counted.total == built(config)
    assert counted.of_kind(Kind.VISION) > 0
    assert all(count >= 0 for count in counted.counts.values())


def test_towers_whose_published_files_leave_out_sizes():
    transformers = require("transformers")
    require("torch")
    text = {"model_type": "opt", "vocab_size": 99, "hidden_size": 64, "ffn_dim": 80, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 4, "max_position_embeddings": 8, "word_embed_proj_dim": 64}
    for model_type, kind in (("blip-2", "blip_2"), ("instructblip", "instructblip")):
        parts = {"vision_config": {"model_type": f"{kind}_vision_model"}, "text_config": text}
        expected = built(transformers.AutoConfig.for_model(model_type, **parts))
        assert count_parameters({"model_type": model_type, **parts}).total == expected
        assert count_parameters({"model_type": model_type, **parts, "vision_config": {}}).total == expected
    tower = vision_tower({"model_type": "blip-2", "vision_config": {}, "text_config": text})
    assert (tower.patch, tower.image_size, tower.tokens(224), tower.text_hidden) == (14, 224, 32, 64)


@pytest.mark.parametrize(
    ("model_type", "tower", "whole", "size", "tokens"),
    [
        ("aria", TOWER | IMAGE, {"projector_patch_to_query_dict": {"16": 5, "4": 9}}, 56, 9),
        ("idefics2", TOWER | IMAGE, {"perceiver_config": {"hidden_size": 64}}, 980, 64),
        ("granite4_vision", TOWER | SIGLIP | {"hidden_size": 64}, GRANITE, 56, 4),
        ("llava_onevision", TOWER | SIGLIP | {"image_size": 384}, {}, 384, 729),
        ("janus", TOWER | {"image_size": 384, "patch_size": 16, "projection_dim": 64}, {}, 384, 576),
        ("got_ocr2", {}, {}, 1024, 256),
        ("molmo2", MOLMO, {"adapter_config": ADAPTER}, 378, 196),
        ("minicpmv4_6", MINICPM, {}, 448, 64),
        ("exaone4_5", QWEN | {"num_key_value_heads": 2, "out_hidden_size": 64, "patch_size": 14}, {}, 448, 256),
        ("step3p7", TOWER | {"image_size": 728, "patch_size": 14}, {}, 728, 169),
    ],
)
def test_the_tokens_of_an_image(model_type, tower, whole, size, tokens):
    require("torch")
    assert vision_tower(made(model_type, tower, whole).to_dict()).tokens(size) == tokens


MLLAMA_TEXT = {"hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 4, "num_attention_heads": 8}
MLLAMA_TEXT |= {"num_key_value_heads": 2, "vocab_size": 130, "cross_attention_layers": [1, 2], "pad_token_id": 0}
MLLAMA = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_global_layers": 2, "patch_size": 14}
MLLAMA |= {"attention_heads": 4, "image_size": 42, "vision_output_dim": 64, "intermediate_layers_indices": [1]}


def small_mllama(**vision):
    transformers = require("transformers")
    return transformers.AutoConfig.for_model(
        "mllama", text_config=MLLAMA_TEXT | {"model_type": "mllama_text_model"}, vision_config=MLLAMA | vision
    )


@pytest.mark.parametrize("vision", [{}, {"max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]}])
def test_small_models_of_llama_3_2_vision(vision):
    require("torch")
    config = small_mllama(**vision)
    written = config.to_dict()
    counted = count_parameters(written)
    assert counted.total == built(config)
    stages = [count_parameters(written, layers=range(n, n + 1)).total for n in range(4)]
    assert sum(stages) == counted.total
    text = count_parameters(written["text_config"] | {"model_type": "mllama_text_model"})
    assert counted.total - text.total == counted.of_kind(Kind.VISION)
    with pytest.raises(UnsupportedOption, match="mllama has an encoder, and no layers for further tokens"):
        count_parameters(written, mtp=True)


def test_a_device_with_a_llama_3_2_vision_is_planned_with_all_tiles():
    require("torch")
    written = small_mllama().to_dict()
    tower = vision_tower(written)
    assert (tower.image_size, tower.tokens(tower.image_size), tower.text_hidden) == (84, 36, 64)
    plan = plan_model(written, device_memory="8GiB")
    assert plan.device.parameters == count_parameters(written).total


@pytest.mark.parametrize("model_type", ["blip", "florence2", "pix2struct"])
def test_a_device_with_an_encoder_of_images_is_planned_from_given_weights(model_type):
    config = require("transformers").AutoConfig.for_model(model_type).to_dict()
    assert vision_tower(config) is None
    plan = plan_model(config, device_memory="24GiB", options=DeviceOptions(weights="2GiB"))
    assert plan.device.parameters is None


@pytest.mark.parametrize("model_type", ["kosmos-2", "kosmos-2.5"])
def test_a_device_is_planned_for_a_text_model_with_names_of_its_own(model_type):
    config = require("transformers").AutoConfig.for_model(model_type).to_dict()
    assert vision_tower(config).text_hidden == config["text_config"]["embed_dim"]
    assert plan_model(config, device_memory="24GiB").device.parameters == count_parameters(config).total


def test_a_wrong_number_of_queries_is_named():
    whole = made("aria", TOWER | IMAGE, {}).to_dict()
    for bad in ([5], {}, {"16": 0}, {"16": "5"}):
        with pytest.raises(ConfigError, match=r"projector_patch_to_query_dict is .* must map patches to numbers"):
            count_parameters(whole | {"projector_patch_to_query_dict": bad})
    with pytest.raises(ConfigError, match=r"vq_config.channel_multiplier is \[\]; it must be a list"):
        count_parameters(made("janus", TOWER | IMAGE, {}).to_dict() | {"vq_config": {"channel_multiplier": []}})
