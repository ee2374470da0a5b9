"""GPT-2 and decoders of its time, with fields of their own: multi-query attention, ALiBi, local windows.

ALiBi adds a slope times the distance to the scores; it stores nothing. The slopes are an argument of the attention
(`alibi_slopes` of `paged_attention`), not a part of the specs.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.families.common_fields import MOSAIC_NAMES
from pagecore.models.families.family import Family, Heads
from pagecore.models.layers.score_scales import unscaled

__all__ = ["GPT"]


def _scale_of_gpt_2(fields: Fields, head_dim: int, layer: int) -> float | None:
    weights, by_layer = fields.flag("scale_attn_weights"), fields.flag("scale_attn_by_inverse_layer_idx")
    if weights and not by_layer:
        return None
    return (head_dim**-0.5 if weights else 1.0) / (layer + 1 if by_layer else 1)


GPT_2 = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
GPT_2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def _heads_of_falcon(fields: Fields, heads: Heads, _layer: int, _slides: bool) -> Heads:
    """Return the key-value heads: num_kv_heads in the new architecture only, else 1 or all."""
    asked = heads.queries if fields.value("num_kv_heads") is None else fields.integer("num_kv_heads")
    if fields.flag("new_decoder_architecture"):
        if heads.queries % asked:
            fields.refuse(
                f"{fields.describe('num_kv_heads')}; it must divide num_attention_heads, which is {heads.queries}"
            )
        return replace(heads, kv_heads=asked)
    if fields.flag("multi_query"):
        return replace(heads, kv_heads=1)
    if asked != heads.queries:
        fields.refuse(
            f"{fields.describe('num_kv_heads')}; without multi_query and new_decoder_architecture it must equal "
            f"num_attention_heads, {heads.queries}"
        )
    return heads


def _one_or_all_heads(fields: Fields, heads: Heads, _layer: int, _slides: bool) -> Heads:
    return replace(heads, kv_heads=1) if fields.flag("multi_query") else heads


def _heads_of_mpt(fields: Fields, heads: Heads, _layer: int, _slides: bool) -> Heads:
    """Return all heads; refuse the attention that transformers does not build either."""
    served: dict[str, object] = {"attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False}
    for name, value in served.items():
        given = fields.given(f"attn_config.{name}")
        if given not in (None, value):
            raise UnsupportedOption(
                f"{fields.source}: {fields.describe(f'attn_config.{name}')}, but mpt attends as if it were {value!r}; "
                "set it so, or leave it out"
            )
    return heads


def _scale_of_mpt(fields: Fields, _head_dim: int, _layer: int) -> float | None:
    name = "attn_config.softmax_scale"
    return None if fields.value(name) is None else fields.number(name)


def _scale_of_bigcode(fields: Fields, _head_dim: int, _layer: int) -> float | None:
    return None if fields.flag("scale_attn_weights") else 1.0


def _local_layers(fields: Fields, layer: int) -> bool:
    """Return True for "local" in `attention_types`: pairs of a pattern and the number of its repetitions."""
    layers = fields.integer("num_hidden_layers")
    kinds: list[Any] = []
    listed: Any = fields.value("attention_types")
    try:
        pairs: Any = [[["global", "local"], 12]] if listed is None else listed
        for pattern, copies in pairs:
            kinds += list(pattern) * min(copies, layers + 1)
    except (TypeError, ValueError):
        fields.refuse(f"{fields.describe('attention_types')}; it must list pairs such as [['global', 'local'], 12]")
    if len(kinds) != layers or any(kind not in ("global", "local") for kind in kinds):
        fields.refuse(
            f"{fields.describe('attention_types')}; it must name 'global' or 'local' for each of the {layers} layers "
            f"({fields.name('num_hidden_layers')})"
        )
    return bool(kinds[layer] == "local")


_FALCON = {"num_kv_heads": None, "new_decoder_architecture": False, "multi_query": True}
_BLOOM_NAMES = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_GPT_NEO_NAMES = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
_XGLM_NAMES = {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "attention_heads"}

GPT: Mapping[str, Family] = {
    "biogpt": Family({}),
    "bloom": Family({}, aliases=_BLOOM_NAMES),
    "codegen": Family({}, aliases=GPT_2_NAMES),
    "ctrl": Family({}, aliases=GPT_2_NAMES),
    "falcon": Family(_FALCON, heads=_heads_of_falcon),
    "gpt2": Family(GPT_2, scale=_scale_of_gpt_2, aliases=GPT_2_NAMES),
    "gpt_bigcode": Family(
        {"multi_query": True, "scale_attn_weights": True},
        scale=_scale_of_bigcode,
        aliases=GPT_2_NAMES,
        heads=_one_or_all_heads,
    ),
    "gpt_neo": Family(
        {"sliding_window": 256, "attention_types": None},
        _local_layers,
        scale=unscaled,
        aliases={**_GPT_NEO_NAMES, "sliding_window": "window_size"},
    ),
    "gpt_neox": Family({}),
    "gpt_neox_japanese": Family({}),
    "gptj": Family({}, aliases=GPT_2_NAMES),
    "mpt": Family(
        {"attn_config.softmax_scale": None},
        scale=_scale_of_mpt,
        aliases=MOSAIC_NAMES,
        heads=_heads_of_mpt,
        nested=("attn_config",),
    ),
    "openai-gpt": Family({}, aliases=GPT_2_NAMES),
    "opt": Family({}),
    "xglm": Family({}, aliases=_XGLM_NAMES),
}
