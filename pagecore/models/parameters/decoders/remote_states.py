"""Parameters of layers with recurrent states, of families whose code is published together with their weights.

Source: as for `pagecore.models.families.remote.hybrids`.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.storage import StateSpec

__all__ = ["add_delta_rule_of_jet", "add_lightning_of_ling", "add_lightning_of_minicpm", "add_mamba_of_plamo"]


def add_delta_rule_of_jet(tally: Tally, fields: Fields, spec: StateSpec) -> None:
    """Add a gated delta rule whose convolution has a kernel for each token, which two projections compute."""
    hidden, (channels, kept) = fields.integer("hidden_size"), spec.planes[0].shape
    heads, value_dim, key_dim = spec.planes[1].shape
    rank = channels // fields.integer("efficient_attention_config.jet.dconv_generator_reduction")
    tally.linear(hidden, 2 * heads * key_dim + 2 * channels + 2 * heads, name="qkvabz_proj")
    tally.linear(hidden, rank, name="dynamic_conv1d.kernel_generator.w1")
    tally.linear(rank, channels * (kept + 1), bias=True, name="dynamic_conv1d.kernel_generator.w2")
    tally.add(2 * heads, Kind.OTHER, Split.TENSOR)
    tally.norm(value_dim)
    tally.linear(channels, hidden, name="o_proj")


def add_lightning_of_ling(tally: Tally, fields: Fields, spec: StateSpec) -> None:
    """Add lightning attention with a gate on its outputs."""
    hidden, (heads, dim, _) = fields.integer("hidden_size"), spec.planes[0].shape
    width = heads * dim
    tally.linear(hidden, 3 * width, bias=fields.flag("use_qkv_bias"), name="query_key_value")
    tally.linear(hidden, width, name="g_proj")
    tally.linear(width, hidden, bias=fields.flag("use_bias"), name="dense")
    tally.add(width, Kind.OTHER, Split.TENSOR)
    if fields.flag("use_qk_norm"):
        tally.norm(dim, copies=2)


def add_lightning_of_minicpm(tally: Tally, fields: Fields, spec: StateSpec) -> None:
    """Add lightning attention whose heads may share keys, with a norm and a gate on its outputs.

    Source: the layer of vLLM.
    """
    hidden, dim = fields.integer("hidden_size"), spec.planes[0].shape[-1]
    heads, kv_heads = (
        fields.integer(of_attention if fields.given(own) is None else own)
        for own, of_attention in (("lightning_nh", "num_attention_heads"), ("lightning_nkv", "num_key_value_heads"))
    )
    width = heads * dim
    tally.linear(hidden, width, copies=1 + fields.flag("use_output_gate"), name="q_proj")
    tally.linear(hidden, kv_heads * dim, copies=2, name="k_proj")
    tally.linear(width, hidden, name="o_proj")
    if fields.flag("use_output_norm"):
        tally.add(width, Kind.OTHER, Split.TENSOR)
    if fields.flag("qk_norm"):
        tally.norm(dim, copies=2)


def add_mamba_of_plamo(tally: Tally, fields: Fields, spec: StateSpec) -> None:
    """Add a Mamba-2 whose B, C and time step come from the convolved channels."""
    hidden, (channels, kept) = fields.integer("hidden_size"), spec.planes[0].shape
    heads, _, state = spec.planes[1].shape
    rank = max(64, hidden // 16)
    tally.linear(hidden, 2 * channels, name="in_proj")
    tally.add(channels * (kept + 1), Kind.OTHER, Split.TENSOR)
    tally.linear(channels, rank + 2 * state, name="bcdt_proj")
    tally.linear(rank, heads, name="dt_proj")
    tally.add(3 * heads, Kind.OTHER, Split.TENSOR)
    tally.norm(rank + 2 * state)
    tally.linear(channels, hidden, name="out_proj")
