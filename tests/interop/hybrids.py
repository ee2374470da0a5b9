"""Small hybrid models with random weights: attention layers, and layers with a state."""

from __future__ import annotations

import functools
from typing import Any

from tests.interop.families import _BASE, _EXPERTS, _GROUPED, _LATENT, torch, transformers

_FEWER_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = _GROUPED | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
_CONVOLUTIONS = _GROUPED | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 8}
_MAMBA1 = {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}
_ZAMBA = {name: value for name, value in _BASE.items() if name != "max_position_embeddings"} | {
    "num_key_value_heads": 4,
    "attention_head_dim": 32,
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
}
_KIMI = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "q_lora_rank": None,
}

# For each family: the prefix of its class names, and its config fields.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", _DELTA | _FEWER_EXPERTS | {"shared_expert_intermediate_size": 32}),
    "lfm2": ("Lfm2", _CONVOLUTIONS | {"block_multiple_of": 16}),
    "falcon_h1": ("FalconH1", _GROUPED | _MAMBA2 | {"mamba_d_ssm": 128}),
    "bamba": ("Bamba", _BASE | _MAMBA2 | {"num_key_value_heads": 2, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "jamba": (
        "Jamba",
        _BASE
        | _MAMBA1
        | {"num_key_value_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2}
        | {"num_hidden_layers": 3}
        | {"expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    "zamba2": (
        "Zamba2",
        _ZAMBA
        | {"mamba_d_state": 12, "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 8}
        | {"num_mem_blocks": 1, "use_mem_rope": True, "adapter_rank": 8, "max_position_embeddings": 512},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        _BASE
        | _MAMBA2
        | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
        | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "nemotron_h": (
        "NemotronH",
        {name: value for name, value in _GROUPED.items() if name != "num_hidden_layers"}
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"]}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 8}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False},
    ),
    "qwen3_5": ("Qwen3_5", _DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", _DELTA | _FEWER_EXPERTS | {"shared_expert_intermediate_size": 32}),
    "lfm2_moe": (
        "Lfm2Moe",
        _CONVOLUTIONS | _FEWER_EXPERTS | {"num_dense_layers": 1},
    ),
    "lfm3": ("Lfm3", _CONVOLUTIONS | _FEWER_EXPERTS),
    "olmo_hybrid": ("OlmoHybrid", _DELTA | {"linear_value_head_dim": 16, "linear_num_key_heads": 4}),
    "zamba": ("Zamba", _ZAMBA | {"mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2}),
    "kimi_linear": ("KimiLinear", _LATENT | _EXPERTS | _KIMI),
    "zaya": (
        "Zaya",
        _GROUPED
        | {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "router_hidden_size": 16}
        | {"num_hidden_layers": 3, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 6},
    ),
    "bailing_hybrid": ("BailingHybrid", _LATENT | _EXPERTS | _KIMI),
}
_ALONE = {
    name: value
    for name, value in _BASE.items()
    if name not in ("intermediate_size", "num_attention_heads", "max_position_embeddings")
}
# Models without attention.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", _ALONE | {"state_size": 8, "time_step_rank": 4}),
    "falcon_mamba": ("FalconMamba", _ALONE | {"state_size": 8, "time_step_rank": 4}),
    "mamba2": (
        "Mamba2",
        _ALONE | {"state_size": 12, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    ),
}
_CONFIGS = {"Qwen3_5": "Qwen3_5TextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}


@functools.cache
def make_hybrid(family: str, dtype: str = "float32", seed: int = 0) -> Any:
    """Return a model that is shared by tests."""
    name, fields = (HYBRIDS | RECURRENT)[family]
    # Large weights without tied embeddings, so that tokens depend on the states and not only on the last token.
    fields = fields | {"initializer_range": 0.2, "tie_word_embeddings": False}
    config = getattr(transformers, _CONFIGS.get(name, f"{name}Config"))(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter, values in model.named_parameters():
        if parameter.endswith("qk_norm.temp"):  # zeros would make all scores equal
            values.data.fill_(0.7)
    return model.to(getattr(torch, dtype))
