"""Structures that several families share.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.counting.traits import Experts, Settled, biased_traits

__all__ = [
    "BIASED",
    "EXPERTS_OF_QWEN",
    "GEMMA_2",
    "GEMMA_3",
    "LLAMA",
    "OLMO",
    "QWEN_3",
    "QWEN_3_MOE",
    "SHARED_EXPERTS",
    "add_hyper_connections",
    "half_as_wide",
]

BIASED: Mapping[str, object] = {"attention_bias": True}
LLAMA = biased_traits(mlp_bias="mlp_bias")
QWEN_3 = biased_traits(qk_norm="head")
QWEN_3_MOE = biased_traits(qk_norm="head", experts=Experts(rule="step"))
GEMMA_2 = biased_traits(norms=4, is_tied=True)
GEMMA_3 = replace(GEMMA_2, qk_norm="head")
SHARED_EXPERTS = Experts("n_routed_experts", shared="n_shared_experts", rule="after")
EXPERTS_OF_QWEN = Experts(shared="shared_expert_intermediate_size", rule="step", has_shared_gate=True)
OLMO = biased_traits(qk_norm="width")


def half_as_wide(fields: Fields) -> Settled:
    """The field has the width of the gate and the projection next to it together."""
    return {"width": fields.integer("intermediate_size") // 2}


def add_hyper_connections(tally: Tally, fields: Fields, rows: int, scales: int) -> None:
    """Add the weights that mix the streams before and after attention and MLP."""
    streams = fields.integer("hc_mult") * fields.integer("hidden_size")
    tally.add(2 * (rows * (streams + 1) + scales))
