"""hadamard as a torch operator."""

from __future__ import annotations

import torch

from pagecore.interop.torch import registration
from pagecore.interop.torch.arguments import check_arguments


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Return rows times orthonormal Hadamard matrices: `pagecore.hadamard` as a torch operator.

    Parameters
    ----------
    x : Tensor, [..., D]

    Returns
    -------
    Tensor, [..., D]
        New and contiguous.

    Raises
    ------
    UnsupportedDtype
        `x` is not a torch tensor.
    PagecoreError
        As `pagecore.hadamard`.
    """
    check_arguments(x, names="x", options={})
    rotated: torch.Tensor = registration.hadamard(x)
    return rotated
