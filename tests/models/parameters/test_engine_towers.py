"""Counts of models with encoders that vLLM or SGLang serve, or whose towers timm or a name describes.

Published checkpoints, and modules of transformers and timm with the same layers, are the references.
"""

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import ConfigError, specs_from_config
from pagecore.models.parameters import count_parameters, vision_tower
from pagecore.storage import AttentionSpec, CrossSpec
from tests.capabilities import require
from tests.models.meta import on_meta_device

SMALL = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2, "vocab_size": 101}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False}
INKLING = {"model_type": "inkling_text", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
INKLING |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32}
INKLING |= {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 16}
INKLING |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "conv_kernel_size": 3}
SMALL_SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 40, "image_size": 56}
SMALL_SIGLIP |= {"num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 14}


def of_tower(config, **flags):
    """Return the parameters of a tower as transformers builds it."""
    transformers = require("transformers")
    with on_meta_device():
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config | flags))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("indicators", [0, 5])
def test_ovis_1_6_has_a_siglip_with_a_head_of_visual_words(indicators):
    tokenizer = {"hidden_stride": 2, "vocab_size": 50, "backbone_config": SMALL_SIGLIP}
    tokenizer |= {"use_indicators": False} if not indicators else {}
    config = {"model_type": "ovis", "hidden_size": 64, "llm_config": SMALL, "visual_tokenizer_config": tokenizer}
    words = 50 - indicators
    tower = of_tower(SMALL_SIGLIP) + 4 * 32 * words + 2 * words
    assert count_parameters(config).total == count_parameters(SMALL).total + tower + 50 * 64
    assert vision_tower(config).tokens(56) == 4


@pytest.mark.parametrize("has_bias", [False, True])
def test_moss_vl_attends_to_images_in_some_layers(has_bias):
    text = {**SMALL, "model_type": "moss_vl_text", "head_dim": 12, "cross_attention_layers": [1]}
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "patch_size": 4}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1], "out_hidden_size": 64}
    config = {"model_type": "moss_vl", "text_config": text | {"attention_bias": has_bias}, "vision_config": vision}
    attention = 2 * 96 * 64 + 2 * 24 * 64 + has_bias * (96 + 48 + 64) + 2 * 12
    language = 2 * (attention + 3 * 64 * 72 + 2 * 64) + 2 + 2 * 101 * 64 + 64  # with two gates
    layer = 4 * 33 * 32 + 33 * 40 + 41 * 32 + 4 * 32
    tower = 3 * layer + (3 * 4 * 4 + 1) * 32 + 16 * 32
    merged = 4 * 3 * 32  # four patches, and the features of three layers
    projector = 3 * 2 * 32 + (merged + 1) * merged + (merged + 1) * 64 + 64
    assert count_parameters(config).total == language + tower + projector
    assert vision_tower(config).depths == 1
    specs = specs_from_config(config)
    assert [type(spec) for spec in specs] == [AttentionSpec, CrossSpec]
    assert [(spec.num_kv_heads, spec.head_dim) for spec in specs] == [(2, 12)] * 2
    assert specs[1].max_tokens is None


def test_moss_vl_as_published():
    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16}
    config = {"model_type": "moss_vl", "text_config": {"model_type": "moss_vl_text"}, "vision_config": vision}
    found = [layer for layer, spec in enumerate(specs_from_config(config)) if isinstance(spec, CrossSpec)]
    assert found == list(range(2, 48, 4))
    assert round(count_parameters(config).total / 1e9, 1) == 11.3


@pytest.mark.parametrize("depth", [0, 2])
def test_kanana_v_merges_patches_between_convolutions(depth):
    """As its modeling file and the stages of a RegNet in timm build it."""
    vision = {"model_type": "kanana-1.5-v-visual-encoder", "depth": 3, "embed_dim": 32, "num_heads": 4}
    projector = {"depth": depth, "encoder_hidden_size": 32, "hidden_size": 24, "output_hidden_size": 64}
    projector |= {"pos_emb_size": 16, "mlp_depth": 3, "num_eos_tokens": 2, "prenorm": True}
    text = {**SMALL, "model_type": "kanana-1.5-3b-instruct"}
    config = {"model_type": "kanana-1.5-v", "text_config": text, "vision_config": vision}
    tower = 3 * (4 * 33 * 32 + 33 * 128 + 129 * 32 + 4 * 32) + 3 * 2 * 14 * 14 * 32

    def block(inputs):
        gate = round(inputs / 4)
        shortcut = inputs * 24 + 48 if inputs != 24 else 0
        return inputs * 24 + 9 * 24 + 24 * 24 + 3 * 48 + 25 * gate + (gate + 1) * 24 + shortcut

    stages = block(32) + block(96) + 2 * block(24) if depth else 0
    rest = (16 + 2) * 32 + 2 * 64 + ((24 if depth else 32) + 1) * 64 + 2 * 65 * 64
    expected = count_parameters(text | {"model_type": "llama"}).total + tower + stages + rest
    assert count_parameters(config | {"projector_config": projector}).total == expected
    assert vision_tower(config).tokens(56) == 4


@pytest.mark.parametrize("qk_norm", [False, True])
def test_bagel_has_a_siglip_of_one_layer_less_than_its_config(qk_norm):
    text = {name: value for name, value in SMALL.items() if name != "model_type"} | {"qk_norm": qk_norm}
    tower = {name: value for name, value in SMALL_SIGLIP.items() if name != "model_type"}
    config = {"model_type": "bagel", "llm_config": text, "vae_config": {"z_channels": 16}}
    expected = count_parameters(SMALL).total + qk_norm * 2 * 2 * 8
    for listed, built in ((27, 26), (3, 3)):
        counted = count_parameters(config | {"vit_config": tower | {"num_hidden_layers": listed}})
        seen = of_tower(SMALL_SIGLIP, num_hidden_layers=built, vision_use_head=False)
        assert counted.total == expected + seen + 33 * 64 + 65 * 64
    assert count_parameters(config | {"vit_config": tower, "visual_und": False}).total == expected
    assert vision_tower(config | {"vit_config": tower}).tokens(56) == 16


@pytest.mark.parametrize(("bias", "scales", "stride"), [(True, None, 4), (False, 1e-5, [4, 8])])
def test_midasheng_has_a_transformer_over_patches_of_a_spectrogram(bias, scales, stride):
    encoder = {"depth": 3, "embed_dim": 32, "num_heads": 4, "mlp_ratio": 2.5, "n_mels": 16, "patch_size": [4, 4]}
    encoder |= {"patch_stride": stride, "target_length": 40, "qkv_bias": bias, "init_values": scales}
    text = {name: value for name, value in SMALL.items() if name != "model_type"}
    config = {"model_type": "midashenglm", "text_config": text, "audio_encoder_config": encoder, "subsample_factor": 3}
    layer = 4 * 32 * 32 + 32 + 3 * 32 * bias + 33 * 80 + 81 * 32 + 4 * 32 + 2 * 32 * bool(scales)
    positions = 4 + (10 if stride == 4 else 5)
    tower = 2 * 16 + 17 * 32 + positions * 32 + 3 * layer + 2 * 32
    projector = (3 * 32 + 1) * 64 + 65 * 64
    assert count_parameters(config).total == count_parameters(SMALL).total + tower + projector
    with pytest.raises(ConfigError, match=r"patch_size is \[4\]; it must be an integer, or two"):
        count_parameters(config | {"audio_encoder_config": encoder | {"patch_size": [4]}})


SOUND = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
SOUND |= {"projection_hidden_size": 24, "projection_bias": True, "subsampling_conv_channels": 8, "num_mel_bins": 16}


def built(model_type, sizes):
    """Return the config of a multimodal model, and its parameters as transformers builds it."""
    transformers = require("transformers")
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    kinds = (transformers.AutoModelForImageTextToText, transformers.AutoModelForMultimodalLM)
    kind = next(each for each in kinds if type(config) in each._model_mapping)
    with on_meta_device():
        model = kind.from_config(config)
    return config.to_dict(), sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("sound", [{}, {"audio_config": SOUND}, {"audio_config": SOUND | {"projection_bias": False}}])
@pytest.mark.parametrize("mtp", [0, 2])
def test_nemotron_omni_has_an_encoder_of_sound(sound, mtp):
    text = {name: value for name, value in SMALL.items() if name not in ("model_type", "num_hidden_layers")}
    text |= {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 2}
    text |= {"ssm_state_size": 12, "num_nextn_predict_layers": mtp, "head_dim": 8}
    radio = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4}
    radio |= {"patch_size": 14, "max_img_size": 56, "video_temporal_patch_size": 2}
    sizes = {"vision_config": radio, "text_config": text, "projector_hidden_size": 40, "vision_hidden_size": 32}
    config, total = built("nemotron_h_omni", sizes | sound)
    assert count_parameters(config).total == total


def test_nemotron_omni_as_published():
    args = {"model": "vit_small_patch16_224", "cpe_max_size": 64}
    config = {"model_type": "NemotronH_Nano_VL_V2", "llm_config": SMALL, "projector_hidden_size": 24}
    config |= {"vision_config": {"args": args}, "downsample_ratio": 0.5}
    omni = config | {
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
        "sound_config": SOUND | {"model_type": "parakeet"},
    }
    sound = of_tower(SOUND | {"model_type": "parakeet_encoder", "attention_bias": False})
    projector = 32 + 33 * 24 + 25 * 64
    assert count_parameters(omni).total == count_parameters(config).total + sound + projector
    predicting = config | {"llm_config": SMALL | {"num_nextn_predict_layers": 1}}
    assert count_parameters(predicting).total == count_parameters(config).total + 2 * 384


def test_nemotron_transcribe_has_encoders_of_speech_speakers_and_times():
    layers = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    heard = layers | {"num_mel_bins": 16, "num_key_value_heads": 2}
    head = {"audio_hidden_size": 32, "hidden_size": 12}
    text = {name: value for name, value in SMALL.items() if name not in ("model_type", "num_hidden_layers")}
    text |= {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 2}
    text |= {"ssm_state_size": 12, "head_dim": 8}
    audio = {"asr_config": heard, "diarization_config": {"audio_config": heard | layers, "head_config": head}}
    sizes = {"audio_config": audio, "text_config": text}
    sizes["word_timestamp_config"] = layers | {"vocab_size": 21, "blank_token_id": 20, "upsampling_factor": 3}
    config, total = built("nemo_speechlm", sizes)
    assert count_parameters(config).total == total


@pytest.mark.parametrize("flags", [{}, {"qkv_bias": False, "use_rel_pos": False, "use_abs_pos": False}])
def test_pp_formulanet_has_the_tower_of_got_ocr(flags):
    vision = {"hidden_size": 32, "output_channels": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "mlp_dim": 40}
    vision |= {"image_size": 64, "window_size": 2, "global_attn_indexes": [1], "decoder_hidden_size": 48}
    vision |= {"post_conv_in_channels": 8, "post_conv_mid_channels": 12, "post_conv_out_channels": 20}
    text = {"d_model": 48, "decoder_layers": 2, "decoder_ffn_dim": 76, "decoder_attention_heads": 4}
    text |= {"vocab_size": 101, "max_position_embeddings": 37}
    config, total = built("pp_formulanet", {"text_config": text, "vision_config": vision | flags})
    assert count_parameters(config).total == total
    assert sum(count_parameters(config, layers=range(n, n + 1)).total for n in range(2)) == total


@pytest.mark.parametrize(("act", "read"), [("gelu", None), ("silu", [-1, -2, -4])])
def test_openpangu_vl_reads_layers_of_its_tower(act, read):
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "patch_size": 4}
    vision |= {"hidden_act": act, "out_hidden_size": 24, "mm_unit_vision_select_layer": read}
    config = {**SMALL, "model_type": "openpangu_vl", "vision_config": vision}
    layer = 4 * 33 * 32 + (1 + (act == "silu")) * 33 * 40 + 41 * 32 + 2 * 32
    tower = 3 * layer + 2 * 3 * 4 * 4 * 32 + 32
    projector = len(read or (0, 1)) * (32 + 129 * 128 + 129 * 24) + 25 * 64
    text = count_parameters({**SMALL, "model_type": "openpangu_dense"}).total
    assert count_parameters(config).total == text + tower + projector
    other = config | {"text_config": SMALL | {"model_type": "openpangu_vl_text"}}
    with pytest.raises(UnsupportedOption, match="expected openpangu_dense, the text model of openpangu_vl"):
        specs_from_config(other)


def test_eagle_2_5_has_a_siglip_without_a_head():
    config = {"model_type": "eagle_2_5_vl", "text_config": SMALL, "vision_config": SMALL_SIGLIP}
    projector = 2 * 128 + 129 * 64 + 65 * 64
    tower = of_tower(SMALL_SIGLIP, vision_use_head=False)
    assert count_parameters(config).total == count_parameters(SMALL).total + tower + projector
    assert vision_tower(config).tokens(56) == 4


@pytest.mark.parametrize("has_bias", [False, True])
def test_nvlm_has_seven_more_heads_than_its_config(has_bias):
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6}
    sizes |= {"image_size": 56, "patch_size": 14, "norm_type": "rms_norm", "qkv_bias": has_bias}
    sizes |= {"model_type": "intern_vit_6b", "qk_normalization": True}
    config = {"model_type": "NVLM_D", "llm_config": SMALL, "vision_config": sizes, "downsample_ratio": 0.5}
    dim, heads = 8, 6 + 7
    layer = 3 * (48 + has_bias) * heads * dim + (heads * dim + 1) * 48 + 2 * heads * dim  # attention
    layer += 2 * 48 * 40 + 40 + 48 + 4 * 48  # an MLP, norms, and the scales of both residuals
    tower = 3 * layer + (3 * 14 * 14 + 1) * 48 + 17 * 48 + 48
    projector = 2 * 192 + 192 * 72 + 72 * 64
    assert count_parameters(config).total == count_parameters(SMALL).total + tower + projector


def test_nvlm_d_72b():
    text = {"model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
    text |= {"num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064, "tie_word_embeddings": False}
    tower = {"hidden_size": 3200, "intermediate_size": 12800, "num_attention_heads": 25, "num_hidden_layers": 45}
    tower |= {"model_type": "intern_vit_6b", "norm_type": "rms_norm", "qk_normalization": True, "qkv_bias": False}
    tower |= {"image_size": 448, "patch_size": 14}
    config = {"model_type": "NVLM_D", "llm_config": text, "vision_config": tower, "downsample_ratio": 0.5}
    assert round(count_parameters(config).total / 1e9, 1) == 79.4  # as published
    assert vision_tower(config).tokens(448) == 256


@pytest.mark.parametrize(
    ("model_type", "has_bias"), [("NemotronH_Nano_VL_V2", False), ("Llama_Nemotron_Nano_VL", True)]
)
def test_nemotron_nano_vl_has_a_radio_tower(model_type, has_bias):
    teachers = [{"name": "clip"}, {"name": "siglip"}, {"name": "dino_v2"}, {"name": "sam", "use_summary": False}]
    args = {"model": "vit_small_patch16_224", "teachers": teachers, "register_multiple": 8, "cpe_max_size": 64}
    args |= {"cls_token_per_teacher": True}
    config = {"model_type": model_type, "llm_config": SMALL, "projector_hidden_size": 24, "downsample_ratio": 0.5}
    config["vision_config"] = {"args": args, "patch_size": 16}
    layers = 12 * (4 * 384 * 385 + 1536 * 385 + 384 * 1537 + 4 * 384)
    tower = layers + 3 * 16**2 * 384 + (4**2 + 8) * 384
    projector = 1536 * (1 + has_bias) + (1536 + has_bias) * 24 + (24 + has_bias) * 64
    assert count_parameters(config).total == count_parameters(SMALL).total + tower + projector
    assert vision_tower(config).tokens(512) == 256
    assert vision_tower(config).hidden == 384
    one = config | {"vision_config": {"args": args | {"cls_token_per_teacher": False, "register_multiple": None}}}
    assert count_parameters(config).total - count_parameters(one).total == 7 * 384
    video = config | {"vision_config": {"args": args, "video_temporal_patch_size": 2}}
    assert count_parameters(video).total - count_parameters(config).total == 2 * 3 * 16**2 * 384
    other = config | {"vision_config": {"args": args | {"model": "vit_tiny"}}}
    with pytest.raises(UnsupportedOption, match=r"args.model is .vit_tiny., a network that is unknown"):
        count_parameters(other)
    unnamed = config | {"vision_config": {"args": args | {"teachers": ["clip"]}}}
    with pytest.raises(ConfigError, match=r"args.teachers is .*a list of objects with a name each"):
        count_parameters(unnamed)


def test_a_radio_tower_of_transformers_has_scales_in_addition():
    sizes = {"hidden_size": 384, "num_hidden_layers": 2, "num_attention_heads": 6, "patch_size": 16}
    sizes |= {"max_img_size": 64, "num_cls_tokens": 4, "num_registers": 4, "video_temporal_patch_size": None}
    args = {"model": "vit_small_patch16_224", "register_multiple": 8, "cpe_max_size": 64, "cls_token_per_teacher": True}
    args["teachers"] = [{"name": name} for name in "abcd"]
    config = {"model_type": "NemotronH_Nano_VL_V2", "llm_config": SMALL, "projector_hidden_size": 24}
    config["vision_config"] = {"args": args}
    projector = 384 + 384 * 24 + 24 * 64
    tower = count_parameters(config).total - count_parameters(SMALL).total - projector
    layer = 4 * 384 * 385 + 1536 * 385 + 384 * 1537 + 4 * 384
    assert of_tower({"model_type": "radio", **sizes}) == tower - 10 * layer + 2 * 2 * 384


# As timm 1.0.31 builds them with these arguments.
@pytest.mark.parametrize(
    ("architecture", "hidden", "depth", "expected"),
    [
        ("vit_pe_core_large_patch14_336", 1024, 23, 291_415_040),
        ("vit_pe_core_gigantic_patch14_448", 1536, 47, 1_740_922_624),
    ],
)
def test_perception_lm_has_a_tower_that_timm_makes(architecture, hidden, depth, expected):
    arguments = {"embed_dim": hidden, "depth": depth, "img_size": [448, 448], "global_pool": "", "init_values": 0.1}
    arguments |= {"use_post_transformer_norm": False, "ref_feat_shape": [32, 32]}
    vision = {"model_type": "timm_wrapper", "architecture": architecture, "model_args": arguments}
    config = {"model_type": "perception_lm", "text_config": SMALL, "vision_config": vision}
    config["projector_pooling_ratio"] = 2
    projector = (hidden + 1) * 64 + 65 * 64
    assert count_parameters(config).total == count_parameters(SMALL).total + expected + projector
    assert (vision_tower(config).tokens(448), vision_tower(config).layers) == (256, depth)
    with pytest.raises(UnsupportedOption, match=r"global_pool is .*does not pool its patches"):
        count_parameters(config | {"vision_config": vision | {"model_args": {**arguments, "global_pool": "map"}}})
    with pytest.raises(UnsupportedOption, match=r"architecture is .resnet50., a network that is unknown"):
        count_parameters(config | {"vision_config": vision | {"architecture": "resnet50"}})


def test_fast_vlm_has_a_network_of_convolutions():
    vision = {"model_type": "timm_wrapper", "architecture": "fastvit_mci3", "hidden_size": 3072}
    config = {"model_type": "fast_vlm", "text_config": SMALL, "vision_config": vision}
    network = 122_714_208  # as timm 1.0.31 builds it for inference
    expected = count_parameters(SMALL).total + network + 3073 * 64 + 65 * 64
    assert count_parameters(config).total == expected
    assert count_parameters(config | {"multimodal_projector_bias": False}).total == expected - 2 * 64
    assert vision_tower(config) is None


def test_kimi_audio_has_the_encoder_of_whisper_large():
    transformers = require("transformers")
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    with on_meta_device():
        encoder = WhisperEncoder(transformers.WhisperConfig(num_mel_bins=128, **sizes))
    config = SMALL | {"model_type": "kimi_audio", "kimia_adaptor_input_dim": 5120}
    adaptor = 5121 * 64 + 65 * 64 + 2 * 64
    text = count_parameters(SMALL).total
    assert count_parameters(config).total == text + adaptor + sum(each.numel() for each in encoder.parameters())
    assert count_parameters(config | {"use_whisper_feature": False}).total == text


# Stages of three blocks with SiLU and LayerNorm2d, as timm 1.0.31 builds them.
@pytest.mark.parametrize(("hidden", "stage"), [(48, 19_620), (1024, 7_914_240)])
def test_hyperclova_x_seed_has_an_abstractor(hidden, stage):
    tower = SMALL_SIGLIP | {"hidden_size": hidden}
    config = {"model_type": "hyperclovax_vlm", "text_config": SMALL, "vision_config": tower, "anyres": True}
    other = count_parameters(SMALL).total + of_tower(tower)
    readout = (hidden + 1) * 64 + 65 * 64
    pooled = {"mm_projector_type": "cabstractor", "proj_pos_emb": True, "proj_prenorm": True}
    assert count_parameters(config | pooled).total == other + 2 * stage + 18 * hidden + readout + 64
    for kind, projector in (
        ("linear", (hidden + 1) * 64),
        ("mlp", (hidden + 1) * hidden + (hidden + 1) * 64),
        ("inverted_mlp", (hidden + 1) * 2 * hidden + (2 * hidden + 1) * 64),
    ):
        assert count_parameters(config | {"mm_projector_type": kind, "anyres": False}).total == other + projector
    with pytest.raises(ConfigError, match=r"mm_projector_type is .other.; expected linear, cabstractor, mlp or inver"):
        count_parameters(config | {"mm_projector_type": "other"})


def test_nemotron_parse_has_a_radio_tower_a_neck_and_an_mbart_without_positions():
    teachers = [{"name": name} for name in ("clip", "siglip", "dino_v2", "sam")]
    args = {"model": "vit_huge_patch16_224", "register_multiple": 8, "cls_token_per_teacher": True}
    decoder = {"model_type": "nemotron_parse_text", "d_model": 1024, "decoder_layers": 10, "decoder_ffn_dim": 4096}
    decoder |= {"decoder_attention_heads": 16, "vocab_size": 52352}
    config = {"model_type": "nemotron_parse", "image_size": [2048, 1664], "max_sequence_length": 9000}
    config |= {"decoder": decoder, "encoder": {"patch_size": 16, "args": args | {"teachers": teachers}}}
    transformers = require("transformers")
    from transformers.models.mbart.modeling_mbart import MBartDecoder

    sizes = {name: decoder[name] for name in decoder if name != "model_type"}
    with on_meta_device():
        mbart = MBartDecoder(transformers.MBartConfig(**sizes, max_position_embeddings=10))
    text = sum(each.numel() for each in mbart.parameters()) - 12 * 1024
    tower = 32 * (12 * 1280**2 + 13 * 1280) + 3 * 16**2 * 1280 + (128**2 + 8) * 1280
    neck = 1281 * 1024 + 4 * 1024**2 + 3841 * 1024 + 6 * 1024
    assert count_parameters(config).total == text + tower + neck
    stages = [count_parameters(config, layers=stage).total for stage in (range(5), range(5, 10))]
    assert sum(stages) == text + tower + neck + 52352 * 1024


@pytest.mark.parametrize(("patch", "frames"), [(40, 2), (14, 2), (48, 4), (7, 2)])
@pytest.mark.parametrize("layers", [1, 3, 5, 7, 12])
def test_inkling_folds_patches_of_growing_size(monkeypatch, patch, frames, layers):
    require("scipy")
    from transformers.models.inkling import configuration_inkling, modeling_inkling

    plan = modeling_inkling.plan_out_scales
    monkeypatch.setattr(modeling_inkling, "plan_out_scales", lambda *sizes: plan(*sizes, device="cpu"))
    config = configuration_inkling.InklingVisionConfig(
        num_hidden_layers=layers, patch_size=patch, temporal_patch_size=frames, text_hidden_size=64
    )
    with on_meta_device():
        tower = modeling_inkling.InklingVisionModel(config)
    text = {"model_type": "inkling_mm_model", "text_config": INKLING}
    added = count_parameters(text | {"vision_config": config.to_dict()}).total - count_parameters(text).total
    assert added == sum(each.numel() for each in tower.parameters())
    assert vision_tower(text | {"vision_config": config.to_dict()}).tokens(4 * patch) == 16


def test_inkling_hears_levels_of_mel_bins():
    text = {"model_type": "inkling_mm_model", "text_config": INKLING}
    sound = {"model_type": "inkling_audio", "n_mel_bins": 8, "mel_vocab_size": 16, "text_hidden_size": 64}
    added = count_parameters(text | {"audio_config": sound}).total - count_parameters(text).total
    assert added == (8 * 16 + 1) * 64
