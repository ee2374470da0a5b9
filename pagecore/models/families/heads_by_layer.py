"""Families whose layers have different numbers of heads, or heads of different dims.

Source: the configuration and modeling files of transformers 5, and those of XiaomiMiMo/MiMo-V2.5-Pro.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.families.common_fields import DIMS_OF_128
from pagecore.models.families.family import Family, Heads
from pagecore.models.layer_types import FULL, SLIDING
from pagecore.models.layers.index_rows import index_rows_of_step_5
from pagecore.models.layers.score_scales import unscaled
from pagecore.models.layers.windows import (
    all_but_every_fifth_layer,
    all_but_every_sixth_and_the_last,
    is_last,
    no_layer,
)
from pagecore.storage.checks import INT32_MAX, LAYERS_MAX

__all__ = ["HEADS_BY_LAYER", "heads_of_layer"]


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


_LAGUNA = {
    **DIMS_OF_128,
    "num_key_value_heads": 8,
    "num_attention_heads_per_layer": None,
    "sliding_window": 512,
    "layer_types": None,
}


def _first_and_every_sixth_attend(_fields: Fields, layer: int) -> bool:
    return layer > 0 and (layer + 1) % 6 != 0


def _twice_the_heads(fields: Fields, heads: Heads, _layer: int, slides: bool) -> Heads:
    """Sliding layers have twice the key-value heads, and the only sinks."""
    heads = replace(heads, v_head_dim=fields.integer("v_head_dim"), has_sinks=slides)
    return replace(heads, kv_heads=2 * heads.kv_heads) if slides else heads


def _patterned(fields: Fields, layer: int) -> bool:
    """Return True for a layer with a window, which `hybrid_layer_pattern` lists as 1."""
    listed, layers = fields.value("hybrid_layer_pattern"), fields.integer("num_hidden_layers")
    if listed is None:
        return _first_and_every_sixth_attend(fields, layer)
    if not isinstance(listed, list | tuple) or len(listed) != layers or any(each not in (0, 1) for each in listed):
        fields.refuse(f"{fields.describe('hybrid_layer_pattern')}; it must list 0 or 1 for each of {layers} layers")
    return bool(listed[layer])


def _heads_of_mimo_v2(fields: Fields, heads: Heads, _layer: int, slides: bool) -> Heads:
    """Layers with a window may have heads and dims of their own; which layers have sinks is a field for each kind."""
    field = "add_swa_attention_sink_bias" if slides else "add_full_attention_sink_bias"
    own = replace(heads, v_head_dim=fields.integer("v_head_dim"), has_sinks=fields.flag(field))
    if not slides:
        return own

    def integer(name: str, default: int) -> int:
        return default if fields.given(f"swa_{name}") is None else fields.integer(f"swa_{name}")

    kv_field = "num_key_value_heads"
    return replace(
        own,
        queries=integer("num_attention_heads", own.queries),
        kv_heads=integer("num_key_value_heads", own.kv_heads),
        head_dim=integer("head_dim", own.head_dim),
        v_head_dim=integer("v_head_dim", own.v_head_dim or own.head_dim),
        kv_field=kv_field if fields.given(f"swa_{kv_field}") is None else f"swa_{kv_field}",
    )


def _preceding_tokens_and_one(fields: Fields) -> int | None:
    """Return `sliding_window`, or one more than `sliding_window_size`, which does not count the token itself."""
    if fields.given("sliding_window_size") is not None:
        return fields.integer("sliding_window_size") + 1
    return None if fields.value("sliding_window") is None else fields.integer("sliding_window")


def _layers_of_gemma_4(fields: Fields) -> int:
    """Return the number of layers, of a model whose layers all attend to preceding tokens."""
    if fields.given("use_bidirectional_attention") not in (None, "vision"):
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('use_bidirectional_attention')}, but only causal attention is "
            'supported; set it to "vision", which is causal for text, or leave it out'
        )
    return fields.integer("num_hidden_layers", max=LAYERS_MAX)


def _wide_where_all_keys_are_seen(fields: Fields, heads: Heads, layer: int, slides: bool) -> Heads:
    """Heads of layers without a window have a dim, and may have a number, of their own."""
    if slides and is_last(fields, layer):
        fields.refuse(f"layer {layer} is {SLIDING!r}; the last layer of the model must be {FULL!r}")
    if fields.given("per_layer_config") is not None:
        return heads_of_layer(fields, heads, layer, slides)
    if slides:
        return heads
    own = replace(heads, head_dim=fields.integer("global_head_dim"))
    if fields.flag("attention_k_eq_v") and fields.value("num_global_key_value_heads") is not None:
        name = "num_global_key_value_heads"
        own = replace(own, kv_heads=fields.integer(name), kv_field=name)
    return own


def heads_of_layer(fields: Fields, heads: Heads, layer: int, _slides: bool) -> Heads:
    """Return the heads of a layer that `per_layer_config` may have."""
    listed = fields.given("per_layer_config")
    if listed is None:
        return heads
    # transformers writes the numbers of layers with leading zeros.
    numbers = {str(key).lstrip("0") or "0": key for key in listed} if isinstance(listed, Mapping) else {}
    given = listed.get(numbers.get(str(layer)), {}) if isinstance(listed, Mapping) else None
    if not isinstance(given, Mapping) or not given.keys() <= {"head_dim", "num_key_value_heads"}:
        fields.refuse(
            f"{fields.describe('per_layer_config')}; it must have, by numbers of layers, objects with head_dim and "
            "num_key_value_heads alone"
        )
    own = Fields(given, fields.source, f"{fields.name('per_layer_config')}.{layer}")
    own.defaults = {"head_dim": heads.head_dim, "num_key_value_heads": heads.kv_heads}
    kv_heads = own.integer("num_key_value_heads")
    return replace(heads, head_dim=own.integer("head_dim"), kv_heads=kv_heads, kv_field="per_layer_config")


GEMMA_3N: Mapping[str, object] = {
    "layer_types": None,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 15,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
}
GEMMA_4: Mapping[str, object] = {
    **dict.fromkeys(("layer_types", "per_layer_config", "num_global_key_value_heads", "use_bidirectional_attention")),
    "head_dim": 256,
    "global_head_dim": 512,
    "num_key_value_heads": 4,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": False,
    "sliding_window": 512,
}
MIMO_V2_FLASH: Mapping[str, object] = {
    "head_dim": 192,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "sliding_window": 129,
    "sliding_window_size": None,
    "layer_types": None,
    # Published files have one, equal to the window; no layer attends in chunks.
    "attention_chunk_size": None,
}
_MIMO_V2: Mapping[str, object] = {
    **MIMO_V2_FLASH,
    "hybrid_layer_pattern": None,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}
_GEMMA_4 = Family(
    GEMMA_4,
    all_but_every_sixth_and_the_last,
    scale=unscaled,
    count_layers=_layers_of_gemma_4,
    heads=_wide_where_all_keys_are_seen,
    shared_field="num_kv_shared_layers",
)


def _heads_of_sliding_layers(fields: Fields, heads: Heads, _layer: int, slides: bool) -> Heads:
    """Layers with a window may have other heads: published files describe them in `attention_other_setting`."""
    if not slides:
        return heads
    if fields.value("num_sliding_attention_heads") is not None:
        return replace(heads, queries=fields.integer("num_sliding_attention_heads"))
    if fields.value("attention_other_setting") is None:
        return heads
    other = fields.inner("attention_other_setting")
    other.defaults = {
        "num_attention_heads": heads.queries,
        "num_attention_groups": heads.kv_heads,
        "head_dim": heads.head_dim,
    }
    return replace(
        heads,
        queries=other.integer("num_attention_heads"),
        kv_heads=other.integer("num_attention_groups"),
        head_dim=other.integer("head_dim"),
    )


def _root_of_scalar_or_dim(fields: Fields, head_dim: int, _layer: int) -> float | None:
    """Return the root of `query_pre_attn_scalar`, and None for a null, which means the head dim."""
    scalar = fields.value("query_pre_attn_scalar")
    return None if scalar in (None, head_dim) else float(fields.integer("query_pre_attn_scalar") ** -0.5)


_STEP: Mapping[str, object] = {
    **dict.fromkeys(("sliding_window", "layer_types", "query_pre_attn_scalar")),
    **dict.fromkeys(("num_sliding_attention_heads", "attention_other_setting")),
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_nextn_predict_layers": 0,
}

_STEP_3 = Family(
    _STEP,
    no_layer,
    scale=_root_of_scalar_or_dim,
    aliases={"num_key_value_heads": "num_attention_groups"},
    heads=_heads_of_sliding_layers,
)
_STEP_5_NAMES = {**_STEP_3.aliases, "num_sliding_attention_heads": "swa_num_attention_heads"}

HEADS_BY_LAYER: Mapping[str, Family] = {
    "gemma3n_text": Family(GEMMA_3N, all_but_every_fifth_layer, scale=unscaled, shared_field="num_kv_shared_layers"),
    "gemma4_text": _GEMMA_4,
    "gemma4_unified_text": replace(_GEMMA_4, defaults={**GEMMA_4, "sliding_window": 1024}),
    "laguna": Family(_LAGUNA, no_layer, heads=_heads_by_layer),
    "mimo_v2_flash": Family(
        MIMO_V2_FLASH,
        _first_and_every_sixth_attend,
        has_sinks=True,
        heads=_twice_the_heads,
        window=_preceding_tokens_and_one,
    ),
    "mimo_v2": Family(
        _MIMO_V2,
        _patterned,
        has_sinks=True,
        heads=_heads_of_mimo_v2,
        window=_preceding_tokens_and_one,
    ),
    "step3p5": _STEP_3,
    "step5": replace(
        _STEP_3,
        defaults={**_STEP, "head_dim": None, "sparse_config": None},
        aliases=_STEP_5_NAMES,
        rows=index_rows_of_step_5,
    ),
}
