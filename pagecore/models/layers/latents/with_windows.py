"""Latent attention whose layers with a window have latents of another rank (dots.3).

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.arrays import DType
from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields, shown
from pagecore.models.layer_types import SLIDING
from pagecore.storage import Alias, LatentSpec, RowSpec

__all__ = ["latents_of_dots", "sizes_of_dots"]

_INDEXED = ("indexed_attention", "full_attention")
# Names of the fields of layers with a window follow "swa_".
_SIZES_WITH_WINDOW = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
}
# Sizes that decide parameters alone.
_OF_PARAMETERS = {"q_lora_rank": 1024, "v_head_dim": 128}


def latents_of_dots(
    fields: Fields, heads: int, num_layers: int, dtype: DType, format: str | None
) -> list[LatentSpec | RowSpec | Alias]:
    """Return the spec of each layer: with a window, or with index keys."""
    scale = (fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim")) ** -0.5
    rank, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    full = LatentSpec(rank, rope, heads, scale=scale, dtype=dtype)
    indexed = replace(full, index_dim=fields.integer("index_head_dim"))
    specs: list[LatentSpec] = [
        _with_window(fields, layer, dtype) if kind == SLIDING else indexed if _indexes(fields, kind) else full
        for layer, kind in enumerate(_kinds(fields, num_layers))
    ]
    return [*specs] if format is None else [spec.with_format(format) for spec in specs]


def _indexes(fields: Fields, kind: str) -> bool:
    """Return True if a layer without a window has an indexer.

    Published files call all of them "full_attention"; files of transformers, which have a `per_layer_config`, only
    those without an indexer.
    """
    if fields.given("use_dsa") is not None:
        return fields.flag("use_dsa")
    return kind == _INDEXED[0] or fields.given("per_layer_config") is None


def _with_window(fields: Fields, layer: int, dtype: DType) -> LatentSpec:
    """Return the spec of a layer with a window."""
    part = sizes_of_dots(fields, layer)
    heads, nope = part.integer("num_attention_heads"), part.integer("qk_nope_head_dim")
    if part.integer("num_key_value_heads") != heads:
        part.refuse(f"{part.describe('num_key_value_heads')}; it must equal num_attention_heads, {heads}")
    if part.value("qk_rope_head_dim") is None:
        if part.integer("head_dim") <= nope:
            part.refuse(f"{part.describe('head_dim')}; it must be above qk_nope_head_dim, {nope}")
        rope = part.integer("head_dim") - nope
    else:
        rope = part.integer("qk_rope_head_dim")
    window = fields.integer("sliding_window_size" if fields.value("sliding_window") is None else "sliding_window")
    rank = part.integer("kv_lora_rank")
    return LatentSpec(rank, rope, heads, scale=(nope + rope) ** -0.5, dtype=dtype, window=window)


def sizes_of_dots(fields: Fields, layer: int) -> Fields:
    """Return the sizes of a layer with a window.

    Published files have them in fields of their own. In files of transformers `per_layer_config` has those that differ
    from the sizes of other layers.
    """
    listed = fields.given("per_layer_config")
    if listed is None:
        sizes = {**_SIZES_WITH_WINDOW, **_OF_PARAMETERS}
        names = (*sizes, "qk_rope_head_dim")
        given = {name: fields.given(f"swa_{name}") for name in names if fields.given(f"swa_{name}") is not None}
        part = Fields(given, fields.source, f"layer {layer}")
        part.defaults = {**sizes, "qk_rope_head_dim": None}
        return part
    own = None
    if isinstance(listed, Mapping):
        own = {str(key).lstrip("0") or "0": value for key, value in listed.items()}.get(str(layer), {})
    if not isinstance(own, Mapping):
        fields.refuse(f"{fields.describe('per_layer_config')}; it must be an object of objects")
    part = Fields(own, fields.source, f"{fields.name('per_layer_config')}.{layer}")
    heads = fields.integer("num_attention_heads")
    part.defaults = {
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("num_attention_heads", heads),
        **{name: fields.value(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")},
        **{name: fields.given(name) for name in _OF_PARAMETERS},
    }
    return part


def _kinds(fields: Fields, num_layers: int) -> list[str]:
    listed = fields.given("layer_types")
    if listed is None:
        has_windows = fields.given("use_sliding_window") is None or fields.flag("use_sliding_window")
        return [SLIDING if has_windows and n >= 2 and n % 4 != 1 else _INDEXED[0] for n in range(num_layers)]
    if not isinstance(listed, list | tuple) or len(listed) != num_layers:
        fields.refuse(f"{fields.describe('layer_types')}; it must list each of the {num_layers} layers")
    for layer, kind in enumerate(listed):
        if kind not in (SLIDING, *_INDEXED):
            raise UnsupportedOption(
                f"{fields.source}: {fields.name('layer_types')}[{layer}] is {shown(kind)}; expected {SLIDING!r} or "
                f"{_INDEXED[0]!r}"
            )
    return list(listed)
