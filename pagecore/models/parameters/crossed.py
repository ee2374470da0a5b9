"""Parameters of Moonshine and T5Gemma with their encoders, and of the decoder of TrOCR.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pagecore.models.crossed import CROSSED
from pagecore.models.fields import Fields
from pagecore.models.parameters.tally import Kind, Split, Tally, check_stage
from pagecore.storage import AttentionSpec, CrossSpec

__all__ = ["COUNTED_CROSSED", "add_crossed"]

_DEFAULTS: Mapping[str, object] = {
    "attention_bias": False,
    "intermediate_size": 9216,
    "layernorm_embedding": True,
    "use_learned_position_embeddings": True,
    "vocab_size": 256000,
}


@dataclass(frozen=True, slots=True)
class _Decoder:
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


def add_crossed(
    tally: Tally, whole: Fields, model_type: str, specs: Sequence[AttentionSpec | CrossSpec], stage: range | None
) -> None:
    """Add the parameters of a model, or of a stage of its decoder; `specs` are those of its config.

    The stage of the first layer has the encoder and the embeddings, that of the last one the head.
    """
    family = CROSSED[model_type]
    fields = whole.inner(family.path) if family.path else whole
    fields.defaults, fields.aliases = {**_DEFAULTS, **family.family.defaults}, family.family.aliases
    fields.sizes = family.sizes
    count = len(specs) // 2
    layers = check_stage(range(count) if stage is None else stage, count)
    own, cross = ([specs[layer + start] for layer in layers] for start in (0, count))
    decoder = _Decoder(fields, own, cross, layers.start == 0, layers.stop == count)
    COUNTED_CROSSED[model_type](tally, whole, decoder)


def _attention(
    tally: Tally, hidden: int, inputs: int, spec: AttentionSpec | CrossSpec, *, bias: bool, output_bias: bool
) -> None:
    """Add an attention whose keys and values read `inputs` features."""
    queries = (spec.num_query_heads or spec.num_kv_heads) * spec.head_dim
    tally.linear(hidden, queries, bias=bias, split=Split.ATTENTION)
    tally.linear(inputs, spec.num_kv_heads * spec.head_dim, bias=bias, split=Split.KEY_VALUE, copies=2)
    tally.linear(queries, hidden, bias=output_bias, split=Split.ATTENTION)


def _tables(tally: Tally, decoder: _Decoder, is_tied: bool) -> None:
    """Add the embedding of the first stage, and the head of the last one."""
    rows = decoder.fields.integer("vocab_size") * (decoder.is_first + decoder.is_last)
    if is_tied and decoder.is_first and decoder.is_last:
        rows //= 2
    tally.add(rows * decoder.hidden, Kind.EMBEDDING, Split.TENSOR)


def _encoder_spec(fields: Fields, heads: int, kv_heads: int) -> AttentionSpec:
    dim = fields.value("head_dim")
    size = fields.integer("hidden_size") // heads if dim is None else fields.integer("head_dim")
    return AttentionSpec(kv_heads, size, num_query_heads=heads)


def _t5gemma(tally: Tally, whole: Fields, decoder: _Decoder) -> None:
    encoder, hidden = whole.inner("encoder"), decoder.hidden
    encoder.defaults, encoder.sizes = decoder.fields.defaults, decoder.fields.sizes
    inputs, width = encoder.integer("hidden_size"), decoder.fields.integer("intermediate_size")
    has_bias = decoder.fields.flag("attention_bias")
    for own, cross in zip(decoder.own, decoder.cross, strict=True):
        _attention(tally, hidden, hidden, own, bias=has_bias, output_bias=has_bias)
        _attention(tally, hidden, inputs, cross, bias=has_bias, output_bias=has_bias)
    _gated(tally, hidden, width, len(decoder.own))
    tally.norm(hidden, copies=6 * len(decoder.own) + decoder.is_last)
    _tables(tally, decoder, whole.given("tie_word_embeddings") is not False)
    if decoder.is_first:
        layers, has_bias = encoder.integer("num_hidden_layers"), encoder.flag("attention_bias")
        heads = encoder.integer("num_attention_heads"), encoder.integer("num_key_value_heads")
        for _ in range(layers):
            _attention(tally, inputs, inputs, _encoder_spec(encoder, *heads), bias=has_bias, output_bias=has_bias)
        _gated(tally, inputs, encoder.integer("intermediate_size"), layers)
        tally.norm(inputs, copies=4 * layers + 1)
        tally.add(encoder.integer("vocab_size") * inputs, Kind.EMBEDDING, Split.TENSOR)


def _gated(tally: Tally, hidden: int, width: int, layers: int) -> None:
    tally.linear(hidden, width, copies=2 * layers)
    tally.linear(width, hidden, copies=layers)


def _moonshine(tally: Tally, whole: Fields, decoder: _Decoder) -> None:
    fields, hidden = decoder.fields, decoder.hidden
    width, has_bias = fields.integer("intermediate_size"), fields.flag("attention_bias")
    for spec in (*decoder.own, *decoder.cross):
        _attention(tally, hidden, hidden, spec, bias=has_bias, output_bias=False)
    tally.linear(hidden, 2 * width, bias=True, copies=len(decoder.own))
    tally.linear(width, hidden, bias=True, copies=len(decoder.own))
    tally.norm(hidden, copies=3 * len(decoder.own) + decoder.is_last)
    _tables(tally, decoder, whole.given("tie_word_embeddings") is not False)
    if not decoder.is_first:
        return
    layers, heads = fields.integer("encoder_num_hidden_layers"), fields.integer("encoder_num_attention_heads")
    is_grouped = fields.given("encoder_num_key_value_heads") is not None
    kv_heads = fields.integer("encoder_num_key_value_heads") if is_grouped else heads
    spec = AttentionSpec(kv_heads, hidden // heads, num_query_heads=heads)
    for _ in range(layers):
        _attention(tally, hidden, hidden, spec, bias=has_bias, output_bias=False)
    tally.linear(hidden, width, bias=True, copies=layers)
    tally.linear(width, hidden, bias=True, copies=layers)
    tally.norm(hidden, copies=2 * layers + 3)  # one follows the layers, and one with a bias the first convolution
    for inputs, outputs, has_bias in ((127, hidden, False), (7 * hidden, 2 * hidden, True), (6 * hidden, hidden, True)):
        tally.linear(inputs, outputs, bias=has_bias, kind=Kind.VISION)


def _trocr(tally: Tally, _whole: Fields, decoder: _Decoder) -> None:
    fields, hidden = decoder.fields, decoder.hidden
    width, layers = fields.integer("decoder_ffn_dim"), len(decoder.own)
    given = fields.given("cross_attention_hidden_size")
    inputs = hidden if given is None else fields.integer("cross_attention_hidden_size")
    for own, cross in zip(decoder.own, decoder.cross, strict=True):
        _attention(tally, hidden, hidden, own, bias=True, output_bias=True)
        _attention(tally, hidden, inputs, cross, bias=True, output_bias=True)
    tally.linear(hidden, width, bias=True, copies=layers)
    tally.linear(width, hidden, bias=True, copies=layers)
    tally.norm(hidden, bias=True, copies=3 * layers + decoder.is_first * fields.flag("layernorm_embedding"))
    _tables(tally, decoder, fields.given("tie_word_embeddings") is not False)
    if decoder.is_first and fields.flag("use_learned_position_embeddings"):
        tally.add((fields.integer("max_position_embeddings") + 2) * hidden, Kind.EMBEDDING)


COUNTED_CROSSED: Mapping[str, Callable[[Tally, Fields, _Decoder], None]] = {
    "moonshine": _moonshine,
    "t5gemma": _t5gemma,
    "trocr": _trocr,
}
