"""The data plane of a paged cache: the bytes of its groups, and what is done to them layer by layer."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any

import numpy as np

from pagecore.arrays import Tensor, strided, zeros
from pagecore.arrays.uploads import to_device
from pagecore.cache.adopted import refuse_shared
from pagecore.cache.batch import Batch
from pagecore.cache.layers import Group, Layer
from pagecore.errors import DeviceError, ShapeError
from pagecore.ops import copy_blocks, paged_attention, transfer_blocks, write_kv
from pagecore.ops._checks import float_array
from pagecore.storage import AttentionSpec, KVLayout, KVPool
from pagecore.storage.layout import as_layout
from pagecore.storage.spec import window_of


class Store:
    """A pool of bytes for each group of layers; none where the device is "none".

    The cache passes blocks and slots: the store decides nothing, and holds no lock. `buffers` has the caller's memory
    for each group. With `scrub` memory that the store allocates is zeros, and `zero` works.
    """

    def __init__(
        self,
        layers: list[Layer],
        groups: list[Group],
        num_blocks: Listed[int],
        block_size: int,
        layout: str | KVLayout | None,
        device: str,
        buffers: Listed[object] | None = None,
        scrub: bool = False,
    ) -> None:
        order = as_layout("layerwise" if layout is None else layout)
        given = [None] * len(groups) if buffers is None else buffers
        made = [] if device == "none" else list(zip(groups, num_blocks, given, strict=True))
        self.pools = [
            KVPool(group.spec, group.num_layers, n, block_size, order, device, own, scrub=scrub and own is None)
            for group, n, own in made
        ]
        refuse_shared(self.pools)
        self._is_adopted = buffers is not None
        self._zeros = [_zeros_of(pool) for pool in self.pools] if scrub else []
        self._options = [_attention_options(layer, device) for layer in layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pool in self.pools)

    def key(self, layer: Layer) -> Tensor:
        """Keys of a layer, ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
        return self._pool(layer).key(layer.index)

    def value(self, layer: Layer) -> Tensor:
        """Values of a layer, ``[num_blocks, block_size, num_kv_heads, v_head_dim]``."""
        return self._pool(layer).value(layer.index)

    def copy(self, group: int, pairs: Any, stream: int | None = None) -> None:
        """Copy blocks ``[n, (source, target)]`` of a group in all of its layers; on CUDA in the order of a stream."""
        if self.pools:
            # Sources are blocks that a sequence still holds, targets are fresh: no pair meets another one of its step.
            copy_blocks(self.pools[group].planes(), pairs, independent=True, stream=stream)

    def zero_adopted(self) -> None:
        """Zero the memory of the caller, all of what the pools use."""
        if self._is_adopted:
            for pool in self.pools:
                pool.zero()

    def zero(self, group: int, pairs: Any, stream: int | None = None) -> None:
        """Zero blocks of a group in all of its layers; on CUDA in the order of a stream.

        `pairs` is ``[n, (1, block)]``: a transfer from blocks of zeros, which takes one launch where a fill of each
        block in each plane would take one for each.
        """
        for sources, targets in self._zeros[group]:
            transfer_blocks(sources, targets, pairs, independent=True, stream=stream)

    def write(self, layer: Layer, key: Any, value: Any, batch: Batch, stream: object) -> None:
        """Write the step's keys and values to the slots of the layer's group."""
        keys, values = self.key(layer), self.value(layer)
        tensor, slots = float_array(key, "key"), batch._groups[layer.group].slot_mapping
        if tensor.ndim == 3 and tensor.shape[0] < batch.num_tokens:
            raise ShapeError(f"key has {tensor.shape[0]} tokens; the step has {batch.num_tokens}")
        rows = tensor.shape[0] if tensor.ndim else 0
        # What `key` was given as says on which stream the write runs.
        given = tensor if keys.device == "cpu" else key
        write_kv(given, value, keys, values, slots if rows >= slots.shape[0] else slots[:rows], stream=stream)

    def attend(self, number: int, layer: Layer, query: Any, batch: Batch, options: dict[str, Any]) -> Any:
        """Attention of the step's queries at model layer `number`; `options` go before what its spec says."""
        group = batch._groups[layer.group]
        defaults = self._options[number]
        if options.keys().isdisjoint(("plan", "causal", "window")):
            defaults = {**defaults, "plan": group.plan}
        return paged_attention(
            query,
            self.key(layer),
            self.value(layer),
            group.block_table,
            batch.seq_lens,
            rows=batch.rows,
            cu_query_lens=batch.cu_query_lens,
            **{**defaults, **options},
        )

    def _pool(self, layer: Layer) -> KVPool:
        if not self.pools:
            raise DeviceError(
                "this cache has device='none' and holds no key or value; make it with device='cpu' or 'cuda'"
            )
        return self.pools[layer.group]


def _zeros_of(pool: KVPool) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Two blocks of zeros for each plane of a pool, and the planes: those of one call of `transfer_blocks` together.

    All zeros lie in the same memory. Their axes lie in the order of the plane's, so that a block in one piece is moved
    in one piece.
    """
    planes = pool.planes()
    held = zeros((max(plane[0].nbytes for plane in planes),), "uint8", pool.device)
    alike: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for plane in planes:
        sources, targets = alike.setdefault(plane.shape[1], ([], []))
        sources.append(_zeros_like(plane, held))
        targets.append(plane)
    return list(alike.values())


def _zeros_like(plane: Tensor, held: Tensor) -> Tensor:
    strides = [0] * plane.ndim  # that of the blocks stays 0
    step = plane.itemsize
    for axis in sorted(range(1, plane.ndim), key=lambda axis: plane.strides[axis]):
        strides[axis] = step
        step *= plane.shape[axis]
    return strided(held, (2, *plane.shape[1:]), strides, 0, plane.dtype)


def _attention_options(layer: Layer, device: str) -> dict[str, Any]:
    """What attention takes from a layer's spec; one of the user's own says its window only."""
    spec = layer.spec
    if not isinstance(spec, AttentionSpec):
        return {"window": window_of(spec)}
    sinks = None if spec.sinks is None else to_device(np.array(list(spec.sinks), np.float32), device)
    return {"window": spec.window, "scale": spec.scale, "softcap": spec.softcap, "sinks": sinks}
