"""Model families: the fields that each reads, their defaults, and the layers with a sliding window.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagecore.arrays import DType
from pagecore.models.fields import Fields
from pagecore.models.indexer import every_layer_indexes, layers_that_index
from pagecore.models.latent_layers import latents_of_mistral_large_4
from pagecore.models.latent_windows import latents_of_dots
from pagecore.models.layer_rules import (
    all_but_every_fourth_layer,
    every_layer,
    every_other_layer,
    layers_above,
    layers_with_rope,
    multiplier,
    no_layer,
    root_of_scalar,
)
from pagecore.models.states import States
from pagecore.storage import Alias, LatentSpec
from pagecore.storage.checks import LAYERS_MAX

__all__ = [
    "FAMILIES",
    "GEMMA_2",
    "GEMMA_3",
    "GPT_2_NAMES",
    "GROUPED",
    "LATENT",
    "MISTRAL",
    "QWEN",
    "Family",
    "Heads",
]


def _layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", max=LAYERS_MAX)


def _two_attentions_each(fields: Fields) -> int:
    """Return twice num_layers; transformers calls this number num_hidden_layers."""
    if fields.given("num_layers") is None:
        if fields.given("num_hidden_layers") is None:
            fields.refuse(f"{fields.name('num_layers')} is missing; add it to the config")
        count = _layers(fields)
        if count % 2:
            fields.refuse(f"{fields.describe('num_hidden_layers')}; it must be even: each of num_layers attends twice")
        return count
    count = 2 * fields.integer("num_layers", max=LAYERS_MAX // 2)
    if fields.given("num_hidden_layers") not in (None, count):
        fields.refuse(f"{fields.describe('num_hidden_layers')}; it must be {count}, twice {fields.name('num_layers')}")
    return count


def _count_heads(fields: Fields) -> int:
    return fields.integer("num_attention_heads")


@dataclass(frozen=True)
class Heads:
    """Heads of a layer.

    Parameters
    ----------
    queries, kv_heads, head_dim : int
    v_head_dim : int, optional
        Dim of values; that of keys by default.
    has_sinks : bool
        False for a layer without sinks, in a family that has them.
    kv_field : str
        Field with `kv_heads`, for messages.
    """

    queries: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    has_sinks: bool = True
    kv_field: str = "num_key_value_heads"


def _same_heads(_fields: Fields, heads: Heads, _layer: int, _slides: bool) -> Heads:
    return heads


@dataclass(frozen=True)
class Family:
    """Differences of a `model_type` from full multi-head attention.

    Parameters
    ----------
    defaults : mapping
        Fields that the family reads, with the value of each if a file does not have it; None is null. Every family
        also reads the required fields hidden_size, num_hidden_layers and num_attention_heads.
    slides : callable
        Returns True if a layer has a sliding window; used if `layer_types` is missing.
    has_sinks : bool
        True if each query head has a learned logit in the denominator of the softmax.
    scale : callable
        Returns the factor of q.k from fields, head_dim and layer; None for ``head_dim ** -0.5``.
    aliases : mapping
        The family's own names of required fields.
    stores_latents : bool
        True for latent attention: layers are described by `LatentSpec`.
    latents : callable, optional
        Returns, for latent attention whose layers differ by more than their index keys, the spec of each layer, from
        fields, the number of query heads, the number of layers, dtype and format.
    indexes : callable, optional
        Returns, for latent attention with an indexer, True for each layer that stores index keys, from fields and the
        number of layers.
    count_layers : callable
        Returns the number of attention layers.
    states : States, optional
        Layers with recurrent states.
    attention_width : int
        Width of queries over all heads, in multiples of hidden_size, if there is no head_dim.
    count_heads : callable
        Returns the number of query heads.
    heads : callable
        Returns the heads of a layer from fields, the heads that the config gives, the layer, and True if it slides.
    rounds_head_dim : bool
        True if hidden_size need not be a multiple of num_attention_heads: without head_dim the quotient is rounded
        down.
    window : callable, optional
        Returns the window in tokens, or None, if it is not the field `sliding_window` alone.
    shared_field : str
        Field with the number of last layers that read the keys and values of an earlier layer; "" without them.
    kinds : callable, optional
        Returns the kind of each layer from fields and the number of layers, in a family without states some of whose
        layers store nothing.
    nested : tuple of str
        Fields that are objects, whose own fields the family reads as "attn_config.kv_n_heads".
    has_chunks : bool
        True if the layers that `slides` and `layer_types` name attend in chunks of `attention_chunk_size` tokens
        instead of windows.
    """

    defaults: Mapping[str, object]
    slides: Callable[[Fields, int], bool] = no_layer
    has_sinks: bool = False
    scale: Callable[[Fields, int, int], float | None] = lambda _fields, _head_dim, _layer: None
    aliases: Mapping[str, str] = field(default_factory=dict)
    stores_latents: bool = False
    latents: Callable[[Fields, int, int, DType, str | None], list[LatentSpec | Alias]] | None = None
    indexes: Callable[[Fields, int], list[bool]] | None = None
    count_layers: Callable[[Fields], int] = _layers
    has_chunks: bool = False
    states: States | None = None
    attention_width: int = 1
    count_heads: Callable[[Fields], int] = _count_heads
    heads: Callable[[Fields, Heads, int, bool], Heads] = _same_heads
    rounds_head_dim: bool = False
    window: Callable[[Fields], int | None] | None = None
    shared_field: str = ""
    kinds: Callable[[Fields, int], list[str]] | None = None
    nested: tuple[str, ...] = ()


def _all_but_every_nth_layer(fields: Fields, layer: int) -> bool:
    return (layer + 1) % fields.integer("sliding_window_pattern") != 0


def _every_other_layer_below(fields: Fields, layer: int) -> bool:
    return layer % 2 == 0 and layer < fields.integer("max_window_layers", min=0)


def _scale_of_gpt_2(fields: Fields, head_dim: int, layer: int) -> float | None:
    weights, by_layer = fields.flag("scale_attn_weights"), fields.flag("scale_attn_by_inverse_layer_idx")
    if weights and not by_layer:
        return None
    return (head_dim**-0.5 if weights else 1.0) / (layer + 1 if by_layer else 1)


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
GPT_OSS = {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "layer_types": None}
# The text model of Qwen2-VL and Qwen2.5-VL, whose fields are at the top level of config.json (see FLAT).
QWEN_2_VL = {
    "num_key_value_heads": 8,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 80,
    "layer_types": None,
}
LLAMA_4 = {
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_chunk_size": 8192,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "layer_types": None,
}
COHERE_2 = {**GROUPED, "sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4}
GPT_2 = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
GPT_2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}

# Latent attention. A null num_key_value_heads means num_attention_heads; head_dim is that of the rotary embedding.
LATENT: Mapping[str, object] = {
    **dict.fromkeys(("head_dim", "qk_head_dim", "num_key_value_heads", "rope_scaling", "rope_parameters")),
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
}
GLM_4_MOE_LITE = {**LATENT, "num_key_value_heads": 20, "qk_nope_head_dim": 192}
MINICPM_3 = {**LATENT, "num_key_value_heads": 40, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
MISTRAL_4 = {
    **LATENT,
    "num_key_value_heads": 32,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "rope_parameters": {"rope_type": "yarn", "factor": 128.0, "mscale_all_dim": 1.0},
}
# Sparse latent attention: an indexer selects the keys.
DEEPSEEK_32 = {
    **LATENT,
    "num_key_value_heads": 128,
    "layer_types": None,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
AXK_2 = {
    **DEEPSEEK_32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "index_n_heads": 16,
}
GLM_DSA = {
    **DEEPSEEK_32,
    **dict.fromkeys(("indexer_types", "index_topk_pattern")),
    "num_key_value_heads": 64,
    "qk_nope_head_dim": 192,
    "index_n_heads": 32,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}

HY_V4 = {
    **GLM_DSA,
    "num_key_value_heads": None,
    "index_n_heads": 16,
    "index_topk_freq": 4,
}
MISTRAL_LARGE_4: Mapping[str, object] = {
    **GLM_DSA,
    **dict.fromkeys(("no_rope_layers", "kv_source_layers")),
    "qk_nope_head_dim": 64,
    "no_rope_layer_interval": 4,
}
DOTS_3: Mapping[str, object] = {
    **LATENT,
    **dict.fromkeys(("layer_types", "per_layer_config", "sliding_window", "use_sliding_window", "use_dsa")),
    "sliding_window_size": 512,
    "index_head_dim": 128,
    "index_topk": 2048,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(GROUPED),
    "qwen2": Family({**QWEN, "num_key_value_heads": 32}, layers_above),
    "qwen2_moe": Family({**QWEN, "num_key_value_heads": 16}, _every_other_layer_below),
    "qwen3": Family({**QWEN, "num_key_value_heads": 32, "head_dim": 128}, layers_above),
    "qwen3_moe": Family({**MISTRAL, "num_key_value_heads": 4, "use_sliding_window": False}, every_layer),
    "mistral": Family(MISTRAL, every_layer),
    "ministral": Family({**MISTRAL, "layer_types": None}, every_layer),
    "mixtral": Family({**MISTRAL, "sliding_window": None}, every_layer),
    "gemma": Family({"head_dim": 256, "num_key_value_heads": 16}),
    "gemma2": Family(GEMMA_2, every_other_layer, scale=root_of_scalar),
    "gemma3_text": Family(GEMMA_3, _all_but_every_nth_layer, scale=root_of_scalar),
    "phi": Family(GROUPED),
    "phi3": Family({**GROUPED, "sliding_window": None}, every_layer),
    "gpt_neox": Family({}),
    "gpt_oss": Family(GPT_OSS, every_other_layer, has_sinks=True),
    "gpt2": Family(GPT_2, scale=_scale_of_gpt_2, aliases=GPT_2_NAMES),
    "glm": Family({"head_dim": 128, "num_key_value_heads": 2}),
    "glm4": Family({"head_dim": 128, "num_key_value_heads": 2}),
    "glm4_moe": Family({**GROUPED, "num_key_value_heads": 8}, rounds_head_dim=True),
    "glm4v_text": Family({"num_key_value_heads": 2}),
    "qwen2_vl_text": Family(QWEN_2_VL, layers_above),
    "qwen2_5_vl_text": Family(QWEN_2_VL, layers_above),
    "qwen3_vl_text": Family({"head_dim": 128, "num_key_value_heads": 32}),
    "qwen3_vl_moe_text": Family({**GROUPED, "num_key_value_heads": 16}),
    "olmo2": Family(GROUPED),
    "olmo3": Family({**GROUPED, "sliding_window": 4096, "layer_types": None}, all_but_every_fourth_layer),
    "llama4_text": Family(LLAMA_4, layers_with_rope, has_chunks=True),
    "starcoder2": Family({**GROUPED, "num_key_value_heads": 2, "sliding_window": None}, every_layer),
    "cohere": Family(GROUPED),
    "cohere2": Family(COHERE_2, _all_but_every_nth_layer),
    "granite": Family({**GROUPED, "attention_multiplier": 1.0}, scale=multiplier),
    "seed_oss": Family({"head_dim": 128, "num_key_value_heads": 8}),
    "minimax_m2": Family({"head_dim": 128, "num_key_value_heads": 8}),
    "deepseek_v2": Family(LATENT, stores_latents=True),
    "deepseek_v3": Family({**LATENT, "num_key_value_heads": 128}, stores_latents=True),
    "kimi_k2": Family({**LATENT, "num_key_value_heads": 128}, stores_latents=True),
    "axk1": Family({**LATENT, "num_key_value_heads": 64}, stores_latents=True),
    "glm4_moe_lite": Family(GLM_4_MOE_LITE, stores_latents=True),
    "minicpm3": Family(MINICPM_3, stores_latents=True),
    "mistral4": Family(MISTRAL_4, stores_latents=True),
    "deepseek_v32": Family(DEEPSEEK_32, stores_latents=True, indexes=every_layer_indexes),
    "axk2": Family(AXK_2, stores_latents=True, indexes=every_layer_indexes),
    "glm_moe_dsa": Family(GLM_DSA, stores_latents=True, indexes=layers_that_index),
    "hy_v4": Family(HY_V4, stores_latents=True, indexes=layers_that_index),
    "dots3_note_text": Family(DOTS_3, stores_latents=True, latents=latents_of_dots),
    "mistral_large4_text": Family(MISTRAL_LARGE_4, stores_latents=True, latents=latents_of_mistral_large_4),
    "longcat_flash": Family(LATENT, stores_latents=True, count_layers=_two_attentions_each),
    "youtu": Family({**LATENT, "num_key_value_heads": 16}, stores_latents=True),
}
