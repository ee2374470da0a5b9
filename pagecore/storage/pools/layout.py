"""Memory layout of a pool: the order of its axes, and the strides that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, SupportsIndex

from pagecore.errors import InvalidBlock, ShapeError, UnsupportedOption
from pagecore.storage.checks import as_tuple, ceil_div, member, require_int, shown
from pagecore.storage.specs.spec import Plane, Spec, is_spec

# Axes: L(ayer) B(lock) C(plane) N(token) H(ead) D(im). A named order fixes the outer three, and `heads` the others.
NAMED = {"layerwise": "LCB", "blockwise": "BLC"}
HEADS = ("NHD", "HND")


@dataclass(frozen=True)
class PlaneLayout:
    """Position of one plane of one layer.

    Attributes
    ----------
    buffer : int
        Number of the buffer that holds it.
    offset : int
        Bytes from the start of the buffer to the plane of layer 0 in it.
    strides : dict
        Bytes from one entry to the next, for each axis of the buffer.
    """

    buffer: int
    offset: int
    strides: dict[str, int]


@dataclass(frozen=True)
class KVLayout:
    """The order of a pool's axes, and with bound sizes its shape, strides and offsets.

    A layout is a value and owns no memory. Strides and offsets are in bytes. Buffers are numbered layer by layer, and
    within a layer plane by plane.

    Parameters
    ----------
    order : str
        "layerwise" (layers outermost, the default), "blockwise" (blocks outermost, so that a block of all layers and
        planes is contiguous), or the axes, outermost first: L(ayer) B(lock) C(plane) N(token) H(ead) D(im). Without L
        every layer has a buffer of its own, and without C every plane: "BNHD" has one buffer for each plane of each
        layer, "CBNHD" one for each layer, "LBNHD" one for each plane.
    heads : {"HND", "NHD"}, optional
        The inner axes of a named order; "HND" by default, which suits host kernels.
    planes : tuple of Plane, or a spec
        The stored planes. With C they share one buffer, even if their last extents differ.
    num_layers, num_blocks, block_size : int, optional
        The sizes; `bind` can set them later.
    block_alignment : int
        The stride between blocks is rounded up to a multiple of this number of bytes, a power of two; for I/O that
        bypasses the page cache, 4096. Above 1 only if B is the outermost axis.

    Raises
    ------
    UnsupportedOption, ShapeError
        An invalid order, heads or size.

    Examples
    --------
    >>> from pagecore import AttentionSpec, KVLayout
    >>> layout = KVLayout("BNHD", planes=AttentionSpec(2, 64), num_layers=3, num_blocks=8, block_size=16)
    >>> layout.shape, layout.num_buffers, layout.plane_layout(1, layer=2).buffer
    ((8, 16, 2, 64), 6, 5)
    """

    order: str = "layerwise"
    heads: str | None = None
    planes: tuple[Plane, ...] = ()
    num_layers: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    block_alignment: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "planes", _planes_of(self.planes))
        for name in ("num_layers", "num_blocks", "block_size"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, require_int(name, getattr(self, name), max=None))
        if not isinstance(self.order, str):
            raise UnsupportedOption(f"layout is {shown(self.order)}; expected a name, axes, or a KVLayout")
        if self.order in NAMED:
            if self.heads is not None and not (isinstance(self.heads, str) and self.heads in HEADS):
                raise UnsupportedOption(f"heads is {shown(self.heads)}; use 'NHD' or 'HND'")
        elif self.heads is not None:
            raise UnsupportedOption(
                f"heads is {shown(self.heads)}, but the axes {self.order!r} already include them; leave heads out"
            )
        else:
            self._check_spelled()
        alignment = require_int("block_alignment", self.block_alignment)
        object.__setattr__(self, "block_alignment", alignment)
        if alignment & (alignment - 1):
            raise ShapeError(f"block_alignment is {alignment}; it must be a power of two")
        if alignment > 1 and NAMED.get(self.order, self.order)[0] != "B":
            raise UnsupportedOption(
                f"block_alignment is {alignment}, but B is not the outermost axis of layout {self.order!r}; use "
                "'blockwise'"
            )

    def _check_spelled(self) -> None:
        axes = self.order
        if len(set(axes)) != len(axes) or not set("BNHD") <= set(axes) <= set("LBCNHD"):
            raise UnsupportedOption(
                f"layout is {shown(axes)}; use 'layerwise', 'blockwise', or B, N, H and D once each, optionally with L "
                "and C"
            )
        if axes[-1] != "D":
            raise UnsupportedOption(
                f"layout {axes!r} ends in {axes[-1]}; D must be last, because kernels read it contiguously"
            )

    def bind(self, planes: tuple[Plane, ...] | Spec, num_layers: int, num_blocks: int, block_size: int) -> KVLayout:
        """Return this order with bound sizes.

        Parameters
        ----------
        planes : tuple of Plane, or a spec
        num_layers, num_blocks : int
        block_size : int
            Tokens of a block.

        Raises
        ------
        ShapeError, UnsupportedOption
            An invalid size, or invalid planes.
        """
        bound: Any = planes
        return replace(self, planes=bound, num_layers=num_layers, num_blocks=num_blocks, block_size=block_size)

    @property
    def axes(self) -> str:
        """The axes of one buffer, outermost first; with L if layers share a buffer, and C if planes do."""
        axes = NAMED[self.order] + (self.heads or "HND") if self.order in NAMED else self.order
        return axes if len(self.planes) > 1 else axes.replace("C", "")

    @property
    def num_buffers(self) -> int:
        """Number of buffers: 1, times the layers without L, times the planes without C."""
        return self._buffers_per_layer * (1 if "L" in self.axes else self._sizes()[0])

    @property
    def _buffers_per_layer(self) -> int:
        return 1 if "C" in self.axes else max(1, len(self.planes))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents in the order of `axes`; ShapeError unless all planes are equal."""
        return tuple(self._extents(self._equal_plane())[axis] for axis in self.axes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in bytes, in the order of `axes`; ShapeError unless all planes are equal."""
        self._equal_plane()
        strides = self.plane_layout(0).strides
        return tuple(strides[axis] for axis in self.axes)

    @property
    def block_stride(self) -> int:
        """Bytes from one block to the next."""
        return self.plane_layout(0).strides["B"]

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all layers and planes, without padding."""
        num_layers, _, block_size = self._sizes()
        counts = {"token": block_size, "block": 1}
        return num_layers * sum(plane.nbytes * counts[plane.per] for plane in self.planes)

    @property
    def layer_stride(self) -> int:
        """Bytes from one layer to the next; ShapeError if each layer has a buffer of its own."""
        if "L" not in self.axes:
            raise ShapeError(
                f"layout {self.order!r} has no stride between layers, because each has a buffer of its own; use "
                "plane_layout(plane, layer).buffer"
            )
        return self.plane_layout(0).strides["L"]

    def block_offset(self, block: SupportsIndex, layer: SupportsIndex = 0) -> int:
        """Return the offset in bytes of `block` of `layer` within its buffer, in the first plane.

        Raises
        ------
        InvalidBlock
            A block or layer that is not an integer, or that the layout does not have.
        """
        num_layers, num_blocks, _ = self._sizes()
        block = member("block", block, num_blocks, "the layout", InvalidBlock)
        layer = member("layer", layer, num_layers, "the layout", InvalidBlock)
        strides = self.plane_layout(0).strides
        return block * strides["B"] + layer * strides.get("L", 0)

    def buffer_nbytes(self, buffer: SupportsIndex = 0) -> int:
        """Return the bytes of one buffer; raise ShapeError if the layout does not have it."""
        number = member("buffer", buffer, self.num_buffers, "the layout")
        return self._walked[1][number % self._buffers_per_layer]

    def buffer_name(self, buffer: SupportsIndex) -> str:
        """Return the name of a buffer for messages: its planes and its layer."""
        number = member("buffer", buffer, self.num_buffers, "the layout")
        what = ", ".join(repr(plane.name) for plane in self.planes_of(number))
        layer = number // self._buffers_per_layer
        return f"buffer of {what}" if "L" in self.axes else f"buffer of {what} of layer {layer}"

    def planes_of(self, buffer: SupportsIndex) -> tuple[Plane, ...]:
        """Return the planes of a buffer."""
        number = member("buffer", buffer, self.num_buffers, "the layout")
        return self.planes if "C" in self.axes else (self.planes[number % self._buffers_per_layer],)

    def buffer_shape(self, buffer: SupportsIndex) -> tuple[int, ...] | None:
        """Return the extents of a buffer in the order of `axes`.

        None if planes of unequal shape or dtype share it, or if there are bytes between blocks.
        """
        planes = self.planes_of(buffer)
        if self.block_alignment > 1:
            return None
        return tuple(self._extents(planes[0])[axis] for axis in self.axes) if _are_alike(planes) else None

    def plane_layout(self, index: SupportsIndex, layer: SupportsIndex = 0) -> PlaneLayout:
        """Return the position of plane `index` of `layer`; raise ShapeError if the layout does not have them."""
        layouts = self._walked[0]
        where = layouts[member("plane", index, len(layouts), "the layout")]
        number = member("layer", layer, self._sizes()[0], "the layout")
        buffer = where.buffer if "L" in self.axes else where.buffer + number * self._buffers_per_layer
        return PlaneLayout(buffer, where.offset, dict(where.strides))

    @cached_property
    def _walked(self) -> tuple[list[PlaneLayout], list[int]]:
        """Return the position of each plane in layer 0, and the bytes of each buffer of a layer.

        Axes are visited from the innermost outwards; the stride of an axis is the size of everything inside it.
        """
        self._sizes()
        extents = [self._extents(plane) for plane in self.planes]
        below = [plane.dtype.itemsize for plane in self.planes]
        offsets = [0] * len(self.planes)
        strides: list[dict[str, int]] = [{} for _ in self.planes]
        shared = False
        for axis in reversed(self.axes):
            if axis == "C":
                offsets = [sum(below[:i]) for i in range(len(below))]
                for plane, offset in zip(strides, below, strict=True):
                    plane["C"] = offset
                below = [sum(below)] * len(below)
                shared = True
                continue
            if shared and len({extent[axis] for extent in extents}) > 1:
                raise UnsupportedOption(
                    f"layout {self.order!r} puts {axis} outside C, but the planes differ in {axis}: "
                    f"{[extent[axis] for extent in extents]}; move C further out or leave it out"
                )
            if axis == "B" and self.block_alignment > 1:
                below = [ceil_div(size, self.block_alignment) * self.block_alignment for size in below]
            for i, extent in enumerate(extents):
                strides[i][axis] = below[i]
                below[i] *= extent[axis]
        self._check_aligned(offsets, strides)
        buffers = [0] * len(below) if shared else list(range(len(below)))
        layouts = [PlaneLayout(*where) for where in zip(buffers, offsets, strides, strict=True)]
        return layouts, below[:1] if shared else below

    def _check_aligned(self, offsets: list[int], strides: list[dict[str, int]]) -> None:
        for plane, offset, stride in zip(self.planes, offsets, strides, strict=True):
            steps = [offset, *(step for axis, step in stride.items() if axis != "C")]
            if any(step % plane.dtype.itemsize for step in steps):
                # The size of a plane per block does not depend on block_size.
                can_align = "N" in self.axes.partition("C")[2] and all(each.per == "token" for each in self.planes)
                blocks = f", or a block_size that is a multiple of {plane.dtype.itemsize}" if can_align else ""
                raise UnsupportedOption(
                    f"layout {self.order!r} misaligns plane {plane.name!r} of {plane.dtype} next to the other planes; "
                    f"use a layout without C{blocks}"
                )

    def _extents(self, plane: Plane) -> dict[str, int]:
        """Return the extent of each axis for one plane; a plane of rank 1 has one head."""
        num_layers, num_blocks, block_size = self._sizes()
        if plane.per == "sequence":
            raise UnsupportedOption(
                f"plane {plane.name!r} is per sequence; a block pool stores planes per token or per block"
            )
        if not 1 <= len(plane.shape) <= 2:
            raise ShapeError(f"plane {plane.name!r} has shape {plane.shape}; a layout places (dim,) or (heads, dim)")
        heads, dim = (1, *plane.shape)[-2:]
        tokens = block_size if plane.per == "token" else 1
        return {"L": num_layers, "B": num_blocks, "C": len(self.planes), "N": tokens, "H": heads, "D": dim}

    def _equal_plane(self) -> Plane:
        self._sizes()
        if not _are_alike(self.planes):
            raise ShapeError(
                "the planes differ, so that a single shape does not describe them; use plane_layout for each plane"
            )
        return self.planes[0]

    def _sizes(self) -> tuple[int, int, int]:
        """Return layers, blocks and tokens per block; raise ShapeError if they are not bound."""
        sizes = (self.num_layers, self.num_blocks, self.block_size)
        if None in sizes or not self.planes:
            names = ("num_layers", "num_blocks", "block_size")
            missing = [name for name, size in zip(names, sizes, strict=True) if size is None]
            missing += [] if self.planes else ["planes"]
            raise ShapeError(f"the layout has no {', '.join(missing)}; call bind first")
        return sizes  # type: ignore[return-value]


def as_layout(layout: str | KVLayout) -> KVLayout:
    """Return a KVLayout, made from its order if a str is given."""
    return layout if isinstance(layout, KVLayout) else KVLayout(layout)


def _are_alike(planes: tuple[Plane, ...]) -> bool:
    return len({(plane.shape, plane.dtype, plane.per) for plane in planes}) == 1


def _planes_of(planes: Any) -> tuple[Plane, ...]:
    """Return the planes of a spec or of an iterable as a tuple."""
    if is_spec(planes):
        planes = planes.planes
    listed = as_tuple("planes", planes, "a spec, or a tuple of Plane")
    for plane in listed:
        if not isinstance(plane, Plane):
            raise UnsupportedOption(f"planes holds {shown(plane)}; expected a spec, or a tuple of Plane")
    return listed
