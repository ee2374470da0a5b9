"""Families that vLLM or SGLang serve and transformers does not have, without states, and Dream.

Source: the models of vLLM and SGLang, and the modeling file of Dream-org/Dream-v0-Instruct-7B.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.families.common_fields import GROUPED, QWEN
from pagecore.models.families.family import Family
from pagecore.models.families.full_attention import FULL_ATTENTION
from pagecore.models.families.heads_by_layer import heads_of_layer
from pagecore.models.families.latent_attention import LATENT_ATTENTION
from pagecore.models.families.remote.llamas import passes_over_layers
from pagecore.models.families.sliding_windows import SLIDING_WINDOWS
from pagecore.models.layer_types import FULL, NEITHER, SLIDING
from pagecore.models.layers.windows import all_but_every_fourth_layer, layers_above
from pagecore.storage.checks import LAYERS_MAX

__all__ = ["ENGINE_MODELS"]


# -- Dory: layers that attend or have an MLP, and those in the middle are passed several times ------------------------

_DORY_PARTS = ("n_input_layers", "n_recurrent_layers", "n_output_layers")
_DORY: Mapping[str, object] = {
    **dict.fromkeys(("layer_types", "n_recurrent_layers")),
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 1024,
    "n_input_layers": 0,
    "n_output_layers": 0,
    "n_recurrent_loops": 1,
    "recurrent_kv_cache_mode": "per_loop",
}


def _passes_of_dory(fields: Fields) -> list[int]:
    """Return the numbers of the model's layers in the order in which they store keys and values."""
    count = fields.integer("num_hidden_layers", max=LAYERS_MAX)
    before, after = (fields.integer(name, min=0) for name in ("n_input_layers", "n_output_layers"))
    given = fields.value("n_recurrent_layers")
    recurrent = count - before - after if given is None else fields.integer("n_recurrent_layers", min=0)
    if recurrent < 0 or before + recurrent + after != count:
        parts = ", ".join(fields.describe(name) for name in _DORY_PARTS)
        fields.refuse(f"{parts}; together they must be num_hidden_layers, {count}")
    if fields.value("recurrent_kv_cache_mode") not in ("per_loop", "last_loop"):
        fields.refuse(f"{fields.describe('recurrent_kv_cache_mode')}; it must be per_loop or last_loop")
    loops = fields.integer("n_recurrent_loops", max=LAYERS_MAX)
    stored = loops if fields.value("recurrent_kv_cache_mode") == "per_loop" else 1
    if before + stored * recurrent + after > LAYERS_MAX:
        fields.refuse(f"{fields.describe('n_recurrent_loops')}; all passes must have at most {LAYERS_MAX} layers")
    layers = [*range(count)]
    return [*layers[:before], *layers[before : before + recurrent] * stored, *layers[before + recurrent :]]


def _types_of_dory(fields: Fields) -> list[str]:
    """Return the types of the model's layers: listed, or every other one attends, and each fourth of these to all."""
    listed, count = fields.value("layer_types"), fields.integer("num_hidden_layers", max=LAYERS_MAX)
    if listed is None:
        return [NEITHER if n % 2 else FULL if n % 8 == 6 else SLIDING for n in range(count)]
    kinds = (FULL, SLIDING, NEITHER)
    if not isinstance(listed, list | tuple) or len(listed) != count or any(each not in kinds for each in listed):
        fields.refuse(f"{fields.describe('layer_types')}; it must list {', '.join(kinds)} for each of {count} layers")
    return list(listed)


def _kinds_of_dory(fields: Fields, _num_layers: int) -> list[str]:
    types = _types_of_dory(fields)
    return [NEITHER if types[layer] == NEITHER else FULL for layer in _passes_of_dory(fields)]


def _windows_of_dory(fields: Fields, _num_layers: int) -> list[int | None]:
    types = _types_of_dory(fields)
    window = fields.integer("sliding_window") if SLIDING in types else None
    return [window if types[layer] == SLIDING else None for layer in _passes_of_dory(fields)]


# -- Others ------------------------------------------------------------------------------------------------------------


def _windows_of_domyn(fields: Fields, num_layers: int) -> list[int | None]:
    """Return one more than the first number of each pair of `window_sizes`, which does not count the token itself."""
    listed = fields.value("window_sizes")
    if listed is None:
        return [None] * num_layers
    if not isinstance(listed, list | tuple) or len(listed) != num_layers:
        fields.refuse(f"{fields.describe('window_sizes')}; it must list a pair for each of {num_layers} layers")
    sizes = [pair[0] if isinstance(pair, list | tuple) and pair else None for pair in listed]
    if not all(type(size) is int for size in sizes):
        fields.refuse(f"{fields.describe('window_sizes')}; it must list pairs of integers")
    return [size + 1 if size is not None and size > 0 else None for size in sizes]


_IQUEST_PARTS: Mapping[str, object] = {
    "first_layers_types": (FULL,),
    "hybrid_layers_types_block": (FULL, SLIDING, SLIDING, SLIDING),
    "last_layers_types": (FULL, FULL, FULL),
}
_IQUEST_Q1: Mapping[str, object] = {
    **_IQUEST_PARTS,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "use_sliding_window": True,
    "use_hybrid_layers": True,
    "num_hybrid_layers_block": 21,
    "layer_types": None,
}


def _windows_of_iquest(fields: Fields, num_layers: int) -> list[int | None]:
    """Return the windows of layers at the start, of a block that repeats, and of layers at the end."""
    if not (fields.flag("use_hybrid_layers") and fields.flag("use_sliding_window")):
        return [None] * num_layers
    parts = [fields.value(name) for name in _IQUEST_PARTS]
    blocks = fields.integer("num_hybrid_layers_block", min=0, max=LAYERS_MAX)
    types: list[object] = []
    if all(isinstance(part, list | tuple) and len(part) <= num_layers for part in parts):
        types = [*parts[0], *list(parts[1]) * blocks, *parts[2]]
    if len(types) != num_layers or any(each not in (FULL, SLIDING) for each in types):
        fields.refuse(
            f"{', '.join(_IQUEST_PARTS)} and num_hybrid_layers_block describe {len(types)} layers; they must name "
            f"{FULL!r} or {SLIDING!r} for each of num_hidden_layers, {num_layers}"
        )
    window = fields.integer("sliding_window") if SLIDING in types else None
    return [window if each == SLIDING else None for each in types]


_MOONDREAM_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "max_context",
}

ENGINE_MODELS: Mapping[str, Family] = {
    **dict.fromkeys(("k2_horizon", "llada2_moe", "param2moe", "sdar", "sdar_moe", "teleflm", "xllm"), Family(GROUPED)),
    "Dream": SLIDING_WINDOWS["qwen2"],
    "domyn_edge": Family(
        {**GROUPED, "window_sizes": None, "per_layer_config": None}, windows=_windows_of_domyn, heads=heads_of_layer
    ),
    "dory": Family(
        _DORY,
        count_layers=lambda fields: len(_passes_of_dory(fields)),
        kinds=_kinds_of_dory,
        windows=_windows_of_dory,
    ),
    "interns1_pro_text": FULL_ATTENTION["qwen3_vl_moe_text"],
    "iquest_q1": Family(_IQUEST_Q1, windows=_windows_of_iquest),
    "kimi_audio": Family(QWEN, layers_above),
    "longcat_flash_ngram": LATENT_ATTENTION["longcat_flash"],
    "moondream3_text": Family({"num_key_value_heads": 32}, aliases=_MOONDREAM_NAMES),
    "musespark1x_text": SLIDING_WINDOWS["muse_spark_text"],
    "nanbeige": passes_over_layers("num_loops", 2),
    "qwen3_asr_text": SLIDING_WINDOWS["qwen3"],
    "spark2_5": Family(
        {"head_dim": 256, "num_key_value_heads": 2, "sliding_window": 512, "layer_types": None},
        all_but_every_fourth_layer,
    ),
}
