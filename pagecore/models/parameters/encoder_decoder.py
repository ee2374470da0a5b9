"""Parameters of models with an encoder and a decoder: Whisper, BART and its kin, and T5 and mT5."""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.errors import UnsupportedOption
from pagecore.models.fields import Fields
from pagecore.models.parameters.tally import Kind, Split, Tally

__all__ = ["COUNTED", "add_encoder_decoder", "check_counted"]

# Norms of an encoder, and of a decoder, outside its layers; 1 in other families.
_OUTER_NORMS: Mapping[str, int] = {"mbart": 2, "marian": 0}
COUNTED = frozenset(
    {"bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mt5", "mvp", "pegasus"}
    | {"plbart", "t5", "whisper"}
)
_OF_T5 = frozenset({"mt5", "t5"})
_COUNTED_FROM_2 = frozenset({"bart", "mbart", "mvp", "plbart"})


def check_counted(fields: Fields, model_type: str) -> None:
    """Raise UnsupportedOption if the parameters of a model with an encoder cannot be counted."""
    if model_type not in COUNTED:
        raise UnsupportedOption(
            f"{fields.source}: the parameters of {model_type} cannot be counted; pass weights= in bytes"
        )


def add_encoder_decoder(tally: Tally, fields: Fields, model_type: str) -> None:
    """Add all parameters of a model whose `model_type` has an encoder."""
    if model_type in _OF_T5:
        _t5(tally, fields)
    else:
        _bart(tally, fields, model_type)


def _attention(tally: Tally, hidden: int, width: int, biases: int, copies: int) -> None:
    """Add the four projections of an attention, `biases` of them with one."""
    tally.linear(hidden, width, split=Split.ATTENTION, copies=3 * copies)
    tally.linear(width, hidden, split=Split.ATTENTION, copies=copies)
    tally.add(copies * biases * hidden)


def _bart(tally: Tally, fields: Fields, model_type: str) -> None:
    hidden = fields.integer("hidden_size")
    is_whisper = model_type == "whisper"
    # Keys of Whisper have no bias.
    biases = 3 if is_whisper else 4
    if model_type == "bigbird_pegasus":
        biases = 4 * fields.flag("use_bias")
    for side, attentions in (("encoder", 1), ("decoder", 2)):
        layers = fields.integer(f"{side}_layers")
        width = fields.integer(f"{side}_ffn_dim")
        _attention(tally, hidden, hidden, biases, layers * attentions)
        tally.linear(hidden, width, bias=True, copies=layers)
        tally.linear(width, hidden, bias=True, copies=layers)
        tally.norm(hidden, bias=True, copies=layers * (attentions + 1) + _OUTER_NORMS.get(model_type, 1))
    tally.add(_rows(fields, model_type) * hidden, Kind.EMBEDDING, Split.TENSOR)
    if is_whisper:
        tally.linear(3 * fields.integer("num_mel_bins"), hidden, bias=True, kind=Kind.VISION)
        tally.linear(3 * hidden, hidden, bias=True, kind=Kind.VISION)
        positions = fields.integer("max_source_positions") + fields.integer("max_target_positions")
    elif model_type == "m2m_100":
        positions = 0  # computed
    else:
        first = 2 if model_type in _COUNTED_FROM_2 else 0
        positions = 2 * (fields.integer("max_position_embeddings") + first)
    tally.add(positions * hidden, Kind.EMBEDDING)


def _rows(fields: Fields, model_type: str) -> int:
    """Return the rows of all tables of tokens, and of the output head."""
    vocab, is_tied = fields.integer("vocab_size"), fields.given("tie_word_embeddings") is not False
    if model_type == "marian" and fields.given("share_encoder_decoder_embeddings") is False:
        own = vocab if fields.given("decoder_vocab_size") is None else fields.integer("decoder_vocab_size")
        return vocab + own * (1 if is_tied else 2)
    # Untied, transformers keeps one that both sides share, one of each side, and the head.
    return vocab if is_tied or model_type == "whisper" else 4 * vocab


def _t5(tally: Tally, fields: Fields) -> None:
    hidden, vocab, width = fields.integer("hidden_size"), fields.integer("vocab_size"), fields.integer("d_ff")
    heads, encoder = fields.integer("num_attention_heads"), fields.integer("num_layers")
    inner = heads * fields.integer("d_kv")
    decoder = encoder if fields.given("num_hidden_layers") is None else fields.integer("num_hidden_layers")
    is_gated = str(fields.value("feed_forward_proj")).startswith("gated-")
    for layers, attentions in ((encoder, 1), (decoder, 2)):
        _attention(tally, hidden, inner, 0, layers * attentions)
        tally.linear(hidden, width, copies=layers * (1 + is_gated))
        tally.linear(width, hidden, copies=layers)
        tally.norm(hidden, copies=layers * (attentions + 1) + 1)
        tally.add(fields.integer("relative_attention_num_buckets") * heads)
    tied = fields.given("tie_word_embeddings") is not False
    tally.add(vocab * hidden * (1 if tied else 2), Kind.EMBEDDING, Split.TENSOR)
