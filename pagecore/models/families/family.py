"""A model family: the fields that it reads, their defaults, and the rules of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagecore.arrays import DType
from pagecore.models.config_files.fields import Fields
from pagecore.models.layers.rows import Rows
from pagecore.models.layers.states.recurrent import States
from pagecore.models.layers.windows import no_layer
from pagecore.storage import Alias, LatentSpec, RowSpec
from pagecore.storage.checks import LAYERS_MAX

__all__ = ["Family", "Heads", "count_layers"]


def count_layers(fields: Fields) -> int:
    """Return `num_hidden_layers`."""
    return fields.integer("num_hidden_layers", max=LAYERS_MAX)


def _count_heads(fields: Fields) -> int:
    return fields.integer("num_attention_heads")


@dataclass(frozen=True)
class Heads:
    """Heads of a layer.

    Parameters
    ----------
    queries, kv_heads, head_dim : int
    v_head_dim : int, optional
        Dim of values; that of keys by default.
    has_sinks : bool
        False for a layer without sinks, in a family that has them.
    kv_field : str
        Field with `kv_heads`, for messages.
    """

    queries: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    has_sinks: bool = True
    kv_field: str = "num_key_value_heads"


def _same_heads(_fields: Fields, heads: Heads, _layer: int, _slides: bool) -> Heads:
    return heads


@dataclass(frozen=True)
class Family:
    """Differences of a `model_type` from full multi-head attention.

    Parameters
    ----------
    defaults : mapping
        Fields that the family reads, with the value of each if a file does not have it; None is null. Every family
        also reads the required fields hidden_size, num_hidden_layers and num_attention_heads.
    slides : callable
        Returns True if a layer has a sliding window; used if `layer_types` is missing.
    has_sinks : bool
        True if each query head has a learned logit in the denominator of the softmax.
    scale : callable
        Returns the factor of q.k from fields, head_dim and layer; None for ``head_dim ** -0.5``.
    aliases : mapping
        The family's own names of required fields.
    stores_latents : bool
        True for latent attention: layers are described by `LatentSpec`.
    latents : callable, optional
        Returns, for latent attention whose layers differ by more than their index keys, the spec of each layer, from
        fields, the number of query heads, the number of layers, dtype and format.
    indexes : callable, optional
        Returns, for latent attention with an indexer, True for each layer that stores index keys, from fields and the
        number of layers.
    rotates : bool
        False for latent attention without a rotary embedding, whose parameters in a file do not change the scores.
    count_layers : callable
        Returns the number of attention layers.
    states : States, optional
        Layers with recurrent states.
    attention_width : int
        Width of queries over all heads, in multiples of hidden_size, if there is no head_dim.
    count_heads : callable
        Returns the number of query heads.
    heads : callable
        Returns the heads of a layer from fields, the heads that the config gives, the layer, and True if it slides.
    rounds_head_dim : bool
        True if hidden_size need not be a multiple of num_attention_heads: without head_dim the quotient is rounded
        down.
    window : callable, optional
        Returns the window in tokens, or None, if it is not the field `sliding_window` alone.
    windows : callable, optional
        Returns the window of each layer, or None for all keys, from fields and the number of layers, in a family whose
        windows follow neither `slides` nor `layer_types`.
    shared_field : str
        Field with the number of last layers that read the keys and values of an earlier layer; "" without them.
    sources : callable, optional
        Returns, from fields and the number of layers, the layer whose keys and values each layer reads, which may be
        its own; in a family without states.
    kinds : callable, optional
        Returns the kind of each layer from fields and the number of layers, in a family without states some of whose
        layers store nothing.
    rows : callable, optional
        Returns the specs of the rows that each layer stores next to its keys and values, or latents, from fields, the
        number of layers, and `RowOptions`.
    nested : tuple of str
        Fields that are objects, whose own fields the family reads as "attn_config.kv_n_heads".
    has_chunks : bool
        True if the layers that `slides` and `layer_types` name attend in chunks of `attention_chunk_size` tokens
        instead of windows.
    """

    defaults: Mapping[str, object]
    slides: Callable[[Fields, int], bool] = no_layer
    has_sinks: bool = False
    scale: Callable[[Fields, int, int], float | None] = lambda _fields, _head_dim, _layer: None
    aliases: Mapping[str, str] = field(default_factory=dict)
    stores_latents: bool = False
    latents: Callable[[Fields, int, int, DType, str | None], list[LatentSpec | RowSpec | Alias]] | None = None
    indexes: Callable[[Fields, int], list[bool]] | None = None
    rotates: bool = True
    count_layers: Callable[[Fields], int] = count_layers
    has_chunks: bool = False
    states: States | None = None
    attention_width: int = 1
    count_heads: Callable[[Fields], int] = _count_heads
    heads: Callable[[Fields, Heads, int, bool], Heads] = _same_heads
    rounds_head_dim: bool = False
    window: Callable[[Fields], int | None] | None = None
    windows: Callable[[Fields, int], list[int | None]] | None = None
    shared_field: str = ""
    sources: Callable[[Fields, int], list[int]] | None = None
    kinds: Callable[[Fields, int], list[str]] | None = None
    rows: Rows | None = None
    nested: tuple[str, ...] = ()
