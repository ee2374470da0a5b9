"""Specs of the layers of a config that attend: heads, dims, windows, scale, softcap and sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import SupportsFloat

from pagecore.arrays import DType
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.models.config_files.fields import Fields, shown
from pagecore.models.families.family import Family, Heads
from pagecore.models.layer_types import CHUNKED_LAYER, FULL, HYBRID_SLIDING, SLIDING, attends
from pagecore.models.layers.latents.dims import latent_spec
from pagecore.storage import Alias, AttentionSpec, LatentSpec, RowSpec
from pagecore.storage.specs.sealing import format_of_layer

__all__ = ["Sinks", "SpecOptions", "attention_specs"]

Sinks = Iterable[Iterable[SupportsFloat]]


@dataclass(frozen=True)
class SpecOptions:
    """Dtype, format and sinks of the layers that attend.

    Attributes
    ----------
    dtype : DType
    format : str or None
    sinks : array_like [attention layers with sinks][query heads], optional
    """

    dtype: DType
    format: str | None
    sinks: Sinks | None


def attention_specs(
    fields: Fields, family: Family, model_type: str, kinds: Sequence[str], asked: SpecOptions
) -> list[AttentionSpec | LatentSpec | RowSpec | Alias]:
    """Return the spec of each layer that attends, of a model whose layers have the given kinds."""
    layers = [layer for layer, kind in enumerate(kinds) if attends(kind)]
    if not layers:
        _sinks(family, model_type, [], asked.sinks)
        return []
    queries = family.count_heads(fields)
    if family.stores_latents:
        _sinks(family, model_type, [queries] * len(layers), asked.sinks)
        return _latent_specs(fields, family, model_type, kinds, queries, asked)
    given = Heads(queries, _kv_heads(fields, queries), _head_dim(fields, queries, family))
    windows = _windows(fields, family, len(kinds))
    own = [family.heads(fields, given, layer, windows[layer] is not None) for layer in layers]
    _check_groups(fields, given, layers, own)
    _refuse_unread(fields, model_type, own[0].head_dim, own[0].kv_heads, windows, kinds)
    softcap = _softcap(fields)
    make: Callable[..., AttentionSpec] = partial(AttentionSpec, dtype=asked.dtype)
    if asked.sinks is None:  # sinks of the caller need not be hashable
        make = lru_cache(maxsize=None, typed=True)(make)  # equal layers share one spec
    rows = iter(_sinks(family, model_type, [each.queries for each in own if each.has_sinks], asked.sinks))
    return [
        make(
            each.kv_heads,
            each.head_dim,
            v_head_dim=each.v_head_dim,
            num_query_heads=each.queries,
            scale=family.scale(fields, each.head_dim, layer),
            softcap=softcap,
            sinks=next(rows) if each.has_sinks else None,
            window=None if family.has_chunks else windows[layer],
            chunk=windows[layer] if family.has_chunks else None,
            format=format_of_layer(asked.format, windows[layer]),
        )
        for layer, each in zip(layers, own, strict=True)
    ]


def _latent_specs(
    fields: Fields, family: Family, model_type: str, kinds: Sequence[str], heads: int, asked: SpecOptions
) -> list[AttentionSpec | LatentSpec | RowSpec | Alias]:
    """Return the specs of layers with latent attention; they differ at most by their index keys."""
    if family.latents is not None:
        found = family.latents(fields, heads, len(kinds), asked.dtype, asked.format)
        return [spec for spec, kind in zip(found, kinds, strict=True) if attends(kind)]
    spec = latent_spec(fields, heads, asked.dtype, asked.format, rotates=family.rotates)
    specs: list[AttentionSpec | LatentSpec | RowSpec | Alias] = [spec for kind in kinds if attends(kind)]
    if family.indexes is not None:
        indexed = replace(spec, index_dim=fields.integer("index_head_dim"))
        specs = [indexed if each else spec for each in family.indexes(fields, len(kinds))]
    head_dim = fields.integer("qk_nope_head_dim") + spec.rope_dim
    _refuse_unread(fields, model_type, head_dim, heads, [None] * len(kinds), kinds)
    return specs


def _kv_heads(fields: Fields, queries: int) -> int:
    if "num_key_value_heads" not in fields.defaults or fields.value("num_key_value_heads") is None:
        return queries
    return fields.integer("num_key_value_heads")


def _check_groups(fields: Fields, given: Heads, layers: Sequence[int], heads: Sequence[Heads]) -> None:
    """Raise if the key-value heads of a layer do not divide its query heads."""
    for layer, own in zip(layers, heads, strict=True):
        if own.queries % own.kv_heads:
            what = fields.describe(own.kv_field)
            if own.kv_heads != given.kv_heads:
                what = f"layer {layer} has {own.kv_heads} key-value heads ({what})"
            fields.refuse(f"{what}; it must divide {fields.name('num_attention_heads')}, which is {own.queries}")


def _head_dim(fields: Fields, heads: int, family: Family) -> int:
    width = family.attention_width
    hidden = width * fields.integer("hidden_size")
    default = fields.sizes.get("head_dim", fields.defaults.get("head_dim"))
    # If the family's default is a number, null has no defined meaning, and integer() raises for it.
    if "head_dim" in fields.defaults and (default is not None or fields.given("head_dim") is not None):
        return fields.integer("head_dim")
    if hidden < heads or (hidden % heads and not family.rounds_head_dim):
        size = f"{width} * " * (width > 1) + fields.name("hidden_size")
        fields.refuse(
            f"{size} is {hidden}, not a multiple of {fields.name('num_attention_heads')} "
            f"{heads}, and head_dim is missing; add head_dim, or correct one of the two"
        )
    return hidden // heads


def _windows(fields: Fields, family: Family, num_layers: int) -> list[int | None]:
    """Return the window of each layer, or its chunk in a family with chunks."""
    if family.windows is not None:
        return family.windows(fields, num_layers)
    size = "attention_chunk_size" if family.has_chunks else "sliding_window"
    if size not in family.defaults:
        return [None] * num_layers
    switched_off = "use_sliding_window" in family.defaults and not fields.flag("use_sliding_window")
    # Published files hold arbitrary numbers in a window that is switched off.
    if family.window is not None:
        window = family.window(fields)
    else:
        window = None if switched_off or fields.value(size) is None else fields.integer(size)
    kind = CHUNKED_LAYER if family.has_chunks else SLIDING
    slides = _listed_layers(fields, num_layers, kind, has_states=family.states is not None)
    if slides is None:
        slides = [not switched_off and family.slides(fields, layer) for layer in range(num_layers)]
    if window is None and any(slides):
        reason = fields.describe("use_sliding_window" if switched_off else size)
        what = "size" if family.has_chunks else "window"
        fields.refuse(f"layer {slides.index(True)} is {kind!r}, but {reason}; set a {what}, or make the layer {FULL!r}")
    return [window if slide else None for slide in slides]


def _listed_layers(fields: Fields, num_layers: int, limited: str, has_states: bool) -> list[bool] | None:
    """Return True for each layer of type `limited` in `layer_types`; None if the family or config does not have it.

    Types of a family whose layers keep states are checked where their kinds are read.
    """
    if "layer_types" not in fields.defaults or fields.given("layer_types") is None:
        return None
    listed, name = fields.given("layer_types"), fields.name("layer_types")
    if not isinstance(listed, list | tuple):
        fields.refuse(f"{fields.describe('layer_types')}; it must be a list with one entry for each layer")
    if "num_nextn_predict_layers" in fields.defaults:  # published files list the layers of a draft, too
        drafted = num_layers + fields.integer("num_nextn_predict_layers", min=0)
        listed = listed[:num_layers] if len(listed) == drafted else listed
    if len(listed) != num_layers:
        fields.refuse(
            f"{name} lists {len(listed)} layers, but {fields.name('num_hidden_layers')} is {num_layers}; they must be "
            "equal"
        )
    for layer, kind in enumerate(listed):
        if not has_states and kind not in (FULL, limited):
            raise UnsupportedOption(
                f"{fields.source}: {name}[{layer}] is {shown(kind)}, which is not supported; "
                f"expected {FULL!r} or {limited!r}"
            )
    return [kind in (limited, HYBRID_SLIDING) for kind in listed]


def _refuse_unread(
    fields: Fields, model_type: str, head_dim: int, kv_heads: int, windows: list[int | None], kinds: Sequence[str]
) -> None:
    """Raise for a field that the family does not read, unless its value equals what the family does anyway."""
    implied: dict[str, object] = {
        "head_dim": head_dim,
        "num_key_value_heads": kv_heads,
        "sliding_window": None,
        "use_sliding_window": any(windows),
        "layer_types": [SLIDING if window is not None else kind for window, kind in zip(windows, kinds, strict=True)],
        "query_pre_attn_scalar": head_dim,
        "attn_logit_softcapping": None,
        "attention_chunk_size": None,
        "index_topk": None,
        "attention_multiplier": head_dim**-0.5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "use_bidirectional_attention": False,
        "is_causal": True,
    }
    for name, value in implied.items():
        if name not in fields.defaults and fields.given(name) not in (None, value):
            raise UnsupportedOption(
                f"{fields.source}: {fields.describe(name)}, but {model_type} attends as if it were {shown(value)}; "
                "set it so, or leave it out"
            )


def _softcap(fields: Fields) -> float:
    name = "attn_logit_softcapping"
    return fields.number(name) if name in fields.defaults and fields.value(name) is not None else 0.0


def _sinks(
    family: Family, model_type: str, heads: Sequence[int], sinks: Sinks | None
) -> list[Iterable[SupportsFloat] | None]:
    """Return the sinks of the layers that have them; `heads` has the query heads of each."""
    if not family.has_sinks:
        if sinks is not None:
            raise UnsupportedOption(f"sinks are given, but {model_type} has no sinks; leave sinks out")
        return [None] * len(heads)
    if sinks is None:
        return [(0.0,) * count for count in heads]
    try:
        rows: list[Iterable[SupportsFloat] | None] = [tuple(row) for row in sinks]
    except TypeError:
        raise ShapeError(f"sinks is a {type(sinks).__name__}; expected [layers][query heads] numbers") from None
    counts = [len(tuple(row or ())) for row in rows]
    if counts != list(heads):
        raise ShapeError(
            f"sinks has {len(rows)} rows of {' or '.join(map(str, sorted(set(counts)))) or 'no'} numbers; "
            f"expected {len(heads)} rows (layers) of {' or '.join(map(str, sorted(set(heads))))} numbers (query heads)"
        )
    return rows
