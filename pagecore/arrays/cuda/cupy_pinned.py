"""Large page-locked memory, outside CuPy's pool.

CuPy's pool never gives memory back, and uses it again only for requests of the same size: a swap space that is dropped
would keep its memory, and a larger one would take new memory in addition.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Requests of more bytes do not come from CuPy's pool.
POOL_BYTES_MAX = 1 << 20


class _PinnedMemory:
    """Owner of memory of cudaHostAlloc, which is freed with the last array over it."""

    def __init__(self, address: int, num_bytes: int, free: Callable[[int], None]) -> None:
        self._address, self._free = address, free
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (num_bytes,), "typestr": "|u1"}

    def __del__(self) -> None:
        if sys.is_finalizing():  # the process frees the memory
            return
        try:
            self._free(self._address)
        except Exception as error:  # a destructor warns and never raises
            warnings.warn(f"pinned memory was not freed: {error}", ResourceWarning, stacklevel=1)


def allocate(cupy: Any, num_bytes: int, free: Callable[[int], None]) -> NDArray[np.uint8]:
    """Return an array of page-locked memory that every device can access; the end of the array calls `free`.

    Raises
    ------
    CUDARuntimeError
        CUDA cannot allocate the memory, not even after the pool has given back what it does not use.
    """
    runtime = cupy.cuda.runtime
    try:
        address = runtime.hostAlloc(num_bytes, runtime.hostAllocPortable)
    except runtime.CUDARuntimeError:
        cupy.get_default_pinned_memory_pool().free_all_blocks()
        address = runtime.hostAlloc(num_bytes, runtime.hostAllocPortable)
    return np.asarray(_PinnedMemory(int(address), num_bytes, free))
