"""Pools of CUDA memory shared between processes by handles of CUDA IPC."""

from __future__ import annotations

import base64
import warnings
import weakref
from dataclasses import dataclass, field
from typing import SupportsIndex

from pagecore.arrays import Tensor, cuda, strided
from pagecore.arrays.cuda.devices import check_device, device_index, device_name
from pagecore.arrays.cuda.protocol import Runtime
from pagecore.arrays.tensors._make import mapped
from pagecore.errors import DeviceError, PeerError, ShapeError, UnsupportedOption
from pagecore.storage import KVLayout, KVPool, Spec
from pagecore.storage.checks import LAYERS_MAX, require_int, shown
from pagecore.storage.specs.spec import check_spec
from pagecore.tiers.engine.geometry import StoredPlanes, layout_values, packed, read_layout, unpacked

KIND = "CUDA pool"


@dataclass(frozen=True)
class IpcHandle:
    """Everything that another process needs to open a pool of CUDA memory; a value that can be sent.

    Attributes
    ----------
    layout : KVLayout
        Bound layout of the pool.
    device : str
        CUDA device of the exporting process.
    buffers : tuple of (bytes, int)
        For each buffer of the layout the handle of its allocation, and its offset there in bytes.
    """

    layout: KVLayout
    device: str
    buffers: tuple[tuple[bytes, int], ...] = field(repr=False)

    def to_bytes(self) -> bytes:
        """Return the handle as a message, for `from_bytes`."""
        buffers = [[base64.b64encode(handle).decode(), offset] for handle, offset in self.buffers]
        return packed(KIND, {"device": self.device, "buffers": buffers, "layout": layout_values(self.layout)})

    @classmethod
    def from_bytes(cls, message: bytes) -> IpcHandle:
        """Return the handle of a message; raise PeerError for anything else."""
        content = unpacked(KIND, message)
        try:
            buffers = [(base64.b64decode(handle), int(offset)) for handle, offset in content["buffers"]]
            layout, device = read_layout(content["layout"]), device_name(content["device"])
        except (KeyError, TypeError, ValueError, DeviceError) as error:
            raise PeerError(f"the message of a {KIND} is not valid: {error!r}") from error
        return cls(layout, device, tuple(buffers))


def export_ipc(pool: KVPool) -> IpcHandle:
    """Return a handle by which another process on the same device opens a pool, without a copy.

    The exporting process keeps the pool alive until every process that opened it has closed it, and finishes its work
    on the pool before the other reads it: CUDA orders nothing between processes.

    Parameters
    ----------
    pool : KVPool
        On a CUDA device; its own memory, or buffers that it adopted.

    Raises
    ------
    UnsupportedOption
        An object that is not a pool; memory that has no handle, such as that of cuMemCreate.
    DeviceError
        A pool in host memory.
    """
    if not isinstance(pool, KVPool):
        raise UnsupportedOption(f"pool is {shown(pool)}; expected a KVPool")
    index = device_index(pool.device)
    if index is None:
        raise DeviceError("the pool is in host memory; share a HostPool(shared=True) by export_pool instead")
    runtime = cuda.runtime()
    return IpcHandle(
        pool.layout, pool.device, tuple(runtime.export_ipc(buffer.pointer, index) for buffer in pool.buffers)
    )


def open_ipc(
    handle: IpcHandle,
    *,
    spec: Spec | None = None,
    num_layers: SupportsIndex | None = None,
    block_size: SupportsIndex | None = None,
    device: str | None = None,
) -> KVPool:
    """Return a pool over the memory of another process.

    Parameters
    ----------
    handle : IpcHandle
    spec : Spec, optional
        Expected spec, which the pool then has; by default the planes of the peer, without options of attention.
    num_layers, block_size : int, optional
        Expected sizes.
    device : str, optional
        Name of the device in this process; by default its name in the other one. CUDA_VISIBLE_DEVICES can make them
        differ.

    Returns
    -------
    KVPool
        The memory is unmapped with the last tensor over it.

    Raises
    ------
    ShapeError
        Another geometry than expected.
    DeviceError
        The device does not exist, or the handle cannot be opened: its process has ended, or is this one.
    UnsupportedOption
        An object that is not a handle.
    """
    if not isinstance(handle, IpcHandle):
        raise UnsupportedOption(f"handle is {shown(handle)}; expected an IpcHandle, from export_ipc or from_bytes")
    layout = handle.layout
    _check_expected(layout, spec, num_layers, block_size)
    if len(handle.buffers) != layout.num_buffers:
        raise PeerError(f"the handle has {len(handle.buffers)} buffers; its layout needs {layout.num_buffers}")
    name = device_name(handle.device if device is None else device)
    index = device_index(name)
    if index is None:
        raise DeviceError("device is 'cpu'; handles of CUDA IPC are opened on a CUDA device")
    check_device(index)
    opened: dict[bytes, _Opened] = {}
    buffers = []
    for number, (content, offset) in enumerate(handle.buffers):
        if content not in opened:
            opened[content] = _Opened(cuda.runtime(), content, index)
        buffers.append(opened[content].bytes(offset, layout.buffer_nbytes(number), name))
    kept = StoredPlanes(layout.planes) if spec is None else spec
    sizes = (layout.num_layers or 0, layout.num_blocks or 0, layout.block_size or 0)
    return KVPool(kept, *sizes, layout=layout, device=name, buffers=buffers)


class _Opened:
    """An allocation of another process, mapped until the last tensor over it is gone."""

    def __init__(self, runtime: Runtime, handle: bytes, device: int) -> None:
        self.address = runtime.open_ipc(handle, device)
        weakref.finalize(self, _close, runtime, self.address, device).atexit = False

    def bytes(self, offset: int, nbytes: int, device: str) -> Tensor:
        return strided(mapped(self.address + offset, nbytes, device, self), (nbytes,))


def _close(runtime: Runtime, address: int, device: int) -> None:
    try:
        runtime.close_ipc(address, device)
    except Exception as error:  # a finalizer warns and never raises
        warnings.warn(f"memory of another process stays mapped: {error}", ResourceWarning, stacklevel=2)


def _check_expected(
    layout: KVLayout, spec: Spec | None, num_layers: SupportsIndex | None, block_size: SupportsIndex | None
) -> None:
    """Raise ShapeError if the peer's pool differs from the expected one."""
    if spec is not None:
        check_spec(spec)
        if tuple(spec.planes) != layout.planes:
            raise ShapeError(f"the peer's pool has the planes {shown(layout.planes)}; expected {shown(spec.planes)}")
    for what, given, has, most in (
        ("layers", num_layers, layout.num_layers, LAYERS_MAX),
        ("tokens in a block", block_size, layout.block_size, None),
    ):
        if given is not None and require_int(what, given, max=most) != has:
            raise ShapeError(f"the peer's pool has {has} {what}; expected {shown(given)}")
