"""Parameters of Dia, Moonshine and MusicGen with their encoders.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.audio.encodec import add_encodec
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.models.parameters.encoders.bart_t5 import add_t5_encoder
from pagecore.models.parameters.encoders.cross_layers import (
    DecoderStage,
    add_cross_layers,
    add_encoder_attention,
    add_gated,
    add_tables,
)

__all__ = ["add_dia", "add_melody_parts", "add_moonshine", "add_moonshine_streaming", "add_musicgen"]

_DIA_ENCODER: Mapping[str, object] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 256,
}
_DIA_DECODER: Mapping[str, object] = {"intermediate_size": 8192, "num_channels": 9, "vocab_size": 1028}
_MOONSHINE_ENCODER: Mapping[str, object] = {
    "hidden_size": 320,
    "intermediate_size": 1280,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": None,
    "attention_bias": False,
    "sample_rate": 16000,
    "frame_ms": 5.0,
}
_MUSICGEN_DECODER: Mapping[str, object] = {"ffn_dim": 4096, "num_codebooks": 4, "vocab_size": 2048}


def add_moonshine(tally: Tally, whole: Fields, decoder: DecoderStage) -> None:
    """Add a Moonshine, or a stage of its decoder."""
    fields, hidden, layers = decoder.fields, decoder.hidden, len(decoder.own)
    width, has_bias = fields.integer("intermediate_size"), fields.flag("attention_bias")
    add_cross_layers(tally, decoder, hidden, bias=has_bias)
    tally.linear(hidden, 2 * width, bias=True, copies=layers)
    tally.linear(width, hidden, bias=True, copies=layers)
    tally.norm(hidden, copies=3 * layers + decoder.is_last)
    is_tied = whole.switch("tie_word_embeddings", True)
    add_tables(tally, decoder, fields.integer("vocab_size"), is_tied=is_tied)
    if not decoder.is_first:
        return
    layers, heads = fields.integer("encoder_num_hidden_layers"), fields.integer("encoder_num_attention_heads")
    is_grouped = fields.given("encoder_num_key_value_heads") is not None
    kv_heads = fields.integer("encoder_num_key_value_heads") if is_grouped else heads
    add_encoder_attention(tally, fields, heads, kv_heads, layers, bias=has_bias, output_bias=False)
    tally.linear(hidden, width, bias=True, copies=layers)
    tally.linear(width, hidden, bias=True, copies=layers)
    tally.norm(hidden, copies=2 * layers + 3)  # one follows the layers, and one with a bias the first convolution
    for inputs, outputs, has_bias in ((127, hidden, False), (7 * hidden, 2 * hidden, True), (6 * hidden, hidden, True)):
        tally.linear(inputs, outputs, bias=has_bias, kind=Kind.VISION)


def add_moonshine_streaming(tally: Tally, whole: Fields, decoder: DecoderStage) -> None:
    """Add a streaming Moonshine, or a stage of its decoder, whose encoder has sizes of its own."""
    fields, hidden, layers = decoder.fields, decoder.hidden, len(decoder.own)
    width = fields.integer("intermediate_size")
    add_cross_layers(tally, decoder, hidden, bias=fields.flag("attention_bias"))
    tally.linear(hidden, 2 * width, bias=True, copies=layers)
    tally.linear(width, hidden, bias=True, copies=layers)
    tally.norm(hidden, copies=3 * layers + decoder.is_last)
    is_tied = whole.switch("tie_word_embeddings", False)
    add_tables(tally, decoder, fields.integer("vocab_size"), is_tied=is_tied)
    if not decoder.is_first:
        return
    encoder = whole.inner("encoder_config")
    encoder.defaults = _MOONSHINE_ENCODER
    inputs, layers = encoder.integer("hidden_size"), encoder.integer("num_hidden_layers")
    heads = encoder.integer("num_attention_heads"), encoder.integer("num_key_value_heads")
    has_bias, width = encoder.flag("attention_bias"), encoder.integer("intermediate_size")
    add_encoder_attention(tally, encoder, *heads, layers, bias=has_bias, output_bias=has_bias)
    tally.linear(inputs, width, bias=True, copies=layers)
    tally.linear(width, inputs, bias=True, copies=layers)
    tally.norm(inputs, copies=2 * layers + 1)
    samples = round(encoder.integer("sample_rate") * encoder.number("frame_ms") / 1000)
    tally.linear(samples, inputs, kind=Kind.VISION)
    tally.linear(5 * inputs, 2 * inputs, bias=True, kind=Kind.VISION)
    tally.linear(10 * inputs, inputs, bias=True, kind=Kind.VISION)
    tally.add(fields.integer("max_position_embeddings") * inputs + 1)
    if inputs != hidden:
        tally.linear(inputs, hidden)


def add_dia(tally: Tally, whole: Fields, decoder: DecoderStage) -> None:
    """Add a Dia, or a stage of its decoder, whose tables have the codes of all channels."""
    name = "encoder_config"
    encoder = whole.inner(name) if whole.given(name) is not None else Fields({}, whole.source, name)
    encoder.defaults = _DIA_ENCODER
    fields, layers, inputs = decoder.fields, len(decoder.own), encoder.integer("hidden_size")
    fields.defaults = {**fields.defaults, **_DIA_DECODER}
    add_cross_layers(tally, decoder, inputs)
    add_gated(tally, decoder.hidden, fields.integer("intermediate_size"), layers)
    tally.norm(decoder.hidden, copies=3 * layers + decoder.is_last)
    add_tables(tally, decoder, fields.integer("num_channels") * fields.integer("vocab_size"), is_tied=False)
    if decoder.is_first:
        layers = encoder.integer("num_hidden_layers")
        heads = encoder.integer("num_attention_heads"), encoder.integer("num_key_value_heads")
        add_encoder_attention(tally, encoder, *heads, layers, bias=False, output_bias=False)
        add_gated(tally, inputs, encoder.integer("intermediate_size"), layers)
        tally.norm(inputs, copies=2 * layers + 1)
        tally.add(encoder.integer("vocab_size") * inputs, Kind.EMBEDDING, Split.TENSOR)


def add_musicgen(tally: Tally, whole: Fields, decoder: DecoderStage) -> None:
    """Add a MusicGen, or a stage of its decoder: a T5 encoder, an EnCodec, and a table and a head for each codebook."""
    fields, hidden, layers = decoder.fields, decoder.hidden, len(decoder.own)
    fields.defaults = {**fields.defaults, **_MUSICGEN_DECODER}
    add_cross_layers(tally, decoder, hidden)
    width, codebooks, vocab = (fields.integer(name) for name in ("ffn_dim", "num_codebooks", "vocab_size"))
    tally.linear(hidden, width, copies=layers)
    tally.linear(width, hidden, copies=layers)
    tally.norm(hidden, bias=True, copies=3 * layers + decoder.is_last)
    rows = codebooks * ((vocab + 1) * decoder.is_first + vocab * decoder.is_last)
    tally.add(rows * hidden, Kind.EMBEDDING, Split.TENSOR)
    if not decoder.is_first:
        return
    _add_text_and_codec(tally, whole, hidden)


def add_melody_parts(tally: Tally, whole: Fields, hidden: int) -> None:
    """Add the T5 encoder and the EnCodec of a MusicGen Melody, and the projection of a melody; else nothing.

    `hidden` is the number of features of the decoder.
    """
    if whole.given("model_type") != "musicgen_melody":
        return
    whole.defaults = {**whole.defaults, "num_chroma": 12}
    _add_text_and_codec(tally, whole, hidden)
    if whole.integer("num_chroma") != hidden:
        tally.linear(whole.integer("num_chroma"), hidden, bias=True)


def _add_text_and_codec(tally: Tally, whole: Fields, hidden: int) -> None:
    encoder, codec = whole.inner("text_encoder"), whole.inner("audio_encoder")
    for part, expected in ((encoder, "t5"), (codec, "encodec")):
        if part.given("model_type") != expected:
            raise UnsupportedOption(
                f"{whole.source}: {part.describe('model_type')}, an encoder whose parameters cannot be counted; "
                f"expected {expected}: pass weights= in bytes"
            )
    add_t5_encoder(tally, encoder)
    inputs = encoder.integer("hidden_size")
    if inputs != hidden:
        tally.linear(inputs, hidden, bias=True)
    add_encodec(tally, codec)
