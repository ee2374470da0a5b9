"""Parameters of Zamba and Zamba 2, whose layers share blocks of attention.

Source: the modeling files of transformers 5.
"""

from __future__ import annotations

from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.attention import add_attention
from pagecore.models.parameters.counting.mlp import add_mlp
from pagecore.models.parameters.counting.tally import Split, Tally
from pagecore.models.parameters.counting.traits import Traits
from pagecore.models.parameters.decoders.states import STATE_LAYERS
from pagecore.storage import AttentionSpec, StateSpec

__all__ = ["add_layer", "add_shared_blocks"]


def add_layer(tally: Tally, fields: Fields, specs: list[Any], layer: int, model_type: str) -> None:
    """Add Mamba of a layer, and what a layer with attention has of its own: a projection and adapters."""
    hidden = fields.integer("hidden_size")
    tally.module = f"model.layers.{layer}.mamba"
    for spec in specs:
        if isinstance(spec, StateSpec):
            STATE_LAYERS[model_type](tally, fields, spec)
            tally.norm(hidden)
            continue
        tally.linear(hidden, hidden)
        if model_type == "zamba":
            continue
        rank, width = fields.integer("adapter_rank"), fields.integer("intermediate_size")
        tally.linear(hidden, rank, split=Split.COPY)
        tally.linear(rank, 2 * width)
        if fields.flag("use_shared_attention_adapter"):
            heads = (spec.num_query_heads or spec.num_kv_heads) * spec.head_dim
            tally.linear(2 * hidden, rank, split=Split.COPY, copies=3)
            tally.linear(rank, heads, copies=3)


def add_shared_blocks(
    tally: Tally, fields: Fields, traits: Traits, specs: list[AttentionSpec], model_type: str
) -> None:
    """Add the blocks of attention that the layers of Zamba share."""
    hidden = fields.integer("hidden_size")
    if model_type == "zamba":  # transformers shares the block together with the embedding
        blocks = len(specs) if fields.given("tie_word_embeddings") is False else 1
    else:
        blocks = fields.integer("num_mem_blocks")
    for block in range(min(blocks, len(specs))):
        tally.module = f"model.shared_transformer.{block}"
        add_attention(tally, fields, traits, specs[0], inputs=2 * hidden)
        add_mlp(tally, fields, traits, fields.integer("intermediate_size"))
        tally.norm(3 * hidden)
