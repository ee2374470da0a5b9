from typing import Any

class ScoredSequences: ...

def write_index(key: Any, key_cache: Any, scale_cache: Any, slot_mapping: Any, *, stream: Any = None) -> None: ...
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
    stream: Any = None,
) -> Any: ...
