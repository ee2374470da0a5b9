from typing import Any

class PositionLists: ...

def select_topk(scores: Any, k: int, lens: Any = None, *, stream: Any = None) -> Any: ...
def slots_of(
    positions: Any,
    block_table: Any,
    block_size: int,
    *,
    rows: Any = None,
    cu_query_lens: Any = None,
    out: Any = None,
    stream: Any = None,
) -> Any: ...
