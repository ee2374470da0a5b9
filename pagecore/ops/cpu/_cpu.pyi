from collections.abc import Sequence

from pagecore.arrays import Tensor
from pagecore.ops._plan import AttentionPlan

def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    rows: Tensor | None,
    cu_query_lens: Tensor | None,
    plan: AttentionPlan | None,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> int: ...
def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> int: ...
def copy_blocks(caches: Sequence[Tensor], pairs: Tensor) -> int: ...
def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor | None) -> int: ...
def isa() -> str: ...
def set_isa(name: str | None) -> str: ...
def available_isas() -> tuple[str, ...]: ...
