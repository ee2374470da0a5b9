"""StorageEngine: the memory of one rank on every medium, looked up by device type and id."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, SupportsIndex

from pagecore.cache.parts import PartsOwner, parts_of
from pagecore.errors import DeviceError, NotRegistered, ShapeError, UnsupportedOption
from pagecore.storage import HostPool, KVLayout, KVPool, Spec
from pagecore.storage.checks import require_int, shown
from pagecore.storage.pools.adoption import tensors_of
from pagecore.storage.pools.layout import as_layout
from pagecore.storage.specs.spec import check_spec
from pagecore.tiers.engine.files import DiskFiles, same_block
from pagecore.tiers.engine.handle import DeviceType, StorageHandle
from pagecore.tiers.store import BlockStore

Key = tuple[DeviceType, int, int]
# Media whose blocks are stored as the host's.
_LIKE_HOST = (DeviceType.DISK, DeviceType.REMOTE)


class StorageEngine:
    """Registry of the pools, files and stores that hold the blocks of a model on one rank.

    Engines with schedulers of their own move blocks between media by the addresses that the handles give. The engine
    owns no policy and moves nothing. Calls may come from several threads.

    Notes
    -----
    Follows the storage engine of FlexKV (2025): device memory is laid out layer by layer, as attention reads it; host
    memory, disks and remote stores block by block, so that a block is one transfer.

    Examples
    --------
    >>> import numpy as np
    >>> from pagecore import AttentionSpec
    >>> from pagecore.tiers.engine import DeviceType, StorageEngine
    >>> engine = StorageEngine()
    >>> layers = [np.zeros((2, 9, 16, 8, 64), np.float32) for layer in range(3)]  # as an engine owns them
    >>> spec = AttentionSpec(8, 64, dtype="float32")
    >>> handle = engine.register(layers, DeviceType.HOST, 0, spec=spec, block_size=16)
    >>> handle.tensor(2).shape, handle.pieces([5]).shape, handle.pieces_per_block
    ((2, 9, 16, 8, 64), (6, 2), 6)
    """

    def __init__(self) -> None:
        self._handles: dict[Key, StorageHandle] = {}
        self._lock = threading.Lock()

    def register(
        self,
        storage: object,
        device_type: DeviceType,
        device_id: SupportsIndex = 0,
        *,
        group: SupportsIndex = 0,
        spec: Spec | None = None,
        num_layers: SupportsIndex | None = None,
        block_size: SupportsIndex | None = None,
        layout: str | KVLayout | None = None,
    ) -> StorageHandle:
        """Register memory, files or a store under a type and id; all groups of a cache or host pool at once.

        Parameters
        ----------
        storage : KVPool, HostPool, PagedKVCache, DiskFiles, BlockStore, or arrays of another framework
            For CUDA and HOST a pool, a cache, or the arrays that `KVPool` adopts: usually a list with one tensor a
            layer. For DISK and REMOTE files or a store.
        device_type : DeviceType
        device_id : int
            Number of the CUDA device; any number for other types.
        group : int
            Group of layers, for models with several; the first one of a cache or host pool.
        spec, num_layers, block_size
            For arrays: spec of the layers; their number, by default one for each entry of a list; tokens in a block.
        layout : str or KVLayout, optional
            For arrays the order of their axes, "CBNHD" by default: (key or value, block, token, head, dim). For a store
            the bound layout of its blocks.

        Returns
        -------
        StorageHandle
            Handle of `group`.

        Raises
        ------
        UnsupportedOption
            An object or type that is not known, options that do not belong to it, a type and id in use, or blocks on
            disk or in a store with another layout than the host's.
        DeviceError
            Memory on another device.
        ShapeError, UnsupportedDtype
            Arrays that do not fit. After every error nothing is registered.
        """
        kind = _checked_type(device_type)
        number = require_int("device_id", device_id, min=0)
        first = require_int("group", group, min=0)
        options = {"spec": spec, "num_layers": num_layers, "block_size": block_size, "layout": layout}
        listed: list[tuple[KVLayout, KVPool | DiskFiles | BlockStore]]
        if kind in _LIKE_HOST:
            listed = [_stored(storage, options)]
        else:
            place = f"cuda:{number}" if kind is DeviceType.CUDA else "cpu"
            listed = [(pool.layout, pool) for pool in _pools(storage, place, options)]
        made = [StorageHandle(kind, number, first + i, bound, held) for i, (bound, held) in enumerate(listed)]
        with self._lock:
            for handle in made:
                self._check_new(handle)
            self._handles |= {(kind, number, handle.group): handle for handle in made}
        return made[0]

    def allocate(
        self,
        spec: Spec,
        num_layers: SupportsIndex,
        num_blocks: SupportsIndex,
        block_size: SupportsIndex,
        device_type: DeviceType,
        device_id: SupportsIndex = 0,
        *,
        group: SupportsIndex = 0,
        folder: str | Path | None = None,
        max_blocks_per_file: SupportsIndex = 32_000,
        **host_options: Any,
    ) -> StorageHandle:
        """Make memory or files with the layout of the medium, and register them.

        CUDA memory is layer-wise, the other media block-wise with blocks at multiples of 4,096 bytes.

        Parameters
        ----------
        spec, num_layers, num_blocks, block_size
            See `KVPool`.
        device_type, device_id, group
            See `register`.
        folder, max_blocks_per_file
            For DISK, see `DiskFiles`; the files are created.
        host_options
            For HOST: `numa_node`, `huge_pages`, `shared`, `touch` and `heads` of `HostPool`.

        Raises
        ------
        PagecoreError
            The errors of `KVPool`, `HostPool`, `DiskFiles.create` and `register`.
        """
        kind = _checked_type(device_type)
        if (folder is not None) != (kind is DeviceType.DISK):
            raise UnsupportedOption(f"folder is {shown(folder)}; DISK needs a folder, and the other types have none")
        if host_options and kind is not DeviceType.HOST:
            raise UnsupportedOption(f"{', '.join(host_options)}: options of HOST, but the type is {kind.name}")
        check_spec(spec)
        sizes = (require_int("num_layers", num_layers), require_int("num_blocks", num_blocks, min=2))
        tokens = require_int("block_size", block_size)
        if kind is DeviceType.CUDA:
            number = require_int("device_id", device_id, min=0)
            return self.register(KVPool(spec, *sizes, tokens, "layerwise", f"cuda:{number}"), kind, number, group=group)
        if kind is DeviceType.HOST:
            pool = HostPool([(spec, sizes[0])], tokens, num_blocks=[sizes[1]], **host_options)
            return self.register(pool, kind, device_id, group=group)
        if folder is None:
            raise UnsupportedOption("REMOTE has no memory to allocate; register a store")
        layout = KVLayout("blockwise", block_alignment=4096).bind(spec, sizes[0], sizes[1], tokens)
        files = DiskFiles(layout, folder, require_int("max_blocks_per_file", max_blocks_per_file))
        handle = self.register(files, kind, device_id, group=group)
        try:
            files.create()
        except BaseException:
            self.unregister(kind, device_id, group)
            raise
        return handle

    def handle(self, device_type: DeviceType, device_id: SupportsIndex = 0, group: SupportsIndex = 0) -> StorageHandle:
        """Return what is registered under a type and id.

        Raises
        ------
        NotRegistered
            A LookupError that names type and id, and lists what is registered.
        """
        key = _key(device_type, device_id, group)
        with self._lock:
            found = self._handles.get(key)
            if found is None:
                raise self._missing(key)
        return found

    def handles(self) -> list[StorageHandle]:
        """Return all handles, in the order of registration."""
        with self._lock:
            return list(self._handles.values())

    def unregister(self, device_type: DeviceType, device_id: SupportsIndex = 0, group: SupportsIndex = 0) -> None:
        """Forget a handle; its memory lives as long as other references to it. NotRegistered if it is unknown."""
        key = _key(device_type, device_id, group)
        with self._lock:
            if self._handles.pop(key, None) is None:
                raise self._missing(key)

    def _missing(self, key: Key) -> NotRegistered:
        kind, number, group = key
        listed = ", ".join(handle.title for handle in self._handles.values()) or "nothing"
        wanted = f"{kind.name} {number}" + (f", group {group}" if group else "")
        return NotRegistered(f"no storage is registered for {wanted}; registered: {listed}")

    def _check_new(self, handle: StorageHandle) -> None:
        if (handle.device_type, handle.device_id, handle.group) in self._handles:
            raise UnsupportedOption(f"{handle.title} is registered already; unregister it first, or use another id")
        for other in self._handles.values():
            kinds = {handle.device_type, other.device_type}
            if other.group != handle.group or DeviceType.HOST not in kinds or not kinds & set(_LIKE_HOST):
                continue
            if not same_block(handle.layout, other.layout):
                raise UnsupportedOption(
                    f"{handle.title} has blocks of {_described(handle.layout)}, and {other.title} of "
                    f"{_described(other.layout)}; disks and stores keep blocks as the host has them: use one layout"
                )


def _described(layout: KVLayout) -> str:
    planes = ", ".join(f"{plane.name} {plane.shape} {plane.dtype}" for plane in layout.planes)
    return (
        f"layout {layout.order!r} ({layout.axes}), {layout.num_layers} layers of {planes}, {layout.block_size} tokens, "
        f"stride {layout.block_stride}"
    )


def _checked_type(device_type: object) -> DeviceType:
    if not isinstance(device_type, DeviceType):
        raise UnsupportedOption(f"device_type is {shown(device_type)}; use one of {', '.join(map(str, DeviceType))}")
    return device_type


def _key(device_type: DeviceType, device_id: SupportsIndex, group: SupportsIndex) -> Key:
    kind = _checked_type(device_type)
    return kind, require_int("device_id", device_id, min=0), require_int("group", group, min=0)


def _stored(storage: object, options: dict[str, Any]) -> tuple[KVLayout, DiskFiles | BlockStore]:
    """Return files or a store with the layout of its blocks."""
    layout = options.pop("layout")
    _refuse(options, "files and stores")
    if isinstance(storage, DiskFiles):
        _refuse({"layout": layout}, "files, which have one")
        return storage.layout, storage
    if not isinstance(storage, BlockStore):
        raise UnsupportedOption(f"storage is {shown(storage)}; DISK and REMOTE take DiskFiles or a BlockStore")
    if not isinstance(layout, KVLayout):
        raise UnsupportedOption(f"layout is {shown(layout)}; a store needs the bound KVLayout of its blocks")
    layout.plane_layout(0)  # raises ShapeError without sizes
    return layout, storage


def _pools(storage: object, device: str, options: dict[str, Any]) -> Iterable[KVPool]:
    """Return the pools of every group of a storage in memory; arrays are adopted."""
    if isinstance(storage, HostPool):
        _refuse(options, "a host pool")
        if device != "cpu" or not storage.kv_pools:
            raise DeviceError(
                f"a HostPool for device {storage.device!r} is not memory of {device}; register it as HOST"
            )
        return storage.kv_pools if storage.device == "cpu" else storage.views("cpu")[0]
    if isinstance(storage, KVPool | PartsOwner):
        _refuse(options, "a pool or a cache")
        pools = [storage] if isinstance(storage, KVPool) else parts_of(storage).store.pools
        if not pools or any(pool.device != device for pool in pools):
            has = pools[0].device if pools else "none"
            raise DeviceError(f"the memory is on device {has!r}, not on {device}; register it under its own device")
        return pools
    return [_adopted(storage, device, **options)]


def _adopted(
    arrays: Any,
    device: str,
    spec: Spec | None,
    num_layers: SupportsIndex | None,
    block_size: SupportsIndex | None,
    layout: str | KVLayout | None,
) -> KVPool:
    """Return a pool over the caller's arrays."""
    if isinstance(arrays, DiskFiles | BlockStore):
        raise UnsupportedOption(f"storage is a {type(arrays).__name__}; CUDA and HOST take pools, caches or arrays")
    if spec is None or block_size is None:
        raise ShapeError("arrays are registered without spec or block_size; pass both, or register a KVPool")
    check_spec(spec)
    count = num_layers
    if count is None:
        if not isinstance(arrays, list | tuple):
            raise ShapeError("num_layers is missing; pass it, or a list with one entry a layer")
        count = len(arrays)
    tokens, layers = require_int("block_size", block_size), require_int("num_layers", count)
    order = as_layout("CBNHD" if layout is None else layout)
    one = order.bind(spec, layers, 1, tokens)
    tensors = tensors_of(arrays, one, device)
    blocks = min(tensor.nbytes // one.buffer_nbytes(i) for i, tensor in enumerate(tensors))
    return KVPool(spec, layers, blocks, tokens, order, device, tensors)


def _refuse(options: dict[str, Any], what: str) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UnsupportedOption(f"{', '.join(given)} cannot be given for {what}; leave them out")
