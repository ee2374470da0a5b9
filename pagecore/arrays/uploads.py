"""Host arrays that a device is to have."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import cuda
from pagecore.arrays._make import empty
from pagecore.arrays._tensor import Tensor, as_tensor
from pagecore.arrays.devices import device_index


def placed(array: NDArray[Any], device: str) -> Tensor:
    """Return a host array as a tensor of `device`: itself there, else a copy that every stream may use at once."""
    index = device_index(device)
    if index is None:
        return as_tensor(array)
    array = np.ascontiguousarray(array)
    tensor = empty(array.shape, array.dtype, device)
    runtime = cuda.runtime()
    stream = runtime.current_stream(index)
    runtime.copy(tensor.pointer, array.ctypes.data, array.nbytes, stream)
    runtime.synchronize(stream, index)
    return tensor
