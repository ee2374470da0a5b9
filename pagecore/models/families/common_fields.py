"""Fields that several families read, with the value of each if a file does not have it.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DIMS_OF_128", "GEMMA_2", "GEMMA_3", "GROUPED", "LATENT", "MISTRAL", "MOSAIC_NAMES", "QWEN"]

# A null head_dim means hidden_size / num_attention_heads; a null num_key_value_heads means num_attention_heads.
GROUPED: Mapping[str, object] = {"head_dim": None, "num_key_value_heads": None}
QWEN = {
    **GROUPED,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
MISTRAL = {**GROUPED, "num_key_value_heads": 8, "sliding_window": 4096}
GEMMA_2 = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "layer_types": None,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
}
# In a multimodal Gemma 3, the config of the text model only has the fields that differ from those of the 4B model.
GEMMA_3 = {
    **GEMMA_2,
    "num_attention_heads": 8,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "max_position_embeddings": 131072,
}
# Latent attention. A null num_key_value_heads means num_attention_heads; head_dim is that of the rotary embedding.
LATENT: Mapping[str, object] = {
    **dict.fromkeys(("head_dim", "qk_head_dim", "num_key_value_heads", "rope_scaling", "rope_parameters")),
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
}
DIMS_OF_128: Mapping[str, object] = {"head_dim": 128, "num_key_value_heads": None}
MOSAIC_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
