"""Parameters that only IDEFICS has: layers with gates that attend to images, and tables of further tokens.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.counting.traits import Settled

__all__ = ["IDEFICS_DEFAULTS", "add_gated_layer", "further_tokens"]

IDEFICS_DEFAULTS: Mapping[str, object] = {
    "additional_vocab_size": 0,
    "alpha_type": "float",
    "cross_layer_interval": 1,
    "qk_layer_norms": False,
}


def further_tokens(fields: Fields) -> Settled:
    """Tokens beyond the vocabulary have tables of their own."""
    rows = fields.integer("additional_vocab_size", min=0) * fields.integer("hidden_size")
    return {"first": rows, "last": 0 if fields.switch("tie_word_embeddings", False) else rows}


def add_gated_layer(tally: Tally, fields: Fields, specs: Sequence[Any], layer: int) -> None:
    """Add the layer that precedes every n-th layer."""
    interval = fields.integer("cross_layer_interval")
    if layer % interval or layer // interval >= fields.integer("num_hidden_layers") // interval:
        return
    hidden, dim, width = fields.integer("hidden_size"), specs[0].head_dim, fields.integer("intermediate_size")
    tally.module = f"model.gated_cross_attn_layers.{layer // interval}"
    tally.linear(hidden, hidden, copies=2, name="cross_attn.q_proj")
    tally.linear(_image_features(fields), hidden, copies=2, name="cross_attn.k_proj")
    tally.linear(hidden, width, copies=2, name="mlp.gate_proj")
    tally.linear(width, hidden, name="mlp.down_proj")
    tally.norm(hidden, copies=2)
    tally.norm(dim, copies=2 * fields.flag("qk_layer_norms"))
    tally.add(2 * (1 if fields.value("alpha_type") == "float" else hidden))


def _image_features(fields: Fields) -> int:
    vision = fields.inner("vision_config")
    vision.defaults = {"embed_dim": 768}
    return vision.integer("embed_dim")
