"""Geometry of a host pool: the entries of each lane, and their places in its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import SupportsIndex

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage.checks import LAYERS_MAX, as_tuple, ceil_div, require_int, require_pool, shown
from pagecore.storage.pools.layout import KVLayout
from pagecore.storage.pools.state_memory import slot_offsets
from pagecore.storage.pools.state_pool import listed_specs
from pagecore.storage.specs.spec import Spec, check_spec
from pagecore.storage.specs.state_spec import StateSpec

# Alignment of an entry: direct I/O needs it, and registration of chunks.
SLOT_ALIGNMENT = 4096
# Alignment of a lane: the largest page of the platforms, so that a lane can be registered page by page.
LANE_ALIGNMENT = 65536


@dataclass(frozen=True)
class PoolGeometry:
    """Everything that decides where an entry is in the memory of a `HostPool`.

    Attributes
    ----------
    groups : tuple of (Spec, int)
        Spec and number of layers of each group.
    block_size : int
    state_specs : tuple of StateSpec
    num_blocks : tuple of int
        Blocks of each group, including the null block.
    num_states : int
        Slots of states, including the null slot; 0 without layers that keep states.
    heads : {"HND", "NHD"}
    """

    groups: tuple[tuple[Spec, int], ...]
    block_size: int
    state_specs: tuple[StateSpec, ...]
    num_blocks: tuple[int, ...]
    num_states: int
    heads: str

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        """Bound layout of each group."""
        order = KVLayout("blockwise", self.heads, block_alignment=SLOT_ALIGNMENT)
        return tuple(
            order.bind(spec.planes, num_layers, count, self.block_size)
            for (spec, num_layers), count in zip(self.groups, self.num_blocks, strict=True)
        )

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Bytes of an entry of each lane: the groups, then the states."""
        states = [slot_offsets([plane for spec in self.state_specs for plane in spec.planes])[1]]
        return (*(layout.block_nbytes for layout in self.layouts), *(states if self.state_specs else []))

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Distance between entries of each lane: the payload, rounded up to 4,096 bytes."""
        return tuple(ceil_div(size, SLOT_ALIGNMENT) * SLOT_ALIGNMENT for size in self.payload_bytes)

    @property
    def counts(self) -> tuple[int, ...]:
        """Entries of each lane, including the null entry."""
        return (*self.num_blocks, *([self.num_states] if self.state_specs else []))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Start of each lane in the memory, and at last the end."""
        sizes = [step * count for step, count in zip(self.slot_bytes, self.counts, strict=True)]
        return tuple(accumulate((ceil_div(size, LANE_ALIGNMENT) * LANE_ALIGNMENT for size in sizes), initial=0))


def checked_geometry(
    groups: Iterable[tuple[Spec, SupportsIndex]],
    block_size: SupportsIndex,
    state_specs: Iterable[StateSpec],
    num_blocks: Sequence[SupportsIndex],
    num_states: SupportsIndex,
    heads: str,
) -> PoolGeometry:
    """Return the geometry of a `HostPool`; see it for arguments and errors."""
    listed: list[tuple[Spec, int]] = []
    for number, group in enumerate(as_tuple("groups", groups, "a list of (spec, num_layers)")):
        if not (isinstance(group, tuple | list) and len(group) == 2):
            raise ShapeError(f"group {number} is {shown(group)}; expected (spec, num_layers)")
        check_spec(group[0], f"group {number}")
        listed.append((group[0], require_int("num_layers", group[1], max=LAYERS_MAX)))
    blocks = as_tuple("num_blocks", num_blocks, "a list with the blocks of each group")
    if len(blocks) != len(listed):
        raise ShapeError(f"num_blocks lists {len(blocks)}; expected one number for each of {len(listed)} groups")
    given = as_tuple("state_specs", state_specs, "a list of StateSpec")
    states = listed_specs(given, None) if given else ()
    if not listed and not states:
        raise ShapeError("groups and state_specs are empty; give at least one of them")
    slots = require_int("num_states", num_states, min=2 if states else 0)
    if slots and not states:
        raise UnsupportedOption("num_states is given without state_specs; leave it out")
    geometry = PoolGeometry(
        tuple(listed),
        require_int("block_size", block_size),
        states,
        tuple(require_pool("num_blocks", count) for count in blocks),
        slots,
        heads,
    )
    for layout in geometry.layouts:
        layout.plane_layout(0)  # refuses planes that are misaligned in a block-wise layout
    return geometry
