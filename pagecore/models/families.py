"""The model families: which fields each reads, what they mean where they are left out, and which layers slide.

The facts are those of the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagecore.models.fields import Fields

__all__ = ["FAMILIES", "TEXT_MODELS", "Family"]


@dataclass(frozen=True)
class Family:
    """How the models of one `model_type` differ from multi-head attention over everything.

    Parameters
    ----------
    defaults : mapping
        The fields that the family reads, and what each means where a file leaves it out; None is null. Every family
        also reads the fields that all need: hidden_size, num_hidden_layers, num_attention_heads.
    slides : callable
        Whether a layer has a sliding window, where no `layer_types` lists them.
    has_sinks : bool
        One learned logit a query head in the softmax's denominator.
    """

    defaults: Mapping[str, object]
    slides: Callable[[Fields, int], bool] = lambda _fields, _layer: False
    has_sinks: bool = False


def _every_layer(fields: Fields, _layer: int) -> bool:
    return fields.value("sliding_window") is not None


def _every_other_layer(_fields: Fields, layer: int) -> bool:
    return layer % 2 == 0


def _all_but_every_nth_layer(fields: Fields, layer: int) -> bool:
    return (layer + 1) % fields.integer("sliding_window_pattern") != 0


def _layers_above(fields: Fields, layer: int) -> bool:
    return layer >= fields.integer("max_window_layers", least=0)


def _every_other_layer_below(fields: Fields, layer: int) -> bool:
    return layer % 2 == 0 and layer < fields.integer("max_window_layers", least=0)


# A null head_dim is hidden_size / num_attention_heads, a null num_key_value_heads num_attention_heads.
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
# The text model inside a multimodal Gemma 3 says only what differs from the 4B model's figures.
GEMMA_3 = {
    **GEMMA_2,
    "num_attention_heads": 8,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "max_position_embeddings": 131072,
}
GPT_OSS = {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "layer_types": None}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(GROUPED),
    "qwen2": Family({**QWEN, "num_key_value_heads": 32}, _layers_above),
    "qwen2_moe": Family({**QWEN, "num_key_value_heads": 16}, _every_other_layer_below),
    "qwen3": Family({**QWEN, "num_key_value_heads": 32, "head_dim": 128}, _layers_above),
    "qwen3_moe": Family({**MISTRAL, "num_key_value_heads": 4, "use_sliding_window": False}, _every_layer),
    "mistral": Family(MISTRAL, _every_layer),
    "ministral": Family({**MISTRAL, "layer_types": None}, _every_layer),
    "mixtral": Family({**MISTRAL, "sliding_window": None}, _every_layer),
    "gemma": Family({"head_dim": 256, "num_key_value_heads": 16}),
    "gemma2": Family(GEMMA_2, _every_other_layer),
    "gemma3_text": Family(GEMMA_3, _all_but_every_nth_layer),
    "phi": Family(GROUPED),
    "phi3": Family({**GROUPED, "sliding_window": None}, _every_layer),
    "gpt_neox": Family({}),
    "gpt_oss": Family(GPT_OSS, _every_other_layer, has_sinks=True),
}
# Multimodal models whose text model stands in `text_config`.
TEXT_MODELS: Mapping[str, str] = {"gemma3": "gemma3_text"}
