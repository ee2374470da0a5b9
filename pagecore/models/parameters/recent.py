"""Structure of the layers of recent decoders whose attention or router is of their own.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagecore.models.fields import Fields
from pagecore.models.latent_windows import sizes_of_dots
from pagecore.models.parameters.blocks import has_experts
from pagecore.models.parameters.tally import Kind, Split, Tally
from pagecore.models.parameters.traits import Experts, Settled, Traits, biased_traits
from pagecore.storage import LatentSpec

__all__ = ["RECENT_TRAITS"]

_SHARED = Experts("n_routed_experts", shared="n_shared_experts", rule="after")


def _zaya_layer(tally: Tally, fields: Fields, _specs: Sequence[Any], layer: int) -> None:
    """Add the convolutions of queries and keys, and scales and biases of keys, residuals and router."""
    dim, keys = fields.integer("head_dim"), fields.integer("num_key_value_heads")
    channels = dim * (fields.integer("num_attention_heads") + keys)
    # One convolution is over each channel, the other one over the channels of a head.
    tally.add(channels * (fields.integer("cca_time0") + dim * fields.integer("cca_time1") + 2), split=Split.TENSOR)
    tally.add(8 * fields.integer("hidden_size") + fields.integer("num_key_value_heads"))
    if layer:
        tally.add(fields.integer("router_hidden_size"))


def _zaya_router(tally: Tally, fields: Fields, experts: int) -> None:
    """Add a router of three layers of low rank, with a row for tokens that skip the experts."""
    hidden, rank = fields.integer("hidden_size"), fields.integer("router_hidden_size")
    tally.norm(rank)
    tally.add(3 * rank)  # biases
    tally.linear(hidden, rank, split=Split.COPY, kind=Kind.OTHER)
    tally.linear(rank, rank, split=Split.COPY, kind=Kind.OTHER, copies=2)
    tally.linear(rank, experts + 1, split=Split.COPY, kind=Kind.OTHER)


def _zaya(fields: Fields) -> Settled:
    """Return the number of parameters in the scale and the bias of the embedding."""
    return {"first": 2 * fields.integer("hidden_size")}


def _add_hyper_connections(tally: Tally, fields: Fields, rows: int, scales: int) -> None:
    """Add the weights that mix the streams before and after attention and MLP."""
    streams = fields.integer("hc_mult") * fields.integer("hidden_size")
    tally.add(2 * (rows * (streams + 1) + scales))


def _glm_layer(tally: Tally, fields: Fields, specs: Sequence[Any], _layer: int) -> None:
    """Add the connections of the streams, and what averages the keys of an indexer."""
    streams = fields.integer("hc_mult")
    _add_hyper_connections(tally, fields, (2 + streams) * streams, 3)
    if any(isinstance(spec, LatentSpec) and spec.index_dim is not None for spec in specs):
        dim = fields.integer("index_head_dim")
        tally.add(dim * (fields.integer("index_kpool") + fields.integer("hidden_size")))


def _hy_layer(tally: Tally, fields: Fields, _specs: Sequence[Any], _layer: int) -> None:
    """Add the connections of the streams, the sinks, and a gate of the outputs of attention."""
    _add_hyper_connections(tally, fields, 2 * fields.integer("hc_mult"), 2)
    heads = fields.integer("num_attention_heads")
    tally.add(heads)
    width = heads * fields.integer("v_head_dim")
    tally.linear(fields.integer("hidden_size"), width, split=Split.ATTENTION, name="gate_proj")


def _hy(fields: Fields) -> Settled:
    """Return the number of parameters that join the streams in the last stage."""
    streams = fields.integer("hc_mult")
    return {"last": streams * (streams * fields.integer("hidden_size") + 1) + 1}


def _mistral_layer(tally: Tally, fields: Fields, specs: Sequence[Any], _layer: int) -> None:
    """Add the scale and the bias of each head's scores, of attention and of the indexer, and a norm of its queries."""
    tally.add(2 * fields.integer("num_attention_heads"))
    if len(specs) == 1 and specs[0].index_dim is not None:  # a layer that reads the latents of another has two specs
        tally.add(2 * fields.integer("index_n_heads") + 2 * fields.integer("hidden_size"))


def _muse(fields: Fields) -> Settled:
    """Each layer has a third norm, and gates of its two residuals."""
    return {"activation": 2 * fields.integer("hidden_size")}


def _muse_layer(tally: Tally, fields: Fields, _specs: Sequence[Any], layer: int) -> None:
    """Add the norms before and after the experts."""
    if has_experts(fields, _MUSE_EXPERTS, layer):
        tally.norm(fields.integer("moe_hidden_size"), copies=2)


def _hrm(fields: Fields) -> Settled:
    """A vector is the first state of the lower stack."""
    return {"first": fields.integer("hidden_size")}


def _weights_in_stacks(fields: Fields, layer: int) -> int:
    """Return the layer of two stacks, the lower one first, whose weights are used by a layer of a pass."""
    listed = "num_layers_per_stack" if fields.given("num_layers_per_stack") is not None else "num_hidden_layers"
    size, lower = fields.integer(listed), fields.integer("L_cycles")
    is_upper = layer // size % (lower + 1) == lower
    return layer % size + size * is_upper


def _dots_layer(tally: Tally, _fields: Fields, specs: Sequence[Any], _layer: int) -> None:
    """Add a norm of the rotary part of the keys."""
    tally.norm(specs[0].rope_dim)


_MUSE_EXPERTS = Experts("num_local_experts", inputs="moe_hidden_size")
RECENT_TRAITS: Mapping[str, Traits] = {
    "dots3_note_text": biased_traits(
        head_gate=True,
        experts=replace(_SHARED, shared_width="shared_experts_intermediate_size"),
        add_to_layer=_dots_layer,
        sizes_of_layer=sizes_of_dots,
        defaults={"first_k_dense_replace": 1, "shared_experts_intermediate_size": 1536, "index_n_heads": 64},
        aliases={"shared_experts_intermediate_size": "moe_shared_expert_intermediate_size"},
    ),
    "glm5_next_text": biased_traits(
        experts=_SHARED,
        add_to_layer=_glm_layer,
        defaults={"first_k_dense_replace": 3, "hc_mult": 4, "index_kpool": 16, "index_n_heads": 32},
    ),
    "hy_v4": biased_traits(
        experts=_SHARED, add_to_layer=_hy_layer, settle=_hy, defaults={"first_k_dense_replace": 1, "hc_mult": 4}
    ),
    "hrm_text": biased_traits(
        norms=0,
        mlp_bias="mlp_bias",
        output_gate="gate_kind",
        settle=_hrm,
        weights_of_layer=_weights_in_stacks,
        defaults={"gate_kind": "features"},
    ),
    "mistral_large4_text": biased_traits(
        experts=_SHARED, add_to_layer=_mistral_layer, defaults={"first_k_dense_replace": 1, "q_lora_rank": None}
    ),
    "muse_spark_text": biased_traits(
        norms=3,
        output_gate="gate_kind",
        experts=_MUSE_EXPERTS,
        settle=_muse,
        add_to_layer=_muse_layer,
        defaults={"gate_kind": "features"},
    ),
    "step3p5": biased_traits(
        mlp_bias="mlp_bias",
        qk_norm="head",
        head_gate=True,
        experts=Experts("n_routed_experts", shared="share_expert_dim", rule="numbered"),
        defaults={"first_k_dense_replace": 3, "share_expert_dim": 1280},
    ),
    "zaya": biased_traits(
        is_tied=True,
        experts=Experts(add_router=_zaya_router),
        add_to_layer=_zaya_layer,
        settle=_zaya,
        defaults={"router_hidden_size": 256},
    ),
}
