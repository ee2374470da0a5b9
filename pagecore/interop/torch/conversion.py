"""Zero-copy views of pagecore tensors in torch."""

from __future__ import annotations

import torch

from pagecore.arrays import Tensor
from pagecore.arrays.exchange.frameworks import refuse_negative_strides
from pagecore.errors import UnsupportedDtype, UnsupportedOption


def as_torch(tensor: Tensor, *, read_only: bool = False) -> torch.Tensor:
    """Return a torch tensor over the memory of a `pagecore.Tensor`, such as `cache.key(0)` or `batch.positions`.

    Zero-copy for every dtype, including bfloat16 and float8. The torch tensor shares ownership of the memory: it stays
    valid after the cache is deleted.

    Parameters
    ----------
    tensor : pagecore.Tensor
    read_only : bool
        Accept read-only memory, such as `cache.block_table(0)`. torch has no read-only tensors, so it does not prevent
        writes to the result; a write corrupts the state of the cache.

    Returns
    -------
    torch.Tensor
        Aliases `tensor`.

    Raises
    ------
    UnsupportedOption
        The tensor is read-only and `read_only` is False, or a stride is negative.
    UnsupportedDtype
        `tensor` is not a `pagecore.Tensor`.
    """
    if type(tensor) is not Tensor:
        raise UnsupportedDtype(
            f"tensor is a {type(tensor).__name__}; it must be a pagecore.Tensor, as pagecore.as_tensor returns it"
        )
    if tensor.readonly and not read_only:
        raise UnsupportedOption(
            "the tensor is read-only, and torch has no read-only tensors; pass read_only=True if you only read the "
            "result, or copy the tensor first"
        )
    refuse_negative_strides(tensor)
    view: torch.Tensor = torch.from_dlpack(tensor)
    return view
