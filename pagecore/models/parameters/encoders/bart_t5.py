"""Parameters of models with an encoder and a decoder: Whisper, Speech2Text, BART and its kin, and T5 and its kin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagecore.models.config_files.fields import Fields
from pagecore.models.encoders.bart_t5 import ENCODER_DECODERS
from pagecore.models.parameters.counting.tally import Kind, Split, Tally, check_stage
from pagecore.models.parameters.encoders.documents import add_udop_inputs

__all__ = ["add_encoder_decoder", "add_t5_encoder"]

# Families with a norm after the embedding of encoder and decoder, and those with one after the last layer of each.
_NORM_FIRST = frozenset({"bart", "bigbird_pegasus", "blenderbot-small", "led", "mbart", "mvp", "plbart"})
_NORM_LAST = frozenset(
    {"blenderbot", "m2m_100", "mbart", "nllb-moe", "pegasus", "pegasus_x", "speech_to_text", "whisper"}
)
_COMPUTED_POSITIONS = frozenset({"m2m_100", "nllb-moe", "pegasus_x", "speech_to_text"})
_OF_T5 = frozenset({"longt5", "mt5", "pop2piano", "switch_transformers", "t5", "udop", "umt5"})
_COUNTED_FROM_2 = frozenset({"bart", "mbart", "mvp", "plbart"})
_DEFAULTS: dict[str, object] = {
    "composer_vocab_size": 21,
    "conv_channels": 1024,
    "conv_kernel_sizes": [5, 5],
    "encoder_attention_type": "local",
    "feed_forward_proj": "relu",
    "input_channels": 1,
    "input_feat_per_channel": 80,
    "num_global_tokens": 32,
    "pad_token_id": 1,
    "relative_attention_num_buckets": 32,
    "router_bias": False,
    "use_bias": False,
}


def add_encoder_decoder(tally: Tally, fields: Fields, model_type: str, stage: range | None = None) -> None:
    """Add the parameters of a model whose `model_type` has an encoder, or of the stage with some decoder layers.

    The stage of the first layer has the encoder and the embeddings, that of the last one the head; a head that is tied
    to an embedding is a copy there, except in a single stage.
    """
    fields.defaults = {**_DEFAULTS, **fields.defaults}
    layers = "num_layers" if model_type in _OF_T5 and fields.given("num_hidden_layers") is None else "num_hidden_layers"
    count = fields.integer(layers)
    own = check_stage(range(count) if stage is None else stage, count)
    ends = _Ends(own, is_first=own.start == 0, is_last=own.stop == count)
    if model_type in _OF_T5:
        _t5(tally, fields, model_type, ends)
    else:
        _bart(tally, fields, model_type, ends)


def add_t5_encoder(tally: Tally, fields: Fields) -> None:
    """Add the encoder of a T5 and its embedding."""
    family = ENCODER_DECODERS["t5"]
    fields.defaults, fields.aliases = {**_DEFAULTS, **family.defaults}, family.aliases
    _t5(tally, fields, "t5", _Ends(range(0), is_first=True, is_last=False))


@dataclass(frozen=True, slots=True)
class _Ends:
    """Decoder layers of a stage, and the ends of the decoder that it has."""

    layers: range
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


def _mlp(tally: Tally, hidden: int, width: int, copies: int, *, bias: bool, gates: int = 0) -> None:
    tally.linear(hidden, width, bias=bias, copies=copies * (1 + gates))
    tally.linear(width, hidden, bias=bias, copies=copies)


def _experts(tally: Tally, fields: Fields, hidden: int, width: int, layers: int, *, bias: bool) -> None:
    """Add the experts of some layers, and their routers."""
    count = fields.integer("num_experts")
    tally.linear(hidden, width, bias=bias, copies=count * layers, kind=Kind.EXPERT)
    tally.linear(width, hidden, bias=bias, copies=count * layers, kind=Kind.EXPERT)
    has_bias = fields.flag("router_bias")
    tally.linear(hidden, count, bias=has_bias, copies=layers, split=Split.COPY, kind=Kind.OTHER)


def _bart(tally: Tally, fields: Fields, model_type: str, ends: _Ends) -> None:
    hidden = fields.integer("hidden_size")
    # Keys of Whisper have no bias.
    biases = {"whisper": 3, "pegasus_x": 0}.get(model_type, 4)
    if model_type == "bigbird_pegasus":
        biases = 4 * fields.flag("use_bias")
    encoder = range(fields.integer("encoder_layers") * ends.is_first)
    for side, own, attentions in (("encoder", encoder, 1), ("decoder", ends.layers, 2)):
        width, layers, sparse = fields.integer(f"{side}_ffn_dim"), len(own), 0
        _attention(tally, hidden, hidden, biases, layers * attentions)
        if model_type == "nllb-moe":
            step = fields.integer(f"{side}_sparse_step", min=0)
            sparse = sum(step > 0 and (layer + 1) % step == 0 for layer in own)
            _experts(tally, fields, hidden, width, sparse, bias=True)
        _mlp(tally, hidden, width, layers - sparse, bias=True)
        tally.norm(hidden, bias=True, copies=layers * (attentions + 1))
    if model_type == "led":  # queries, keys and values of tokens that attend to the whole text
        tally.linear(hidden, hidden, bias=True, split=Split.ATTENTION, copies=3 * len(encoder))
    if model_type == "pegasus_x":
        tally.norm(hidden, bias=True, copies=len(encoder))
    first, last = model_type in _NORM_FIRST, model_type in _NORM_LAST
    tally.norm(hidden, bias=True, copies=(2 * first + last) * ends.is_first + last * ends.is_last)
    _add_rows(tally, fields, ends, *_rows(fields, model_type))
    if ends.is_first:
        _add_inputs(tally, fields, model_type)


def _add_inputs(tally: Tally, fields: Fields, model_type: str) -> None:
    """Add the embeddings of positions, and the convolutions over sound."""
    hidden = fields.integer("hidden_size")
    if model_type == "speech_to_text":
        _add_convolutions(tally, fields, hidden)
    if model_type == "whisper":
        tally.linear(3 * fields.integer("num_mel_bins"), hidden, bias=True, kind=Kind.VISION)
        tally.linear(3 * hidden, hidden, bias=True, kind=Kind.VISION)
        positions = fields.integer("max_source_positions") + fields.integer("max_target_positions")
    elif model_type in _COMPUTED_POSITIONS:
        positions = fields.integer("num_global_tokens") if model_type == "pegasus_x" else 0
    elif model_type == "led":
        positions = sum(fields.integer(f"max_{side}_position_embeddings") for side in ("encoder", "decoder"))
    elif model_type == "fsmt":
        positions = 2 * (fields.integer("max_position_embeddings") + fields.integer("pad_token_id", min=0) + 1)
    else:
        first = 2 if model_type in _COUNTED_FROM_2 else 0
        positions = 2 * (fields.integer("max_position_embeddings") + first)
    tally.add(positions * hidden, Kind.EMBEDDING)


def _add_convolutions(tally: Tally, fields: Fields, hidden: int) -> None:
    """Add the convolutions of Speech2Text, whose outputs are halved by gates."""
    kernels = fields.value("conv_kernel_sizes")
    if not isinstance(kernels, list | tuple) or not all(type(size) is int and size > 0 for size in kernels):
        fields.refuse(f"{fields.describe('conv_kernel_sizes')}; it must be a list of integers above 0")
    inputs = fields.integer("input_feat_per_channel") * fields.integer("input_channels")
    for number, size in enumerate(kernels):
        outputs = fields.integer("conv_channels") if number < len(kernels) - 1 else 2 * hidden
        tally.linear(size * inputs, outputs, bias=True, kind=Kind.VISION)
        inputs = outputs // 2


def _rows(fields: Fields, model_type: str) -> tuple[int, int, bool]:
    """Return the rows of all tables of tokens and of the output head, and True if the head is one of the tables."""
    if model_type == "fsmt":
        source, target = fields.integer("src_vocab_size"), fields.integer("tgt_vocab_size")
        is_one = fields.switch("tie_word_embeddings", False)
        return target + source * (not is_one), target, is_one
    vocab, is_tied = fields.integer("vocab_size"), fields.switch("tie_word_embeddings", True)
    if model_type == "marian" and fields.given("share_encoder_decoder_embeddings") is False:
        own = vocab if fields.given("decoder_vocab_size") is None else fields.integer("decoder_vocab_size")
        return vocab + own, own, is_tied
    if is_tied or model_type in ("speech_to_text", "whisper"):
        return vocab, vocab, is_tied
    # transformers keeps one table that both sides share, and one of each side.
    return 3 * vocab, vocab, False


def _t5(tally: Tally, fields: Fields, model_type: str, ends: _Ends) -> None:
    hidden, vocab, width = fields.integer("hidden_size"), fields.integer("vocab_size"), fields.integer("d_ff")
    heads, encoder = fields.integer("num_attention_heads"), range(fields.integer("num_layers") * ends.is_first)
    inner = heads * fields.integer("d_kv")
    gates = int(str(fields.value("feed_forward_proj")).startswith("gated-") and model_type != "switch_transformers")
    for side, own, attentions in (("encoder", encoder, 1), ("decoder", ends.layers, 2)):
        layers, sparse = len(own), 0
        _attention(tally, hidden, inner, 0, layers * attentions)
        if model_type == "switch_transformers":
            sparse = sum(map(_is_sparse(fields, side), own))
            _experts(tally, fields, hidden, width, sparse, bias=False)
        _mlp(tally, hidden, width, layers - sparse, bias=False, gates=gates)
        tally.norm(hidden, copies=layers * (attentions + 1))
    tally.norm(hidden, copies=ends.is_first + ends.is_last)
    # The first layer of each side computes the bias of positions for all, unless each layer has its own.
    tables = len(encoder) + len(ends.layers) if model_type == "umt5" else ends.is_first * (1 + bool(ends.layers))
    if model_type == "longt5" and fields.value("encoder_attention_type") == "transient-global":
        tables += ends.is_first
        tally.norm(hidden, copies=len(encoder))
    if model_type == "udop" and ends.is_first:
        add_udop_inputs(tally, fields, heads)
    tally.add(tables * fields.integer("relative_attention_num_buckets") * heads)
    if model_type == "pop2piano":
        tally.add(fields.integer("composer_vocab_size") * hidden * ends.is_first, Kind.EMBEDDING)
    is_tied = fields.switch("tie_word_embeddings", True) and model_type != "pop2piano"
    copies = 3 if model_type == "switch_transformers" and not is_tied else 1
    _add_rows(tally, fields, ends, copies * vocab, vocab, is_tied)


def _is_sparse(fields: Fields, side: str) -> Callable[[int], bool]:
    """Return the rule by which a layer of a Switch Transformer has experts."""
    layers = fields.integer("num_layers" if side == "encoder" else "num_hidden_layers")
    sparse = fields.integer(f"num_sparse_{side}_layers", min=0)
    step = layers // sparse if sparse else layers
    return lambda layer: step > 0 and (layer % step == 1 or step == 1)
