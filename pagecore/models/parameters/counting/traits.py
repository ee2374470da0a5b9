"""Structure of the layers of a family: the parts that decide its number of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["Experts", "Settled", "Traits", "biased_traits", "is_true"]

Settled = Mapping[str, Any]


@dataclass(frozen=True)
class Experts:
    """Layers with a mixture of experts.

    Parameters
    ----------
    count, width : str
        Fields with the number of routed experts and the width of each.
    shared : str
        Field with the width of the shared expert, or with the number of shared experts of `width`; "" without one.
    rule : str
        Rule for the layers that have experts: "every", "after" (all but the first `dense` layers), "step" (Qwen),
        "period" (Jamba), "interleaved" (Llama 4), "range" (Ernie) or "numbered" (Step, or "after").
    dense : str
        Field with the number of first layers without experts, for the rule "after".
    unlisted : tuple of int
        Layers without experts for the rule "step" if `mlp_only_layers` is null or missing.
    last : str
        Field with the number of the last layer with experts, for the rule "after"; "" if all later layers have them.
    has_shared_gate, has_biases, has_norm, has_output_bias : bool
        The shared expert has a gate; router and experts have biases; a norm follows the experts; the sum of the experts
        has a bias.
    score_biases : int
        Biases of the scores of experts that are parameters.
    inputs : str
        Field with the features that the routed experts read and write, between two projections; if it is null or "",
        those of the hidden size.
    gate_rank : str
        Field with the rank of a gate of the norm before the experts; "" without one.
    shared_width : str
        Field with the width of a shared expert if `shared` is their number; "" for that of the routed experts.
    add_router : callable, optional
        Adds a router that is not one matrix, from the number of experts.
    """

    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    shared: str = ""
    rule: str = "every"
    dense: str = "first_k_dense_replace"
    unlisted: tuple[int, ...] = ()
    last: str = ""
    has_shared_gate: bool = False
    has_biases: bool = False
    has_norm: bool = False
    has_output_bias: bool = False
    score_biases: int = 0
    inputs: str = ""
    gate_rank: str = ""
    shared_width: str = ""
    add_router: Callable[[Tally, Fields, int], None] | None = None


@dataclass(frozen=True)
class Traits:
    """Differences of a family from Llama.

    Parameters
    ----------
    qkv_bias, output_bias, mlp_bias : str or bool
        Field that is true if the projections have biases, or the fact itself.
    norms : int
        Norms of a layer over the hidden size; with 0 there is none after the last layer either.
    head_gate : str or bool
        Field that is true if attention has a gate of one number for each query head, or the fact itself.
    shared_projection_field : str
        Field that is true if layers without a window have no projection of values, but normalise that of keys.
    post_norms : str
        Field that is true if a layer has two more norms; "" without them.
    norm_bias : bool
        Norms have biases.
    qk_norm : {"", "head", "width", "heads"}
        Norms of queries and keys: none, of one head's dim, of all heads' width, or of a dim for each head.
    qk_norm_field : str
        Field that is true if the family has these norms; "" for always.
    is_gated : bool
        MLPs have a gate.
    has_gated_queries : bool
        Queries have a gate of their own width; in latent attention, of the width of the values.
    output_gate : str
        Field with the kind of gate on the outputs of attention: one value for each head if it is true or "per-head",
        else one for each feature; "" without a gate.
    query_rank : str
        Field with the width between the two projections of queries, where a norm is; "" for one projection.
    has_query_experts : bool
        Queries and outputs of attention are projected by experts.
    dense_width : str
        Field with the width of MLPs in layers without experts; if it is null, `intermediate_size`.
    has_mlp_norm : bool
        A norm precedes the last projection of an MLP.
    is_tied : bool
        Default of `tie_word_embeddings`.
    can_tie : bool
        The family reads `tie_word_embeddings`.
    has_head_bias : str or bool
        The output head has a bias.
    head_rows : str
        Field with the rows of the output head; "" for `vocab_size`.
    activation : int
        Parameters of the activation of a layer.
    has_positions : bool
        Positions are embedded.
    experts : Experts, optional
    defaults : mapping
        Defaults of fields that these parameters name.
    aliases : mapping
        The family's own names of fields.
    has_last_norm : bool
        A norm follows the last layer.
    position_rows : int
        Rows of the embedding of positions beyond `max_position_embeddings`.
    embedding_width : int
        Features of the embedding and the output head; 0 for the hidden size.
    width : int
        Width of a dense MLP; 0 for the field.
    first, last : int
        Further parameters of the first and the last stage.
    settle : callable, optional
        Returns those of these values that depend on the config's fields.
    add_attention : callable, optional
        Adds attention of a kind that no other family has, from the specs of a layer.
    add_to_layer : callable, optional
        Adds what a layer has besides, from its specs and its number.
    sizes_of_layer : callable, optional
        Returns the fields with the sizes of a layer with latents and a window, from its number.
    weights_of_layer : callable, optional
        Returns the number of the weights that a layer uses, for layers that share them.
    """

    qkv_bias: str | bool = False
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    norms: int = 2
    head_gate: str | bool = False
    shared_projection_field: str = ""
    post_norms: str = ""
    norm_bias: bool = False
    qk_norm: str = ""
    qk_norm_field: str = ""
    is_gated: bool = True
    has_gated_queries: bool = False
    output_gate: str = ""
    query_rank: str = ""
    has_query_experts: bool = False
    dense_width: str = "intermediate_size"
    has_mlp_norm: bool = False
    is_tied: bool = False
    can_tie: bool = True
    has_head_bias: str | bool = False
    head_rows: str = ""
    activation: int = 0
    has_positions: bool = False
    experts: Experts | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    has_last_norm: bool = True
    position_rows: int = 0
    embedding_width: int = 0
    width: int = 0
    first: int = 0
    last: int = 0
    settle: Callable[[Fields], Settled] | None = None
    add_attention: Callable[[Tally, Fields, Sequence[Any]], None] | None = None
    add_to_layer: Callable[[Tally, Fields, Sequence[Any], int], None] | None = None
    sizes_of_layer: Callable[[Fields, int], Fields] | None = None
    weights_of_layer: Callable[[Fields, int], int] | None = None


# Traits of a family whose field `attention_bias` adds biases to all projections of attention.
biased_traits = partial(Traits, qkv_bias="attention_bias", output_bias="attention_bias")


def is_true(fields: Fields, what: str | bool) -> bool:
    """Return a flag, or the value of the field that a name refers to."""
    return fields.flag(what) if isinstance(what, str) else what
