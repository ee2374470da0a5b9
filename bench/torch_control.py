"""torch as a control, where it is installed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from bench.runner import Bench


def load_torch(bench: Bench) -> Any:
    """Torch, held to one thread; None, with a note, where it is missing: its controls are then left out."""
    try:
        import torch
    except ImportError:
        bench.note("torch is not installed; its controls are left out (pip install 'pagecore[bench]')")
        return None
    torch.set_num_threads(1)
    return torch


def torch_view(torch: Any, array: np.ndarray) -> Any:
    """The array's memory as a tensor; torch does not know NumPy's bfloat16."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
