from typing import Any

def write_index(key: Any, key_cache: Any, scale_cache: Any, slot_mapping: Any) -> None: ...
def index_scores(
    query: Any,
    weights: Any,
    key_cache: Any,
    scale_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    rows: Any = None,
    cu_query_lens: Any = None,
    causal: bool = True,
    out: Any = None,
) -> Any: ...
def select_topk(scores: Any, k: int, lens: Any = None, *, stream: Any = None) -> Any: ...
def slots_of(
    positions: Any, block_table: Any, block_size: int, *, rows: Any = None, cu_query_lens: Any = None
) -> Any: ...
