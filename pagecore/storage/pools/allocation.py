"""Memory from an allocator of the caller."""

from __future__ import annotations

from collections.abc import Callable

from pagecore.arrays import Tensor, as_tensor, cuda, strided
from pagecore.arrays.cuda.devices import device_index
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
from pagecore.storage.checks import shown

# Returns an array with the given number of bytes, or more, on a device such as "cpu" or "cuda:0".
Allocator = Callable[[int, str], object]
# A vector load of a host kernel and the accesses of a warp are aligned to this.
ALIGNMENT = 64


def checked_allocator(allocator: object) -> Allocator | None:
    """Return an allocator, or None; raise UnsupportedOption for anything else."""
    if allocator is not None and not callable(allocator):
        raise UnsupportedOption(f"allocator is {shown(allocator)}; expected a function of (bytes, device)")
    return allocator


def allocated(allocator: Allocator, nbytes: int, device: str) -> Tensor:
    """Return memory of the caller's allocator as flat bytes, uint8 ``[nbytes]``, which keep its array alive.

    Raises
    ------
    DeviceError, ShapeError, UnsupportedOption
        The allocator returned memory on another device, less of it, or memory that is read-only, not contiguous, or
        not aligned to 64 bytes.
    PagecoreError
        It returned something else than an array.
    """
    memory = as_tensor(allocator(nbytes, device))
    if memory.device != device:
        raise DeviceError(f"the allocator returned memory on {memory.device}; it was asked for {device}")
    if memory.readonly:
        raise UnsupportedOption("the allocator returned read-only memory; return a writable array")
    if memory.nbytes < nbytes:
        raise ShapeError(f"the allocator returned {memory.nbytes} bytes; it was asked for {nbytes}")
    if memory.pointer % ALIGNMENT:
        raise ShapeError(f"the allocator returned memory at {memory.pointer:#x}; align it to {ALIGNMENT} bytes")
    return strided(memory, (nbytes,), (1,), 0, "uint8")


def fill_zeros(buffers: list[Tensor] | tuple[Tensor, ...], device: str) -> None:
    """Zero contiguous memory; on CUDA by the current stream of CuPy, and the host waits.

    Raises
    ------
    DeviceError
        The current stream is being captured; nothing was written.
    """
    index = device_index(device)
    if index is None:
        for buffer in buffers:
            buffer.numpy().fill(0)
        return
    runtime = cuda.runtime()
    stream = runtime.current_stream(index)
    if runtime.is_capturing(stream):
        raise DeviceError(f"stream {stream:#x} is being captured; zero the pool before the capture")
    for buffer in buffers:
        runtime.fill(buffer.pointer, 0, buffer.nbytes, stream)
    runtime.synchronize(stream, index)
