"""HostMemory: one mapping of host memory, private or shared between processes, page-locked for CUDA on request."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from pagecore.arrays import Tensor, as_tensor, cuda
from pagecore.arrays.cuda.devices import check_device, device_index
from pagecore.arrays.tensors._make import mapped
from pagecore.errors import DeviceError, NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.storage.checks import ceil_div, flag, require_int
from pagecore.storage.memory.budgets import free_memory
from pagecore.storage.memory.numa import bind, checked_node, cpus_of
from pagecore.storage.memory.registration import Chunk, Registration, whole_chunks

PAGE = mmap.PAGESIZE
HUGE_PAGE = 1 << 21
NBYTES_MAX = 1 << 62
# Pages are made present by the kernel, from Linux 5.14 on; `mmap` does not export it.
_MADV_POPULATE_WRITE = 23
# Below this many bytes a thread costs more than it saves.
_BYTES_PER_THREAD = 32 << 20
_THREADS_MAX = 16
# F_SEAL_SHRINK | F_SEAL_GROW: a process that maps the memory cannot lose pages of it.
SEALS = 0x2 | 0x4
# Calls of a CDLL run without the GIL.
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p


class HostMemory:
    """Zeroed host memory, aligned to pages, and to huge pages if it is private and has the size of one.

    Parameters
    ----------
    nbytes : int
        Rounded up to whole pages.
    numa_node : int, optional
        Node of the host's memory that holds the pages; by default the system decides.
    huge_pages : bool
        Advise huge pages (MADV_HUGEPAGE), a hint: shared memory has them only if the system enables them for it.
    shared : bool
        Memory with a file descriptor (memfd), which another process can map; see `pagecore.tiers.engine.share`. It
        cannot be resized.
    touch : bool
        Make all pages present now, by several threads, on the processors of `numa_node`. Otherwise a page takes memory
        when it is first touched, and the first touch of each is slow.

    Attributes
    ----------
    nbytes, address : int
    numa_node : int or None
    fd : int or None
        Descriptor of shared memory, until `close`. The memory owns it.

    Raises
    ------
    ShapeError, UnsupportedOption
        An invalid size; a NUMA node that the host does not have, or to which the system does not permit to bind.
    NotEnoughMemory
        The system cannot provide the memory.

    Notes
    -----
    Tensors over the memory keep it mapped, and keep the registration of `register`, even if this object is collected.
    """

    def __init__(
        self,
        nbytes: SupportsIndex,
        *,
        numa_node: SupportsIndex | None = None,
        huge_pages: bool = True,
        shared: bool = False,
        touch: bool = True,
    ) -> None:
        size = require_int("nbytes", nbytes, max=NBYTES_MAX)
        is_huge, is_shared, touches = (
            flag("huge_pages", huge_pages),
            flag("shared", shared),
            flag("touch", touch),
        )
        node = None if numa_node is None else checked_node(numa_node)
        size = ceil_div(size, PAGE) * PAGE
        if touches and size > (free := free_memory()):
            raise NotEnoughMemory(f"{size:,} bytes are requested and {free:,} are available; request less")
        fd = _new_memfd(size) if is_shared else None
        self._map(size, fd, is_huge)
        self.numa_node = node
        try:
            if is_huge:
                _advise(self.address, self.nbytes, mmap.MADV_HUGEPAGE)
            if node is not None:
                bind(self.address, self.nbytes, node)
            if touches:
                _touch(self.address, self.nbytes, node)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_fd(cls, fd: int, nbytes: SupportsIndex) -> HostMemory:
        """Map shared memory of another process; nothing is written, and the descriptor belongs to the result.

        Raises
        ------
        UnsupportedOption
            The descriptor is not a memfd that is sealed against shrinking, as `HostMemory` makes it: the owner could
            take the pages away. It is closed.
        ShapeError
            The file has another size.
        NotEnoughMemory
            The system cannot map it.
        """
        try:
            size = require_int("nbytes", nbytes, max=NBYTES_MAX)
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:
                seals = 0
            if seals & SEALS != SEALS:
                raise UnsupportedOption(
                    f"descriptor {fd} is not sealed shared memory; pass the descriptor of a HostMemory(shared=True)"
                )
            if (has := os.fstat(fd).st_size) != size:
                raise ShapeError(f"the shared memory has {has:,} bytes; expected {size:,}")
        except BaseException:
            os.close(fd)
            raise
        memory = cls.__new__(cls)
        memory._map(size, fd, is_huge=False)
        memory.numa_node = None
        return memory

    def _map(self, size: int, fd: int | None, is_huge: bool) -> None:
        """Map the memory; a private mapping has a huge page more, in which its start can be aligned."""
        spare = HUGE_PAGE if fd is None and is_huge and size >= HUGE_PAGE else 0
        try:
            start = _map(size + spare, fd)
        except NotEnoughMemory:
            if fd is not None:
                os.close(fd)
            raise
        self.address = ceil_div(start, HUGE_PAGE) * HUGE_PAGE if spare else start
        self.nbytes = size
        self._held = _Held(start, size + spare, fd)
        self._owner = _Owner(self.address, size)
        weakref.finalize(self._owner, _Held.unmap, self._held).atexit = False
        self._bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.asarray(self._owner)

    @property
    def fd(self) -> int | None:
        """Descriptor of shared memory; None if it is private or closed."""
        return self._held.fd

    def tensor(self, device: str = "cpu") -> Tensor:
        """Return the memory as bytes, uint8 ``[nbytes]``.

        On a CUDA device the tensor is for operations of the device, which may access what is registered.
        """
        if device_index(device) is None:
            return as_tensor(self._bytes)
        return mapped(self.address, self.nbytes, device, self._owner)

    def register(self, device: str, chunks: Sequence[Chunk] | None = None, *, awaits_captures: bool = True) -> None:
        """Page-lock the memory for CUDA devices, in the background.

        Parameters
        ----------
        device : str
            CUDA device whose context registers the memory; every device of the process can access it.
        chunks : sequence of (int, int), optional
            Adjoining ranges of bytes from 0 on, registered one by one: a copy by DMA must not cross from one into
            another. By default ranges of at most 1 GiB; see docs/tiers_memory.md.
        awaits_captures : bool
            While a graph is being captured, CUDA registers nothing: try again after it. If False, `wait_registered`
            raises DeviceError then.

        Raises
        ------
        DeviceError
            `device` is not a CUDA device that the process sees, or the memory is registered already or closed.
        """
        index = device_index(device)
        if index is None:
            raise DeviceError(f"device is {device!r}; only CUDA devices need registered memory: pass 'cuda:0'")
        check_device(index)
        if self._held.registration is not None or self._held.is_closed:
            raise DeviceError("the memory is registered already, or closed; make another HostMemory")
        ranges = whole_chunks(self.nbytes, PAGE) if chunks is None else chunks
        self._held.registration = Registration(
            cuda.runtime(), index, self.address, ranges, self._owner, awaits_captures=awaits_captures
        )

    def is_registered(self, begin: int, end: int) -> bool:
        """Return True if bytes [begin, end) of the memory are page-locked, so that a device may access them."""
        registration = self._held.registration
        return registration is not None and registration.covers(begin, end)

    def wait_registered(self, timeout: float | None = None) -> bool:
        """Wait for the end of `register`; return False if `timeout` seconds pass first, or if it was not called.

        Raises
        ------
        DeviceError, NotEnoughMemory
            The memory could not be registered.
        """
        registration = self._held.registration
        return registration is not None and registration.wait(timeout)

    def discard(self) -> None:
        """Give all pages back to the system: the content is zero from now on, and pages come back when touched.

        Raises
        ------
        DeviceError
            The memory is page-locked for a device, or otherwise locked.
        """
        if self._held.registration is not None and not self._held.is_closed:
            raise DeviceError("the memory is registered with a device, which may access it; close it first")
        advice = mmap.MADV_DONTNEED if self.fd is None else mmap.MADV_REMOVE
        failed = _advise(self.address, self.nbytes, advice)
        if failed:
            raise DeviceError(f"the system does not take the pages of the memory back: {os.strerror(failed)}")

    def close(self) -> None:
        """Unregister the memory and close its descriptor; it is unmapped with the last tensor over it.

        The caller waits for the work of devices on the memory first. A second call does nothing.
        """
        self._held.close()

    def __repr__(self) -> str:
        kind = "shared" if self.fd is not None else "private"
        return f"HostMemory({self.nbytes / 2**20:.1f} MiB, {kind})"


class _Owner:
    """Base of every view of a mapping; the resources are released with it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


@dataclass
class _Held:
    """Resources of a mapping: its range, which may begin before the memory, its descriptor and its registration."""

    start: int
    nbytes: int
    fd: int | None
    registration: Registration | None = None
    is_closed: bool = False

    def close(self) -> None:
        """Unregister, and close the descriptor."""
        self.is_closed = True
        if self.registration is not None:
            self.registration.close()
        if self.fd is not None:
            fd, self.fd = self.fd, None
            os.close(fd)

    def unmap(self) -> None:
        """Release everything, when there are no tensors over the memory."""
        self.close()
        LIBC.munmap(ctypes.c_void_p(self.start), ctypes.c_size_t(self.nbytes))


def _map(nbytes: int, fd: int | None) -> int:
    """Return the address of a new mapping. (An `mmap` of Python would keep a copy of the descriptor open.)"""
    flags = mmap.MAP_SHARED if fd is not None else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    arguments = (None, ctypes.c_size_t(nbytes), protection, flags, -1 if fd is None else fd, ctypes.c_long(0))
    address: int | None = LIBC.mmap(*arguments)
    if address is None or address == ctypes.c_void_p(-1).value:
        reason = os.strerror(ctypes.get_errno())
        raise NotEnoughMemory(f"the system cannot map {nbytes:,} bytes: {reason}; request less")
    return address


def _new_memfd(size: int) -> int:
    """Return a new descriptor of shared memory that cannot be resized."""
    fd = -1
    try:
        fd = os.memfd_create("pagecore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise NotEnoughMemory(f"the system cannot make {size:,} bytes of shared memory: {error}") from error
    return fd


def _advise(address: int, nbytes: int, advice: int) -> int:
    """Call madvise without the GIL; return 0 or the number of the error."""
    failed = LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)
    return ctypes.get_errno() if failed else 0


def _touch(address: int, nbytes: int, node: int | None) -> None:
    """Make all pages present by several threads."""
    from concurrent.futures import ThreadPoolExecutor  # takes long to import, and few processes need it

    allowed = os.sched_getaffinity(0)
    cpus = allowed if node is None else cpus_of(node) or allowed
    num_threads = min(len(cpus), _THREADS_MAX, ceil_div(nbytes, _BYTES_PER_THREAD))
    step = ceil_div(ceil_div(nbytes, num_threads), HUGE_PAGE) * HUGE_PAGE

    def work(begin: int) -> None:
        if cpus != allowed:
            os.sched_setaffinity(0, cpus)  # of this thread
        _touch_range(address + begin, min(step, nbytes - begin))

    with ThreadPoolExecutor(num_threads, thread_name_prefix="pagecore-touch") as pool:
        list(pool.map(work, range(0, nbytes, step)))


def _touch_range(address: int, nbytes: int) -> None:
    failed = _advise(address, nbytes, _MADV_POPULATE_WRITE)
    if failed == errno.EINVAL:  # a kernel before 5.14; the memory is new, so that zeros change nothing
        ctypes.memset(address, 0, nbytes)
    elif failed:
        raise NotEnoughMemory(f"the system cannot provide {nbytes:,} bytes: {os.strerror(failed)}; request less")
