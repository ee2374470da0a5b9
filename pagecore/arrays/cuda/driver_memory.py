"""Memory of CUDA devices through the driver: addresses that stay, memory that comes and goes, starts of allocations.

The functions are those of libcuda, because CuPy has no binding for them. The context of the device must be current.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_size_t, c_ubyte, c_uint64, c_void_p

from pagecore.errors import DeviceError, NotEnoughMemory

__all__ = ["free_address", "granularity", "map_memory", "reserve_address", "unmap_memory"]

# CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3
# CU_MEM_ALLOC_GRANULARITY_MINIMUM, CUDA_ERROR_OUT_OF_MEMORY.
_MINIMUM, _OUT_OF_MEMORY = 0, 2


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows_metadata", c_void_p),
        ("flags", c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


_SIGNATURES = {
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
}


def granularity(device: int) -> int:
    """Return the bytes of which sizes of reserved and mapped memory are multiples."""
    found = c_size_t()
    _call("cuMemGetAllocationGranularity", byref(found), byref(_properties(device)), _MINIMUM)
    return found.value


def allocation_start(address: int) -> int:
    """Return the start of the allocation that holds a device address."""
    base, size = c_uint64(), c_size_t()
    _call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
    return base.value


def reserve_address(num_bytes: int) -> int:
    """Reserve addresses without memory; return the first."""
    address = c_uint64()
    _call("cuMemAddressReserve", byref(address), num_bytes, 0, 0, 0)
    return address.value


def map_memory(address: int, num_bytes: int, device: int) -> None:
    """Put new memory of a device, with any content, at reserved addresses; do nothing if it fails.

    Raises
    ------
    NotEnoughMemory
        The device does not have the memory.
    """
    handle = c_uint64()
    _call("cuMemCreate", byref(handle), num_bytes, byref(_properties(device)), 0)
    try:
        _call("cuMemMap", address, num_bytes, 0, handle, 0)
    finally:
        _call("cuMemRelease", handle)  # the mapping keeps the memory
    access = _Access(_Location(_DEVICE, device), _READ_WRITE)
    try:
        _call("cuMemSetAccess", address, num_bytes, byref(access), 1)
    except DeviceError:
        unmap_memory(address, num_bytes)
        raise


def unmap_memory(address: int, num_bytes: int) -> None:
    """Give the memory at reserved addresses back; no work of a device uses it any more."""
    _call("cuMemUnmap", address, num_bytes)


def free_address(address: int, num_bytes: int) -> None:
    """Give reserved addresses back, without memory there."""
    _call("cuMemAddressFree", address, num_bytes)


def _properties(device: int) -> _Properties:
    return _Properties(type=_PINNED, location=_Location(_DEVICE, device))


def _call(name: str, *arguments: object) -> None:
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        raise DeviceError(f"the CUDA driver lacks {name} ({error}); update the driver") from error
    function.argtypes = _SIGNATURES[name]
    status = function(*arguments)
    if status == _OUT_OF_MEMORY:
        raise NotEnoughMemory(f"{name} failed: the device has no memory for the request; free some and call again")
    if status:
        raise DeviceError(f"{name} failed with status {status} of the CUDA driver")
