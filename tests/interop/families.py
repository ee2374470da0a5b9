"""Small models of several families with random weights, for comparing a paged cache with a DynamicCache."""

from __future__ import annotations

import functools
from typing import Any

from tests.capabilities import require

torch, transformers = require("torch"), require("transformers")
torch.set_num_threads(1)  # the models are too small to gain from threads

VOCABULARY, PAD, EOS = 97, 0, 96
NUM_LAYERS = 2  # of models whose layers are all of one kind
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
_GROUPED = _BASE | {"num_key_value_heads": 2, "head_dim": 16}
_WINDOW = {"sliding_window": 8}
# Layers with a window and layers that see all keys, in turn.
_ALTERNATING = _WINDOW | {"num_hidden_layers": 3}
_SLIDING_FIRST = _ALTERNATING | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 256}

# Latent attention: head_dim is that of the rotary embedding.
_LATENT = _BASE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Two attention layers in each of num_layers.
_LONGCAT = {name: value for name, value in (_LATENT | _EXPERTS).items() if name != "num_hidden_layers"}
_LONGCAT |= {"num_layers": 2, "head_dim": 4, "moe_topk": 2, "zero_expert_num": 2}
_LONGCAT |= {"ffn_hidden_size": 128, "expert_ffn_hidden_size": 32}
_MSCALE = _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}

# Chunks of 8 tokens, and every fourth layer without rotary embeddings, whose queries are scaled by their position.
_LLAMA_4 = {
    "num_hidden_layers": 4,
    "attention_chunk_size": 8,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "floor_scale": 8,
}

_QWEN_2_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT_2 = _BASE | {"n_embd": 64, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 512}

# For each family: the prefix of its class names, and its config fields.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "qwen3": ("Qwen3", _GROUPED),
    "mistral": ("Mistral", _GROUPED | _WINDOW),
    "gemma2": ("Gemma2", _GROUPED | _ALTERNATING | {"query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", _GROUPED | _SLIDING_FIRST | {"query_pre_attn_scalar": 16}),
    "gpt_neox": ("GPTNeoX", _BASE),
    "gpt2": ("GPT2", _GPT_2),
    "gpt_oss": ("GptOss", _GROUPED | _ALTERNATING | {"num_local_experts": 4, "rope_parameters": _YARN}),
    "phi3": ("Phi3", _GROUPED),
    "qwen2_moe": ("Qwen2Moe", _GROUPED | _QWEN_2_MOE),
    # Two masks, of which each layer gets one; its attention is passed no window.
    "qwen2_moe_windows": ("Qwen2Moe", _GROUPED | _ALTERNATING | _QWEN_2_MOE | {"use_sliding_window": True}),
    "mixtral": ("Mixtral", _GROUPED | {"num_local_experts": 4}),
    "llama4": ("Llama4", _GROUPED | _LLAMA_4),
    # One mask with a window for all layers, to whose attention the model passes no window.
    "phimoe": ("Phimoe", _GROUPED | _WINDOW | {"num_local_experts": 4}),
    # Not in pagecore.models: its fields are read with their usual meaning.
    "gpt_bigcode": ("GPTBigCode", _GPT_2),
    "starcoder2": ("Starcoder2", _GROUPED | _WINDOW),
    "cohere2": ("Cohere2", _GROUPED | _SLIDING_FIRST),
    "olmo2": ("Olmo2", _GROUPED),
    "deepseek_v2": ("DeepseekV2", _LATENT | _EXPERTS | {"q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", _LATENT | _EXPERTS | {"rope_parameters": _MSCALE}),
    "minicpm3": ("MiniCPM3", _LATENT),
    "youtu": ("Youtu", _LATENT),
    "glm4_moe_lite": ("Glm4MoeLite", _LATENT | _EXPERTS),
    "mistral4": ("Mistral4", _LATENT | _EXPERTS),
    "axk1": ("AXK1", _LATENT | _EXPERTS),
    "longcat_flash": ("LongcatFlash", _LONGCAT),
    # Every layer has the window of the config as an attribute; those without a window pass None to their attention.
    "exaone4": ("Exaone4", _GROUPED | _SLIDING_FIRST),
}
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}


@functools.cache
def make_model(family: str, dtype: str = "float32", seed: int = 0) -> Any:
    """Return a model that is shared by tests; a test that changes one makes its own with another seed."""
    name, fields = FAMILIES[family]
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(**fields)
    classes = {"GPT2": "GPT2LMHeadModel"}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, classes.get(name, f"{name}ForCausalLM"))(config).eval()
    return model.to(getattr(torch, dtype))


def make_cache(model: Any, **options: Any) -> Any:
    """Return a paged cache of small blocks, and switch the attention of `model` to "pagecore"."""
    from pagecore.interop.transformers import PagedCache

    model.set_attn_implementation("pagecore")
    return PagedCache(model, **{"num_blocks": 200, "block_size": 4} | options)


def dynamic_cache(model: Any) -> Any:
    """Return the reference cache, and switch the attention of `model` to eager."""
    model.set_attn_implementation("eager")
    return transformers.DynamicCache(config=model.config)


def prompts(rows: int = 2, columns: int = 7, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, EOS, (rows, columns), generator=generator)


def left_padded(ids: Any, padding: int = 3) -> Any:
    """Return a mask in which the first row begins with padding."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return mask
