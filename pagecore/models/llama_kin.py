"""Further families with the attention of Llama, Gemma 2, Olmo 3 or GPT-OSS, and fields of their own.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.models.families import GEMMA_2, GROUPED, MISTRAL, Family, Heads
from pagecore.models.fields import Fields
from pagecore.models.layer_rules import (
    all_but_every_fifth_layer,
    every_layer,
    every_other_layer,
    layers_above,
    layers_with_rope,
    multiplier,
    no_layer,
    root_of_scalar,
)
from pagecore.storage.checks import INT32_MAX

__all__ = ["LLAMA_KIN"]


def _all_but_every_nth_layer(name: str) -> Family:
    """Return a family in which every layer whose number from 1 is a multiple of a field attends to all keys."""

    def slides(fields: Fields, layer: int) -> bool:
        return fields.value("sliding_window") is not None and (layer + 1) % fields.integer(name) != 0

    defaults = {**GROUPED, "layer_types": None, name: 4}
    if name == "sliding_window_pattern":
        return Family({**defaults, "num_key_value_heads": 32, "sliding_window": 4096}, slides)
    return Family({**defaults, "head_dim": 128, "sliding_window": 1024}, slides)


def _first_of_four_attends(_fields: Fields, layer: int) -> bool:
    return layer % 4 != 0


def _layers_without_rope(fields: Fields, layer: int) -> bool:
    return fields.value("sliding_window") is not None and not layers_with_rope(fields, layer)


def _multiplier_or_default(fields: Fields, head_dim: int, layer: int) -> float | None:
    return None if fields.value("attention_multiplier") is None else multiplier(fields, head_dim, layer)


def _windowed_layers_above(fields: Fields, layer: int) -> bool:
    return every_layer(fields, layer) and layers_above(fields, layer)


def _two_patterns(fields: Fields, layer: int) -> bool:
    """Return True if a layer slides: the first dense layers and the layers after them have a pattern each."""
    dense = fields.integer("first_k_dense_replace", min=0)
    if layer < dense:
        return (layer + 1) % fields.integer("prefix_dense_sliding_window_pattern") != 0
    return (layer - dense + 1) % fields.integer("sliding_window_pattern") != 0


def _heads_by_layer(fields: Fields, heads: Heads, layer: int, _slides: bool) -> Heads:
    """Layers may have a number of query heads each."""
    listed = fields.value("num_attention_heads_per_layer")
    if listed is None:
        return heads
    layers = fields.integer("num_hidden_layers")
    if not isinstance(listed, list | tuple) or len(listed) != layers or not all(map(_is_count, listed)):
        fields.refuse(
            f"{fields.describe('num_attention_heads_per_layer')}; it must list a positive integer for each of "
            f"num_hidden_layers, {layers}, or be null"
        )
    return replace(heads, queries=int(listed[layer]))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= INT32_MAX


def _heads_of_experts(fields: Fields) -> int:
    """Return the query heads of JetMoe: each chosen expert has one for each key-value head.

    Query head ``h`` attends to key-value head ``h % kv_heads``: order them by key-value head for grouped attention.
    """
    heads = fields.integer("num_key_value_heads") * fields.integer("num_experts_per_tok")
    if fields.given("num_attention_heads") not in (None, heads):
        fields.refuse(
            f"{fields.describe('num_attention_heads')}; it must be {heads}, num_key_value_heads times "
            "num_experts_per_tok, or be left out"
        )
    return heads


_DIMS_OF_128: Mapping[str, object] = {"head_dim": 128, "num_key_value_heads": None}
_SMOL_LM = {
    **GROUPED,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
_GRANITE_MOE = Family({**GROUPED, "attention_multiplier": 1.0}, scale=multiplier)
# Every fourth layer, from the first, attends to all keys; all layers have sinks.
_GRANITE_SWA: Mapping[str, object] = {
    **GROUPED,
    "attention_multiplier": 1.0,
    "sliding_window": 128,
    "layer_types": None,
}
_COHERE_2_MOE = {
    **_DIMS_OF_128,
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
_LAGUNA = {
    **_DIMS_OF_128,
    "num_key_value_heads": 8,
    "num_attention_heads_per_layer": None,
    "sliding_window": 512,
    "layer_types": None,
}
_JETMOE = {"head_dim": 128, "num_key_value_heads": 16, "num_experts_per_tok": 2}

LLAMA_KIN: Mapping[str, Family] = {
    "afmoe": _all_but_every_nth_layer("global_attn_every_n_layers"),
    "apertus": Family(GROUPED),
    "arcee": Family(GROUPED),
    "aria_text": Family(GROUPED),
    "bitnet": Family({**GROUPED, "num_key_value_heads": 5}),
    "cohere2_moe": Family(_COHERE_2_MOE, _two_patterns),
    "cwm": Family(
        {**_DIMS_OF_128, "num_key_value_heads": 8, "sliding_window": 8192, "layer_types": None},
        _first_of_four_attends,
    ),
    "dots1": Family(_DOTS_1, _windowed_layers_above),
    "ernie4_5": Family({**_DIMS_OF_128, "num_key_value_heads": 2}),
    "ernie4_5_moe": Family({**GROUPED, "num_key_value_heads": 4}),
    "exaone4": _all_but_every_nth_layer("sliding_window_pattern"),
    "exaone_moe": _all_but_every_nth_layer("sliding_window_pattern"),
    "flex_olmo": Family(GROUPED),
    "granite_swa": Family(
        {**_GRANITE_SWA, "num_key_value_heads": 4},
        _first_of_four_attends,
        has_sinks=True,
        scale=multiplier,
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoe_swa": Family(_GRANITE_SWA, _first_of_four_attends, has_sinks=True, scale=multiplier),
    "granitemoeshared": _GRANITE_MOE,
    "helium": Family({**_DIMS_OF_128, "num_key_value_heads": 20}),
    "hunyuan_v1_dense": Family(GROUPED),
    "hunyuan_v1_moe": Family(GROUPED),
    "hy_v3": Family({**_DIMS_OF_128, "num_key_value_heads": 8}),
    "hyperclovax": Family({**GROUPED, "attention_multiplier": None}, scale=_multiplier_or_default),
    "internlm3": Family({**_DIMS_OF_128, "num_key_value_heads": 2}),
    "iquestcoder": Family({**_DIMS_OF_128, "num_key_value_heads": 8}),
    "jais2": Family(GROUPED),
    "jetmoe": Family(_JETMOE, aliases={"head_dim": "kv_channels"}, count_heads=_heads_of_experts),
    "kolibri1": Family(
        {**_DIMS_OF_128, "num_key_value_heads": 4, "sliding_window": 513, "layer_types": None},
        all_but_every_fifth_layer,
    ),
    "laguna": Family(_LAGUNA, no_layer, heads=_heads_by_layer),
    "mellum": Family({**_DIMS_OF_128, "num_key_value_heads": 4, "sliding_window": 1024, "layer_types": None}, no_layer),
    "minimax_m3_vl_text": Family({**_DIMS_OF_128, "num_key_value_heads": 4}),
    "ministral3": Family({**MISTRAL, "head_dim": 128, "sliding_window": None}, every_layer),
    "nanochat": Family(GROUPED),
    "nemotron": Family(GROUPED),
    "olmo": Family(GROUPED),
    "olmoe": Family(GROUPED),
    "persimmon": Family({}),
    "phimoe": Family({**MISTRAL, "sliding_window": None}, every_layer),
    "smollm3": Family(_SMOL_LM, _layers_without_rope),
    "solar_open": Family({**_DIMS_OF_128, "num_key_value_heads": 8}),
    "stablelm": Family({**GROUPED, "num_key_value_heads": 32}),
    "vaultgemma": Family(GEMMA_2, every_other_layer, scale=root_of_scalar),
}
