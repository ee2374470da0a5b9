from collections.abc import Sequence
from typing import Any

from pagecore.ops.planning._plan import AttentionPlan

def latent_attention(
    query_latent: Any,
    query_rope: Any,
    latent_cache: Any,
    rope_cache: Any,
    block_table: Any = None,
    seq_lens: Any = None,
    *,
    scale: float | None = None,
    rows: Any = None,
    cu_query_lens: Any = None,
    causal: bool = True,
    window: int | Sequence[int | None] | None = None,
    sinks: Any = None,
    indices: Any = None,
    index_lens: Any = None,
    format: str | None = None,
    latent_scale: float | None = None,
    out: Any = None,
    return_lse: bool = False,
    plan: AttentionPlan | None = None,
    stream: Any = None,
) -> Any: ...
