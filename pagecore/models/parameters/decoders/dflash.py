"""Parameters of DFlash drafts, which predict a block of tokens at once from hidden states of the model.

DFlash 2 has convolutions around attention and MLP, and a selector of candidates; DSpark has a head for transitions
between the tokens of a block. Source: the drafts that vLLM and SGLang build. Embedding and head are those of the model,
unless the draft has its own vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.attention import add_attention
from pagecore.models.parameters.counting.mlp import add_mlp
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.models.parameters.structures.common_traits import QWEN_3
from pagecore.models.specs import read_model_config
from pagecore.storage import AttentionSpec

__all__ = ["add_dflash", "is_dflash"]

# Values of `speculators_model_type` in drafts of the library speculators.
_SPECULATORS = ("dflash", "dflash2", "dspark")


def is_dflash(whole: Fields) -> bool:
    """Return True for the config of a DFlash, DFlash 2 or DSpark draft."""
    return (
        isinstance(whole.given("dflash_config"), Mapping)
        or whole.given("speculators_model_type") in _SPECULATORS
        or whole.given("markov_rank") is not None
    )


def add_dflash(tally: Tally, config: Any, whole: Fields, fields: Fields, model_type: str) -> int:
    """Add a draft; return its number of key-value heads.

    Raises
    ------
    UnsupportedOption
        Its layers are not those of a Qwen 3, or its transitions have a head of an unknown type.
    """
    specs = read_model_config(config, dtype="bfloat16", format=None).layers
    layers = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    if model_type != "qwen3":
        raise UnsupportedOption(
            f"{whole.source}: a DFlash draft of {model_type}, whose parameters cannot be counted; expected layers of a "
            "qwen3: pass weights= in bytes"
        )
    fields.defaults = {**fields.defaults, "attention_bias": False}
    hidden, options = fields.integer("hidden_size"), _options(whole)
    has_sinks = options.switch("attention_sink_bias", whole.switch("add_swa_attention_sink_bias", False))
    for number, spec in enumerate(layers):
        tally.module = f"model.layers.{number}.self_attn"
        add_attention(tally, fields, QWEN_3, spec)
        tally.add(has_sinks * fields.integer("num_attention_heads"))
        tally.module = f"model.layers.{number}.mlp"
        add_mlp(tally, fields, QWEN_3, fields.integer("intermediate_size"))
    tally.module = "model"
    tally.norm(hidden, copies=2 * len(layers) + 2)
    read = _num_layers_read(whole, len(layers))
    if read:
        target = whole.given("target_hidden_size")
        inputs = hidden if target is None else whole.integer("target_hidden_size")
        tally.linear(read * inputs, hidden, split=Split.COPY, name="fc")
    vocabulary = fields.integer("vocab_size")
    rows = vocabulary if whole.given("draft_vocab_size") is None else whole.integer("draft_vocab_size")
    if rows != vocabulary:
        tally.add(rows * hidden, Kind.EMBEDDING, Split.TENSOR)
        tally.head += rows * hidden
    if options.given("conv_kernel_size") is not None:
        _add_convolutions(tally, options, hidden, len(layers))
    if options.given("selector_rank") is not None:
        rank = options.integer("selector_rank")
        tally.add((2 * vocabulary + hidden) * rank)
    if whole.given("markov_rank") is not None:
        _add_transitions(tally, whole, hidden, vocabulary + rows)
    return max(spec.num_kv_heads for spec in layers)


def _options(whole: Fields) -> Fields:
    """Return the fields of `dflash_config`, or those of the draft if it has no such object."""
    return whole.inner("dflash_config") if whole.has_object("dflash_config") else whole


def _add_convolutions(tally: Tally, options: Fields, hidden: int, num_layers: int) -> None:
    """Add the convolutions before and after attention and MLP: a kernel, and what each token adds to it."""
    taps, size = options.integer("conv_kernel_size"), options.integer("conv_group_size")
    if hidden % size:
        options.refuse(f"{options.describe('conv_group_size')}; it must divide hidden_size, which is {hidden}")
    for _ in range(2 * num_layers):
        tally.add(2 * taps * hidden)
        tally.linear(hidden, 2 * taps * (hidden // size), split=Split.COPY, name="kernel_projection")


def _add_transitions(tally: Tally, whole: Fields, hidden: int, rows: int) -> None:
    """Add the head of DSpark for transitions, of low rank, and the estimate of acceptance if there is one."""
    rank, kind = whole.integer("markov_rank"), whole.given("markov_head_type") or "vanilla"
    inner = {"vanilla": 0, "gated": (hidden + rank + 1) * rank, "rnn": (hidden + 2 * rank + 1) * 3 * rank}
    if not isinstance(kind, str) or kind not in inner:
        raise UnsupportedOption(
            f"{whole.source}: {whole.describe('markov_head_type')}; expected {', '.join(inner)}: pass weights= in bytes"
        )
    tally.add(rows * rank + inner[kind])
    if whole.switch("enable_confidence_head", False):
        tally.add(hidden + rank * whole.switch("confidence_head_with_markov", False) + 1)


def _num_layers_read(whole: Fields, num_layers: int) -> int:
    """Return the number of the model's layers whose hidden states the draft reads: `num_layers` if it lists none."""
    options = _options(whole)
    eagle = whole.inner("eagle_config") if whole.has_object("eagle_config") else Fields({}, whole.source)
    reads = True
    for part in (whole, eagle, options):
        reads = part.switch("use_aux_hidden_state", reads)
    listed = (
        whole.given("eagle_aux_hidden_state_layer_ids"),
        options.given("target_layer_ids"),
        whole.given("target_layer_ids"),
        whole.given("aux_hidden_state_layer_ids"),
        options.given("layer_ids"),
        eagle.given("layer_ids"),
    )
    found = (len(ids) for ids in listed if isinstance(ids, list | tuple) and ids)
    return next(found, num_layers) if reads else 0
