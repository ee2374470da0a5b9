"""Sealer: the calls that quantise blocks of a paged cache when a commit seals them, and restore or repack them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Listed
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor
from pagecore.cache.layers.groups import Group, Layer
from pagecore.cache.layers.sealed import blocks_of
from pagecore.cache.memory.repack import KeptTokens, repack
from pagecore.cache.memory.store import Store
from pagecore.ops import SealedBlocks, seal_kv, unseal_kv
from pagecore.storage import AttentionSpec


class Sealer:
    """Quantises the newest tokens of whole blocks to sealed blocks, in all layers of each group, and the inverse.

    Parameters
    ----------
    store : Store
    groups : list of Group
        Groups of the cache.
    pairs : list of (int, int)
        Number of each tail, and of its group of sealed blocks.
    stream : callable
        Returns the stream of the last step, or raises DeviceError while it is captured; None on the host.
    is_captured : callable
        Returns True while that stream is being captured into a graph.
    """

    def __init__(
        self,
        store: Store,
        groups: Listed[Group],
        pairs: Iterable[tuple[int, int]],
        stream: Callable[[], Any],
        is_captured: Callable[[], bool],
    ) -> None:
        self._store = store
        self._places: list[tuple[int, int, AttentionSpec]] = []
        for tail, sealed in pairs:
            spec = groups[sealed].spec
            assert isinstance(spec, AttentionSpec)
            self._places.append((tail, sealed, spec))
        self._stream = stream
        self.is_captured = is_captured

    def __call__(self, blocks: list[NDArray[np.int32]]) -> None:
        """Seal pairs of blocks (tail, sealed) of each tail."""
        for key, value, sealed, pairs, stream in self._calls(blocks):
            seal_kv(key, value, sealed, pairs, stream=stream)

    def restore(self, blocks: list[NDArray[np.int32]]) -> None:
        """Write the numbers of sealed blocks to blocks of each tail, for pairs (sealed, tail)."""
        for key, value, sealed, pairs, stream in self._calls(blocks):
            unseal_kv(sealed, key, value, pairs, stream=stream)

    def repack(self, kept: list[tuple[Any, ...]]) -> None:
        """Fill new blocks with the tokens that a compacted sequence keeps; `kept` has `KeptTokens` of each tail."""
        stream = self._stream()
        self._store.await_arrivals()
        for (tail, sealed, spec), tokens in zip(self._places, kept, strict=True):
            repack(self._store.pools[tail], self._store.pools[sealed], spec, KeptTokens(*tokens), stream)

    def _calls(
        self, blocks: list[NDArray[np.int32]]
    ) -> Iterator[tuple[Tensor, Tensor, SealedBlocks, NDArray[np.int32], Any]]:
        """Return key, value, sealed blocks, pairs and stream of each layer."""
        stream = self._stream()
        self._store.await_arrivals()
        for (tail, sealed, spec), pairs in zip(self._places, blocks, strict=True):
            newest, target = self._store.pools[tail], self._store.pools[sealed]
            for layer in range(newest.num_layers):
                planes = blocks_of(target, layer, spec)
                yield newest.plane("key", layer), newest.plane("value", layer), planes, pairs, stream


def sealed_groups(layers: Iterable[Layer]) -> dict[int, int]:
    """Return the group of sealed blocks by the group of its newest tokens, in the order of the latter."""
    return dict(sorted({(layer.group, layer.sealed_group) for layer in layers if layer.sealed_group is not None}))
