"""Memory of pagecore as torch tensors."""

from __future__ import annotations

import torch

from pagecore.arrays import Tensor
from pagecore.arrays.frameworks import refuse_negative_strides
from pagecore.errors import UnsupportedDtype, UnsupportedOption


def as_torch(tensor: Tensor, *, read_only: bool = False) -> torch.Tensor:
    """A torch tensor over the memory of a `pagecore.Tensor`: `cache.key(0)`, `batch.positions`, a pool's plane.

    Zero-copy in every dtype of the table, bfloat16 and float8 among them. Each side keeps the memory alive, not the
    other: the cache may go first, or the torch tensor.

    Parameters
    ----------
    tensor : Tensor
    read_only : bool
        Show read-only memory too, such as `cache.block_table(0)`, for the operators to read. torch cannot guard it:
        whoever writes to it breaks what its owner counts on.

    Raises
    ------
    UnsupportedOption
        The tensor is read-only, and `read_only` does not allow for it; or it has negative strides.
    UnsupportedDtype
        No `pagecore.Tensor`.
    """
    if type(tensor) is not Tensor:
        raise UnsupportedDtype(
            f"tensor is a {type(tensor).__name__}; it must be a pagecore.Tensor, as pagecore.as_tensor returns it"
        )
    if tensor.readonly and not read_only:
        raise UnsupportedOption(
            "the tensor is read-only, which torch cannot say of a tensor; pass read_only=True where nobody writes to "
            "it, or copy it first"
        )
    refuse_negative_strides(tensor)
    shown: torch.Tensor = torch.from_dlpack(tensor)
    return shown
