"""Layers of DeepSeek-V4 and V4.1: latents in a window, and latents of which each belongs to several tokens.

Source: the modeling file of DeepSeek-V4 in transformers 5, and the models of DeepSeek-V4 and V4.1 in vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagecore.arrays import DType, as_dtype
from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields, shown
from pagecore.models.layer_types import SLIDING
from pagecore.models.layers.rows import LayerRows, RowOptions, ring
from pagecore.storage import Alias, LatentSpec, Plane, RowSpec, StateSpec

__all__ = ["latents_of_deepseek_4", "rows_of_deepseek_4"]

# Bytes of a row of "fp8_ds_mla" with 448 codes, 64 numbers of the rotary part, 7 scales and one byte of padding.
_PACKED = 584


@dataclass(frozen=True)
class _Compression:
    """Tokens that share a row, 0 for no rows; two groups for each row if they overlap; and keys of an indexer."""

    rate: int
    overlaps: bool = False
    has_keys: bool = True


_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_BY_KIND: Mapping[str, _Compression] = {
    SLIDING: _Compression(0),
    _SPARSE: _Compression(4, overlaps=True),
    _HEAVY: _Compression(128, has_keys=False),
}
_BY_RATE: Mapping[int, _Compression] = {
    each.rate: each for each in (*_BY_KIND.values(), _Compression(1), _Compression(2))
}


def _index_planes(dim: int) -> tuple[Plane, ...]:
    """Return the planes of index keys in 8 bits, with a scale for each."""
    return Plane("index_key", (dim,), as_dtype("float8_e4m3fn")), Plane("index_scale", (1,), as_dtype("float32"))


def latents_of_deepseek_4(
    fields: Fields, heads: int, num_layers: int, dtype: DType, format: str | None
) -> list[LatentSpec | RowSpec | Alias]:
    """Return the spec of each layer's window: key and value are the same row, rotary part included."""
    dim, window = fields.integer("head_dim", min=2), fields.integer("sliding_window")
    if fields.value("num_key_value_heads") not in (None, 1):
        fields.refuse(f"{fields.describe('num_key_value_heads')}; it must be 1, all heads share a key")
    if format == "fp8_ds_mla":
        return [RowSpec((_packed_row(fields),), window=window)] * num_layers
    spec = LatentSpec(dim, 0, heads, scale=dim**-0.5, dtype=dtype, window=window)
    return [spec if format is None else spec.with_format(format)] * num_layers


def _packed_row(fields: Fields) -> Plane:
    if fields.integer("head_dim") != 512:
        fields.refuse(f"{fields.describe('head_dim')}; rows of 'fp8_ds_mla' have 512 numbers: use 'float8_e4m3fn'")
    return Plane("latent", (_PACKED,), as_dtype("uint8"))


def rows_of_deepseek_4(fields: Fields, num_layers: int, asked: RowOptions) -> list[LayerRows]:
    """Return the compressed latents of each layer with the keys of its indexer, and the tokens of an open group.

    In a file with `kv_source_layer_ids` only these layers store rows, and other layers read those of the last one
    before them.
    """
    layers = _compression_of_deepseek(fields, num_layers)
    rates = [each.rate for each in layers if each.rate]
    size, chunk, dim = asked.size_for(rates), math.lcm(*rates), fields.integer("head_dim")
    index_dim = fields.integer("index_head_dim")
    kv, index = (_sources(fields, name, num_layers) for name in ("kv_source_layer_ids", "index_source_layer_ids"))
    if asked.format == "fp8_ds_mla":
        latent = _packed_row(fields)
    else:
        latent = Plane("latent", (dim,), asked.dtype if asked.format is None else as_dtype(asked.format))
    found: list[LayerRows] = []
    for layer, each in enumerate(layers):
        if not each.rate or layer not in kv:
            found.append(())
            continue
        keys = _index_planes(index_dim) if each.has_keys and layer in index else ()
        rows = RowSpec((latent, *keys), tokens=each.rate, block_size=size if each.rate > 1 else None)
        found.append((rows,) if each.rate == 1 else (rows, _open_groups(each, dim, index_dim, chunk)))
    return found


def _open_groups(group: _Compression, dim: int, index_dim: int, chunk: int) -> StateSpec:
    """Return the tokens that are compressed next, as a ring: numbers for their values and for weights."""
    widths = {"state": dim, **({"index_state": index_dim} if group.overlaps else {})}
    size = 1 + group.overlaps
    return ring(size * group.rate, {name: 2 * size * width for name, width in widths.items()}, "float32", chunk)


def _sources(fields: Fields, name: str, num_layers: int) -> Container[int]:
    """Return the layers that store rows of their own: those that a field lists, or all."""
    return range(num_layers) if fields.value(name) is None else fields.integers(name, min=0)


def _compression_of_deepseek(fields: Fields, num_layers: int) -> list[_Compression]:
    """Return the compression of each layer.

    Published files list rates, those of a draft too, and files of transformers name kinds. A file with neither has two
    layers of 128 tokens, and then one of 128 and one of 4 in turn.
    """
    kinds, rates = fields.value("layer_types"), fields.value("compress_ratios")
    known: Mapping[Any, _Compression] = _BY_RATE if kinds is None else _kinds_of_deepseek(fields)
    if kinds is None and rates is None:
        return [_BY_KIND[_SPARSE if layer > 2 and layer % 2 else _HEAVY] for layer in range(num_layers)]
    name, listed = ("compress_ratios", rates) if kinds is None else ("layer_types", kinds)
    if not isinstance(listed, list | tuple) or len(listed) < num_layers:
        fields.refuse(f"{fields.describe(name)}; it must have an entry for each of {num_layers} layers")
    for layer, each in enumerate(listed[:num_layers]):
        if isinstance(each, bool) or not isinstance(each, str | int) or each not in known:
            raise UnsupportedOption(
                f"{fields.source}: {fields.name(name)}[{layer}] is {shown(each)}; expected "
                f"{' or '.join(map(repr, known))}"
            )
    return [known[each] for each in listed[:num_layers]]


def _kinds_of_deepseek(fields: Fields) -> Mapping[str, _Compression]:
    """Return the compression of each kind of layers, at the rates in `compress_rates`."""
    if not fields.has_object("compress_rates"):
        return _BY_KIND
    part = fields.inner("compress_rates")
    part.defaults = {kind: each.rate for kind, each in _BY_KIND.items()}
    return {kind: replace(each, rate=part.integer(kind, min=0)) for kind, each in _BY_KIND.items()}
