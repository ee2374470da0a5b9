"""Specs of further decoders with cross attention, compared with the caches that small models fill."""

import pytest

from pagecore import ConfigError, CrossSpec, UnsupportedOption
from pagecore.models import read_model_config, specs_from_config
from pagecore.models.encoders.cross_attention import COMPOSED, CROSS_DECODERS
from pagecore.models.parameters import count_parameters
from pagecore.models.parameters.encoders.cross_attention import COUNTED_CROSS_DECODERS
from tests.capabilities import require
from tests.passing import passing

HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 3, "intermediate_size": 32}
GROUPED = {**HEADS, "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 101, "pad_token_id": 0}
GEMMA = {**GROUPED, "num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 12}
BART = {"d_model": 48, "decoder_layers": 3, "decoder_attention_heads": 6, "decoder_ffn_dim": 32, "encoder_layers": 1}
BART |= {"encoder_attention_heads": 4, "encoder_ffn_dim": 16, "vocab_size": 101, "pad_token_id": 0}
SIDES = {name: size for name, size in BART.items() if name != "d_model"} | {"hidden_size": 48}
SMALL_VIT = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL_VIT |= {"intermediate_size": 16, "image_size": 40, "patch_size": 8}
# Sizes of a small model, the decoder's module in it, and the features of the encoder that the decoder reads.
MODELS = {
    "blip": (
        {
            "text_config": {**HEADS, "vocab_size": 101, "encoder_hidden_size": 32, "pad_token_id": 0},
            "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        },
        "BlipForConditionalGeneration",
        "text_decoder",
        32,
    ),
    "canary": (
        {
            "decoder_config": {**GROUPED, "num_key_value_heads": 6, "head_dim": 8},
            "vocab_size": 101,
            "encoder_config": {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
        },
        "CanaryForConditionalGeneration",
        "model.decoder",
        48,
    ),
    "cohere_asr": (
        {
            **GROUPED,
            "head_dim": 8,
            "num_key_value_heads": 6,
            "encoder_config": {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
        },
        "CohereAsrForConditionalGeneration",
        "model.decoder",
        48,
    ),
    "dia": (
        {
            "decoder_config": {
                **GROUPED,
                "cross_num_attention_heads": 4,
                "cross_num_key_value_heads": 2,
                "cross_head_dim": 6,
                "cross_hidden_size": 32,
            },
            "encoder_config": {**HEADS, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4},
        },
        "DiaForConditionalGeneration",
        "model.decoder",
        32,
    ),
    "moonshine": (
        {
            **HEADS,
            "decoder_num_hidden_layers": 3,
            "encoder_num_hidden_layers": 1,
            "vocab_size": 101,
            "decoder_num_attention_heads": 6,
            "decoder_num_key_value_heads": 2,
            "encoder_num_attention_heads": 6,
            "pad_head_dim_to_multiple_of": 16,
            "pad_token_id": 0,
        },
        "MoonshineForConditionalGeneration",
        "model.decoder",
        48,
    ),
    "moonshine_streaming": (
        {
            **HEADS,
            "vocab_size": 101,
            "head_dim": 10,
            "num_key_value_heads": 6,
            "pad_token_id": 0,
            "encoder_config": {**HEADS, "num_key_value_heads": 6},
        },
        "MoonshineStreamingForConditionalGeneration",
        "model.decoder",
        48,
    ),
    "musicgen": (
        {"decoder": {**HEADS, "ffn_dim": 32, "vocab_size": 40, "num_codebooks": 2, "pad_token_id": 0}},
        "MusicgenForCausalLM",
        "model.decoder",
        48,
    ),
    "pix2struct": (
        {
            "text_config": {
                "hidden_size": 48,
                "num_layers": 3,
                "num_heads": 6,
                "d_kv": 8,
                "d_ff": 32,
                "vocab_size": 101,
                "pad_token_id": 0,
            },
            "vision_config": {"hidden_size": 48, "patch_embed_hidden_size": 48, "num_hidden_layers": 1},
        },
        "Pix2StructForConditionalGeneration",
        "decoder",
        48,
    ),
    "pp_formulanet": ({"text_config": BART}, "PPFormulaNetForConditionalGeneration", "model.decoder", 48),
    "seamless_m4t": (SIDES, "SeamlessM4TForTextToText", "text_decoder", 48),
    "seamless_m4t_v2": (SIDES, "SeamlessM4Tv2ForTextToText", "text_decoder", 48),
    "speecht5": (SIDES, "SpeechT5ForSpeechToText", "speecht5.decoder.wrapped_decoder", 48),
    "t5gemma": ({"encoder": GEMMA, "decoder": GEMMA}, "T5GemmaForConditionalGeneration", "model.decoder", 48),
    "t5gemma2": (
        {
            "encoder": {
                "text_config": GEMMA,
                "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            },
            "decoder": GEMMA,
            "eoi_token_index": 7,
        },
        "T5Gemma2ForConditionalGeneration",
        "model.decoder",
        48,
    ),
    "trocr": ({**BART, "cross_attention_hidden_size": 32, "is_decoder": True}, "TrOCRForCausalLM", "model.decoder", 32),
}

WINDOWS = {"t5gemma": [5, None] * 3 + [5], "t5gemma2": [5] * 5 + [None, 5]}
# (longest sequence, most tokens of the encoder)
LENGTHS = {
    "blip": (512, 577),
    "canary": (1024, 5000),
    "cohere_asr": (1024, 5000),
    "dia": (3072, 1024),
    "moonshine": (512, None),
    "moonshine_streaming": (4096, 4096),
    "musicgen": (2048, None),
    "pix2struct": (None, 4096),
    "pp_formulanet": (2560, None),
    "seamless_m4t": (1024, 1024),
    "seamless_m4t_v2": (4096, 4096),
    "speecht5": (4000, 4000),
    "t5gemma": (8192, 8192),
    "t5gemma2": (131072, 131072),
    "trocr": (512, None),
}


def inputs(torch, model_type):
    """Return the arguments of a forward pass of a decoder: 2 rows of 7 tokens."""
    if model_type == "speecht5":
        return {"hidden_states": torch.randn(2, 7, 48)}
    shape = {"dia": (2, 7, 9), "musicgen": (4, 7)}.get(model_type, (2, 7))  # audio has several codebooks
    return {"input_ids": torch.randint(1, 30, shape)}


def stored(decoder, arguments):
    """Return heads and dim of the keys that each layer stores: first of its own, then of the encoder."""
    transformers, torch = require("transformers"), require("torch")
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    with torch.no_grad():
        decoder(**arguments, **passing(cache), use_cache=True)
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    assert {layer.keys.shape[2] for layer in layers[len(layers) // 2 :]} == {9}
    return [(layer.keys.shape[1], layer.keys.shape[3]) for layer in layers]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_specs_are_those_of_the_cache_of_a_small_model(model_type):
    transformers, torch = require("transformers"), require("torch")
    sizes, name, path, width = MODELS[model_type]
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = getattr(transformers, name)(config.decoder if model_type == "musicgen" else config).eval()
    arguments = inputs(torch, model_type) | {"encoder_hidden_states": torch.randn(2, 9, width)}
    found = read_model_config(config.to_dict())
    assert [(spec.num_kv_heads, spec.head_dim) for spec in found.layers] == stored(model.get_submodule(path), arguments)
    half = len(found.layers) // 2
    assert [spec.window for spec in found.layers[:half]] == WINDOWS.get(model_type, [None] * half)
    assert [isinstance(spec, CrossSpec) for spec in found.layers] == [False] * half + [True] * half
    assert found.specs_by_layer == tuple((n, half + n) for n in range(half))
    assert (found.max_length, found.layers[-1].max_tokens) == LENGTHS[model_type]
    scales = [each.scaling for each in model.get_submodule(path).modules() if hasattr(each, "scaling")]
    for spec in found.layers:
        assert (spec.scale or spec.head_dim**-0.5) == pytest.approx(scales[0] if scales else spec.head_dim**-0.5)


@pytest.mark.parametrize("model_type", MODELS)
def test_defaults_are_those_of_transformers(model_type):
    transformers = require("transformers")
    written = transformers.AutoConfig.for_model(model_type).to_dict()
    crossed = CROSS_DECODERS[model_type]
    if crossed.path:
        fewest = {"model_type": model_type, crossed.path: {}}
        if model_type in ("blip", "canary"):
            encoder = "vision_config" if model_type == "blip" else "encoder_config"
            fewest[encoder] = written[encoder]
        if model_type.startswith("t5gemma"):
            fewest["encoder"] = written["encoder"]
    else:
        names = {"hidden_size", "num_hidden_layers", "num_attention_heads"}
        kept = names | {crossed.family.aliases.get(name, name) for name in names}
        kept |= {"encoder_config", "max_position_embeddings", "max_speech_positions"}
        fewest = {"model_type": model_type} | {name: value for name, value in written.items() if name in kept}
    found, expected = (read_model_config(config, dtype="float32") for config in (fewest, written))
    assert found.layers == expected.layers


def composed(model_type, decoder, encoder=SMALL_VIT):
    return {"model_type": model_type, "encoder": encoder, "decoder": decoder}


BERT = {"model_type": "bert", **HEADS, "max_position_embeddings": 512, "vocab_size": 101}
GPT_2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 6, "vocab_size": 101, "add_cross_attention": True}


@pytest.mark.parametrize(
    ("config", "width", "source"),
    [
        (composed("vision-encoder-decoder", {"model_type": "trocr", **BART, "is_decoder": True}), 32, 26),
        (composed("vision-encoder-decoder", GPT_2), 48, 26),
        (composed("encoder-decoder", BERT | {"is_decoder": True, "add_cross_attention": True}, BERT), 48, 512),
        (composed("vision-encoder-decoder", {"model_type": "mbart", **BART, "is_decoder": True}), 48, 26),
    ],
    ids=["trocr", "gpt2", "bert", "mbart"],
)
def test_models_made_of_two_others(config, width, source):
    transformers, torch = require("transformers"), require("torch")
    fields = dict(config["decoder"])
    kind = fields.pop("model_type")
    if kind == "trocr":
        fields["cross_attention_hidden_size"] = width
    own = transformers.AutoConfig.for_model(kind, **fields)
    model = transformers.AutoModelForCausalLM.from_config(own)
    arguments = {"input_ids": torch.randint(1, 30, (2, 7)), "encoder_hidden_states": torch.randn(2, 9, width)}
    found = read_model_config(config)
    assert [(spec.num_kv_heads, spec.head_dim) for spec in found.layers] == stored(model.eval(), arguments)
    assert {spec.max_tokens for spec in found.layers if isinstance(spec, CrossSpec)} == {source}


def test_a_nested_decoder_has_a_dtype_of_its_own():
    config = {"model_type": "musicgen", "dtype": "float32", "decoder": {"torch_dtype": "float16"}}
    assert {str(spec.dtype) for spec in specs_from_config(config)} == {"float16"}
    assert {str(spec.dtype) for spec in specs_from_config(config | {"decoder": {}})} == {"float32"}


def test_a_florence_is_a_bart_that_sees():
    bart = {"model_type": "bart", "max_position_embeddings": 1024, **BART}
    assert read_model_config({"model_type": "florence2", "text_config": bart}).layers == read_model_config(bart).layers


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"model_type": "dia", "decoder_config": 3}, ConfigError, "decoder_config is 3; it must be an object"),
        ({"model_type": "dia"}, ConfigError, "decoder_config is missing"),
        (
            {"model_type": "dia", "decoder_config": {"cross_num_key_value_heads": 3}},
            ConfigError,
            "cross_num_key_value_heads is 3; it must divide .*cross_num_attention_heads, 16",
        ),
        ({"model_type": "t5gemma", "decoder": {"sliding_window": None}}, ConfigError, "sliding_window is null"),
        ({"model_type": "blip", "text_config": {"hidden_size": 50}}, ConfigError, "hidden_size is 50, not a multiple"),
        (composed("encoder-decoder", BERT), UnsupportedOption, "add_cross_attention is missing.*; set it to true"),
        (composed("encoder-decoder", {"model_type": "mamba"}), UnsupportedOption, 'decoder.model_type is "mamba", a'),
        (composed("encoder-decoder", {}), ConfigError, "decoder.model_type is missing"),
    ],
)
def test_decoders_without_a_meaning_are_refused_by_name(config, error, words):
    with pytest.raises(error, match=words):
        specs_from_config(config)


READERS = {"encoder-decoder", "florence2", "nemotron_parse", "speech-encoder-decoder", "vision-encoder-decoder"}


@pytest.mark.parametrize("model_type", sorted({*CROSS_DECODERS, *COMPOSED} - {*COUNTED_CROSS_DECODERS, *READERS}))
def test_parameters_of_the_others_are_not_counted(model_type):
    with pytest.raises(UnsupportedOption, match=f"the parameters of {model_type} cannot be counted; pass weights="):
        count_parameters({"model_type": model_type})


def test_nemotron_parse_reads_merged_patches_of_an_image():
    decoder = {"model_type": "nemotron_parse_text", "d_model": 1024, "decoder_layers": 10, "decoder_ffn_dim": 4096}
    decoder |= {"decoder_attention_heads": 16, "add_cross_attention": True, "max_sequence_length": 9000}
    config = {"model_type": "nemotron_parse", "image_size": [2048, 1664], "max_sequence_length": 9000}
    config |= {"decoder": decoder, "encoder": {"patch_size": 16}, "torch_dtype": "bfloat16"}
    found = read_model_config(config)
    own, cross = found.layers[:10], found.layers[10:]
    assert {(spec.num_kv_heads, spec.head_dim) for spec in own} == {(16, 64)}
    assert {(spec.num_kv_heads, spec.head_dim, spec.max_tokens) for spec in cross} == {(16, 64, 128 * 26 + 1)}
    assert found.max_length == 9000
    assert read_model_config(config | {"image_size": None}).layers[10].max_tokens is None
    with pytest.raises(ConfigError, match=r"image_size is \[768\]; it must be the height and the width of an image"):
        specs_from_config(config | {"image_size": [768]})
