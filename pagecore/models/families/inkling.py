"""Inkling: attention with grouped heads, of which some layers have windows, next to short convolutions.

The layers add biases of positions to their scores, which no spec describes; they store nothing. Source: the
configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.models.config_files.fields import Fields
from pagecore.models.families.family import Family, Heads, count_layers
from pagecore.models.layer_types import HYBRID, HYBRID_SLIDING
from pagecore.models.layers.loops import LOOP_DEFAULTS, passes_of_inkling
from pagecore.models.layers.states import kinds
from pagecore.models.layers.states.inkling import convolutions_of_inkling, heads_of_inkling
from pagecore.models.layers.states.recurrent import Dtypes, Planes, States

__all__ = ["INKLING"]


def _slides(fields: Fields, layer: int) -> bool:
    """Return True for a layer with a window: as listed in `local_layer_ids`, or all but every sixth."""
    listed = fields.value("local_layer_ids")
    if listed is None:
        return (layer + 1) % 6 != 0
    if not isinstance(listed, list | tuple) or not all(type(each) is int for each in listed):
        fields.refuse(f"{fields.describe('local_layer_ids')}; it must list numbers of layers, or be null")
    return layer in listed


def _slides_as_listed(fields: Fields, layer: int) -> bool:
    listed = fields.given("layer_types")
    return _slides(fields, layer) if listed is None else bool(listed[layer] == HYBRID_SLIDING)


def _heads(fields: Fields, heads: Heads, _layer: int, slides: bool) -> Heads:
    queries, kv_heads, dim = heads_of_inkling(fields, slides)
    name = "swa_num_key_value_heads" if slides else "num_key_value_heads"
    return replace(heads, queries=queries, kv_heads=kv_heads, head_dim=dim, kv_field=name)


def _inverse_of_dim(_fields: Fields, head_dim: int, _layer: int) -> float:
    """Return the scale of queries and keys that are normalised."""
    return 1.0 / head_dim


def _first_planes(fields: Fields, dtypes: Dtypes) -> Planes:
    return _BY_LAYER(fields, dtypes, 0)


_BY_LAYER = convolutions_of_inkling(_slides_as_listed)
_STATES = States(kinds.kinds_of_zaya, _first_planes, planes_of_layer=_BY_LAYER)
_NAMES = {
    "conv_kernel_size": "sconv_kernel_size",
    "max_position_embeddings": "model_max_length",
    "sliding_window": "sliding_window_size",
}


# -- Inkling 2 with a loop: layers in the middle are passed several times, and store each pass -----------------------


def _kinds_of_passes(fields: Fields, _num_passes: int) -> list[str]:
    kinds.kinds_of_zaya(fields, count_layers(fields))
    return [HYBRID] * len(passes_of_inkling(fields))


def _slides_in_pass(fields: Fields, number: int) -> bool:
    return _slides_as_listed(fields, passes_of_inkling(fields)[number])


def _windows_of_passes(fields: Fields, _num_passes: int) -> list[int | None]:
    slides = [_slides_as_listed(fields, layer) for layer in passes_of_inkling(fields)]
    window = fields.integer("sliding_window") if any(slides) else None
    return [window if each else None for each in slides]


_PASS_BY_LAYER = convolutions_of_inkling(_slides_in_pass)


def _first_planes_of_passes(fields: Fields, dtypes: Dtypes) -> Planes:
    return _PASS_BY_LAYER(fields, dtypes, 0)


def _family(heads: int, swa_kv_heads: int, window: int, longest: int) -> Family:
    """Return a family with the given default heads, window and length."""
    defaults: Mapping[str, object] = {
        **dict.fromkeys(("layer_types", "local_layer_ids")),
        **dict.fromkeys(("num_attention_heads", "swa_num_attention_heads"), heads),
        **dict.fromkeys(("head_dim", "swa_head_dim"), 128),
        "num_key_value_heads": 8,
        "swa_num_key_value_heads": swa_kv_heads,
        "sliding_window": window,
        "conv_kernel_size": 4,
        "max_position_embeddings": longest,
    }
    return Family(defaults, _slides, scale=_inverse_of_dim, heads=_heads, states=_STATES, aliases=_NAMES)


_INKLING_2_LOOP = _family(24, 8, 1024, 1048576)

INKLING: Mapping[str, Family] = {
    "inkling_model": _family(64, 16, 512, 131072),
    "inkling_text": _family(64, 16, 512, 131072),
    "inkling2_text": _family(48, 8, 1024, 1048576),
    "inkling2_loop_text": replace(
        _INKLING_2_LOOP,
        defaults={
            **_INKLING_2_LOOP.defaults,
            **LOOP_DEFAULTS,
        },
        count_layers=lambda fields: len(passes_of_inkling(fields)),
        windows=_windows_of_passes,
        states=States(_kinds_of_passes, _first_planes_of_passes, planes_of_layer=_PASS_BY_LAYER),
        nested=("loop_config",),
    ),
}
