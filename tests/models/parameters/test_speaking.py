"""Counts of parameters of models that speak, with their codecs, and of models whose layers share weights."""

import pytest

from pagecore.models import ConfigError
from pagecore.models.parameters import Kind, count_parameters
from tests.capabilities import require
from tests.models.meta import on_meta_device
from tests.models.parameters.test_sweep import built

TEXT = {"vocab_size": 90, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
MIMI = {"hidden_size": 24, "num_filters": 4, "upsampling_ratios": [5, 3, 2], "num_residual_layers": 2, "kernel_size": 5}
MIMI |= {"num_hidden_layers": 2, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
MIMI |= {"head_dim": 6, "upsample_groups": 8, "vector_quantization_hidden_dimension": 10, "residual_kernel_size": 7}
MIMI |= {"model_type": "mimi"}
DEPTH = {"num_codebooks": 5, "vocab_size": 33, "backbone_hidden_size": 48, "hidden_size": 32, "intermediate_size": 56}
DEPTH |= {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "model_type": "csm_depth_decoder_model",
}
CSM = TEXT | {"vocab_size": 33, "num_codebooks": 5, "text_vocab_size": 70, "intermediate_size": 72}
CSM |= {"num_key_value_heads": 2, "codec_config": MIMI, "depth_decoder_config": DEPTH}
KYUTAI = TEXT | {"ffn_dim": 88, "num_codebooks": 3, "codebook_vocab_size": 17, "codec_config": MIMI}
KYUTAI |= {"audio_pad_token_id": 90, "audio_bos_token_id": 16, "pad_token_id": 3, "bos_token_id": 4}


def made(model_type, sizes):
    return require("transformers").AutoConfig.for_model(model_type, **sizes)


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("csm", CSM),
        ("csm", CSM | {"tie_codebooks_embeddings": False}),
        ("csm", CSM | {"attention_bias": True, "mlp_bias": True, "codec_config": MIMI | {"use_conv_shortcut": True}}),
        ("kyutai_speech_to_text", KYUTAI),
        ("kyutai_speech_to_text", KYUTAI | {"codec_config": MIMI | {"attention_bias": True, "audio_channels": 2}}),
        ("moshi", TEXT | {"ffn_dim": 72}),
        (
            "hrm_text",
            TEXT | {"intermediate_size": 56, "prefix_lm": False, "H_cycles": 3, "L_cycles": 2, "head_dim": 10},
        ),
        (
            "muse_spark_text",
            TEXT
            | {"moe_intermediate_size": 20, "num_local_experts": 5, "moe_hidden_size": 28, "intermediate_size": 64}
            | {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_key_value_heads": 2, "head_dim": 10},
        ),
    ],
)
def test_small_models_that_speak_or_share_layers(model_type, sizes):
    require("torch")
    config = made(model_type, sizes)
    counted = count_parameters(config.to_dict())
    head = 90 * 48 * (model_type == "muse_spark_text")  # transformers has its head in the multimodal model
    assert counted.total == built(config) + head
    assert (counted.of_kind(Kind.VISION) > 0) == ("codec_config" in sizes)
    assert all(count >= 0 for count in counted.counts.values())


def test_a_moshi_that_speaks_has_a_depth_decoder_and_a_codec():
    transformers = require("transformers")
    depth = {"vocab_size": 90, "hidden_size": 24, "input_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    depth |= {"audio_vocab_size": 31, "ffn_dim": 44, "num_codebooks": 3, "num_key_value_heads": 2, "head_dim": 10}
    sizes = TEXT | {"ffn_dim": 72, "audio_vocab_size": 31, "num_codebooks": 3, "depth_decoder_config": depth}
    config = made("moshi", sizes | {"audio_encoder_config": MIMI | {"num_quantizers": 3}})
    with on_meta_device():
        model = transformers.MoshiForConditionalGeneration(config)
    assert count_parameters(config.to_dict()).total == sum(each.numel() for each in model.parameters())


def test_stages_of_layers_that_share_weights_have_each_once():
    config = made("hrm_text", TEXT | {"intermediate_size": 56, "prefix_lm": False, "H_cycles": 2, "L_cycles": 2})
    written = config.to_dict()
    stacks, size = written["num_hidden_layers"], written["num_layers_per_stack"]
    assert (stacks, size) == (18, 3)
    layer = count_parameters(written, layers=range(1, 2)).total
    ends = count_parameters(written).total - 6 * layer
    assert count_parameters(written, layers=range(3, 6)).total == 3 * layer  # the second pass of the lower stack
    assert count_parameters(written, layers=range(3, 9)).total == 6 * layer
    assert (
        count_parameters(written, layers=range(0, 6)).total + count_parameters(written, layers=range(6, 18)).total
        == ends + 3 * layer + 6 * layer
    )


def test_wrong_ratios_of_a_codec_are_named():
    config = made("csm", CSM).to_dict()
    for bad in ([], 8, [4, 0], ["8"]):
        with pytest.raises(ConfigError, match=r"codec_config.upsampling_ratios is .*; it must be a list of integers"):
            count_parameters(config | {"codec_config": MIMI | {"upsampling_ratios": bad}})
