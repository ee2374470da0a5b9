"""Controls of the GPU attention benches: torch's SDPA on contiguous key and value, and FlashInfer if installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.gpu.device import Call, Gpu, in_turn
from bench.gpu.load import GpuLoad
from bench.harness.runner import Bench, Job

COPY, SDPA, FLASHINFER = "device copy that moves the same bytes", "torch SDPA, contiguous KV", "FlashInfer"
MATMUL = "bf16 matrix product of equal FLOP"
WORKSPACE_BYTES = 128 << 20


def load_flashinfer(bench: Bench) -> Any:
    """Import FlashInfer; return None with a note if it is missing."""
    try:
        import flashinfer
    except ImportError as error:
        bench.note(f"FlashInfer cannot be imported ({error}); its controls are left out")
        return None
    return flashinfer


def optional_control(
    bench: Bench, gpu: Gpu, name: str, make: Callable[[], list[Call]], least: int | None = None
) -> dict[str, Job]:
    """Return the job of a control by its name; {} with a note if the control raises."""
    try:
        return {name: gpu.job(in_turn(make(), least))}
    except Exception as error:
        bench.note(f"{name} is left out: {type(error).__name__}: {error}")
        return {}


def sdpa(load: GpuLoad, query: Any, *, causal: bool) -> list[Call]:
    """Return a call for each batch; `query` is ``[sequences, query heads, queries, dim]``."""
    attend = load.gpu.torch.nn.functional.scaled_dot_product_attention
    return [_sdpa(attend, query, *load.contiguous(batch), causal) for batch in range(len(load.tables))]


def _sdpa(attend: Any, query: Any, key: Any, value: Any, causal: bool) -> Call:
    return lambda: attend(query, key, value, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1])


def matmuls(gpu: Gpu, rows: int, width: int, dtype: str) -> list[Call]:
    """Return ``[rows, width] @ [width, rows]``, 2 * rows * rows * width FLOP."""
    left, right, out = (gpu.random(size, dtype) for size in ((rows, width), (width, rows), (rows, rows)))
    return [lambda: gpu.torch.mm(left, right, out=out)]


def flashinfer_decode(flashinfer: Any, load: GpuLoad, query: Any) -> list[Call]:
    """Return a decode step of each batch; `query` is ``[sequences, query heads, dim]``."""
    return [_planned(flashinfer.BatchDecodeWithPagedKVCacheWrapper, load, table, query, None) for table in load.tables]


def flashinfer_prefill(flashinfer: Any, load: GpuLoad, query: Any, cu_query_lens: Any) -> list[Call]:
    """Return a causal prompt of each batch; `query` is ``[tokens, query heads, dim]``."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    return [_planned(wrapper, load, table, query, cu_query_lens) for table in load.tables]


def _planned(wrapper: Any, load: GpuLoad, table: Any, query: Any, cu_query_lens: Any) -> Call:
    shape, torch = load.shape, load.gpu.torch
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    planned = wrapper(workspace, "NHD", use_tensor_cores=True) if cu_query_lens is None else wrapper(workspace, "NHD")
    starts = torch.arange(len(table) + 1, dtype=torch.int32, device=query.device) * table.shape[1]
    last = torch.full_like(load.seq_lens, (shape.context - 1) % load.block_size + 1)
    sizes = (shape.query_heads, shape.kv_heads, shape.dim, load.block_size)
    types = {"q_data_type": query.dtype, "kv_data_type": query.dtype}
    if cu_query_lens is None:
        planned.plan(starts, table.flatten(), last, *sizes, **types)
    else:
        planned.plan(cu_query_lens, starts, table.flatten(), last, *sizes, causal=True, **types)
    out = torch.empty_like(query)
    return lambda: planned.run(query, (load.key_cache, load.value_cache), out=out)
