"""torch as a control, if installed."""

from __future__ import annotations

import gc
import sys
from typing import Any

import ml_dtypes
import numpy as np

from bench.harness.runner import Bench


def load_torch(bench: Bench) -> Any:
    """Import torch, limited to one thread; return None with a note if it is missing."""
    is_new = "torch" not in sys.modules
    try:
        import torch
    except ImportError:
        bench.note("torch is not installed; its controls are left out (pip install 'pagecore[bench]')")
        return None
    if is_new:  # each figure starts with a collection, which would walk the modules of torch
        gc.collect()
        gc.freeze()
    torch.set_num_threads(1)
    return torch


def torch_view(torch: Any, array: np.ndarray) -> Any:
    """View an array as a tensor; torch does not support NumPy's bfloat16."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
