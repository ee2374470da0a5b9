"""Attributes of the attention layers that transformers builds for decoders from before Llama (see `record.py`)."""

import copy

# Attention modules by class; their names of sizes and projections differ.
CLASSES = {
    "Attention",
    "BioGptAttention",
    "CodeGenAttention",
    "DbrxAttention",
    "FalconAttention",
    "GPTBigCodeAttention",
    "GPTJAttention",
    "GPTNeoSelfAttention",
    "GPTNeoXJapaneseAttention",
    "BloomAttention",
    "ModernBertDecoderAttention",
    "MptAttention",
    "MultiHeadAttention",
    "OPTAttention",
    "XGLMAttention",
}
HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head")
KEYS = ("k_proj", "Wk")
JOINED = ("c_attn", "query_key_value", "qkv_proj", "Wqkv")


def first(module, names):
    return next((getattr(module, name) for name in names if getattr(module, name, None) is not None), None)


def outputs(linear):
    return linear.nf if hasattr(linear, "nf") else linear.out_features


def modules_of(model):
    return [module for module in model.modules() if type(module).__name__ in CLASSES]


def earlier_layer(config, module):
    """Return heads, dims, scale and window of a layer; the window of GPT-Neo is counted in its own mask."""
    heads = first(module, HEADS)
    head_dim = first(module, ("head_dim", "head_size")) or module.split_size // heads
    keys = first(module, KEYS)
    kv_width = (outputs(first(module, JOINED)) - heads * head_dim) // 2 if keys is None else outputs(keys)
    return {
        "num_query_heads": heads,
        "num_kv_heads": kv_width // head_dim,
        "head_dim": head_dim,
        "scale": scale(module, head_dim),
        "softcap": 0.0,
        "window": local_window(config, module) if hasattr(module, "attention_type") else None,
        "sinks": None,
    }


def scale(module, head_dim):
    if type(module).__name__ == "GPTNeoSelfAttention":
        return 1.0
    if type(module).__name__ == "Attention":
        return head_dim**-0.5 if module.scale else 1.0
    divisor = first(module, ("scale_attn", "norm_factor"))
    return first(module, ("scaling", "inv_norm_factor", "softmax_scale")) if divisor is None else 1 / float(divisor)


def local_window(config, module):
    import torch

    config = copy.deepcopy(config)
    config.max_position_embeddings = config.window_size + 10
    with torch.device("cpu"):
        mask = type(module)(config, module.attention_type).bias[0, 0]
    seen = int(mask[-1].sum())
    return None if seen == len(mask) else seen
