"""KVCache: the interface that every cache shares."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from pagecore.arrays import Tensor
from pagecore.storage import Spec, TensorParallel


@runtime_checkable
class KVCache(Protocol):
    """The common part of `PagedKVCache` and `StaticKVCache`: layers, bytes, and the arrays that hold them.

    Writing differs between the two, and so do the axes of `plane`, `key` and `value`: a paged cache takes a batch of
    any sequences and shows blocks, a static cache takes the next tokens of all sequences and shows sequences.
    ``isinstance(cache, KVCache)`` checks only that the names exist.
    """

    parallel: TensorParallel
    device: str

    @property
    def num_layers(self) -> int:
        """Number of model layers, including those that share another layer's storage."""

    @property
    def nbytes(self) -> int:
        """Bytes of all planes of this rank."""

    def spec(self, layer: int) -> Spec:
        """Return the spec of this rank's part of a model layer."""

    def plane(self, name: str, layer: int) -> Tensor:
        """Return a view of one plane of a model layer."""

    def key(self, layer: int) -> Tensor:
        """Return a view of the keys of a model layer; its last axis is head_dim."""

    def value(self, layer: int) -> Tensor:
        """Return a view of the values of a model layer; its last axis is v_head_dim."""
