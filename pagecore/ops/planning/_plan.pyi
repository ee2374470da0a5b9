from typing import Any

import numpy as np

from pagecore.ops.cuda.plan._plan import CudaPlan

class AttentionPlan:
    """Work items of the attention of one batch; see `plan_attention`."""

    def __init__(
        self,
        *,
        num_query_heads: int,
        num_kv_heads: int,
        causal: bool = True,
        window: int | tuple[int, int] | None = None,
        chunk: int | None = None,
        sink_tokens: int | None = None,
        tree: bool = False,
        batch_invariant: bool = False,
        num_workers: int | None = None,
        device: str = "cpu",
        max_sequences: int | None = None,
        max_tokens: int | None = None,
    ) -> None: ...
    @property
    def cuda(self) -> CudaPlan | None: ...
    @property
    def device(self) -> str: ...
    @property
    def num_query_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    @property
    def window(self) -> tuple[int, int]: ...
    @property
    def chunk(self) -> int | None: ...
    @property
    def sink_tokens(self) -> int: ...
    @property
    def tree(self) -> bool: ...
    @property
    def batch_invariant(self) -> bool: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def num_items(self) -> int: ...
    @property
    def num_partial_rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def items(self) -> np.ndarray[Any, np.dtype[np.void]]: ...

def plan_attention(
    cu_query_lens: object | None,
    seq_lens: object,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    chunk: int | None = None,
    sink_tokens: int | None = None,
    tree: bool = False,
    batch_invariant: bool = False,
    num_workers: int | None = None,
    device: str | None = None,
    out: AttentionPlan | None = None,
    stream: object | None = None,
) -> AttentionPlan: ...
