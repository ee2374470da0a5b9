"""Parameters of DFlash drafts, which predict a block of tokens at once from hidden states of the model.

Source: the draft that vLLM builds. Embedding and head are those of the model, unless the draft has its own vocabulary.
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


def is_dflash(whole: Fields) -> bool:
    """Return True for the config of a DFlash draft."""
    return isinstance(whole.given("dflash_config"), Mapping)


def add_dflash(tally: Tally, config: Any, whole: Fields, fields: Fields, model_type: str) -> int:
    """Add a draft; return its number of key-value heads.

    Raises
    ------
    UnsupportedOption
        Its layers are not those of a Qwen 3.
    """
    specs = read_model_config(config, dtype="bfloat16", format=None).layers
    layers = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    if model_type != "qwen3":
        raise UnsupportedOption(
            f"{whole.source}: a DFlash draft of {model_type}, whose parameters cannot be counted; expected layers of a "
            "qwen3: pass weights= in bytes"
        )
    fields.defaults = {**fields.defaults, "attention_bias": False}
    hidden, options = fields.integer("hidden_size"), whole.inner("dflash_config")
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
    if whole.given("draft_vocab_size") is not None:
        rows = whole.integer("draft_vocab_size")
        if rows != fields.integer("vocab_size"):
            tally.add(rows * hidden, Kind.EMBEDDING, Split.TENSOR)
            tally.head += rows * hidden
    return max(spec.num_kv_heads for spec in layers)


def _num_layers_read(whole: Fields, num_layers: int) -> int:
    """Return the number of the model's layers whose hidden states the draft reads: `num_layers` if it lists none."""
    options = whole.inner("dflash_config")
    eagle = whole.inner("eagle_config") if whole.has_object("eagle_config") else Fields({}, whole.source)
    reads = True
    for part in (whole, eagle, options):
        reads = part.switch("use_aux_hidden_state", reads)
    listed = (
        whole.given("eagle_aux_hidden_state_layer_ids"),
        options.given("target_layer_ids"),
        whole.given("target_layer_ids"),
        options.given("layer_ids"),
        eagle.given("layer_ids"),
    )
    found = (len(ids) for ids in listed if isinstance(ids, list | tuple) and ids)
    return next(found, num_layers) if reads else 0
