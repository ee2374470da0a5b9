"""The bytes of one group of layers."""

from __future__ import annotations

from typing import SupportsIndex

from pagecore.arrays import Tensor, cuda, empty, strided, zeros
from pagecore.arrays.devices import device_index, device_name
from pagecore.errors import DeviceError, NotEnoughMemory, UnsupportedOption
from pagecore.storage.adoption import Span, adopt
from pagecore.storage.checks import LAYERS_MAX, flag, member, require_int, shown
from pagecore.storage.layout import KVLayout, as_layout
from pagecore.storage.memory import Memory, parse_memory
from pagecore.storage.spec import Plane, Spec, check_spec


class KVPool:
    """The arrays of all layers that share a spec, cut into blocks.

    Parameters
    ----------
    spec : Spec
        What each layer stores.
    num_layers, num_blocks, block_size : int
        `num_blocks` counts the null block 0.
    layout : str or KVLayout
        How the planes lie in memory; see `KVLayout`.
    device : str
        "cpu", "cuda" (the first CUDA device) or another one, such as "cuda:1".
    buffers : optional
        Memory of the caller, adopted instead of allocated: an array for each buffer of the layout (see `KVLayout`),
        from any producer that `as_tensor` takes. One array; a list, layer by layer and within a layer plane by plane;
        a list with one list or mapping for each layer; or a mapping of plane names to arrays, or to lists with one
        array for each layer. Arrays are writable, contiguous, aligned, do not overlap, and hold raw bytes (uint8) or
        the planes' dtype. The views alias them and keep them alive. Nothing is written to them here unless `scrub` is
        True. Without `buffers` the pool allocates, and zeroes the null block; on CUDA all of it, which is one fill.
    scrub : bool
        Zero all bytes that the layout needs, of `buffers` too; see `zero`. False by default: blocks of host memory then
        begin with whatever the heap held, and `buffers` stay as they are.

    Raises
    ------
    ShapeError, DeviceError, UnsupportedOption, UnsupportedDtype
        Sizes, device or buffers that do not fit.
    NotEnoughMemory
        The system has not that much.

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
    ) -> None:
        check_spec(spec)
        is_scrubbed = flag("scrub", scrub)
        self.spec = spec
        self.device = device_name(device)
        self.num_layers = require_int("num_layers", num_layers, max=LAYERS_MAX)
        self.num_blocks = require_int("num_blocks", num_blocks, min=2)
        self.block_size = require_int("block_size", block_size)
        self.layout = as_layout(layout).bind(spec.planes, self.num_layers, self.num_blocks, self.block_size)
        # Memory of the caller that the pool lies in.
        self.spans: tuple[Span, ...] = ()
        if buffers is None:
            self._buffers = self._allocate(is_scrubbed)
        else:
            self._buffers, self.spans = adopt(buffers, self.layout, self.device)
        names = [plane.name for plane in spec.planes]
        self._views = {
            name: tuple(self._view(index, layer) for layer in range(self.num_layers))
            for index, name in enumerate(names)
        }
        if is_scrubbed and buffers is not None:
            self.zero()
        elif buffers is None and self.device == "cpu" and not is_scrubbed:
            self._zero_null_block()

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, planes and blocks."""
        return sum(self.layout.buffer_nbytes(i) for i in range(self.layout.num_buffers))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers."""
        return bytes_per_block(self.spec, self.num_layers, self.block_size)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in all layers; what is stored once a block is shared out among its tokens."""
        return self.bytes_per_block / self.block_size

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The memory itself, as flat arrays of bytes; zero-copy."""
        return self._buffers

    def plane(self, name: str, layer: SupportsIndex = 0) -> Tensor:
        """View of one plane of one layer, ``[num_blocks, block_size, *plane.shape]``; it aliases the pool.

        A plane that is per block has no token axis. The view keeps the memory alive, also after the pool is gone.
        """
        if not isinstance(name, str) or name not in self._views:
            raise UnsupportedOption(f"plane {shown(name)} is not stored; this pool has {', '.join(self._views)}")
        return self._views[name][member("layer", layer, self.num_layers, "the pool")]

    def key(self, layer: SupportsIndex = 0) -> Tensor:
        """View ``[num_blocks, block_size, num_kv_heads, head_dim]`` of a layer's keys; it aliases the pool."""
        return self.plane("key", layer)

    def value(self, layer: SupportsIndex = 0) -> Tensor:
        """View ``[num_blocks, block_size, num_kv_heads, v_head_dim]`` of a layer's values; it aliases the pool."""
        return self.plane("value", layer)

    def planes(self) -> list[Tensor]:
        """Every plane of every layer: what a copy of whole blocks has to move."""
        return [view for views in self._views.values() for view in views]

    def zero(self) -> None:
        """Zero every block of every plane and layer; bytes of adopted memory past what the layout needs stay.

        On CUDA the fill goes to the current stream of CuPy, which is waited for; work of other streams on the memory
        must be done.

        Raises
        ------
        DeviceError
            The current stream is being captured; nothing was written.
        """
        index = device_index(self.device)
        if index is None:
            for buffer in self._buffers:
                buffer.numpy().fill(0)
            return
        runtime = cuda.runtime()
        stream = runtime.current_stream(index)
        if runtime.is_capturing(stream):
            raise DeviceError(
                f"stream {stream:#x} is being captured, and a pool is not zeroed in a graph; do it before the capture"
            )
        for buffer in self._buffers:
            runtime.fill(buffer.pointer, 0, buffer.nbytes, stream)
        runtime.synchronize(stream, index)

    @classmethod
    def blocks_for(cls, memory: Memory, spec: Spec, num_layers: int, block_size: int = 16, device: str = "cpu") -> int:
        """How many whole blocks of all layers fit into `memory`, the null block among them.

        Raises
        ------
        NotEnoughMemory
            Fewer than two fit.
        ShapeError, UnsupportedOption
            Numbers that are out of range, or a spec that a pool cannot store, such as one with planes per sequence.
        """
        check_spec(spec)
        one = bytes_per_block(
            spec, require_int("num_layers", num_layers, max=LAYERS_MAX), require_int("block_size", block_size)
        )
        return blocks_within(parse_memory(memory, device), one)

    def _allocate(self, scrub: bool) -> tuple[Tensor, ...]:
        sizes = [self.layout.buffer_nbytes(i) for i in range(self.layout.num_buffers)]
        # Untouched, memory of the host costs nothing yet; a device has all of its own at once.
        make = empty if self.device == "cpu" and not scrub else zeros
        return tuple(make((size,), "uint8", self.device) for size in sizes)

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
    """Bytes that one block of `num_layers` layers takes."""
    counts = {"token": block_size, "block": 1}
    return num_layers * sum(plane.nbytes * counts[plane.per] for plane in spec.planes)


def blocks_within(budget: int, one_block: int) -> int:
    """Whole blocks of `one_block` bytes in `budget` bytes; at least two, or `NotEnoughMemory`."""
    blocks = budget // one_block
    if blocks < 2:
        raise NotEnoughMemory(
            f"memory is {shown(budget)} bytes; two blocks of {shown(one_block)} bytes are needed, the null block and "
            f"one to give: give at least {shown(2 * one_block)}, or make block_size smaller"
        )
    return blocks


def _logical(
    plane: Plane, num_blocks: int, block_size: int, strides: dict[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of ``[block, token, head, dim]``, less the axes that the plane has not."""
    axes: list[tuple[int, int]] = [(num_blocks, strides["B"])]
    if plane.per == "token":
        axes.append((block_size, strides["N"]))
    if len(plane.shape) == 2:
        axes.append((plane.shape[0], strides["H"]))
    axes.append((plane.shape[-1], strides["D"]))
    shape, steps = zip(*axes, strict=True)
    return shape, steps
