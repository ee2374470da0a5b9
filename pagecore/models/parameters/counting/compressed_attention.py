"""Parameters of the attention of DeepSeek-V4 and V4.1, and of the n-grams of V4.1.

Source: the modeling file of DeepSeek-V4 in transformers 5, the models of V4.1 in vLLM and SGLang, and the tensors of
deepseek-ai/DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.storage import RowSpec

__all__ = ["add_compressed_attention", "add_ngrams", "add_projections", "add_sources"]


def add_compressed_attention(tally: Tally, fields: Fields, specs: Sequence[Any]) -> None:
    """Add attention of one key for all heads, the compression of keys, and the indexer of layers that have one."""
    add_projections(tally, fields, specs)
    rows = next((spec for spec in specs if isinstance(spec, RowSpec)), None)
    if rows is None:
        return
    hidden, rank, dim = (fields.integer(name) for name in ("hidden_size", "q_lora_rank", "head_dim"))
    has_indexer = any(row.name == "index_key" for row in rows.rows)
    # Rows of layers with an indexer are computed from two groups of tokens.
    _add_compressor(tally, hidden, dim, rows.tokens, 1 + has_indexer, "compressor")
    if has_indexer:
        index_heads, index_dim = fields.integer("index_n_heads"), fields.integer("index_head_dim")
        _add_compressor(tally, hidden, index_dim, rows.tokens, 2, "compressor.indexer")
        tally.linear(rank, index_heads * index_dim, split=Split.COPY, name="compressor.indexer.q_b_proj")
        tally.linear(hidden, index_heads, split=Split.COPY, kind=Kind.OTHER)


def add_projections(tally: Tally, fields: Fields, _specs: Sequence[Any]) -> None:
    """Add sinks, and the projections of queries, of the key that all heads share, and of the output."""
    hidden, rank = fields.integer("hidden_size"), fields.integer("q_lora_rank")
    heads, dim = fields.integer("num_attention_heads"), fields.integer("head_dim")
    groups, output = fields.integer("o_groups"), fields.integer("o_lora_rank")
    tally.add(heads)  # sinks
    tally.linear(hidden, rank, split=Split.COPY, name="q_a_proj")
    tally.norm(rank)
    tally.linear(rank, heads * dim, split=Split.ATTENTION, name="q_b_proj")
    tally.linear(hidden, dim, split=Split.COPY, name="kv_proj")
    tally.norm(dim)
    tally.linear(heads * dim // groups, output, split=Split.ATTENTION, copies=groups, name="o_a_proj")
    tally.linear(groups * output, hidden, split=Split.ATTENTION, name="o_b_proj")


def add_sources(tally: Tally, fields: Fields, layer: int) -> None:
    """Add what computes compressed keys and index keys for later layers, and the queries of an indexer (V4.1)."""
    hidden, dim, index_dim = (fields.integer(name) for name in ("hidden_size", "head_dim", "index_head_dim"))
    if layer in fields.integers("index_source_layer_ids", min=0):
        heads = fields.integer("index_n_heads")
        tally.linear(fields.integer("q_lora_rank"), heads * index_dim, split=Split.COPY, name="indexer.wq_b")
        tally.linear(hidden, heads, split=Split.COPY, kind=Kind.OTHER)
    if layer in fields.integers("kv_source_layer_ids", min=0):
        # Keys of one token each have no weights to average by.
        parts = 1 + (fields.integers("compress_ratios", min=0)[layer] > 1)
        tally.linear(hidden, dim, split=Split.COPY, kind=Kind.OTHER, copies=parts)
        tally.norm(dim)
        tally.linear(dim, index_dim, split=Split.COPY, kind=Kind.OTHER)
        tally.norm(index_dim)


def add_ngrams(tally: Tally, fields: Fields, layer: int) -> None:
    """Add the table of a layer with hashed n-grams, and what projects and weights its rows (V4.1)."""
    listed = fields.value("engram_layer_ids")
    if not listed or layer not in (layers := fields.integers("engram_layer_ids", min=0)):
        return
    rows = fields.integers("engram_num_embeddings")
    if len(rows) != len(layers):
        fields.refuse(f"{fields.describe('engram_num_embeddings')}; it must have a number for each of {len(layers)}")
    dim, hidden, streams = (fields.integer(name) for name in ("engram_head_dim", "hidden_size", "hc_mult"))
    columns = (fields.integer("engram_max_ngram_size", min=2) - 1) * fields.integer("engram_n_heads")
    tally.linear(dim, rows[layers.index(layer)], name="engram.embed")
    tally.linear(columns * dim, hidden * (streams + 1), split=Split.COPY, name="engram.wkv")
    tally.add(2 * streams * hidden)


def _add_compressor(tally: Tally, hidden: int, dim: int, tokens: int, groups: int, name: str) -> None:
    """Add the projections of values and weights, a bias of the weights for each token of a group, and a norm."""
    for part in ("kv_proj", "gate_proj"):
        tally.linear(hidden, groups * dim, split=Split.COPY, name=f"{name}.{part}")
    tally.add(tokens * groups * dim)
    tally.norm(dim)
