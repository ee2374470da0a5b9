"""Parameters of T5Gemma and Pix2Struct with their encoders, and of the decoder of TrOCR.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.models.parameters.encoders.cross_layers import (
    DecoderStage,
    add_cross_layers,
    add_encoder_attention,
    add_gated,
    add_tables,
)
from pagecore.models.parameters.vision.tower import add_vision

__all__ = ["add_blip", "add_pix2struct", "add_t5gemma", "add_t5gemma2", "add_trocr"]

_T5GEMMA: Mapping[str, object] = {"intermediate_size": 9216, "vocab_size": 256000}
_PIX2STRUCT_VISION: Mapping[str, object] = {
    "hidden_size": 768,
    "patch_embed_hidden_size": 768,
    "d_ff": 2048,
    "d_kv": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "seq_len": 4096,
}
_PIX2STRUCT_TEXT: Mapping[str, object] = {"d_ff": 2048, "relative_attention_num_buckets": 32, "vocab_size": 50244}


def add_t5gemma(tally: Tally, whole: Fields, decoder: DecoderStage) -> None:
    """Add a T5Gemma, or a stage of its decoder."""
    encoder, fields, layers = whole.inner("encoder"), decoder.fields, len(decoder.own)
    fields.defaults = {**fields.defaults, **_T5GEMMA}
    encoder.defaults, encoder.sizes = fields.defaults, fields.sizes
    inputs, has_bias = encoder.integer("hidden_size"), fields.flag("attention_bias")
    add_cross_layers(tally, decoder, inputs, bias=has_bias, output_bias=has_bias)
    add_gated(tally, decoder.hidden, fields.integer("intermediate_size"), layers)
    tally.norm(decoder.hidden, copies=6 * layers + decoder.is_last)
    is_tied = whole.switch("tie_word_embeddings", True)
    add_tables(tally, decoder, fields.integer("vocab_size"), is_tied=is_tied)
    if decoder.is_first:
        layers, has_bias = encoder.integer("num_hidden_layers"), encoder.flag("attention_bias")
        heads = encoder.integer("num_attention_heads"), encoder.integer("num_key_value_heads")
        add_encoder_attention(tally, encoder, *heads, layers, bias=has_bias, output_bias=has_bias)
        add_gated(tally, inputs, encoder.integer("intermediate_size"), layers)
        tally.norm(inputs, copies=4 * layers + 1)
        tally.add(encoder.integer("vocab_size") * inputs, Kind.EMBEDDING, Split.TENSOR)


def add_t5gemma2(tally: Tally, whole: Fields, decoder: DecoderStage) -> None:
    """Add a T5Gemma 2, or a stage of its decoder, whose layers attend to both texts with the same projections."""
    encoder, fields, layers = whole.inner("encoder"), decoder.fields, len(decoder.own)
    text = encoder.inner("text_config")
    fields.defaults = {**fields.defaults, **_T5GEMMA, "vocab_size": 262208}
    text.defaults, text.sizes = fields.defaults, fields.sizes
    for part, count in ((fields, layers), (text, text.integer("num_hidden_layers") * decoder.is_first)):
        hidden, has_bias = part.integer("hidden_size"), part.flag("attention_bias")
        heads = part.integer("num_attention_heads"), part.integer("num_key_value_heads")
        add_encoder_attention(tally, part, *heads, count, bias=has_bias, output_bias=has_bias)
        add_gated(tally, hidden, part.integer("intermediate_size"), count)
        tally.norm(hidden, copies=4 * count)
        tally.add(2 * count * part.integer("head_dim"))
    tally.norm(decoder.hidden, copies=decoder.is_last)
    add_tables(tally, decoder, text.integer("vocab_size"), is_tied=whole.switch("tie_word_embeddings", True))
    if decoder.is_first:
        hidden = text.integer("hidden_size")
        tally.norm(hidden)
        tally.add(hidden, Kind.EMBEDDING)  # the end of an image
        add_vision(tally, encoder, hidden)


def add_blip(tally: Tally, whole: Fields, decoder: DecoderStage) -> None:
    """Add a BLIP, or a stage of its decoder, which is a BERT."""
    fields, hidden, layers = decoder.fields, decoder.hidden, len(decoder.own)
    fields.defaults = {**fields.defaults, "intermediate_size": 3072, "max_position_embeddings": 512}
    fields.defaults |= {"vocab_size": 30524, "encoder_hidden_size": 768}
    width, vocab = fields.integer("intermediate_size"), fields.integer("vocab_size")
    add_cross_layers(tally, decoder, fields.integer("encoder_hidden_size"), bias=True, output_bias=True)
    tally.linear(hidden, width, bias=True, copies=layers)
    tally.linear(width, hidden, bias=True, copies=layers)
    tally.norm(hidden, bias=True, copies=3 * layers + decoder.is_first + decoder.is_last)
    add_tables(tally, decoder, vocab, is_tied=whole.switch("tie_word_embeddings", True))
    if decoder.is_last:
        tally.linear(hidden, hidden, bias=True)
        tally.add(vocab)
    if decoder.is_first:
        tally.add(fields.integer("max_position_embeddings") * hidden, Kind.EMBEDDING)
        add_vision(tally, whole, hidden)


def add_trocr(tally: Tally, _whole: Fields, decoder: DecoderStage) -> None:
    """Add the decoder of a TrOCR, or a stage of it."""
    fields, hidden, layers = decoder.fields, decoder.hidden, len(decoder.own)
    fields.defaults = {**fields.defaults, "layernorm_embedding": True, "use_learned_position_embeddings": True}
    width, given = fields.integer("decoder_ffn_dim"), fields.given("cross_attention_hidden_size")
    inputs = hidden if given is None else fields.integer("cross_attention_hidden_size")
    add_cross_layers(tally, decoder, inputs, bias=True, output_bias=True)
    tally.linear(hidden, width, bias=True, copies=layers)
    tally.linear(width, hidden, bias=True, copies=layers)
    tally.norm(hidden, bias=True, copies=3 * layers + decoder.is_first * fields.flag("layernorm_embedding"))
    is_tied = fields.switch("tie_word_embeddings", True)
    add_tables(tally, decoder, fields.integer("vocab_size"), is_tied=is_tied)
    if decoder.is_first and fields.flag("use_learned_position_embeddings"):
        tally.add((fields.integer("max_position_embeddings") + 2) * hidden, Kind.EMBEDDING)


def add_pix2struct(tally: Tally, whole: Fields, decoder: DecoderStage) -> None:
    """Add a Pix2Struct, or a stage of its decoder."""
    fields, hidden, layers = decoder.fields, decoder.hidden, len(decoder.own)
    fields.defaults = {**fields.defaults, **_PIX2STRUCT_TEXT}
    add_cross_layers(tally, decoder, hidden)
    add_gated(tally, hidden, fields.integer("d_ff"), layers)
    tally.norm(hidden, copies=3 * layers + decoder.is_last)
    heads = decoder.own[0].num_query_heads or decoder.own[0].num_kv_heads
    tally.add(decoder.is_first * fields.integer("relative_attention_num_buckets") * heads)
    is_tied = whole.switch("tie_word_embeddings", False)
    add_tables(tally, decoder, fields.integer("vocab_size"), is_tied=is_tied)
    if decoder.is_first:
        _add_pix2struct_tower(tally, whole)


def _add_pix2struct_tower(tally: Tally, whole: Fields) -> None:
    name = "vision_config"
    tower = whole.inner(name) if whole.given(name) is not None else Fields({}, whole.source, name)
    tower.defaults = _PIX2STRUCT_VISION
    hidden, layers, width = (tower.integer(name) for name in ("hidden_size", "num_hidden_layers", "d_ff"))
    inner = tower.integer("num_attention_heads") * tower.integer("d_kv")
    encoder_linear(tally, tower.integer("patch_embed_hidden_size"), hidden, bias=True)
    encoder_linear(tally, hidden, inner, copies=4 * layers)
    encoder_linear(tally, hidden, width, copies=3 * layers)
    encoder_add(tally, (2 * tower.integer("seq_len") + 2 * layers + 1) * hidden)
