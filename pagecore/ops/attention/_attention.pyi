from collections.abc import Sequence
from typing import Any

from pagecore.ops.arguments.sealed_blocks import SealedBlocks
from pagecore.ops.planning._plan import AttentionPlan

def paged_attention(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    rows: Any = None,
    cu_query_lens: Any = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | Sequence[int | None] | None = None,
    chunk: int | None = None,
    sink_tokens: int | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    mask: Any = None,
    tree_mask: Any = None,
    positions: Any = None,
    blocks: Any = None,
    block_counts: Any = None,
    indices: Any = None,
    index_counts: Any = None,
    key_scale: Any = None,
    value_scale: Any = None,
    key_global_scale: float = 1.0,
    value_global_scale: float = 1.0,
    sealed: SealedBlocks | None = None,
    query_scale: Any = None,
    output_scale: Any = None,
    out: Any = None,
    return_lse: bool = False,
    plan: AttentionPlan | None = None,
    stream: None = None,
) -> Any: ...
def merge_attention(
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    *,
    mask: Any = None,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]: ...
def merge_attention_parts(
    outs: Any, lses: Any, cu_parts: Any = None, *, out: Any = None, lse: Any = None, stream: Any = None
) -> tuple[Any, Any]: ...
def table_from_pages(indptr: Any, indices: Any, last_page_len: Any, block_size: int) -> tuple[Any, Any]: ...
def pages_from_table(block_table: Any, seq_lens: Any, block_size: int, *, rows: Any = None) -> tuple[Any, Any, Any]: ...
