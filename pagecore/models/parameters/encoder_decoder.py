"""Parameters of models with an encoder and a decoder: Whisper, BART and its kin, and T5, mT5 and UMT5."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.errors import UnsupportedOption
from pagecore.models.fields import Fields
from pagecore.models.parameters.tally import Kind, Split, Tally, check_stage

__all__ = ["COUNTED", "add_encoder_decoder", "check_counted"]

# Families with a norm after the embedding of encoder and decoder, and those with one after the last layer of each.
_NORM_FIRST = frozenset({"bart", "bigbird_pegasus", "blenderbot-small", "mbart", "mvp", "plbart"})
_NORM_LAST = frozenset({"blenderbot", "m2m_100", "mbart", "pegasus", "whisper"})
COUNTED = frozenset(
    {"bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mt5", "mvp", "pegasus"}
    | {"plbart", "t5", "umt5", "whisper"}
)
_OF_T5 = frozenset({"mt5", "t5", "umt5"})
_COUNTED_FROM_2 = frozenset({"bart", "mbart", "mvp", "plbart"})


def check_counted(fields: Fields, model_type: str) -> None:
    """Raise UnsupportedOption if the parameters of a model with an encoder cannot be counted."""
    if model_type not in COUNTED:
        raise UnsupportedOption(
            f"{fields.source}: the parameters of {model_type} cannot be counted; pass weights= in bytes"
        )


def add_encoder_decoder(tally: Tally, fields: Fields, model_type: str, stage: range | None = None) -> None:
    """Add the parameters of a model whose `model_type` has an encoder, or of the stage with some decoder layers.

    The stage of the first layer has the encoder and the embeddings, that of the last one the head; a head that is tied
    to an embedding is a copy there, except in a single stage.
    """
    layers = "num_layers" if model_type in _OF_T5 and fields.given("num_hidden_layers") is None else "num_hidden_layers"
    count = fields.integer(layers)
    own = check_stage(range(count) if stage is None else stage, count)
    ends = _Ends(len(own), is_first=own.start == 0, is_last=own.stop == count)
    if model_type in _OF_T5:
        _t5(tally, fields, ends, has_own_biases=model_type == "umt5")
    else:
        _bart(tally, fields, model_type, ends)


@dataclass(frozen=True, slots=True)
class _Ends:
    """Decoder layers of a stage, and the ends of the decoder that it has."""

    layers: int
    is_first: bool
    is_last: bool


def _add_rows(tally: Tally, fields: Fields, ends: _Ends, embedded: int, head: int, is_tied: bool) -> None:
    """Add the rows of the tables of tokens in the first stage, and those of the output head in the last one."""
    rows = embedded * ends.is_first + head * (ends.is_last and not (is_tied and ends.is_first))
    tally.add(rows * fields.integer("hidden_size"), Kind.EMBEDDING, Split.TENSOR)


def _attention(tally: Tally, hidden: int, width: int, biases: int, copies: int) -> None:
    """Add the four projections of an attention, `biases` of them with one."""
    tally.linear(hidden, width, split=Split.ATTENTION, copies=3 * copies)
    tally.linear(width, hidden, split=Split.ATTENTION, copies=copies)
    tally.add(copies * biases * hidden)


def _bart(tally: Tally, fields: Fields, model_type: str, ends: _Ends) -> None:
    hidden = fields.integer("hidden_size")
    # Keys of Whisper have no bias.
    biases = 3 if model_type == "whisper" else 4
    if model_type == "bigbird_pegasus":
        biases = 4 * fields.flag("use_bias")
    encoder = fields.integer("encoder_layers") * ends.is_first
    for side, layers, attentions in (("encoder", encoder, 1), ("decoder", ends.layers, 2)):
        width = fields.integer(f"{side}_ffn_dim")
        _attention(tally, hidden, hidden, biases, layers * attentions)
        tally.linear(hidden, width, bias=True, copies=layers)
        tally.linear(width, hidden, bias=True, copies=layers)
        tally.norm(hidden, bias=True, copies=layers * (attentions + 1))
    first, last = model_type in _NORM_FIRST, model_type in _NORM_LAST
    tally.norm(hidden, bias=True, copies=(2 * first + last) * ends.is_first + last * ends.is_last)
    _add_rows(tally, fields, ends, *_rows(fields, model_type))
    if ends.is_first:
        _add_inputs(tally, fields, model_type)


def _add_inputs(tally: Tally, fields: Fields, model_type: str) -> None:
    """Add the embeddings of positions, and the convolutions of Whisper."""
    hidden = fields.integer("hidden_size")
    if model_type == "whisper":
        tally.linear(3 * fields.integer("num_mel_bins"), hidden, bias=True, kind=Kind.VISION)
        tally.linear(3 * hidden, hidden, bias=True, kind=Kind.VISION)
        positions = fields.integer("max_source_positions") + fields.integer("max_target_positions")
    elif model_type == "m2m_100":
        positions = 0  # computed
    else:
        first = 2 if model_type in _COUNTED_FROM_2 else 0
        positions = 2 * (fields.integer("max_position_embeddings") + first)
    tally.add(positions * hidden, Kind.EMBEDDING)


def _rows(fields: Fields, model_type: str) -> tuple[int, int, bool]:
    """Return the rows of all tables of tokens and of the output head, and True if the head is one of the tables."""
    vocab, is_tied = fields.integer("vocab_size"), fields.given("tie_word_embeddings") is not False
    if model_type == "marian" and fields.given("share_encoder_decoder_embeddings") is False:
        own = vocab if fields.given("decoder_vocab_size") is None else fields.integer("decoder_vocab_size")
        return vocab + own, own, is_tied
    if is_tied or model_type == "whisper":
        return vocab, vocab, is_tied
    # transformers keeps one table that both sides share, and one of each side.
    return 3 * vocab, vocab, False


def _t5(tally: Tally, fields: Fields, ends: _Ends, *, has_own_biases: bool) -> None:
    hidden, vocab, width = fields.integer("hidden_size"), fields.integer("vocab_size"), fields.integer("d_ff")
    heads, encoder = fields.integer("num_attention_heads"), fields.integer("num_layers") * ends.is_first
    inner = heads * fields.integer("d_kv")
    is_gated = str(fields.value("feed_forward_proj")).startswith("gated-")
    for layers, attentions in ((encoder, 1), (ends.layers, 2)):
        _attention(tally, hidden, inner, 0, layers * attentions)
        tally.linear(hidden, width, copies=layers * (1 + is_gated))
        tally.linear(width, hidden, copies=layers)
        tally.norm(hidden, copies=layers * (attentions + 1))
    tally.norm(hidden, copies=ends.is_first + ends.is_last)
    # The first layer of each side computes the bias of positions for all, unless each layer has its own.
    tables = encoder + ends.layers if has_own_biases else 2 * ends.is_first
    tally.add(tables * fields.integer("relative_attention_num_buckets") * heads)
    _add_rows(tally, fields, ends, vocab, vocab, fields.given("tie_word_embeddings") is not False)
