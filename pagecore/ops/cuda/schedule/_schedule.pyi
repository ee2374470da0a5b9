from typing import Any

from pagecore.arrays import Tensor
from pagecore.ops import AttentionPlan

def plan_shape(
    num_sequences: Any, num_tokens: Any, num_query_heads: int, num_kv_heads: int, has_sinks: bool = False
) -> tuple[Any, Any]: ...
def plan_lengths(
    out: Any,
    seq_lens: Any,
    cu_query_lens: Any,
    num_tokens: int,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    sink_tokens: int | None = None,
    tree: bool = False,
    stream: Any = None,
) -> None: ...
def plan_on_device(plan: AttentionPlan, seq_lens: Tensor, cu_query_lens: Tensor | None, num_tokens: int) -> Tensor: ...
