"""Arrays in, arrays out: write to a paged cache, attend to it, copy its blocks, merge partial attention."""

from pagecore.ops._attention import merge_attention, paged_attention
from pagecore.ops._plan import AttentionPlan, plan_attention
from pagecore.ops._write import copy_blocks, write_kv

__all__ = ["AttentionPlan", "copy_blocks", "merge_attention", "paged_attention", "plan_attention", "write_kv"]
