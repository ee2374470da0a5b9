"""Families with recurrent states whose code is published together with their weights.

Source: the configuration and modeling files of inclusionAI/Ring-mini-linear-2.0, pfnet/plamo-2-8b,
upstage/Solar-Open-2, nvidia/Jet-Nemotron-2B and openbmb/MiniCPM-SALA, and the models of vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.models.config_files.fields import Fields
from pagecore.models.families.common_fields import DIMS_OF_128, GROUPED, LATENT
from pagecore.models.families.family import Family
from pagecore.models.families.hybrids import HYBRIDS, NEMOTRON_H, STATES_OF_NEMOTRON
from pagecore.models.layers.states import kinds, remote_kinds
from pagecore.models.layers.states import recurrent as states
from pagecore.models.layers.states import remote as remote_states
from pagecore.models.layers.states.recurrent import States

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
_DELTA_SIZES = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
}
_GIGACHAT: Mapping[str, object] = {
    **LATENT,
    **_DELTA_SIZES,
    **dict.fromkeys(("layer_types", "full_attention_layers")),
    "linear_conv_kernel_dim": 4,
}
_ALICE: Mapping[str, object] = {
    **GROUPED,
    **dict.fromkeys(("layer_types", *_DELTA_SIZES)),
    "linear_conv_kernel_dim": 4,
}
_JET: Mapping[str, object] = {**GROUPED, "layer_types": None}
_JET_PARTS = ("efficient_attention_config", "efficient_attention_config.swa", "efficient_attention_config.jet")
_MINICPM: Mapping[str, object] = {
    **GROUPED,
    **dict.fromkeys(("mixer_types", "lightning_nkv", "lightning_head_dim", "sparse_config")),
    "num_key_value_heads": 8,
}

REMOTE_HYBRIDS: Mapping[str, Family] = {
    "alice_ai": Family(_ALICE, states=States(remote_kinds.listed_layers, states.delta_rule, states.chunk_of_64)),
    "bailing_moe_linear": Family(
        _RING, states=States(kinds.kinds_of_ling, states.lightning_attention, states.lightning_chunk)
    ),
    "gigachat3_5": Family(
        _GIGACHAT,
        stores_latents=True,
        states=States(remote_kinds.kinds_of_gigachat, states.delta_rule, states.chunk_of_64),
    ),
    "interns2_mobius_text": HYBRIDS["qwen3_5_moe_text"],
    "jet_nemotron": Family(
        _JET,
        windows=remote_kinds.windows_of_jet,
        nested=_JET_PARTS,
        states=States(remote_kinds.kinds_of_jet, remote_states.delta_rule_of_jet, states.chunk_of_64),
    ),
    "minicpm_sala": Family(
        _MINICPM,
        states=States(remote_kinds.kinds_of_minicpm, remote_states.lightning_of_minicpm, states.lightning_chunk),
    ),
    "nemotron_h_puzzle": Family(
        {**NEMOTRON_H, "block_configs": None},
        count_layers=remote_kinds.count_blocks,
        states=replace(STATES_OF_NEMOTRON, kinds=remote_kinds.kinds_of_puzzle),
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
