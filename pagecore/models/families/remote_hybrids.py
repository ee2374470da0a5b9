"""Families with recurrent states whose code is published together with their weights.

Source: the configuration and modeling files of inclusionAI/Ring-mini-linear-2.0, pfnet/plamo-2-8b and
upstage/Solar-Open-2, and the models of vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.families.common_fields import DIMS_OF_128
from pagecore.models.families.family import Family
from pagecore.models.layers import hybrid_kinds as kinds
from pagecore.models.layers import recurrent_states as states
from pagecore.models.layers import remote_states
from pagecore.models.layers.recurrent_states import States

__all__ = ["REMOTE_HYBRIDS"]


def _slides_in_plamo(fields: Fields, layer: int) -> bool:
    """Return True for a layer that attends to a window, as all do but those listed."""
    listed = fields.value("full_attention_idx")
    if listed is None:
        return True
    if not isinstance(listed, list | tuple) or not all(type(each) is int for each in listed):
        fields.refuse(f"{fields.describe('full_attention_idx')}; it must list numbers of layers, or be null")
    return layer not in listed


_RING = {
    "head_dim": 128,
    "num_key_value_heads": 4,
    "layer_types": None,
    "layer_group_size": 1,
}
_PLAMO_2: Mapping[str, object] = {
    **DIMS_OF_128,
    "sliding_window": 2048,
    "full_attention_idx": None,
    "mamba_enabled": True,
    "mamba_step": 2,
    "mamba_num_heads": 64,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 256,
}
_SOLAR_OPEN_2: Mapping[str, object] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "layer_types": None,
    "linear_attn_config": None,
    "gqa_layers": None,
    "gqa_interval": 3,
}

REMOTE_HYBRIDS: Mapping[str, Family] = {
    "bailing_moe_linear": Family(
        _RING, states=States(kinds.kinds_of_ling, states.lightning_attention, states.lightning_chunk)
    ),
    "plamo2": Family(
        _PLAMO_2,
        _slides_in_plamo,
        aliases={"head_dim": "hidden_size_per_head", "sliding_window": "attention_window_size"},
        states=States(kinds.kinds_of_plamo_2, remote_states.mamba_of_plamo, states.chunk_of("mamba_chunk_size")),
    ),
    "solar_open2": Family(
        _SOLAR_OPEN_2, states=States(kinds.kinds_of_solar, remote_states.delta_rule_of_solar, states.chunk_of_64)
    ),
}
