"""What every cache of keys and values offers."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from pagecore.arrays import Tensor
from pagecore.storage import Spec, TensorParallel


@runtime_checkable
class KVCache(Protocol):
    """What `PagedKVCache` and `StaticKVCache` share: layers, bytes, and the arrays that hold them.

    How tokens get in differs, and so do the axes of `key` and `value`: a paged cache takes a batch of any sequences and
    shows blocks, a static one takes the next tokens of all and shows sequences. ``isinstance(cache, KVCache)`` looks
    for the names only.
    """

    parallel: TensorParallel
    device: str

    @property
    def num_layers(self) -> int:
        """Model layers, those that share another's storage among them."""

    @property
    def nbytes(self) -> int:
        """Bytes of key and value, of this rank."""

    def spec(self, layer: int) -> Spec:
        """What this rank stores and attends of a model layer."""

    def key(self, layer: int) -> Tensor:
        """Keys of a model layer; a view of the cache, which has its last axis over head_dim."""

    def value(self, layer: int) -> Tensor:
        """Values of a model layer; a view of the cache, which has its last axis over v_head_dim."""
