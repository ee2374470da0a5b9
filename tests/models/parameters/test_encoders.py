"""Counts of parameters of models with an encoder and a decoder, compared with modules that transformers builds now."""

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import ConfigError
from pagecore.models.encoders.bart_t5 import ENCODER_DECODERS
from pagecore.models.parameters import count_parameters
from tests.capabilities import require
from tests.models.meta import on_meta_device
from tests.models.parameters.test_sweep import built

OF_T5 = {"longt5", "mt5", "pop2piano", "switch_transformers", "t5", "umt5"}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 56}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 101, "pad_token_id": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
T5 |= {"vocab_size": 101, "relative_attention_num_buckets": 12}
OF_FAMILY = {
    "bigbird_pegasus": [{"use_bias": True}],
    "fsmt": [
        {"src_vocab_size": 40, "tgt_vocab_size": 60, "pad_token_id": 2},
        {"src_vocab_size": 9, "tgt_vocab_size": 9},
    ],
    "led": [{"max_encoder_position_embeddings": 50, "max_decoder_position_embeddings": 20, "attention_window": 4}],
    "marian": [
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 57},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 101},
    ],
    "nllb-moe": [
        {"num_experts": 3, "encoder_sparse_step": 2, "decoder_sparse_step": 3, "router_bias": True},
        {"num_experts": 3, "encoder_sparse_step": 0, "decoder_sparse_step": 1},
    ],
    "pegasus_x": [{"num_global_tokens": 5}],
    "speech_to_text": [
        {"conv_kernel_sizes": [3, 5, 7], "num_conv_layers": 3, "conv_channels": 26, "input_feat_per_channel": 11}
    ],
    "whisper": [{"num_mel_bins": 10, "max_source_positions": 30, "max_target_positions": 12}],
}
SWITCH = {"num_experts": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
OF_T5_FAMILY = {
    "longt5": [{"encoder_attention_type": "transient-global"}],
    "pop2piano": [{"composer_vocab_size": 7}],
    "switch_transformers": [
        SWITCH,
        SWITCH | {"num_layers": 4, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 3, "router_bias": True},
        SWITCH | {"num_sparse_encoder_layers": 0},
    ],
}


def made(model_type, sizes):
    return require("transformers").AutoConfig.for_model(model_type, **sizes)


@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", sorted(ENCODER_DECODERS.keys() - OF_T5 - {"udop"}))
def test_small_models_with_the_decoder_of_bart(model_type, change):
    require("torch")
    for own in [{}, *OF_FAMILY.get(model_type, [])]:
        config = made(model_type, {"max_position_embeddings": 64} | BART | own | change)
        written = config.to_dict()
        whole = count_parameters(written).total
        assert whole == built(config)
        stages = [count_parameters(written, layers=range(n, n + 1)).total for n in range(3)]
        head = 32 * (
            config.tgt_vocab_size if model_type == "fsmt" else getattr(config, "decoder_vocab_size", 101) or 101
        )
        is_tied = written.get("tie_word_embeddings", True)
        assert sum(stages) - whole == (head if is_tied else 0)


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
@pytest.mark.parametrize("model_type", sorted(OF_T5))
def test_small_models_of_the_kin_of_t5(model_type, feed_forward):
    require("torch")
    for own in [{}, *OF_T5_FAMILY.get(model_type, [])]:
        config = made(model_type, T5 | {"feed_forward_proj": feed_forward} | own)
        written = config.to_dict()
        whole = count_parameters(written).total
        assert whole == built(config)
        stages = [count_parameters(written, layers=range(n, n + 1)).total for n in range(3)]
        # A head that is the embedding is a copy in the last stage.
        assert sum(stages) == whole + 101 * 32 * (model_type != "pop2piano")


def test_an_untied_switch_transformer_has_a_table_for_each_side():
    config = made("switch_transformers", T5 | {"tie_word_embeddings": False})
    assert count_parameters(config.to_dict()).total == built(config)


GEMMA = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 70}
GEMMA |= {"num_key_value_heads": 2, "head_dim": 10, "query_pre_attn_scalar": 10}
MOONSHINE = {"hidden_size": 48, "intermediate_size": 56, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 3}
MOONSHINE |= {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 6, "vocab_size": 60}
MOONSHINE |= {"encoder_num_key_value_heads": 2, "decoder_num_key_value_heads": 3}
STREAM = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
STREAM |= {"num_key_value_heads": 2, "head_dim": 6, "attention_bias": True, "sample_rate": 8000, "frame_ms": 3.5}
STREAMING = {"hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 3, "num_attention_heads": 6}
STREAMING |= {"vocab_size": 60, "num_key_value_heads": 2, "max_position_embeddings": 30, "encoder_config": STREAM}
TROCR = {"d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 56, "vocab_size": 60}
WIDE = GEMMA | {"hidden_size": 56, "num_hidden_layers": 2, "intermediate_size": 60, "attention_bias": True}


DIA_ENCODER = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
DIA_ENCODER |= {"num_key_value_heads": 2, "head_dim": 6, "vocab_size": 30}
DIA = {"hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 21}
DIA |= {"num_key_value_heads": 2, "head_dim": 10, "cross_num_attention_heads": 4, "cross_num_key_value_heads": 2}
DIA |= {"cross_head_dim": 14, "cross_hidden_size": 40, "num_channels": 5, "pad_token_id": 20}
PIX = {"hidden_size": 48, "d_kv": 12, "d_ff": 56, "num_layers": 3, "num_heads": 4, "vocab_size": 61}
PIX |= {"relative_attention_num_buckets": 9}
PIX_VISION = {"hidden_size": 48, "patch_embed_hidden_size": 30, "d_ff": 44, "d_kv": 6, "num_hidden_layers": 2}
PIX_VISION |= {"num_attention_heads": 3, "seq_len": 17}


@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("model_type", "sizes", "head"),
    [
        ("moonshine", MOONSHINE, 60 * 48),
        ("moonshine", MOONSHINE | {"attention_bias": True}, 60 * 48),
        ("moonshine_streaming", STREAMING, 0),
        ("moonshine_streaming", STREAMING | {"attention_bias": True, "tie_word_embeddings": True}, 60 * 48),
        ("moonshine_streaming", STREAMING | {"encoder_config": STREAM | {"hidden_size": 48}}, 0),
        ("t5gemma", {"encoder": GEMMA, "decoder": GEMMA, "vocab_size": 70}, 70 * 48),
        ("t5gemma", {"encoder": WIDE, "decoder": GEMMA | {"num_key_value_heads": 1}, "vocab_size": 70}, 70 * 48),
        ("dia", {"encoder_config": DIA_ENCODER, "decoder_config": DIA, "delay_pattern": [0] * 5}, 0),
        ("pix2struct", {"vision_config": PIX_VISION, "text_config": PIX}, 0),
        ("trocr", TROCR, 60 * 32),
        ("trocr", TROCR | {"cross_attention_hidden_size": 20, "layernorm_embedding": False}, 60 * 32),
        ("trocr", TROCR | {"use_learned_position_embeddings": False, "max_position_embeddings": 30}, 60 * 32),
    ],
)
def test_small_models_with_cross_attention(model_type, sizes, head, change):
    require("torch")
    config = made(model_type, sizes | change)
    written = config.to_dict()
    whole = count_parameters(written).total
    assert whole == built(config)
    stages = [count_parameters(written, layers=range(n, n + 1)).total for n in range(3)]
    assert sum(stages) - whole == (0 if change else head)


MUSIC = {"hidden_size": 48, "ffn_dim": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 33}
MUSIC |= {"num_codebooks": 5, "pad_token_id": 33, "bos_token_id": 33}
CODEC = {"hidden_size": 12, "num_filters": 4, "upsampling_ratios": [5, 3], "num_residual_layers": 2, "kernel_size": 5}


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ({}, {}),
        ({"d_model": 48, "feed_forward_proj": "gated-gelu"}, {"use_conv_shortcut": False, "audio_channels": 2}),
        ({}, {"norm_type": "time_group_norm", "num_lstm_layers": 3, "last_kernel_size": 9}),
    ],
)
def test_small_models_that_make_music(text, codec):
    transformers = require("transformers")
    parts = {
        "text_encoder": T5 | text | {"model_type": "t5"},
        "audio_encoder": CODEC | codec | {"model_type": "encodec"},
    }
    config = made("musicgen", parts | {"decoder": MUSIC})
    with on_meta_device():
        model = transformers.MusicgenForConditionalGeneration(config)
    written = config.to_dict()
    whole = count_parameters(written).total
    assert whole == sum(each.numel() for each in model.parameters())
    assert sum(count_parameters(written, layers=range(n, n + 1)).total for n in range(3)) == whole


@pytest.mark.parametrize("change", [{}, {"num_chroma": 48}])
def test_small_models_that_continue_a_melody(change):
    transformers = require("transformers")
    parts = {"text_encoder": T5 | {"model_type": "t5"}, "audio_encoder": CODEC | {"model_type": "encodec"}}
    config = made("musicgen_melody", parts | {"decoder": MUSIC, **change})
    with on_meta_device():
        model = transformers.MusicgenMelodyForConditionalGeneration(config)
    written = config.to_dict()
    whole = count_parameters(written).total
    assert whole == sum(each.numel() for each in model.parameters())
    assert sum(count_parameters(written, layers=range(n, n + 1)).total for n in range(3)) == whole


def test_encoders_of_music_that_are_not_counted_are_named():
    parts = {"text_encoder": T5 | {"model_type": "t5"}, "audio_encoder": CODEC | {"model_type": "encodec"}}
    written = made("musicgen", parts | {"decoder": MUSIC}).to_dict()
    with pytest.raises(UnsupportedOption, match=r'text_encoder.model_type is "bert", an encoder .*; expected t5'):
        count_parameters(written | {"text_encoder": {"model_type": "bert"}})
    for bad, reason in (
        ({"upsampling_ratios": []}, "list of integers above 0"),
        ({"norm_type": "x"}, "weight_norm or"),
    ):
        with pytest.raises(ConfigError, match=f"audio_encoder.{next(iter(bad))} is .*{reason}"):
            count_parameters(written | {"audio_encoder": CODEC | {"model_type": "encodec"} | bad})


def test_wrong_convolutions_are_named():
    config = made("speech_to_text", BART).to_dict()
    for bad in (5, [0], ["5"]):
        with pytest.raises(ConfigError, match=r"conv_kernel_sizes is .*; it must be a list of integers above 0"):
            count_parameters(config | {"conv_kernel_sizes": bad})
