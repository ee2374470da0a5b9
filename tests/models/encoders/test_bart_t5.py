"""Specs of models with an encoder, from their configs; published sizes, and the defaults of transformers."""

import pytest

from pagecore import AttentionSpec, ConfigError, CrossSpec, UnsupportedOption
from pagecore.models import read_model_config, specs_from_config
from pagecore.models.encoders.bart_t5 import ENCODER_DECODERS
from pagecore.serving.planner import plan_model
from tests.capabilities import require
from tests.models.meta import on_meta_device

# Fields of the published config.json files of openai/whisper-tiny, facebook/bart-large and google/flan-t5-small.
WHISPER_TINY = {
    "model_type": "whisper",
    "d_model": 384,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "torch_dtype": "float32",
    "is_encoder_decoder": True,
}
BART_LARGE = {
    "model_type": "bart",
    "d_model": 1024,
    "decoder_layers": 12,
    "decoder_attention_heads": 16,
    "encoder_layers": 6,
    "encoder_attention_heads": 8,
    "max_position_embeddings": 1024,
}
FLAN_T5_SMALL = {
    "model_type": "t5",
    "d_model": 512,
    "d_kv": 64,
    "num_heads": 6,
    "num_layers": 8,
    "num_decoder_layers": 8,
    "n_positions": 512,
}


@pytest.mark.parametrize(
    ("config", "count", "heads", "source", "target", "scale"),
    [
        (WHISPER_TINY, 4, 6, 1500, 448, None),
        (BART_LARGE, 12, 16, 1024, 1024, None),
        (FLAN_T5_SMALL, 8, 6, 512, 512, 1.0),
    ],
    ids=["whisper", "bart", "t5"],
)
def test_a_decoder_stores_its_own_tokens_and_those_of_the_encoder(config, count, heads, source, target, scale):
    model = read_model_config(config, dtype="float16")
    options = {"dtype": "float16", "num_query_heads": heads, "scale": scale}
    own, cross = AttentionSpec(heads, 64, **options), CrossSpec(heads, 64, **options, max_tokens=source)
    assert model.layers == (own,) * count + (cross,) * count
    assert model.max_length == target


def test_a_t5_without_a_number_of_decoder_layers_has_those_of_the_encoder():
    config = {name: value for name, value in FLAN_T5_SMALL.items() if name not in ("num_decoder_layers", "n_positions")}
    model = read_model_config(config)
    assert len(model.layers) == 16
    assert model.max_length is None
    assert model.layers[-1].max_tokens is None


def test_a_distilled_model_has_fewer_layers_than_its_encoder():
    # Fields of the published config.json files of distil-whisper/distil-large-v3 and sshleifer/distilbart-cnn-12-6.
    whisper = WHISPER_TINY | {"d_model": 1280, "decoder_layers": 2, "encoder_layers": 32, "num_hidden_layers": 32}
    whisper |= {"decoder_attention_heads": 20, "encoder_attention_heads": 20}
    bart = BART_LARGE | {"decoder_layers": 6, "encoder_layers": 12, "num_hidden_layers": 12}
    assert [len(specs_from_config(config)) for config in (whisper, bart)] == [4, 12]
    other = BART_LARGE | {"encoder_attention_heads": 8, "num_attention_heads": 8}
    assert {spec.num_kv_heads for spec in specs_from_config(other)} == {16}


def test_formats_and_dtypes_apply_to_both():
    specs = specs_from_config(WHISPER_TINY, dtype="bfloat16", format="int8_token")
    assert {(str(spec.dtype), spec.format) for spec in specs} == {("bfloat16", "int8_token")}


def test_bad_configs_are_refused_by_name():
    for change, error, text in (
        ({"d_model": 385}, ConfigError, "d_model is 385, not a multiple of decoder_attention_heads 6"),
        ({"decoder_layers": 0}, ConfigError, "decoder_layers is 0"),
        ({"is_encoder_decoder": False}, UnsupportedOption, "is_encoder_decoder is false"),
        ({"max_source_positions": "long"}, ConfigError, "max_source_positions"),
    ):
        with pytest.raises(error, match=text):
            specs_from_config(WHISPER_TINY | change)
    with pytest.raises(UnsupportedOption, match="whisper has no sinks"):
        specs_from_config(WHISPER_TINY, sinks=[[0.0] * 6] * 4)


def test_a_plan_counts_the_blocks_of_encoder_tokens():
    plan = plan_model(WHISPER_TINY, "1GiB", context=448).memory
    assert [group.is_cross for group in plan.groups] == [False, True]
    (context,) = plan.contexts
    assert context.blocks_per_request == (28, 94)
    block = plan.groups[0].bytes_per_block
    assert plan.bytes_per_token == block / 16, "encoder tokens are not counted"
    assert context.best_requests == ((1 << 30) - 2 * block) // (122 * block)
    assert plan.as_json()["groups"][1]["cross"] is True


def test_the_default_split_of_whisper_is_by_its_own_length():
    (context,) = plan_model(WHISPER_TINY, "1GiB", context=448).memory.contexts
    assert context.requests >= 0.97 * context.best_requests


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ENCODER_DECODERS)
def test_defaults_are_those_of_transformers(model_type):
    transformers = require("transformers")
    written = transformers.AutoConfig.for_model(model_type).to_dict()
    missing = {"model_type": model_type}
    for name in ("d_model", "decoder_layers", "decoder_attention_heads", "num_heads", "num_layers"):
        if name in written:
            missing[name] = written[name]
    found, expected = (read_model_config(config, dtype="float32") for config in (missing, written))
    assert found == expected


OTHERS = {"led", "speech_to_text", "whisper"}  # two longest sequences
KIN_OF_T5 = {"longt5", "mt5", "pop2piano", "switch_transformers", "t5", "udop", "umt5"}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(ENCODER_DECODERS.keys() - KIN_OF_T5 - OTHERS))
def test_kin_of_bart_have_the_layers_that_transformers_builds(model_type):
    transformers = require("transformers")
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 3, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 4, "vocab_size": 101, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(model_type, max_position_embeddings=48, **sizes)
    with on_meta_device():
        decoder = transformers.AutoModel.from_config(config).get_decoder()
    model = read_model_config(config.to_dict())
    attentions = [layer.self_attn for layer in decoder.layers] + [encoder_attention(layer) for layer in decoder.layers]
    for spec, attention in zip(model.layers, attentions, strict=True):
        assert (spec.num_query_heads, spec.num_kv_heads, spec.head_dim) == (attention.num_heads, 4, attention.head_dim)
        assert attention.k_proj.out_features == spec.num_kv_heads * spec.head_dim
        assert attention.scaling == pytest.approx(spec.head_dim**-0.5, rel=1e-12)
    assert [isinstance(spec, CrossSpec) for spec in model.layers] == [False] * 3 + [True] * 3
    assert (model.max_length, model.layers[-1].max_tokens) == (48, 48)


@pytest.mark.parametrize("model_type", sorted(OTHERS))
def test_encoders_have_a_longest_sequence_of_their_own(model_type):
    transformers = require("transformers")
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 4, "vocab_size": 101, "pad_token_id": 0}
    source, target = "max_source_positions", "max_target_positions"
    if model_type == "led":
        source, target = "max_encoder_position_embeddings", "max_decoder_position_embeddings"
    config = transformers.AutoConfig.for_model(model_type, **sizes, **{source: 96, target: 32})
    with on_meta_device():
        decoder = transformers.AutoModel.from_config(config).get_decoder()
    model = read_model_config(config.to_dict())
    assert [spec.head_dim for spec in model.layers] == [layer.self_attn.head_dim for layer in decoder.layers] * 2
    assert (model.max_length, model.layers[-1].max_tokens, len(model.layers)) == (32, 96, 4)


@pytest.mark.parametrize("model_type", sorted(KIN_OF_T5))
def test_kin_of_t5_have_the_layers_that_transformers_builds(model_type):
    transformers = require("transformers")
    config = transformers.AutoConfig.for_model(
        model_type, d_model=48, d_kv=16, d_ff=32, num_heads=3, num_layers=2, num_decoder_layers=4, vocab_size=101
    )
    name = {"pop2piano": "Pop2Piano", "switch_transformers": "SwitchTransformers", "longt5": "LongT5"}.get(model_type)
    name = name or model_type.upper().replace("UDOP", "Udop").replace("MT", "MT").replace("UMT5", "UMT5")
    with on_meta_device():
        whole = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    keys = [each.k.out_features for key, each in whole.decoder.named_modules() if key.endswith("Attention")]
    specs = read_model_config(config.to_dict()).layers
    assert [spec.num_kv_heads * spec.head_dim for spec in specs] == keys == [48] * 8
    assert {spec.scale for spec in specs} == {1.0}


def encoder_attention(layer):
    return layer.cross_attention if hasattr(layer, "cross_attention") else layer.encoder_attn


def test_a_prompt_of_mvp_is_refused():
    with pytest.raises(UnsupportedOption, match="use_prompt is true, but the keys and values of a prompt"):
        specs_from_config(BART_LARGE | {"model_type": "mvp", "use_prompt": True})
