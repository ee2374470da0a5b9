"""Page-locked host memory of any size: one allocation of CUDA, or a mapping that is registered in chunks."""

from __future__ import annotations

from pagecore.arrays import Tensor
from pagecore.arrays.tensors._make import pinned
from pagecore.storage.memory import registration
from pagecore.storage.memory.host_memory import HostMemory


def page_locked(nbytes: int, device: str, *, zeroed: bool = False) -> Tensor:
    """Return new host memory, uint8 ``[nbytes]``, that a CUDA device and its kernels can access.

    More than `registration.CHUNK_BYTES` are registered in chunks of that size, as those of a `HostPool`: some systems
    refuse larger pieces. A copy by DMA must not cross from one chunk into another.

    Parameters
    ----------
    nbytes : int
    device : str
        A CUDA device, on which the tensor is.
    zeroed : bool
        Fill the memory with zeros.

    Raises
    ------
    NotEnoughMemory
        The host does not have the memory, or may not page-lock it.
    DeviceError
        A graph is being captured, or another failure of CUDA.
    """
    if nbytes <= registration.CHUNK_BYTES:
        return pinned(nbytes, device, zeroed=zeroed)
    memory = HostMemory(nbytes)
    chunks = registration.whole_chunks(memory.nbytes, registration.CHUNK_BYTES, registration.CHUNK_BYTES)
    try:
        memory.register(device, chunks, awaits_captures=False)
        memory.wait_registered()
    except BaseException:
        memory.close()
        raise
    return memory.tensor(device)[:nbytes]
