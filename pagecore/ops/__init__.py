"""Functions on arrays: write to a paged cache, attend to it, copy its blocks, merge partial attention, quantise."""

from pagecore.ops._attention import merge_attention, paged_attention
from pagecore.ops._blocks import copy_blocks, gather_blocks, scatter_blocks, transfer_blocks
from pagecore.ops._debug import debug
from pagecore.ops._plan import AttentionPlan, plan_attention
from pagecore.ops._quantize import dequantize, quantize
from pagecore.ops._write import write_kv

__all__ = [
    "AttentionPlan",
    "copy_blocks",
    "debug",
    "dequantize",
    "gather_blocks",
    "merge_attention",
    "paged_attention",
    "plan_attention",
    "quantize",
    "scatter_blocks",
    "transfer_blocks",
    "write_kv",
]
