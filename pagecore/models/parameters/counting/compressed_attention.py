"""Parameters of the attention of DeepSeek-V4.

Source: the modeling file of transformers 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.storage import RowSpec

__all__ = ["add_compressed_attention"]


def add_compressed_attention(tally: Tally, fields: Fields, specs: Sequence[Any]) -> None:
    """Add attention of one key for all heads, the compression of keys, and the indexer of layers that have one."""
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
    rows = next((spec for spec in specs if isinstance(spec, RowSpec)), None)
    if rows is None:
        return
    has_indexer = any(row.name == "index_key" for row in rows.rows)
    # Rows of layers with an indexer are computed from two groups of tokens.
    _add_compressor(tally, hidden, dim, rows.tokens, 1 + has_indexer, "compressor")
    if has_indexer:
        index_heads, index_dim = fields.integer("index_n_heads"), fields.integer("index_head_dim")
        _add_compressor(tally, hidden, index_dim, rows.tokens, 2, "compressor.indexer")
        tally.linear(rank, index_heads * index_dim, split=Split.COPY, name="compressor.indexer.q_b_proj")
        tally.linear(hidden, index_heads, split=Split.COPY, kind=Kind.OTHER)


def _add_compressor(tally: Tally, hidden: int, dim: int, tokens: int, groups: int, name: str) -> None:
    """Add the projections of values and weights, a bias of the weights for each token of a group, and a norm."""
    for part in ("kv_proj", "gate_proj"):
        tally.linear(hidden, groups * dim, split=Split.COPY, name=f"{name}.{part}")
    tally.add(tokens * groups * dim)
    tally.norm(dim)
