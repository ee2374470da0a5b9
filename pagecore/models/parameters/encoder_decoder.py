"""Parameters of models with an encoder and a decoder: Whisper, BART and T5."""

from __future__ import annotations

from pagecore.models.fields import Fields
from pagecore.models.parameters.tally import Kind, Split, Tally

__all__ = ["add_encoder_decoder"]


def add_encoder_decoder(tally: Tally, fields: Fields, model_type: str) -> None:
    """Add all parameters of a model whose `model_type` has an encoder."""
    if model_type == "t5":
        _t5(tally, fields)
    else:
        _bart(tally, fields, is_whisper=model_type == "whisper")


def _attention(tally: Tally, hidden: int, width: int, biases: int, copies: int) -> None:
    """Add the four projections of an attention, `biases` of them with one."""
    tally.linear(hidden, width, split=Split.ATTENTION, copies=3 * copies)
    tally.linear(width, hidden, split=Split.ATTENTION, copies=copies)
    tally.add(copies * biases * hidden)


def _bart(tally: Tally, fields: Fields, is_whisper: bool) -> None:
    hidden, vocab = fields.integer("hidden_size"), fields.integer("vocab_size")
    # Keys of Whisper have no bias.
    biases = 3 if is_whisper else 4
    for side, attentions in (("encoder", 1), ("decoder", 2)):
        layers = fields.integer(f"{side}_layers")
        width = fields.integer(f"{side}_ffn_dim")
        _attention(tally, hidden, hidden, biases, layers * attentions)
        tally.linear(hidden, width, bias=True, copies=layers)
        tally.linear(width, hidden, bias=True, copies=layers)
        tally.norm(hidden, bias=True, copies=layers * (attentions + 1) + 1)
    tally.add(vocab * hidden, Kind.EMBEDDING, Split.TENSOR)
    if is_whisper:
        tally.linear(3 * fields.integer("num_mel_bins"), hidden, bias=True, kind=Kind.VISION)
        tally.linear(3 * hidden, hidden, bias=True, kind=Kind.VISION)
        positions = fields.integer("max_source_positions") + fields.integer("max_target_positions")
    else:
        # BART counts positions from 2.
        positions = 2 * (fields.integer("max_position_embeddings") + 2)
    tally.add(positions * hidden, Kind.EMBEDDING)


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
