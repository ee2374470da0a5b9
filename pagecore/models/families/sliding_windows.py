"""Families with a sliding window, or chunks, in all or some layers.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.families.common_fields import DIMS_OF_128, GEMMA_2, GEMMA_3, GROUPED, MISTRAL, QWEN
from pagecore.models.families.family import Family
from pagecore.models.layers.score_scales import multiplier, root_of_scalar
from pagecore.models.layers.windows import (
    all_but_every_fifth_layer,
    all_but_every_fourth_layer,
    all_but_every_sixth_and_the_last,
    every_layer,
    every_other_layer,
    is_last,
    layers_above,
    layers_with_rope,
    no_layer,
)

__all__ = ["SLIDING_WINDOWS"]


def _all_but_every_nth_layer(fields: Fields, layer: int) -> bool:
    return (layer + 1) % fields.integer("sliding_window_pattern") != 0


def _every_other_layer_below(fields: Fields, layer: int) -> bool:
    return layer % 2 == 0 and layer < fields.integer("max_window_layers", min=0)


GPT_OSS = {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "layer_types": None}
# The text model of Qwen2-VL and Qwen2.5-VL, whose fields are at the top level of config.json.
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


def _every_nth_layer_attends_to_all(name: str) -> Family:
    """Return a family in which every layer whose number from 1 is a multiple of a field attends to all keys.

    The field may also spell the layers, such as "LLLG": L has a window (local), G attends to all keys (global).
    """

    def slides(fields: Fields, layer: int) -> bool:
        pattern = fields.value(name)
        if fields.value("sliding_window") is None:
            return False
        if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
            return pattern[layer % len(pattern)] == "L"
        return (layer + 1) % fields.integer(name) != 0

    defaults = {**GROUPED, "layer_types": None, name: 4}
    if name == "sliding_window_pattern":
        return Family({**defaults, "num_key_value_heads": 32, "sliding_window": 4096}, slides)
    return Family({**defaults, "head_dim": 128, "sliding_window": 1024}, slides)


def _first_of_four_attends(_fields: Fields, layer: int) -> bool:
    return layer % 4 != 0


def _layers_without_rope(fields: Fields, layer: int) -> bool:
    return fields.value("sliding_window") is not None and not layers_with_rope(fields, layer)


def _windowed_layers_above(fields: Fields, layer: int) -> bool:
    return every_layer(fields, layer) and layers_above(fields, layer)


def _two_patterns(fields: Fields, layer: int) -> bool:
    """Return True if a layer slides: the first dense layers and the layers after them have a pattern each."""
    dense = fields.integer("first_k_dense_replace", min=0)
    if layer < dense:
        return (layer + 1) % fields.integer("prefix_dense_sliding_window_pattern") != 0
    return (layer - dense + 1) % fields.integer("sliding_window_pattern") != 0


_SMOL_LM = {
    **GROUPED,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
# Every fourth layer, from the first, attends to all keys; all layers have sinks.
_GRANITE_SWA: Mapping[str, object] = {
    **GROUPED,
    "attention_multiplier": 1.0,
    "sliding_window": 128,
    "layer_types": None,
}
_COHERE_2_MOE = {
    **DIMS_OF_128,
    "sliding_window": 4096,
    "layer_types": None,
    "sliding_window_pattern": 4,
    "prefix_dense_sliding_window_pattern": 1,
    "first_k_dense_replace": 0,
}
_DOTS_1 = {
    **GROUPED,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 62,
    "layer_types": None,
}
_QWEN_2_5_OMNI = {
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 28,
    "layer_types": None,
}


def _slides_in_flint(fields: Fields, layer: int) -> bool:
    """Return True if a layer slides: all but the first two, the last, and one of each four."""
    return layer >= 2 and layer % 4 != 1 and not is_last(fields, layer)


def _all_but_every_fourth_from_the_last(fields: Fields, layer: int) -> bool:
    return (fields.integer("num_hidden_layers") - 1 - layer) % 4 != 0


def _windowed(kv_heads: int, head_dim: int, window: int) -> Mapping[str, object]:
    return {"num_key_value_heads": kv_heads, "head_dim": head_dim, "sliding_window": window, "layer_types": None}


def _half_of_local_attention(fields: Fields) -> int:
    """Return the window of ModernBERT: `sliding_window`, or half of `local_attention`, which counts both sides."""
    if fields.given("sliding_window") is not None:
        return fields.integer("sliding_window")
    return fields.integer("local_attention", min=2) // 2


def _all_but_first_of_n(fields: Fields, layer: int) -> bool:
    return layer % fields.integer("global_attn_every_n_layers") != 0


_MODERN_BERT = {
    "layer_types": None,
    "sliding_window": None,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
}

SLIDING_WINDOWS: Mapping[str, Family] = {
    "afmoe": _every_nth_layer_attends_to_all("global_attn_every_n_layers"),
    "beam": Family(_windowed(8, 128, 512), all_but_every_sixth_and_the_last),
    "cohere2": Family(COHERE_2, _all_but_every_nth_layer),
    "cohere2_moe": Family(_COHERE_2_MOE, _two_patterns),
    "cohere_compass_text": Family({**GROUPED, "sliding_window": 4096, "layer_types": None}, no_layer),
    "cwm": Family(
        {**DIMS_OF_128, "num_key_value_heads": 8, "sliding_window": 8192, "layer_types": None},
        _first_of_four_attends,
    ),
    "dots1": Family(_DOTS_1, _windowed_layers_above),
    "exaone4": _every_nth_layer_attends_to_all("sliding_window_pattern"),
    "exaone_moe": _every_nth_layer_attends_to_all("sliding_window_pattern"),
    "flint": Family(_windowed(4, 128, 513), _slides_in_flint, has_sinks=True),
    "gemma2": Family(GEMMA_2, every_other_layer, scale=root_of_scalar),
    "gemma3_text": Family(GEMMA_3, _all_but_every_nth_layer, scale=root_of_scalar),
    "gpt_oss": Family(GPT_OSS, every_other_layer, has_sinks=True),
    "granite_swa": Family(
        {**_GRANITE_SWA, "num_key_value_heads": 4},
        _first_of_four_attends,
        has_sinks=True,
        scale=multiplier,
    ),
    "granitemoe_swa": Family(_GRANITE_SWA, _first_of_four_attends, has_sinks=True, scale=multiplier),
    "kolibri1": Family(
        {**DIMS_OF_128, "num_key_value_heads": 4, "sliding_window": 513, "layer_types": None},
        all_but_every_fifth_layer,
    ),
    "llama4_text": Family(LLAMA_4, layers_with_rope, has_chunks=True),
    "mellum": Family({**DIMS_OF_128, "num_key_value_heads": 4, "sliding_window": 1024, "layer_types": None}, no_layer),
    "ministral": Family({**MISTRAL, "layer_types": None}, every_layer),
    "ministral3": Family({**MISTRAL, "head_dim": 128, "sliding_window": None}, every_layer),
    "mistral": Family(MISTRAL, every_layer),
    "mixtral": Family({**MISTRAL, "sliding_window": None}, every_layer),
    "modernbert-decoder": Family(_MODERN_BERT, _all_but_first_of_n, window=_half_of_local_attention),
    "muse_glimmer_text": Family(_windowed(2, 128, 2048), _all_but_every_fourth_from_the_last),
    "muse_spark_text": Family(_windowed(16, 64, 2048), _all_but_every_fourth_from_the_last),
    "olmo3": Family({**GROUPED, "sliding_window": 4096, "layer_types": None}, all_but_every_fourth_layer),
    "phi3": Family({**GROUPED, "sliding_window": None}, every_layer),
    "phi4_multimodal": Family({"num_key_value_heads": 8, "sliding_window": None}, every_layer),
    "phimoe": Family({**MISTRAL, "sliding_window": None}, every_layer),
    "qwen2": Family({**QWEN, "num_key_value_heads": 32}, layers_above),
    "qwen2_5_omni_text": Family(_QWEN_2_5_OMNI, layers_above),
    "qwen2_5_vl_text": Family(QWEN_2_VL, layers_above),
    "qwen2_moe": Family({**QWEN, "num_key_value_heads": 16}, _every_other_layer_below),
    "qwen2_vl_text": Family(QWEN_2_VL, layers_above),
    "qwen3": Family({**QWEN, "num_key_value_heads": 32, "head_dim": 128}, layers_above),
    "qwen3_moe": Family({**MISTRAL, "num_key_value_heads": 4, "use_sliding_window": False}, every_layer),
    "qwen3_omni_moe_text": Family(
        {**GROUPED, "num_key_value_heads": 4, "sliding_window": None}, every_layer, rounds_head_dim=True
    ),
    "smollm3": Family(_SMOL_LM, _layers_without_rope),
    "starcoder2": Family({**GROUPED, "num_key_value_heads": 2, "sliding_window": None}, every_layer),
    "vaultgemma": Family(GEMMA_2, every_other_layer, scale=root_of_scalar),
    "voxtral_realtime_text": Family({**GROUPED, "num_key_value_heads": 8, "sliding_window": 4096}, every_layer),
}
