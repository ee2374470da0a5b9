"""Rows of indexers next to keys and values: for each token, or for groups of tokens.

Source: the modeling files of MiniMax-M3 and Qwen4 in transformers 5, and the models of MiniMax-M3, Qwen4 and Step5 in
vLLM.
"""

from __future__ import annotations

from pagecore.arrays import as_dtype
from pagecore.models.config_files.fields import Fields
from pagecore.models.layer_types import FULL
from pagecore.models.layers.rows import LayerRows, RowOptions, ring
from pagecore.models.layers.states.kinds import kinds_of_qwen_4
from pagecore.models.layers.states.recurrent import chunk_of_64
from pagecore.models.layers.unsupported import SPARSE_LAYER
from pagecore.storage import Plane, RowSpec

__all__ = ["index_rows_of_minimax", "index_rows_of_qwen_4", "index_rows_of_step_5"]


def index_rows_of_minimax(fields: Fields, num_layers: int, asked: RowOptions) -> list[LayerRows]:
    """Return an index key for each token, in layers that attend to selected blocks: listed by name, or as 1 and 0."""
    part = fields.inner("sparse_attention_config") if fields.has_object("sparse_attention_config") else fields
    name = "layer_types" if fields.value("layer_types") is not None else "sparse_attention_freq"
    listed = fields.value(name) if name == "layer_types" else part.given(name)
    if listed is None:
        return [()] * num_layers
    kinds = (FULL, SPARSE_LAYER, 0, 1)
    if not isinstance(listed, list | tuple) or len(listed) != num_layers or any(each not in kinds for each in listed):
        part.refuse(f"{part.describe(name)}; it must list {FULL!r} or {SPARSE_LAYER!r} for each of {num_layers} layers")
    dim = fields.integer("index_head_dim")
    if part is not fields and part.given("sparse_index_dim") is not None:
        dim = part.integer("sparse_index_dim")
    row = RowSpec((Plane("index_key", (dim,), asked.dtype),))
    return [(row,) if each in (SPARSE_LAYER, 1) else () for each in listed]


def index_rows_of_qwen_4(fields: Fields, num_layers: int, asked: RowOptions) -> list[LayerRows]:
    """Return, for layers that attend, the mean index key of each group of tokens, and the keys of an open group."""
    if fields.value("indexer_n_heads") is None:
        return [()] * num_layers
    chunk = chunk_of_64(fields)
    tokens = fields.integer("indexer_compress_ratio")
    if chunk % tokens:
        fields.refuse(f"{fields.describe('indexer_compress_ratio')}; it must divide {chunk}, the chunk of the states")
    rows = _grouped_keys(fields.integer("indexer_head_dim"), tokens, chunk, asked)
    return [rows if kind == FULL else () for kind in kinds_of_qwen_4(fields, num_layers)]


def _grouped_keys(dim: int, tokens: int, chunk: int, asked: RowOptions) -> LayerRows:
    size = asked.size_for([tokens]) if tokens > 1 else None
    grouped = RowSpec((Plane("index_key", (dim,), asked.dtype),), tokens=tokens, block_size=size)
    return grouped, ring(tokens, {"index_state": dim}, asked.dtype, chunk)


def index_rows_of_step_5(fields: Fields, num_layers: int, asked: RowOptions) -> list[LayerRows]:
    """Return, for layers without a window, a summary of each region of tokens, and the rows that it is made of."""
    if not fields.has_object("sparse_config"):
        return [()] * num_layers
    part = fields.inner("sparse_config")
    part.defaults = {"enabled": True, "proxy_dim": 256, "region_block_size": 8}
    listed = fields.value("layer_types") or [FULL] * num_layers
    dim, tokens = part.integer("proxy_dim"), part.integer("region_block_size", min=2)
    summary = Plane("index_summary", (dim,), as_dtype("float8_e4m3fn"))
    rows = RowSpec((summary,), tokens=tokens, block_size=asked.size_for([tokens]))
    waiting = ring(tokens, {"index_state": 2 * dim}, asked.dtype, tokens)
    return [(rows, waiting) if part.flag("enabled") and kind == FULL else () for kind in listed[:num_layers]]
