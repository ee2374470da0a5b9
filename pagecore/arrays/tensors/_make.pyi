from collections.abc import Iterable
from typing import Any, SupportsIndex

from pagecore.arrays.tensors._tensor import Tensor

def pinned(nbytes: int, device: str, *, zeroed: bool = False) -> Tensor: ...
def mapped(address: int, nbytes: int, device: str, owner: object) -> Tensor: ...
def empty(
    shape: SupportsIndex | Iterable[SupportsIndex], dtype: Any = "float32", device: Any = "cpu", *, stream: Any = None
) -> Tensor: ...
def zeros(
    shape: SupportsIndex | Iterable[SupportsIndex], dtype: Any = "float32", device: Any = "cpu", *, stream: Any = None
) -> Tensor: ...
def strided(
    buffer: Any,
    shape: SupportsIndex | Iterable[SupportsIndex],
    strides_bytes: SupportsIndex | Iterable[SupportsIndex] | None = None,
    byte_offset: SupportsIndex = 0,
    dtype: Any = None,
) -> Tensor: ...
def like(tensor: Any, example: Any) -> Any: ...
