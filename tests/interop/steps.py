"""Torch tensors of one small step of an attention layer, for the tests of the operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagecore import AttentionSpec, PagedKVCache
from tests.capabilities import require

torch = require("torch")
DTYPES = ("float32", "float16", "bfloat16")
BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 16


@dataclass
class Step:
    """Arguments of one layer: sequences of 5 and 1 new tokens, and a sequence of 9 tokens that decodes one."""

    query: Any
    key: Any
    value: Any
    key_cache: Any
    value_cache: Any
    slot_mapping: Any
    block_table: Any
    seq_lens: Any
    cu_query_lens: Any

    @property
    def written(self) -> tuple[Any, ...]:
        return self.key, self.value, self.key_cache, self.value_cache, self.slot_mapping

    @property
    def attended(self) -> tuple[Any, ...]:
        return self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens


def planes(layout: str | None, dtype: Any) -> tuple[Any, Any]:
    """Return random caches of 9 blocks: separate tensors, or the strided planes of a pool's second layer."""
    from pagecore.interop.torch import as_torch

    if layout is None:
        caches = [torch.empty(9, BLOCK, KV_HEADS, DIM, dtype=dtype) for _ in range(2)]
    else:
        spec = AttentionSpec(KV_HEADS, DIM, dtype=str(dtype).removeprefix("torch."))
        pool = PagedKVCache(spec, num_layers=2, num_blocks=9, block_size=BLOCK, layout=layout)
        caches = [as_torch(pool.key(1)), as_torch(pool.value(1))]
    for cache in caches:
        cache.copy_(torch.randn(cache.shape))
    return caches[0], caches[1]


def make_step(dtype: str = "float32", layout: str | None = None) -> Step:
    torch.manual_seed(0)
    kind = getattr(torch, dtype)

    def normal(*shape: int) -> Any:
        return torch.randn(shape).to(kind)

    return Step(
        normal(7, HEADS, DIM),
        normal(7, KV_HEADS, DIM),
        normal(7, KV_HEADS, DIM),
        *planes(layout, kind),
        torch.tensor([12, 13, 14, 15, 8, 4, 28]),  # block * BLOCK + offset
        torch.tensor([[3, 2, 0], [1, 0, 0], [6, 5, 7]], dtype=torch.int32),
        torch.tensor([5, 1, 9], dtype=torch.int32),
        torch.tensor([0, 5, 6, 7], dtype=torch.int32),
    )


# The checks of torch.library.opcheck but for its trace with symbolic shapes, which takes most of the time.
WITHOUT_TRACE = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor")}


def compile_whole(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    """Compile a function as one graph.

    Inductor calls torch's kernels for torch's own operators here, because g++ takes five seconds for a kernel. Writes
    in place, strides and the order of calls are those of graphs with compiled kernels.
    """
    if backend == "inductor":
        options["options"] = {"fallback_by_default": True}
    return torch.compile(function, fullgraph=True, backend=backend, **options)
