"""Structure of the layers of families with a sliding window, or chunks.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.experts import has_experts
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.counting.traits import Experts, Settled, Traits, biased_traits
from pagecore.models.parameters.structures.common_traits import (
    BIASED,
    EXPERTS_OF_QWEN,
    GEMMA_2,
    GEMMA_3,
    LLAMA,
    OLMO,
    QWEN_3,
    QWEN_3_MOE,
    SHARED_EXPERTS,
)

__all__ = ["SLIDING_WINDOWS"]

_QWEN_2 = Traits(qkv_bias=True, qk_norm="head", qk_norm_field="qk_norm", defaults={"qk_norm": False})
# A gate of the width of the queries, whatever a config says.
_GATED_BY_FEATURE = {"gate_kind": "features"}


def _voxtral(fields: Fields) -> Settled:
    """Each layer has a norm that is conditioned on the delay."""
    return {"activation": 2 * fields.integer("ada_rms_norm_t_cond_dim") * fields.integer("hidden_size")}


def _beam(fields: Fields) -> Settled:
    """The gate of attention has a bias for each head."""
    return {"activation": fields.integer("num_attention_heads")}


def _modern_bert(fields: Fields) -> Settled:
    """A norm of the embedding in place of that before the first attention; a layer before the output head."""
    hidden, norm_bias = fields.integer("hidden_size"), fields.flag("norm_bias")
    head = hidden * hidden + hidden * fields.flag("classifier_bias")
    return {"norm_bias": norm_bias, "last": head + hidden * (1 + norm_bias)}


def _muse(fields: Fields) -> Settled:
    """Each layer has a third norm, and gates of its two residuals."""
    return {"activation": 2 * fields.integer("hidden_size")}


def _muse_layer(tally: Tally, fields: Fields, _specs: Sequence[Any], layer: int) -> None:
    """Add the norms before and after the experts."""
    if has_experts(fields, _MUSE_EXPERTS, layer):
        tally.norm(fields.integer("moe_hidden_size"), copies=2)


_MUSE_EXPERTS = Experts("num_local_experts", inputs="moe_hidden_size")

SLIDING_WINDOWS: Mapping[str, Traits] = {
    "afmoe": biased_traits(
        norms=4,
        qk_norm="head",
        output_gate="gate_kind",
        experts=Experts(shared="num_shared_experts", rule="after", dense="num_dense_layers", score_biases=1),
        defaults={"gate_kind": "features"},
    ),
    "beam": biased_traits(
        norms=4,
        qk_norm="head",
        output_gate="gate_kind",
        experts=Experts(rule="after"),
        settle=_beam,
        defaults={**_GATED_BY_FEATURE, "first_k_dense_replace": 3},
    ),
    "cohere2": biased_traits(norms=1, is_tied=True),
    "cohere2_moe": biased_traits(
        norms=1,
        is_tied=True,
        experts=Experts(width="intermediate_size", shared="num_shared_experts", rule="after"),
        dense_width="prefix_dense_intermediate_size",
        defaults={"first_k_dense_replace": 0, "num_shared_experts": 0, "prefix_dense_intermediate_size": None},
    ),
    "cohere_compass_text": biased_traits(norms=1, is_tied=True),
    "cwm": LLAMA,
    "dots1": biased_traits(qk_norm="head", experts=SHARED_EXPERTS, defaults={"first_k_dense_replace": 0}),
    "exaone4": Traits(qk_norm="head"),
    "exaone_moe": Traits(
        qk_norm="head",
        experts=Experts(shared="num_shared_experts", rule="after"),
        defaults={"first_k_dense_replace": 1, "num_shared_experts": 1},
    ),
    "flint": biased_traits(
        qk_norm="head",
        experts=Experts(shared="shared_expert_intermediate_size", rule="step", unlisted=(0, 1)),
        defaults={"decoder_sparse_step": 1, "shared_expert_intermediate_size": 1024},
    ),
    "gemma2": GEMMA_2,
    "gemma3_text": GEMMA_3,
    "gpt_oss": biased_traits(
        experts=Experts("num_local_experts", "intermediate_size", has_biases=True), defaults=BIASED
    ),
    "granite_swa": biased_traits(mlp_bias="mlp_bias", is_tied=True),
    "granitemoe_swa": biased_traits(
        experts=Experts("num_local_experts", "intermediate_size", shared="shared_intermediate_size"),
        defaults={"shared_intermediate_size": 0},
    ),
    "kolibri1": Traits(norms=4, qk_norm="head", experts=Experts(shared="shared_expert_intermediate_size")),
    "llama4_text": biased_traits(
        experts=Experts("num_local_experts", "intermediate_size", shared="intermediate_size", rule="interleaved"),
        dense_width="intermediate_size_mlp",
    ),
    "mellum": biased_traits(qk_norm="head", experts=Experts()),
    "ministral": Traits(),
    "ministral3": Traits(),
    "mistral": Traits(),
    "mixtral": Traits(experts=Experts("num_local_experts", "intermediate_size")),
    "modernbert-decoder": Traits(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        is_tied=True,
        has_head_bias="decoder_bias",
        settle=_modern_bert,
        defaults={"norm_bias": False, "classifier_bias": False, "decoder_bias": True},
    ),
    "muse_glimmer_text": biased_traits(norms=4, output_gate="gate_kind", defaults=_GATED_BY_FEATURE),
    "muse_spark_text": biased_traits(
        norms=3,
        output_gate="gate_kind",
        experts=_MUSE_EXPERTS,
        settle=_muse,
        add_to_layer=_muse_layer,
        defaults={"gate_kind": "features"},
    ),
    "olmo3": OLMO,
    "phi3": Traits(),
    "phimoe": biased_traits(
        norm_bias=True, has_head_bias="lm_head_bias", experts=Experts("num_local_experts", "intermediate_size")
    ),
    "qwen2": _QWEN_2,
    "qwen2_5_omni_text": Traits(qkv_bias=True),
    "qwen2_5_vl_text": _QWEN_2,
    "qwen2_moe": Traits(qkv_bias="qkv_bias", experts=EXPERTS_OF_QWEN, defaults={"qkv_bias": True}),
    "qwen2_vl_text": _QWEN_2,
    "qwen3": QWEN_3,
    "qwen3_moe": QWEN_3_MOE,
    "qwen3_omni_moe_text": biased_traits(qk_norm="head", experts=Experts(rule="step")),
    "smollm3": biased_traits(mlp_bias="mlp_bias", is_tied=True),
    "starcoder2": Traits(
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        norm_bias=True,
        is_gated=False,
        is_tied=True,
        defaults={"use_bias": True},
    ),
    "vaultgemma": biased_traits(is_tied=True),
    "voxtral_realtime_text": Traits(settle=_voxtral, defaults={"ada_rms_norm_t_cond_dim": 32}),
}
