from typing import Any, Literal

def select(
    scores: Any,
    budget: int,
    *,
    lens: Any,
    sinks: int = 0,
    recent: int = 0,
    threshold: int | None = None,
    stream: Any = None,
) -> tuple[Any, Any]: ...

class KeySummary: ...

def score_blocks(
    query: Any,
    key_min: Any,
    key_max: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    block_size: int,
    rows: Any = None,
    cu_query_lens: Any = None,
    causal: bool = True,
    group: Literal["max", "mean"] = "max",
    stream: Any = None,
) -> Any: ...
def score_tokens(
    query: Any,
    label: Any,
    channels: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    rows: Any = None,
    cu_query_lens: Any = None,
    reduce: Literal["max_abs", "mean"] = "max_abs",
    max_len: int | None = None,
    stream: Any = None,
) -> Any: ...
