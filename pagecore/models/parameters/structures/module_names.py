"""Names of modules in the checkpoints of families that do not call them as Llama does.

A `quantization_config` names the modules that a checkpoint leaves unquantised, or stores in another format. A part of a
name replaces the one that the counts use: "self_attn", "mixer" for a layer with a state, "mlp", "experts.0",
"shared_experts", "gate_proj" for gate and up-projection, and "down_proj". Source: published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["MODULE_NAMES"]

_W = {"gate_proj": "w1", "down_proj": "w2"}
_MIXTRAL = {"mlp": "block_sparse_moe", **_W}
_MINIMAX = {"mixer": "self_attn", **_MIXTRAL}
_MAMBA = {"mixer": "mamba", "mlp": "feed_forward"}
_ONE_SHARED = {"shared_experts": "shared_expert"}
_DELTA_RULE = {"mixer": "linear_attn", **_ONE_SHARED}
# Checkpoints hold these in two parts each.
_SPLIT = {"in_proj_qkvz": "in_proj_qkv", "in_proj_ba": "in_proj_b"}
# qkv_proj and gate_up_proj hold several projections each.
_FUSED = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"), "gate_proj": "gate_up_proj"}
_GRANITE = {"gate_proj": "input_linear", "down_proj": "output_linear"}
_GRANITE |= {"mlp.experts.0": "block_sparse_moe", "mlp.shared_experts": "shared_mlp"}
_LFM2 = {"mixer": "conv", "mlp": "feed_forward", "o_proj": "out_proj", **_W}
_PER_LAYER = {f"mlp.per_layer_{name}": f"per_layer_{name}" for name in ("input_gate", "projection")}
# Names of vLLM, in which the first projections of queries and keys are one, and checkpoints that are quantised for it.
_DEEPSEEK_4 = {"self_attn": "attn", "mlp": "ffn", "compressor.kv_proj": "compressor.wkv"}
_DEEPSEEK_4 |= {"indexer.kv_proj": "indexer.wkv", "indexer.q_b_proj": "indexer.wq_b", "q_b_proj": "wq_b"}
_DEEPSEEK_4 |= {"o_a_proj": "wo_a", "o_b_proj": "wo_b", **dict.fromkeys(("q_a_proj", "kv_proj"), "fused_wqa_wkv")}

MODULE_NAMES: Mapping[str, Mapping[str, str]] = {
    "bamba": _MAMBA,
    "bailing_moe_linear": {"mixer": "attention", "self_attn": "attention"},
    "deepseek_v4": _DEEPSEEK_4,
    "falcon_h1": _MAMBA,
    "gemma3n_text": _PER_LAYER,
    "gemma4_text": _PER_LAYER,
    "granitemoe": _GRANITE,
    "granitemoehybrid": {"mixer": "mamba", **_GRANITE, "mlp": "shared_mlp"},
    "granitemoeshared": _GRANITE,
    "jamba": _MAMBA,
    "kimi_linear": {"mixer": "self_attn", "mlp.experts": "block_sparse_moe.experts"}
    | {"mlp.shared_experts": "block_sparse_moe.shared_experts"},
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "llama4_text": {"mlp": "feed_forward", **_ONE_SHARED},
    **dict.fromkeys(("minimax", "minimax_m1", "minimax_text_01"), _MINIMAX),
    **dict.fromkeys(("minimax_m2", "mixtral", "phimoe"), _MIXTRAL),
    "nemotron_h": dict.fromkeys(("self_attn", "mlp"), "mixer"),
    "olmo_hybrid": {"mixer": "linear_attn"},
    "phi3": _FUSED,
    "phi4mm": _FUSED,
    "qwen2_moe": _ONE_SHARED,
    "qwen3_next": _DELTA_RULE,
    **dict.fromkeys(
        ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_8_flash_next_text", "qwen4_exp_text"), _DELTA_RULE | _SPLIT
    ),
}
