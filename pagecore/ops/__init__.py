"""Functions on arrays: write to a paged cache, attend to it, copy its blocks, merge partial attention, quantise."""

from pagecore.ops.arguments._tree import tree_mask
from pagecore.ops.attention._attention import paged_attention
from pagecore.ops.attention._merge import merge_attention
from pagecore.ops.attention._pages import pages_from_table, table_from_pages
from pagecore.ops.codecs._quantize import dequantize, quantize
from pagecore.ops.codecs._state_codec import dequantize_state, quantize_state
from pagecore.ops.codecs._transfer import transfer_blocks
from pagecore.ops.index_checks._debug import debug
from pagecore.ops.latent._indexer import index_scores, write_index
from pagecore.ops.latent._latent import latent_attention
from pagecore.ops.latent._latent_rows import gather_latent, write_latent
from pagecore.ops.latent._topk import select_topk, slots_of
from pagecore.ops.moves._blocks import copy_blocks, gather_blocks, scatter_blocks
from pagecore.ops.moves._move_slots import move_slots
from pagecore.ops.moves._write import write_kv
from pagecore.ops.planning._plan import AttentionPlan, plan_attention
from pagecore.ops.sparse._score import score_blocks, score_tokens
from pagecore.ops.sparse._select import select

__all__ = [
    "AttentionPlan",
    "copy_blocks",
    "debug",
    "dequantize",
    "dequantize_state",
    "gather_blocks",
    "gather_latent",
    "index_scores",
    "latent_attention",
    "merge_attention",
    "move_slots",
    "paged_attention",
    "pages_from_table",
    "plan_attention",
    "quantize",
    "quantize_state",
    "scatter_blocks",
    "score_blocks",
    "score_tokens",
    "select",
    "select_topk",
    "slots_of",
    "table_from_pages",
    "transfer_blocks",
    "tree_mask",
    "write_index",
    "write_kv",
    "write_latent",
]
