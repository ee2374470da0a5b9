"""Structure of the layers of families in which some layers keep states, and some attend.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.layers.states.remote import is_lightning
from pagecore.models.parameters.counting.ngrams import NGRAM_DEFAULTS, add_hashed_ngrams
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.models.parameters.counting.traits import Experts, Settled, Traits, biased_traits
from pagecore.models.parameters.structures.common_traits import (
    EXPERTS_OF_QWEN,
    LLAMA,
    OLMO,
    SHARED_EXPERTS,
    add_hyper_connections,
    half_as_wide,
)
from pagecore.storage import AttentionSpec, LatentSpec, RowSpec

__all__ = ["HYBRIDS"]

_QWEN_NEXT = biased_traits(qk_norm="head", has_gated_queries=True)
_QWEN_NEXT_MOE = biased_traits(qk_norm="head", has_gated_queries=True, experts=EXPERTS_OF_QWEN)
_BAILING_EXPERTS = Experts(shared="num_shared_experts", rule="after")
_LIGHTNING = Traits(experts=Experts("num_local_experts", "intermediate_size"))


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


def _kimi(fields: Fields) -> Settled:
    """After the last layer, Kimi K3 has a query of the blocks of layers and its norm."""
    return {"last": 0 if fields.value("attn_res_block_size") is None else 2 * fields.integer("hidden_size")}


def _kimi_layer(tally: Tally, fields: Fields, specs: Sequence[Any], layer: int) -> None:
    """Add what Kimi K3 has: gates of latent attention, queries of blocks of layers, a norm of narrower experts."""
    if fields.flag("mla_use_output_gate") and isinstance(specs[0], LatentSpec):
        width = fields.integer("num_attention_heads") * fields.integer("v_head_dim")
        tally.linear(fields.integer("hidden_size"), width, split=Split.ATTENTION, name="g_proj")
    if fields.value("attn_res_block_size") is not None:
        tally.add(4 * fields.integer("hidden_size"))
    if fields.flag("latent_moe_use_norm") and layer >= fields.integer("first_k_dense_replace", min=0):
        tally.norm(fields.integer("routed_expert_hidden_size"))


def _glm_layer(tally: Tally, fields: Fields, specs: Sequence[Any], _layer: int) -> None:
    """Add the connections of the streams, and what averages the keys of an indexer."""
    streams = fields.integer("hc_mult")
    add_hyper_connections(tally, fields, (2 + streams) * streams, 3)
    if any(isinstance(spec, LatentSpec) and spec.index_dim is not None for spec in specs):
        dim = fields.integer("index_head_dim")
        tally.add(dim * (fields.integer("index_kpool") + fields.integer("hidden_size")))


def _qwen_4_layer(tally: Tally, fields: Fields, specs: Sequence[Any], layer: int) -> None:
    """Add the connections of the streams, which have norms and low rank, and what only some layers have."""
    streams, rank = fields.integer("hc_count"), fields.integer("hc_lowrank")
    width = streams * fields.integer("hidden_size")
    tally.add(2 * width * (1 + 2 * rank + streams))
    if any(isinstance(spec, RowSpec) for spec in specs):
        dim = fields.integer("indexer_head_dim")
        heads = fields.integer("indexer_n_heads") + fields.integer("indexer_kv_heads")
        tally.linear(fields.integer("hidden_size"), heads * dim, split=Split.COPY, name="indexer.index_qk_proj")
        tally.norm(dim, copies=2)
    add_hashed_ngrams(tally, fields, layer)


def _qwen_4(fields: Fields) -> Settled:
    """Return the number of parameters that join the streams in the last stage."""
    width = fields.integer("hc_count") * fields.integer("hidden_size")
    return {"last": width * (1 + 2 * fields.integer("hc_lowrank"))}


def _ling(fields: Fields) -> Settled:
    """Attention has gates in Ling 3, whose layers with states have no lightning attention."""
    return {"head_gate": not is_lightning(fields)}


def _solar(fields: Fields) -> Settled:
    """Layers that attend may have a gate for each feature, with biases of its own."""
    return {"output_gate": "gate_kind" if fields.flag("use_gqa_gate") else ""}


def _solar_layer(tally: Tally, fields: Fields, specs: Sequence[Any], _layer: int) -> None:
    for spec in specs:
        if isinstance(spec, AttentionSpec) and fields.flag("use_gqa_gate") and fields.flag("use_gqa_gate_bias"):
            tally.add((spec.num_query_heads or spec.num_kv_heads) * spec.head_dim)


def _minicpm(fields: Fields) -> Settled:
    """Layers that attend may have a gate of the width of the queries."""
    return {"has_gated_queries": fields.flag("attn_use_output_gate")}


HYBRIDS: Mapping[str, Traits] = {
    "qwen3_next": _QWEN_NEXT_MOE,
    "qwen3_5_text": _QWEN_NEXT,
    "qwen3_5_moe_text": _QWEN_NEXT_MOE,
    **dict.fromkeys(
        ("qwen4_exp_text", "qwen3_8_flash_next_text"),
        replace(
            _QWEN_NEXT_MOE,
            norms=0,
            add_to_layer=_qwen_4_layer,
            settle=_qwen_4,
            defaults={"hc_count": 4, "hc_lowrank": 320, "indexer_kv_heads": 1, **NGRAM_DEFAULTS},
        ),
    ),
    "jet_nemotron": Traits(qkv_bias=True),
    "kimi_linear": Traits(
        can_tie=False,
        experts=Experts(shared="num_shared_experts", rule="after", inputs="routed_expert_hidden_size"),
        settle=_kimi,
        add_to_layer=_kimi_layer,
        defaults={"attn_res_block_size": None, "latent_moe_use_norm": False, "mla_use_output_gate": False},
    ),
    "solar_open2": Traits(
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_field="use_qk_norm",
        experts=SHARED_EXPERTS,
        settle=_solar,
        add_to_layer=_solar_layer,
        defaults={
            "gate_kind": "features",
            "use_gqa_gate": True,
            "use_gqa_gate_bias": False,
            "kda_use_full_proj": False,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
        },
    ),
    "nemotron_h": Traits(
        mlp_bias="mlp_bias",
        norms=1,
        can_tie=False,
        is_gated=False,
        experts=Experts("n_routed_experts", shared="moe_shared_expert_intermediate_size", inputs="moe_latent_size"),
    ),
    "granitemoehybrid": biased_traits(
        experts=Experts("num_local_experts", "intermediate_size", shared="shared_intermediate_size")
    ),
    "falcon_h1": LLAMA,
    "jamba": Traits(experts=Experts(width="intermediate_size", rule="period")),
    "bamba": LLAMA,
    "zamba2": Traits(is_tied=True, mlp_bias="add_bias_linear"),
    "zamba": Traits(
        is_tied=True, defaults={"mamba_dt_rank": "auto", "mamba_conv_bias": True, "mamba_proj_bias": False}
    ),
    "lfm2": Traits(is_tied=True, qk_norm="head"),
    "lfm2_moe": Traits(is_tied=True, qk_norm="head", experts=Experts(rule="after", dense="num_dense_layers")),
    "lara_mini": biased_traits(qk_norm="head", is_tied=True, experts=Experts(shared="shared_expert_intermediate_size")),
    "lfm3": biased_traits(
        qk_norm="head",
        is_tied=True,
        post_norms="use_sandwich_norm",
        head_gate="use_attention_gate",
        defaults={"use_sandwich_norm": True, "use_attention_gate": True},
    ),
    "olmo_hybrid": OLMO,
    "glm5_next_text": biased_traits(
        experts=SHARED_EXPERTS,
        add_to_layer=_glm_layer,
        defaults={"first_k_dense_replace": 3, "hc_mult": 4, "index_kpool": 16, "index_n_heads": 32},
    ),
    "zaya": biased_traits(
        is_tied=True,
        has_head_bias="lm_head_bias",
        experts=Experts(add_router=_zaya_router),
        add_to_layer=_zaya_layer,
        settle=_zaya,
        defaults={"router_hidden_size": 256},
    ),
    "minicpm_sala": biased_traits(
        settle=_minicpm,
        defaults={
            **dict.fromkeys(("lightning_nh", "lightning_nkv")),
            **dict.fromkeys(("attn_use_output_gate", "qk_norm", "use_output_gate", "use_output_norm"), True),
        },
    ),
    "minimax": _LIGHTNING,
    "minimax_m1": _LIGHTNING,
    "minimax_text_01": _LIGHTNING,
    "bailing_hybrid": biased_traits(
        settle=_ling,
        can_tie=False,
        experts=_BAILING_EXPERTS,
        defaults={"first_k_dense_replace": 2, "num_shared_experts": 1, "q_lora_rank": None},
    ),
    "recurrent_gemma": Traits(
        qkv_bias="attention_bias", output_bias=True, mlp_bias=True, is_tied=True, settle=half_as_wide
    ),
}
