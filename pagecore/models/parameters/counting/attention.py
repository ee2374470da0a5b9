"""Parameters of attention, of keys and values or of latents.

Source: the modeling files of transformers 5.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.experts import expert_count
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.models.parameters.counting.traits import Traits, is_true
from pagecore.storage import AttentionSpec, LatentSpec

__all__ = ["add_attention", "add_latent_attention"]


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
