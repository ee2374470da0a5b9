"""Parameters of attention, MLPs and mixtures of experts.

Source: the modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pagecore.models.fields import Fields
from pagecore.models.parameters.tally import Kind, Split, Tally
from pagecore.models.parameters.traits import Experts, Traits
from pagecore.storage import AttentionSpec, LatentSpec

__all__ = ["add_attention", "add_experts", "add_latent_attention", "add_mlp", "expert_count", "has_experts", "is_true"]

# Names of the number of routed experts; transformers writes some of them under another name than the published file.
_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")


def is_true(fields: Fields, what: str | bool) -> bool:
    """Return a flag, or the value of the field that a name refers to."""
    return fields.flag(what) if isinstance(what, str) else what


def add_attention(
    tally: Tally,
    fields: Fields,
    traits: Traits,
    spec: AttentionSpec,
    inputs: int | None = None,
    *,
    has_keys: bool = True,
) -> None:
    """Add the projections and norms of a layer with attention; queries and keys read `inputs` features.

    A layer without keys reads those of another, and the values.
    """
    hidden, dim = fields.integer("hidden_size"), spec.head_dim
    heads = spec.num_query_heads or spec.num_kv_heads
    width, kv_width = heads * dim, spec.num_kv_heads * dim
    if traits.has_query_experts and traits.experts is not None:
        _add_expert_attention(tally, hidden, kv_width, expert_count(fields, traits.experts))
        return
    value_dim = spec.v_head_dim or dim
    has_bias, has_output_bias = is_true(fields, traits.qkv_bias), is_true(fields, traits.output_bias)
    if is_true(fields, traits.head_gate):
        tally.linear(hidden, heads, split=Split.ATTENTION, name="g_proj")
    inputs = inputs or hidden
    queries = width * (1 + traits.has_gated_queries)
    if traits.query_rank:
        rank = fields.integer(traits.query_rank)
        tally.linear(inputs, rank, split=Split.COPY, name="q_proj")
        tally.norm(rank)
        tally.linear(rank, queries, split=Split.ATTENTION, name="wq")
    else:
        tally.linear(inputs, queries, bias=has_bias, split=Split.ATTENTION, name="q_proj")
    joins_values = traits.shared_projection_field and fields.flag(traits.shared_projection_field)
    if has_keys:
        tally.linear(inputs, kv_width, bias=has_bias, split=Split.KEY_VALUE, name="k_proj")
    if has_keys and not (joins_values and spec.window is None):
        tally.linear(inputs, spec.num_kv_heads * value_dim, bias=has_bias, split=Split.KEY_VALUE, name="v_proj")
    tally.linear(heads * value_dim, hidden, bias=has_output_bias, split=Split.ATTENTION, name="o_proj")
    if traits.qk_norm and (not traits.qk_norm_field or fields.flag(traits.qk_norm_field)):
        kinds = 1 + has_keys
        tally.add(kinds * dim * (1 + traits.norm_bias) if traits.qk_norm == "head" else width + kv_width * has_keys)
    if traits.output_gate:
        per_head = fields.value(traits.output_gate) in (True, "per-head")
        tally.linear(hidden, heads if per_head else width, split=Split.ATTENTION, name="g_proj")
    if spec.sinks is not None:
        tally.add(heads)


def _add_expert_attention(tally: Tally, hidden: int, width: int, experts: int) -> None:
    """Add attention whose experts share the keys and values of `width` features; each has queries and an output."""
    tally.linear(hidden, width, split=Split.KEY_VALUE, copies=2, name="kv_proj")
    tally.linear(hidden, width, split=Split.ATTENTION, copies=experts, name="experts.input_linear")
    tally.linear(width, hidden, split=Split.ATTENTION, copies=experts, name="experts.output_linear")
    tally.linear(hidden, experts, split=Split.COPY, kind=Kind.OTHER)
    tally.add(hidden)


def add_latent_attention(
    tally: Tally, fields: Fields, traits: Traits, spec: LatentSpec, sizes: Fields, *, has_latents: bool = True
) -> None:
    """Add the projections and norms of a layer with latents, and of its indexer.

    `sizes` are the fields with the layer's sizes. A layer without latents reads those of another.
    """
    hidden, heads = fields.integer("hidden_size"), spec.num_query_heads or 1
    value_dim, has_bias = sizes.integer("v_head_dim"), is_true(fields, traits.qkv_bias)
    rotary = spec.rope_dim if sizes.value("qk_rope_head_dim") is None else sizes.integer("qk_rope_head_dim", min=0)
    # A layer without a rotary part has keys of the same width: all of it comes from the latents.
    key_dim = sizes.integer("qk_nope_head_dim") + rotary - spec.rope_dim
    queries = heads * (key_dim + spec.rope_dim)
    rank = None if sizes.value("q_lora_rank") is None else sizes.integer("q_lora_rank")
    if rank is None:
        tally.linear(hidden, queries, split=Split.ATTENTION, name="q_proj")
    else:
        tally.linear(hidden, rank, bias=has_bias, split=Split.COPY, name="q_a_proj")
        tally.norm(rank)
        if traits.has_gated_queries:
            tally.linear(2 * rank, queries + heads * value_dim, split=Split.ATTENTION, name="q_gate_proj")
        else:
            tally.linear(rank, queries, split=Split.ATTENTION, name="q_b_proj")
    if has_latents:
        rows = spec.latent_dim + spec.rope_dim
        tally.linear(hidden, rows, bias=has_bias, split=Split.COPY, name="kv_a_proj_with_mqa")
        tally.norm(spec.latent_dim)
    tally.linear(spec.latent_dim, heads * (key_dim + value_dim), split=Split.ATTENTION, name="kv_b_proj")
    output_bias = is_true(fields, traits.output_bias)
    tally.linear(heads * value_dim, hidden, bias=output_bias, split=Split.ATTENTION, name="o_proj")
    if is_true(fields, traits.head_gate):
        tally.linear(hidden, heads, split=Split.ATTENTION, name="g_proj")
    if spec.index_dim is not None and has_latents:
        _add_indexer(tally, fields, rank or hidden)


def _add_indexer(tally: Tally, fields: Fields, inputs: int) -> None:
    """Add an indexer whose queries read `inputs` features."""
    hidden = fields.integer("hidden_size")
    heads, dim = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    tally.linear(inputs, heads * dim, split=Split.COPY, name="indexer.wq_b")
    tally.linear(hidden, dim, split=Split.COPY, name="indexer.wk")
    # Checkpoints keep the weights of the heads as they are.
    tally.linear(hidden, heads, split=Split.COPY, kind=Kind.OTHER)
    tally.norm(dim, bias=True)


def add_mlp(tally: Tally, fields: Fields, traits: Traits, width: int, inside: str = "") -> None:
    """Add an MLP of `width` features, with a gate or without; `inside` is the name of its own module and a dot."""
    hidden, has_bias = fields.integer("hidden_size"), is_true(fields, traits.mlp_bias)
    first = "gate_proj" if traits.is_gated else "up_proj"
    tally.linear(hidden, width, bias=has_bias, copies=1 + traits.is_gated, name=f"{inside}{first}")
    tally.linear(width, hidden, bias=has_bias, name=f"{inside}down_proj")
    if traits.has_mlp_norm:
        tally.norm(width)


def expert_count(fields: Fields, experts: Experts) -> int:
    """Return the number of routed experts; 0 for null, which means dense layers."""
    names = [experts.count, *(name for name in _COUNTS if name != experts.count)]
    name = next((each for each in names if fields.given(each) is not None), experts.count)
    return fields.integer(name, min=0) if fields.value(name) is not None else 0


def has_experts(fields: Fields, experts: Experts | None, layer: int) -> bool:
    """Return True if a layer has a mixture of experts."""
    if experts is None or not expert_count(fields, experts):
        return False
    listed: Any = fields.given("mlp_layer_types")
    if isinstance(listed, list | tuple) and layer < len(listed):
        return bool(listed[layer] == "sparse")
    flags: Any = fields.given("moe_layer_freq")
    if isinstance(flags, list | tuple) and layer < len(flags):
        return bool(flags[layer])
    if experts.rule == "numbered" and fields.given("moe_layers_enum") is not None:
        return layer in _numbered_layers(fields)
    if experts.rule in ("after", "numbered"):
        return layer >= fields.integer(experts.dense, min=0)
    if experts.rule == "range":
        first, last = fields.integer("moe_layer_start_index", min=0), fields.integer("moe_layer_end_index", min=-1)
        # -1 is the last layer.
        return (
            (layer + 1) % fields.integer("moe_layer_interval") == 0 and first <= layer and (last < 0 or layer <= last)
        )
    if experts.rule == "step":
        without = _layer_numbers(fields, "mlp_only_layers") or ()
        return layer not in without and (layer + 1) % fields.integer("decoder_sparse_step") == 0
    if experts.rule == "period":
        return layer % fields.integer("expert_layer_period") == fields.integer("expert_layer_offset", min=0)
    if experts.rule == "interleaved":
        numbered = _layer_numbers(fields, "moe_layers")
        if numbered is not None:
            return layer in numbered
        return (layer + 1) % fields.integer("interleave_moe_layer_step") == 0
    return True


def _numbered_layers(fields: Fields) -> Collection[int]:
    """Return the layer numbers in `moe_layers_enum`, which is a list or a text such as "3,4,5"."""
    listed: Any = fields.given("moe_layers_enum")
    if not isinstance(listed, str):
        return _layer_numbers(fields, "moe_layers_enum") or ()
    parts = [part.strip() for part in listed.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        fields.refuse(f"{fields.describe('moe_layers_enum')}; it must list layer numbers, such as '3,4,5'")
    return {int(part) for part in parts}


def _layer_numbers(fields: Fields, name: str) -> Collection[int] | None:
    """Return a list of layer numbers; None if it is null or missing."""
    listed: Any = fields.given(name)
    if listed is None:
        return None
    if not isinstance(listed, list | tuple) or not all(type(layer) is int for layer in listed):
        fields.refuse(f"{fields.describe(name)}; it must be a list of layer numbers")
    return listed


def add_experts(tally: Tally, fields: Fields, traits: Traits, experts: Experts) -> None:
    """Add a router, the routed experts and the shared expert of a layer."""
    hidden, count = fields.integer("hidden_size"), expert_count(fields, experts)
    width = fields.integer(experts.width)
    if experts.add_router is not None:
        experts.add_router(tally, fields, count)
    else:
        tally.linear(hidden, count, bias=experts.has_biases, split=Split.COPY, kind=Kind.OTHER)
    first = "gate_proj" if traits.is_gated else "up_proj"
    inputs = _add_latent_projections(tally, fields, traits, experts) or hidden
    tally.linear(inputs, width, kind=Kind.EXPERT, copies=count * (1 + traits.is_gated), name=f"experts.0.{first}")
    tally.linear(width, inputs, kind=Kind.EXPERT, copies=count, name="experts.0.down_proj")
    if experts.has_biases:
        tally.add(count * (width * (1 + traits.is_gated) + hidden), Kind.OTHER, Split.TENSOR)
    if experts.has_score_bias:
        tally.add(count)
    if experts.has_output_bias:
        tally.add(hidden)
    if experts.gate_rank:
        rank = fields.integer(experts.gate_rank)
        tally.linear(hidden, rank, split=Split.COPY, kind=Kind.OTHER)
        tally.linear(rank, hidden, split=Split.COPY, kind=Kind.OTHER)
    if experts.has_norm:
        tally.norm(hidden)
    if experts.has_shared_gate:
        tally.linear(hidden, 1, split=Split.COPY, kind=Kind.OTHER)
    shared = _shared_width(fields, experts, width)
    if shared:
        add_mlp(tally, fields, traits, shared, "shared_experts.")


def _add_latent_projections(tally: Tally, fields: Fields, traits: Traits, experts: Experts) -> int:
    """Add the projections to and from the features of the experts; return their number, 0 for the hidden size."""
    if not experts.inputs or fields.given(experts.inputs) is None:
        return 0
    hidden, inputs = fields.integer("hidden_size"), fields.integer(experts.inputs)
    has_bias = is_true(fields, traits.mlp_bias)
    tally.linear(hidden, inputs, bias=has_bias, split=Split.COPY, name="fc1_latent_proj")
    tally.linear(inputs, hidden, bias=has_bias, split=Split.COPY, name="fc2_latent_proj")
    return inputs


def _shared_width(fields: Fields, experts: Experts, width: int) -> int:
    """Return the width of the shared expert; 0 without one."""
    if not experts.shared or fields.value(experts.shared) is None:
        return 0
    number = fields.integer(experts.shared, min=0)
    if experts.shared_width:
        return number * fields.integer(experts.shared_width)
    return number * width if experts.shared.startswith(("n_", "num_", "moe_num_")) else number
