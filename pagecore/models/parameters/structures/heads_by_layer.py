"""Structure of the layers of families whose layers have different heads.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.models.parameters.counting.traits import Experts, Traits, biased_traits
from pagecore.models.parameters.structures.common_traits import GEMMA_3

__all__ = ["HEADS_BY_LAYER"]

_GEMMA_4 = replace(GEMMA_3, shared_projection_field="attention_k_eq_v")

HEADS_BY_LAYER: Mapping[str, Traits] = {
    "gemma3n_text": replace(
        GEMMA_3,
        defaults={
            "intermediate_size": 16384,
            "vocab_size": 262400,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "altup_num_inputs": 4,
            "laurel_rank": 64,
            "enable_moe_block": False,
        },
    ),
    "gemma4_text": replace(
        _GEMMA_4,
        defaults={
            "enable_moe_block": False,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
        },
    ),
    "gemma4_unified_text": _GEMMA_4,
    "laguna": biased_traits(
        qk_norm="head",
        output_gate="gating",
        experts=Experts(shared="shared_expert_intermediate_size", rule="after", score_biases=1),
        defaults={"first_k_dense_replace": 1, "gating": True},
    ),
    "mimo_v2_flash": Traits(
        qkv_bias="attention_bias",
        experts=Experts("n_routed_experts", rule="after"),
        defaults={"first_k_dense_replace": 1},
    ),
    "mimo_v2": Traits(
        qkv_bias="attention_bias",
        experts=Experts("n_routed_experts", shared="n_shared_experts", rule="after"),
        defaults={"first_k_dense_replace": 1, "n_shared_experts": None},
    ),
    "step3p5": biased_traits(
        mlp_bias="mlp_bias",
        qk_norm="head",
        head_gate=True,
        experts=Experts("n_routed_experts", shared="share_expert_dim", rule="numbered"),
        defaults={"first_k_dense_replace": 3, "share_expert_dim": 1280},
    ),
}
