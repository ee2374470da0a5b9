from collections.abc import Sequence
from typing import Any

from pagecore.ops.planning._plan import AttentionPlan

class LatentPlanes: ...

LATENT_FORMATS: tuple[str, ...]
LATENT_ROW_BYTES: dict[str, int]
PACKED_LATENT_DIMS: tuple[int, int]

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
def write_latent(
    latent: Any,
    rope: Any,
    latent_cache: Any,
    rope_cache: Any,
    slot_mapping: Any,
    *,
    format: str | None = None,
    scale: float | None = None,
    stream: Any = None,
) -> None: ...
def gather_latent(
    latent_cache: Any,
    rope_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    rows: Any = None,
    null_block: bool = True,
    format: str | None = None,
    latent_scale: float | None = None,
    dtype: Any = None,
    out: Any = None,
    stream: Any = None,
) -> Any: ...

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
