"""Parts of decoders with cross attention, whose layers have the specs of a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.storage import AttentionSpec, CrossSpec

__all__ = ["DecoderStage", "add_cross_layers", "add_encoder_attention", "add_gated", "add_tables"]


@dataclass(frozen=True, slots=True)
class DecoderStage:
    """Fields of a decoder, and the specs of a stage's layers: those of their own attention and of cross attention."""

    fields: Fields
    own: Sequence[AttentionSpec | CrossSpec]
    cross: Sequence[AttentionSpec | CrossSpec]
    is_first: bool
    is_last: bool

    @property
    def hidden(self) -> int:
        """Features of a token."""
        return self.fields.integer("hidden_size")


def add_cross_layers(
    tally: Tally, decoder: DecoderStage, inputs: int, *, bias: bool = False, output_bias: bool = False
) -> None:
    """Add both attentions of each layer; the keys and values of the second one read `inputs` features."""
    for own, cross in zip(decoder.own, decoder.cross, strict=True):
        _attention(tally, decoder.hidden, decoder.hidden, own, bias, output_bias)
        _attention(tally, decoder.hidden, inputs, cross, bias, output_bias)


def add_encoder_attention(
    tally: Tally, fields: Fields, heads: int, kv_heads: int, layers: int, *, bias: bool, output_bias: bool
) -> None:
    """Add the attention of the layers of an encoder."""
    hidden = fields.integer("hidden_size")
    dim = hidden // heads if fields.value("head_dim") is None else fields.integer("head_dim")
    for _ in range(layers):
        _attention(tally, hidden, hidden, AttentionSpec(kv_heads, dim, num_query_heads=heads), bias, output_bias)


def _attention(
    tally: Tally, hidden: int, inputs: int, spec: AttentionSpec | CrossSpec, bias: bool, output_bias: bool
) -> None:
    queries = (spec.num_query_heads or spec.num_kv_heads) * spec.head_dim
    tally.linear(hidden, queries, bias=bias, split=Split.ATTENTION)
    tally.linear(inputs, spec.num_kv_heads * spec.head_dim, bias=bias, split=Split.KEY_VALUE, copies=2)
    tally.linear(queries, hidden, bias=output_bias, split=Split.ATTENTION)


def add_gated(tally: Tally, hidden: int, width: int, layers: int) -> None:
    """Add MLPs with a gate."""
    tally.linear(hidden, width, copies=2 * layers)
    tally.linear(width, hidden, copies=layers)


def add_tables(tally: Tally, decoder: DecoderStage, rows: int, *, is_tied: bool) -> None:
    """Add the embedding of the first stage, and the head of the last one, which may be the embedding."""
    copies = decoder.is_first + decoder.is_last - (is_tied and decoder.is_first and decoder.is_last)
    tally.add(copies * rows * decoder.hidden, Kind.EMBEDDING, Split.TENSOR)
