"""Structure of the layers of Inkling and Inkling 2, next to their attention and experts.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.layers.loops import layers_of_loop, loop_number, passes_of_inkling
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.models.parameters.counting.traits import Experts, Settled, Traits
from pagecore.storage import AttentionSpec, StateSpec

__all__ = ["INKLING"]


def _first_norm(fields: Fields) -> Settled:
    """A norm follows the embedding."""
    return {"first": fields.integer("hidden_size")}


def _router(tally: Tally, fields: Fields, experts: int) -> None:
    """Add a router that scores the shared experts, too, and its scale."""
    count = experts + fields.integer("n_shared_experts", min=0)
    tally.linear(fields.integer("hidden_size"), count, split=Split.COPY, kind=Kind.OTHER)
    tally.add(1)


def _add_positions(tally: Tally, fields: Fields, spec: AttentionSpec) -> int:
    """Add what computes the biases of positions from a token and the distance; return the features for all heads."""
    features, heads = fields.integer("d_rel"), spec.num_query_heads or spec.num_kv_heads
    extent = fields.integer("sliding_window" if spec.window else "rel_extent")
    tally.linear(fields.integer("hidden_size"), heads * features, split=Split.ATTENTION, name="r_proj")
    tally.add(features * extent)
    return heads * features


def _add_to_layer(tally: Tally, fields: Fields, specs: Sequence[Any], layer: int) -> None:
    """Add the biases of positions and the short convolutions; a dense MLP has a scale."""
    attention, state = specs
    _add_positions(tally, fields, attention)
    kernel = fields.integer("conv_kernel_size")
    tally.add(kernel * sum(plane.shape[0] for plane in state.planes))
    listed = fields.given("mlp_layer_types")
    tally.add(1 if isinstance(listed, list | tuple) and listed[layer : layer + 1] == ["dense"] else 0)


def _add_to_layer_of_2(tally: Tally, fields: Fields, specs: Sequence[Any], layer: int) -> None:
    """Add the biases of positions, gate, sinks, limits and convolutions, and the queries of earlier blocks of layers.

    A layer without a window has three queries, three norms before its attention, and convolutions whose weights depend
    on the token.
    """
    attention: AttentionSpec = specs[0]
    state: StateSpec = specs[1]
    hidden, kernel = fields.integer("hidden_size"), fields.integer("conv_kernel_size")
    heads = attention.num_query_heads or attention.num_kv_heads
    width = heads * attention.head_dim
    tally.linear(hidden, width, split=Split.ATTENTION, name="gate_proj")
    tally.linear(hidden, heads, split=Split.ATTENTION, name="sink_proj")
    tally.add(width + _add_positions(tally, fields, attention))
    tally.add(kernel * sum(plane.shape[0] for plane in state.planes))
    tally.add(hidden)  # the query of the MLP
    if attention.window:
        tally.add(hidden * (layer > 0))
        return
    tally.add(hidden * (2 + 3 * (layer > 0)))
    tally.linear(hidden, kernel * attention.num_kv_heads, split=Split.KEY_VALUE, copies=2, name="weight_proj")


def _ends_of_2(fields: Fields) -> Settled:
    """A norm follows the embedding, and a query chooses among the blocks of layers after the last one."""
    return {"first": fields.integer("hidden_size"), "last": fields.integer("hidden_size")}


def _add_to_layer_of_loop(tally: Tally, fields: Fields, specs: Sequence[Any], layer: int) -> None:
    """Add what a layer of Inkling 2 has, and in the loop four gates of messages from the pass before."""
    _add_to_layer_of_2(tally, fields, specs, layer)
    if passes_of_inkling(fields)[layer] in layers_of_loop(fields):
        hidden, rank = fields.integer("hidden_size"), loop_number(fields, "gate_rank")
        tally.linear(2 * hidden, rank, split=Split.COPY, copies=4, name="message_gate.down_proj")
        tally.linear(rank, hidden, split=Split.COPY, copies=8, name="message_gate.up_proj")


def _ends_of_loop(fields: Fields) -> Settled:
    """Each layer of the loop has queries of four messages from the pass before."""
    ends = _ends_of_2(fields)
    return {**ends, "last": fields.integer("hidden_size") * (1 + 4 * len(layers_of_loop(fields)))}


_INKLING = Traits(
    qk_norm="head",
    experts=Experts("n_routed_experts", shared="n_shared_experts", add_router=_router),
    add_to_layer=_add_to_layer,
    settle=_first_norm,
    defaults={"d_rel": 16, "rel_extent": 1024, "n_shared_experts": 2},
)
_INKLING_2 = Traits(
    experts=Experts("n_routed_experts"),
    add_to_layer=_add_to_layer_of_2,
    settle=_ends_of_2,
    defaults={"d_rel": 16, "rel_extent": 1024},
)
INKLING: Mapping[str, Traits] = {
    "inkling_model": _INKLING,
    "inkling_text": _INKLING,
    "inkling2_text": _INKLING_2,
    "inkling2_loop_text": replace(
        _INKLING_2,
        add_to_layer=_add_to_layer_of_loop,
        settle=_ends_of_loop,
        weights_of_layer=lambda fields, layer: passes_of_inkling(fields)[layer],
    ),
}
