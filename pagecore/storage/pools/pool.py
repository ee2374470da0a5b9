"""KVPool: the bytes of one group of layers."""

from __future__ import annotations

from functools import cached_property
from typing import SupportsIndex

from pagecore.arrays import Tensor, empty, strided, zeros
from pagecore.arrays.cuda.devices import device_name
from pagecore.errors import NotEnoughMemory, UnsupportedOption
from pagecore.storage.checks import LAYERS_MAX, flag, member, require_int, require_pool, shown
from pagecore.storage.memory.budgets import Memory, parse_memory
from pagecore.storage.pools.adoption import Span, adopt
from pagecore.storage.pools.allocation import Allocator, allocated, checked_allocator, fill_zeros
from pagecore.storage.pools.layout import KVLayout, as_layout
from pagecore.storage.pools.regions import Region
from pagecore.storage.specs.spec import Plane, Spec, check_block_size, check_spec


class KVPool:
    """The planes of all layers that share a spec, divided into blocks.

    Parameters
    ----------
    spec : Spec
        Spec of each layer.
    num_layers, num_blocks, block_size : int
        `num_blocks` includes the null block 0.
    layout : str or KVLayout
        Memory layout of the planes; see `KVLayout`.
    device : str
        "cpu", "cuda" (short for "cuda:0") or another CUDA device, such as "cuda:1".
    buffers : optional
        Memory of the caller, adopted instead of allocated: one array for each buffer of the layout (see `KVLayout`),
        of any type that `as_tensor` accepts. Pass one array; a list, layer by layer and within a layer plane by plane;
        a list with one list or mapping per layer; or a mapping of plane names to arrays, or to lists with one array
        per layer. The arrays must be writable, contiguous and aligned, must not overlap, and must have dtype uint8 (raw
        bytes) or the planes' dtype, with the axes of the layout. Adjacent axes may be merged, and the outermost may be
        longer. The views alias the arrays and keep them alive. They are not written to unless `scrub` is True. Without
        `buffers` the pool allocates its memory and zeroes the null block (on CUDA all blocks, by one fill).
    scrub : bool
        Zero all bytes that the layout needs, also in `buffers`; see `zero`. By default host memory initially contains
        whatever the heap held, and `buffers` are unchanged.
    allocator : callable, optional
        Returns the memory of a buffer for ``allocator(bytes, device)``, instead of pagecore's own allocation: any array
        that `as_tensor` accepts, of at least that number of bytes, contiguous and aligned to 64 bytes. The pool keeps
        it alive, and zeroes it as its own. Exclusive with `buffers`.

    Raises
    ------
    ShapeError, DeviceError, UnsupportedOption, UnsupportedDtype
        Invalid sizes, device, buffers or allocator.
    NotEnoughMemory
        The allocation failed.

    Examples
    --------
    >>> import numpy as np
    >>> from pagecore import AttentionSpec, KVPool
    >>> owned = [np.zeros((2, 8, 16, 1, 64), np.float32) for layer in range(3)]  # key and value of 8 blocks of 16
    >>> pool = KVPool(AttentionSpec(1, 64, dtype="float32"), 3, 8, 16, layout="CBNHD", buffers=owned)
    >>> pool.value(2)[5] = 1.0
    >>> float(owned[2][1, 5].min())
    1.0
    """

    def __init__(
        self,
        spec: Spec,
        num_layers: int,
        num_blocks: int,
        block_size: int = 16,
        layout: str | KVLayout = "layerwise",
        device: str = "cpu",
        buffers: object = None,
        *,
        scrub: bool = False,
        allocator: Allocator | None = None,
    ) -> None:
        check_spec(spec)
        is_scrubbed = flag("scrub", scrub)
        self.spec = spec
        self.device = device_name(device)
        self.num_layers = require_int("num_layers", num_layers, max=LAYERS_MAX)
        self.num_blocks = require_pool("num_blocks", num_blocks)
        self.block_size = require_int("block_size", block_size)
        check_block_size(spec, self.block_size)
        self.layout = as_layout(layout).bind(spec.planes, self.num_layers, self.num_blocks, self.block_size)
        # Spans of the caller's memory; empty if the pool allocates its own.
        self.spans: tuple[Span, ...] = ()
        source = checked_allocator(allocator)
        if source is not None:
            if buffers is not None:
                raise UnsupportedOption("buffers and allocator are given; give one of them")
            self._buffers, self.spans = self._allocate_from(source)
        elif buffers is None:
            self._buffers = self._allocate(is_scrubbed)
        else:
            self._buffers, self.spans = adopt(buffers, self.layout, self.device)
        self._divided: dict[object, Tensor] = {}
        names = [plane.name for plane in spec.planes]
        self._views = {
            name: tuple(self._view(index, layer) for layer in range(self.num_layers))
            for index, name in enumerate(names)
        }
        if (source is not None and (is_scrubbed or self.device != "cpu")) or (is_scrubbed and buffers is not None):
            self.zero()
        elif buffers is None and self.device == "cpu" and not is_scrubbed:
            self._zero_null_block()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all layers, planes and blocks."""
        return sum(self.layout.buffer_nbytes(i) for i in range(self.layout.num_buffers))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers."""
        return bytes_per_block(self.spec, self.num_layers, self.block_size)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in all layers, including an equal share of the planes per block."""
        return self.bytes_per_block / self.block_size

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The memory as flat uint8 tensors, one for each buffer of the layout; no copies."""
        return self._buffers

    def regions(self) -> list[Region]:
        """Return the memory as regions, one for each buffer, to register it with NIXL or Mooncake in one call."""
        return [
            Region(self.layout.buffer_name(number), buffer.pointer, buffer.nbytes, self.device)
            for number, buffer in enumerate(self._buffers)
        ]

    def plane(self, name: str, layer: SupportsIndex = 0) -> Tensor:
        """Return one plane of one layer, ``[num_blocks, block_size, *plane.shape]``; it aliases the pool.

        A plane per block has no token axis. The view keeps the memory alive, even after the pool is collected.

        Raises
        ------
        UnsupportedOption
            The spec has no plane of that name.
        ShapeError
            The pool does not have that layer.
        """
        if not isinstance(name, str) or name not in self._views:
            raise UnsupportedOption(f"plane {shown(name)} is not stored; this pool has {', '.join(self._views)}")
        return self._views[name][member("layer", layer, self.num_layers, "the pool")]

    def key(self, layer: SupportsIndex = 0) -> Tensor:
        """Return ``plane("key", layer)``: ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
        return self.plane("key", layer)

    def value(self, layer: SupportsIndex = 0) -> Tensor:
        """Return ``plane("value", layer)``: ``[num_blocks, block_size, num_kv_heads, v_head_dim]``."""
        return self.plane("value", layer)

    def divided(self, name: str, axes: tuple[int, ...], layer: SupportsIndex = 0, *, by_token: bool = False) -> Tensor:
        """Return a plane per block of shape ``(heads, numbers)`` with its numbers divided into `axes`; an alias.

        ``[num_blocks, heads, *axes]``, or with `by_token` ``[num_blocks, axes[0], heads, *axes[1:]]``. Errors are those
        of `plane`. Views are made once.
        """
        wanted = name, axes, layer, by_token
        found = self._divided.get(wanted)
        if found is None:
            found = self._divided[wanted] = self._divide(name, axes, layer, by_token)
        return found

    def _divide(self, name: str, axes: tuple[int, ...], layer: SupportsIndex, by_token: bool) -> Tensor:
        plane = self.plane(name, layer)
        where = self.layout.plane_layout([each.name for each in self.spec.planes].index(name), layer)
        inner = [plane.itemsize]
        for extent in reversed(axes[1:]):
            inner.insert(0, inner[0] * extent)
        heads, lengths, steps = plane.shape[1], list(axes), [plane.strides[1], *inner]
        lengths.insert(int(by_token), heads)
        if by_token:
            steps[:2] = steps[1::-1]
        offset = where.offset + member("layer", layer, self.num_layers, "the pool") * where.strides.get("L", 0)
        shape, strides = (self.num_blocks, *lengths), (plane.strides[0], *steps)
        return strided(self._buffers[where.buffer], shape, strides, offset, plane.dtype)

    def planes(self) -> list[Tensor]:
        """Return every plane of every layer, which a copy of whole blocks must move."""
        return [view for views in self._views.values() for view in views]

    def zero(self) -> None:
        """Zero every block of every plane and layer; adopted bytes that the layout does not use are unchanged.

        On CUDA the fill is submitted to CuPy's current stream, and the host waits for it. Work of other streams on the
        memory must have finished.

        Raises
        ------
        DeviceError
            The current stream is being captured; nothing was written.
        """
        fill_zeros(self._buffers, self.device)

    @classmethod
    def blocks_for(cls, memory: Memory, spec: Spec, num_layers: int, block_size: int = 16, device: str = "cpu") -> int:
        """Return the number of blocks of all layers that fit into `memory`, including the null block.

        Raises
        ------
        NotEnoughMemory
            Fewer than two blocks fit.
        ShapeError, UnsupportedOption
            Numbers out of range, or a spec that a pool cannot store, such as one with planes per sequence.
        """
        check_spec(spec)
        one = bytes_per_block(
            spec, require_int("num_layers", num_layers, max=LAYERS_MAX), require_int("block_size", block_size)
        )
        return blocks_within(parse_memory(memory, device), one)

    def _allocate(self, scrub: bool) -> tuple[Tensor, ...]:
        sizes = [self.layout.buffer_nbytes(i) for i in range(self.layout.num_buffers)]
        # Host memory is only committed when it is touched; device memory is committed at once.
        make = empty if self.device == "cpu" and not scrub else zeros
        return tuple(make((size,), "uint8", self.device) for size in sizes)

    def _allocate_from(self, allocator: Allocator) -> tuple[tuple[Tensor, ...], tuple[Span, ...]]:
        sizes = [self.layout.buffer_nbytes(i) for i in range(self.layout.num_buffers)]
        buffers = [allocated(allocator, size, self.device) for size in sizes]
        return adopt(buffers, self.layout, self.device)

    def _view(self, index: int, layer: int) -> Tensor:
        plane = self.spec.planes[index]
        where = self.layout.plane_layout(index, layer)
        shape, strides = _logical(plane, self.num_blocks, self.block_size, where.strides)
        offset = where.offset + layer * where.strides.get("L", 0)
        return strided(self._buffers[where.buffer], shape, strides, offset, plane.dtype)

    def _zero_null_block(self) -> None:
        for view in self.planes():
            view[0] = 0

    def __repr__(self) -> str:
        return (
            f"KVPool({self.num_layers} layers, {self.num_blocks} blocks of {self.block_size}, "
            f"{self.layout.order}, {self.nbytes / 2**20:.1f} MiB on {self.device})"
        )


def bytes_per_block(spec: Spec, num_layers: int, block_size: int) -> int:
    """Return the bytes of one block in `num_layers` layers; raise ShapeError for a block size that the spec refuses."""
    check_block_size(spec, block_size)
    counts = {"token": block_size, "block": 1}
    return num_layers * sum(plane.nbytes * counts[plane.per] for plane in spec.planes)


def blocks_within(budget: int, one_block: int) -> int:
    """Return the number of blocks of `one_block` bytes in `budget` bytes; raise NotEnoughMemory below two."""
    blocks = budget // one_block
    if blocks < 2:
        raise NotEnoughMemory(
            f"memory is {shown(budget)} bytes; at least two blocks of {shown(one_block)} bytes are needed, including "
            f"the null block: give at least {shown(2 * one_block)} bytes, or make block_size smaller"
        )
    return blocks


def _logical(
    plane: Plane, num_blocks: int, block_size: int, strides: dict[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of ``[block, token, head, dim]``, without the axes that the plane lacks."""
    axes: list[tuple[int, int]] = [(num_blocks, strides["B"])]
    if plane.per == "token":
        axes.append((block_size, strides["N"]))
    if len(plane.shape) == 2:
        axes.append((plane.shape[0], strides["H"]))
    axes.append((plane.shape[-1], strides["D"]))
    shape, steps = zip(*axes, strict=True)
    return shape, steps
