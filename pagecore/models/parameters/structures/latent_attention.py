"""Structure of the layers of families with latent attention.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.layers.latents.with_windows import sizes_of_dots
from pagecore.models.parameters.counting.compressed_attention import (
    add_compressed_attention,
    add_ngrams,
    add_projections,
    add_sources,
)
from pagecore.models.parameters.counting.tally import Split, Tally
from pagecore.models.parameters.counting.traits import Experts, Settled, Traits, biased_traits
from pagecore.models.parameters.structures.common_traits import SHARED_EXPERTS, add_hyper_connections

__all__ = ["LATENT_ATTENTION"]

_DEEPSEEK = Traits(experts=SHARED_EXPERTS, qkv_bias="attention_bias", output_bias="attention_bias")


def _ax_k2(fields: Fields) -> Settled:
    """The norm before attention has a gate of low rank."""
    return {"activation": 2 * fields.integer("hidden_size") * fields.integer("gated_norm_rank")}


def _hy_layer(tally: Tally, fields: Fields, _specs: Sequence[Any], _layer: int) -> None:
    """Add the connections of the streams, the sinks, and a gate of the outputs of attention."""
    add_hyper_connections(tally, fields, 2 * fields.integer("hc_mult"), 2)
    heads = fields.integer("num_attention_heads")
    tally.add(heads)
    width = heads * fields.integer("v_head_dim")
    tally.linear(fields.integer("hidden_size"), width, split=Split.ATTENTION, name="gate_proj")


def _streams_of_deepseek(tally: Tally, fields: Fields, _specs: Sequence[Any], _layer: int) -> None:
    """Add the connections of the streams."""
    streams = fields.integer("hc_mult")
    add_hyper_connections(tally, fields, (2 + streams) * streams, 3)


def _deepseek_41_layer(tally: Tally, fields: Fields, _specs: Sequence[Any], layer: int) -> None:
    """Add what only some layers have, and the connections of the streams."""
    add_sources(tally, fields, layer)
    tally.module = f"model.layers.{layer}"
    add_ngrams(tally, fields, layer)
    _streams_of_deepseek(tally, fields, _specs, layer)


def _hy(fields: Fields) -> Settled:
    """Return the number of parameters that join the streams in the last stage."""
    streams = fields.integer("hc_mult")
    return {"last": streams * (streams * fields.integer("hidden_size") + 1) + 1}


def _mistral_layer(tally: Tally, fields: Fields, specs: Sequence[Any], _layer: int) -> None:
    """Add the scale and the bias of each head's scores, of attention and of the indexer, and a norm of its queries."""
    tally.add(2 * fields.integer("num_attention_heads"))
    if len(specs) == 1 and specs[0].index_dim is not None:  # a layer that reads the latents of another has two specs
        tally.add(2 * fields.integer("index_n_heads") + 2 * fields.integer("hidden_size"))


def _scales_of_positions(fields: Fields) -> Settled:
    """Each frequency of the rotary embedding has a learned scale, once for all layers."""
    return {"first": fields.integer("qk_rope_head_dim", min=0) // 2}


def _sarvam(fields: Fields) -> Settled:
    """The shared expert is as wide as a routed one unless it has a width of its own."""
    name = "moe_shared_expert_intermediate_size"
    has_own = fields.given(name) is not None
    return {"experts": Experts(shared="num_shared_experts", rule="after", shared_width=name if has_own else "")}


def _dots_layer(tally: Tally, _fields: Fields, specs: Sequence[Any], _layer: int) -> None:
    """Add a norm of the rotary part of the keys."""
    tally.norm(specs[0].rope_dim)


def _pangu(fields: Fields) -> Settled:
    """Norms may follow attention and MLP, too."""
    return {"norms": 2 + 2 * fields.flag("sandwich_norm")}


_HY_4 = biased_traits(
    experts=SHARED_EXPERTS, add_to_layer=_hy_layer, settle=_hy, defaults={"first_k_dense_replace": 1, "hc_mult": 4}
)
LATENT_ATTENTION: Mapping[str, Traits] = {
    "axk1": biased_traits(experts=Experts("n_routed_experts", shared="n_shared_experts", rule="after", has_norm=True)),
    "axk2": biased_traits(
        has_gated_queries=True,
        experts=Experts("n_routed_experts", shared="n_shared_experts", rule="after", gate_rank="gated_norm_rank"),
        settle=_ax_k2,
        defaults={"gated_norm_rank": 16, "first_k_dense_replace": 1},
    ),
    "deepseek_v2": replace(_DEEPSEEK, mlp_bias="mlp_bias"),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": Traits(
        mlp_bias="mlp_bias",
        experts=Experts("n_routed_experts", shared="n_shared_experts"),
        add_attention=add_compressed_attention,
        add_to_layer=_streams_of_deepseek,
        settle=_hy,
        defaults={"hc_mult": 4, "n_shared_experts": 1, "o_groups": 8, "index_n_heads": 64},
    ),
    "deepseek_v41_text": Traits(
        # A bias of the scores for text, and one for images.
        experts=Experts("n_routed_experts", shared="n_shared_experts", score_biases=2),
        add_attention=add_projections,
        add_to_layer=_deepseek_41_layer,
        defaults={"hc_mult": 4, "n_shared_experts": 1, "o_groups": 8, "index_n_heads": 64, "engram_layer_ids": None},
    ),
    "dots3_note_text": biased_traits(
        head_gate=True,
        experts=replace(SHARED_EXPERTS, shared_width="shared_experts_intermediate_size"),
        add_to_layer=_dots_layer,
        sizes_of_layer=sizes_of_dots,
        defaults={"first_k_dense_replace": 1, "shared_experts_intermediate_size": 1536, "index_n_heads": 64},
        aliases={"shared_experts_intermediate_size": "moe_shared_expert_intermediate_size"},
    ),
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "hy_v4": _HY_4,
    "hy_v4_vl_text": _HY_4,
    "kimi_k2": _DEEPSEEK,
    "longcat_flash": biased_traits(aliases={"intermediate_size": "ffn_hidden_size"}, defaults={"zero_expert_num": 256}),
    "minicpm3": biased_traits(mlp_bias="mlp_bias", is_tied=True),
    "mistral4": _DEEPSEEK,
    "mistral_large4_text": biased_traits(
        experts=SHARED_EXPERTS,
        add_to_layer=_mistral_layer,
        settle=_scales_of_positions,
        defaults={"first_k_dense_replace": 1, "q_lora_rank": None},
    ),
    "pangu_ultra_moe": biased_traits(
        experts=Experts("num_routed_experts", shared="num_shared_experts", rule="after", dense="num_dense_layers"),
        settle=_pangu,
        defaults={"sandwich_norm": False},
    ),
    "sarvam_mla": Traits(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        settle=_sarvam,
        defaults={"first_k_dense_replace": 1, "num_shared_experts": 1, "q_lora_rank": None},
        aliases={"num_shared_experts": "n_shared_experts"},  # in files that transformers has written
    ),
    "youtu": biased_traits(is_tied=True),
}
