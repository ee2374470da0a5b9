"""Further families with the attention of Llama, Gemma 2 or Olmo 3, and fields of their own.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.families import GEMMA_2, GROUPED, MISTRAL, Family, layers_with_rope
from pagecore.models.fields import Fields

__all__ = ["LLAMA_KIN"]


def _all_but_every_nth_layer(name: str) -> Family:
    """Return a family in which every layer whose number from 1 is a multiple of a field attends to all keys."""

    def slides(fields: Fields, layer: int) -> bool:
        return fields.value("sliding_window") is not None and (layer + 1) % fields.integer(name) != 0

    defaults = {**GROUPED, "layer_types": None, name: 4}
    if name == "sliding_window_pattern":
        return Family({**defaults, "num_key_value_heads": 32, "sliding_window": 4096}, slides)
    return Family({**defaults, "head_dim": 128, "sliding_window": 1024}, slides)


def _all_but_every_fourth_layer(_fields: Fields, layer: int) -> bool:
    return layer % 4 != 0


def _layers_without_rope(fields: Fields, layer: int) -> bool:
    return fields.value("sliding_window") is not None and not layers_with_rope(fields, layer)


def _every_windowed(fields: Fields, _layer: int) -> bool:
    return fields.value("sliding_window") is not None


def _every_other_layer(_fields: Fields, layer: int) -> bool:
    return layer % 2 == 0


def _root_of_scalar(fields: Fields, _head_dim: int, _layer: int) -> float:
    return float(fields.number("query_pre_attn_scalar") ** -0.5)


def _multiplier(fields: Fields, _head_dim: int, _layer: int) -> float:
    return fields.number("attention_multiplier")


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
_GRANITE_MOE = Family({**GROUPED, "attention_multiplier": 1.0}, scale=_multiplier)

LLAMA_KIN: Mapping[str, Family] = {
    "afmoe": _all_but_every_nth_layer("global_attn_every_n_layers"),
    "apertus": Family(GROUPED),
    "arcee": Family(GROUPED),
    "cwm": Family(
        {**_DIMS_OF_128, "num_key_value_heads": 8, "sliding_window": 8192, "layer_types": None},
        _all_but_every_fourth_layer,
    ),
    "ernie4_5": Family({**_DIMS_OF_128, "num_key_value_heads": 2}),
    "ernie4_5_moe": Family({**GROUPED, "num_key_value_heads": 4}),
    "exaone4": _all_but_every_nth_layer("sliding_window_pattern"),
    "flex_olmo": Family(GROUPED),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "helium": Family({**_DIMS_OF_128, "num_key_value_heads": 20}),
    "hunyuan_v1_dense": Family(GROUPED),
    "internlm3": Family({**_DIMS_OF_128, "num_key_value_heads": 2}),
    "jais2": Family(GROUPED),
    "ministral3": Family({**MISTRAL, "head_dim": 128, "sliding_window": None}, _every_windowed),
    "nanochat": Family(GROUPED),
    "nemotron": Family(GROUPED),
    "olmo": Family(GROUPED),
    "olmoe": Family(GROUPED),
    "persimmon": Family({}),
    "phimoe": Family({**MISTRAL, "sliding_window": None}, _every_windowed),
    "smollm3": Family(_SMOL_LM, _layers_without_rope),
    "solar_open": Family({**_DIMS_OF_128, "num_key_value_heads": 8}),
    "stablelm": Family({**GROUPED, "num_key_value_heads": 32}),
    "vaultgemma": Family(GEMMA_2, _every_other_layer, scale=_root_of_scalar),
}
