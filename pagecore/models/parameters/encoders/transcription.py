"""Parameters of Canary, Cohere ASR and SpeechT5 with their encoders.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.audio.parakeet import add_parakeet
from pagecore.models.parameters.counting.formulas import add_formulas
from pagecore.models.parameters.counting.tally import Kind, Tally
from pagecore.models.parameters.encoders.convolutions import CONVOLUTIONS, add_convolutions
from pagecore.models.parameters.encoders.cross_layers import DecoderStage, add_cross_layers, add_tables

__all__ = ["add_canary", "add_cohere_asr", "add_speecht5"]

_SPEECHT5: Mapping[str, object] = {**CONVOLUTIONS, "encoder_max_relative_position": 160}
_SPEECHT5_MATRICES = """
    channels * hidden_size
    + hidden_size * (hidden_size // num_conv_pos_embedding_groups) * num_conv_pos_embeddings
    + encoder_layers * (4 * hidden_size ** 2 + 2 * hidden_size * encoder_ffn_dim)"""
_SPEECHT5_REST = """
    2 * normed_channels + 2 * channels + 5 * hidden_size + num_conv_pos_embeddings
    + 2 * encoder_max_relative_position * (hidden_size // encoder_attention_heads)
    + encoder_layers * (9 * hidden_size + encoder_ffn_dim)"""


def add_canary(tally: Tally, whole: Fields, decoder: DecoderStage) -> None:
    """Add a Canary, or a stage of its decoder."""
    _add_decoder(tally, decoder, is_tied=whole.switch("tie_word_embeddings", True))
    if decoder.is_first:
        add_parakeet(tally, whole, whole.inner("encoder_config"))


def add_cohere_asr(tally: Tally, whole: Fields, decoder: DecoderStage) -> None:
    """Add a Cohere ASR, or a stage of its decoder, which embeds positions and projects the features of the encoder."""
    _add_decoder(tally, decoder, is_tied=whole.switch("tie_word_embeddings", False))
    if decoder.is_first:
        inputs = add_parakeet(tally, whole, whole.inner("encoder_config"))
        tally.add(decoder.fields.integer("max_position_embeddings") * decoder.hidden, Kind.EMBEDDING)
        tally.linear(inputs, decoder.hidden, bias=True)


def _add_decoder(tally: Tally, decoder: DecoderStage, *, is_tied: bool) -> None:
    fields, hidden, layers = decoder.fields, decoder.hidden, len(decoder.own)
    fields.defaults = {**fields.defaults, "attention_bias": True, "intermediate_size": 4096, "vocab_size": 16384}
    width, vocab = fields.integer("intermediate_size"), fields.integer("vocab_size")
    has_bias = fields.flag("attention_bias")
    add_cross_layers(tally, decoder, hidden, bias=has_bias, output_bias=has_bias)
    tally.linear(hidden, width, bias=True, copies=layers)
    tally.linear(width, hidden, bias=True, copies=layers)
    tally.norm(hidden, bias=True, copies=3 * layers + decoder.is_first + decoder.is_last)
    add_tables(tally, decoder, vocab, is_tied=is_tied)
    tally.add(decoder.is_last * vocab)


def add_speecht5(tally: Tally, whole: Fields, decoder: DecoderStage) -> None:
    """Add a SpeechT5 that transcribes speech, or a stage of its decoder."""
    fields, hidden, layers = decoder.fields, decoder.hidden, len(decoder.own)
    fields.defaults = {**fields.defaults, **_SPEECHT5}
    width = fields.integer("decoder_ffn_dim")
    add_cross_layers(tally, decoder, hidden, bias=True, output_bias=True)
    tally.linear(hidden, width, bias=True, copies=layers)
    tally.linear(width, hidden, bias=True, copies=layers)
    tally.norm(hidden, bias=True, copies=3 * layers)
    add_tables(tally, decoder, fields.integer("vocab_size"), is_tied=whole.switch("tie_word_embeddings", True))
    if decoder.is_first:
        names = add_convolutions(tally, fields)
        add_formulas(tally, _SPEECHT5_MATRICES, _SPEECHT5_REST, fields, whole, names)
