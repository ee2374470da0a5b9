"""Functions on arrays: write to a paged cache, attend to it, copy its blocks, merge partial attention, quantise."""

from pagecore.ops.arguments._arguments import tree_mask
from pagecore.ops.arguments.sealed_blocks import SealedBlocks
from pagecore.ops.attention._attention import (
    merge_attention,
    merge_attention_parts,
    paged_attention,
    pages_from_table,
    table_from_pages,
)
from pagecore.ops.codecs._codecs import (
    dequantize,
    dequantize_state,
    hadamard,
    quantize,
    quantize_state,
    seal_kv,
    transfer_blocks,
    unseal_kv,
)
from pagecore.ops.index_checks._index_checks import debug
from pagecore.ops.latent._latent import (
    gather_latent,
    index_scores,
    latent_attention,
    select_topk,
    slots_of,
    write_index,
    write_latent,
)
from pagecore.ops.moves._moves import copy_blocks, gather_blocks, move_slots, scatter_blocks, write_kv
from pagecore.ops.planning._plan import AttentionPlan, plan_attention
from pagecore.ops.sparse._sparse import score_blocks, score_tokens, select

__all__ = [
    "AttentionPlan",
    "SealedBlocks",
    "copy_blocks",
    "debug",
    "dequantize",
    "dequantize_state",
    "gather_blocks",
    "gather_latent",
    "hadamard",
    "index_scores",
    "latent_attention",
    "merge_attention",
    "merge_attention_parts",
    "move_slots",
    "paged_attention",
    "pages_from_table",
    "plan_attention",
    "quantize",
    "quantize_state",
    "scatter_blocks",
    "score_blocks",
    "score_tokens",
    "seal_kv",
    "select",
    "select_topk",
    "slots_of",
    "table_from_pages",
    "transfer_blocks",
    "tree_mask",
    "unseal_kv",
    "write_index",
    "write_kv",
    "write_latent",
]
