"""Inputs of the GPU attention benches: random key and value in scattered blocks, and contiguous copies of them.

The same key and value can be in a format, or in sealed blocks.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import pagecore
from bench.gpu.device import Gpu
from bench.host.attention_load import Shape
from bench.host.sealed_load import BLOCK, RESIDUAL, plane_shapes
from pagecore import SealedBlocks
from pagecore.arrays.dtypes.formats import SEALED_FORMATS, Format

# Quantised caches of a quick run: one format of each kind of scale.
QUICK_FORMATS = ("float8_e4m3fn", "int8_token", "nvfp4", "mxfp8")


class GpuLoad:
    """Batches of one shape with disjoint blocks of one cache.

    Attributes
    ----------
    key_cache, value_cache : array ``[blocks, block size, kv heads, dim]``
    tables : list of int32 arrays ``[sequences, blocks a sequence]``
        One for each batch; the blocks of a sequence are scattered over the whole cache.
    seq_lens : int32 array ``[sequences]``
    """

    def __init__(self, gpu: Gpu, shape: Shape, dtype: str, batches: int, block_size: int = 16) -> None:
        self.gpu, self.shape, self.dtype, self.block_size = gpu, shape, dtype, block_size
        each = -(-shape.context // block_size)
        count = batches * shape.sequences * each
        size = (count + 1, block_size, shape.kv_heads, shape.dim)
        self.key_cache, self.value_cache = gpu.random(size, dtype), gpu.random(size, dtype, seed=1)
        ids = 1 + gpu.permutation(count).to(gpu.torch.int32)
        self.tables = list(ids.reshape(batches, shape.sequences, each))
        self.seq_lens = gpu.torch.full((shape.sequences,), shape.context, dtype=gpu.torch.int32, device=gpu.place)

    def query(self, tokens: int) -> Any:
        """Return random queries ``[tokens, query heads, dim]``."""
        return self.gpu.random((tokens, self.shape.query_heads, self.shape.dim), self.dtype, seed=2)

    def contiguous(self, batch: int) -> tuple[Any, Any]:
        """Return key and value of a batch, ``[sequences, kv heads, context, dim]``."""
        shape, table = self.shape, self.tables[batch].long()
        planes = (cache[table].flatten(1, 2)[:, : shape.context] for cache in (self.key_cache, self.value_cache))
        key, value = (plane.transpose(1, 2).contiguous() for plane in planes)
        return key, value

    def expected(self, batch: int, query: Any, position: int, sequence: int, head: int) -> Any:
        """Return the attention of one query ``[dim]`` at a position, in float64."""
        part = (sequence, head // self.shape.group, slice(position + 1))
        key, value = (plane[part].double() for plane in self.contiguous(batch))
        scores = key @ query.double() / self.shape.dim**0.5
        return self.gpu.torch.softmax(scores, 0) @ value

    def plan(self, cu_query_lens: list[int] | None, num_tokens: int) -> pagecore.AttentionPlan:
        """Return a plan of a batch; on a GPU one of fixed size, as graph capture requires."""
        shape = self.shape
        heads: dict[str, Any] = {"num_query_heads": shape.query_heads, "num_kv_heads": shape.kv_heads}
        device = self.gpu.name
        sizes = {} if device == "cpu" else {"max_sequences": shape.sequences, "max_tokens": num_tokens}
        plan = pagecore.AttentionPlan(**heads, **sizes, device=device)  # type: ignore[arg-type]
        return pagecore.plan_attention(cu_query_lens, [shape.context] * shape.sequences, **heads, out=plan)


class GpuStored:
    """The key and value of a load in a format, in the same blocks.

    Attributes
    ----------
    caches : list of two arrays ``[blocks, block size, kv heads, codes]``
    scales : dict
        The arguments key_scale and value_scale of the ops; empty for formats without stored scales.
    read : GpuLoad
        The load with the numbers of the codes, rounded to its dtype.
    nbytes : int
        Bytes of codes and scales of a batch.
    """

    def __init__(self, load: GpuLoad, format: Format) -> None:
        torch, planes = load.gpu.torch, (load.key_cache, load.value_cache)
        *rows, dim = load.key_cache.shape

        def zeros(width: int, dtype: str) -> Any:
            return torch.zeros((*rows, width), dtype=getattr(torch, dtype), device=load.gpu.place)

        self.format = format
        self.caches = [zeros(format.row_codes(dim), str(format.dtype)) for _ in planes]
        self.scales: dict[str, Any] = {}
        if format.scale_dtype is not None:
            scale_dtype = str(format.scale_dtype)
            self.scales = {name: zeros(format.row_scales(dim), scale_dtype) for name in ("key_scale", "value_scale")}
        slots = torch.arange(rows[0] * rows[1], dtype=torch.int32, device=load.gpu.place)
        key, value = (plane.flatten(0, 1) for plane in planes)
        key_cache, value_cache = self.caches
        pagecore.write_kv(key, value, key_cache, value_cache, slots, format=format.name, **self.scales)
        self.read = copy(load)
        scale_planes = self.scales.values() or (None, None)
        self.read.key_cache, self.read.value_cache = (
            pagecore.dequantize(codes, format.name, scales, dtype=load.dtype)
            for codes, scales in zip(self.caches, scale_planes, strict=True)
        )
        row = sum(plane[0, 0].nbytes for plane in (*self.caches, *self.scales.values()))
        self.nbytes = load.shape.sequences * load.shape.context * row


class GpuSealed:
    """The key and value of a load in sealed blocks, but for the newest tokens of each sequence.

    The load must have blocks of `BLOCK` tokens.

    Attributes
    ----------
    name : str
        "kivi2" or "kivi4".
    bits : int
        Bits of a code.
    batches : list of SealedBlocks
        One for each batch of the load; they share their planes.
    read : GpuLoad
        The load with the numbers of the sealed blocks, rounded to its dtype.
    nbytes : int
        Bytes of words, scales and newest tokens of a batch.
    """

    def __init__(self, load: GpuLoad, name: str) -> None:
        torch, place, shape = load.gpu.torch, load.gpu.place, load.shape
        self.name, self.bits = name, SEALED_FORMATS[name]
        blocks, _, heads, dim = load.key_cache.shape
        shapes = plane_shapes(blocks, heads, dim, self.bits)
        kinds = {each: torch.bfloat16 if "scale" in each else torch.int32 for each in shapes}
        planes = {each: torch.zeros(size, dtype=kinds[each], device=place) for each, size in shapes.items()}
        whole = max(shape.context - RESIDUAL, shape.context // 2) // BLOCK
        lens = torch.full((shape.sequences,), whole * BLOCK, dtype=torch.int32, device=place)
        tables = [table[:, :whole].contiguous() for table in load.tables]
        self.batches = [SealedBlocks(**planes, block_table=table, lens=lens) for table in tables]
        pairs = torch.cat([table.flatten() for table in tables]).unsqueeze(1).repeat(1, 2)
        pagecore.seal_kv(load.key_cache, load.value_cache, self.batches[0], pairs)
        self.read = copy(load)
        self.read.key_cache, self.read.value_cache = load.key_cache.clone(), load.value_cache.clone()
        pagecore.unseal_kv(self.batches[0], self.read.key_cache, self.read.value_cache, pairs)
        sealed = sum(plane[0].nbytes for plane in planes.values()) * whole
        newest = (load.key_cache[0, 0].nbytes + load.value_cache[0, 0].nbytes) * (shape.context - whole * BLOCK)
        self.nbytes = shape.sequences * (sealed + newest)
