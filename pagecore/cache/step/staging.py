"""How a cache on CUDA tells its device what a step needs: one copy, and a kernel that applies what changed.

    host      arrays of the step, plans, copies on write, changed table entries ──► a slot of pinned memory
    device                                                                               │ one copy
              all of it at the batch's fixed addresses                             ◄─────┘
              key and value              ◄── transfer_blocks ──── zeros for blocks of another namespace, with scrub
              key and value              ◄── copy_blocks ──────── copies on write
              block tables, row lengths  ◄── scatter_entries ──── changed entries

Where more has changed than a batch has room for, more rounds follow that carry changes alone. Everything is given to
one stream, or to another that waits for it, and the host waits for nothing, so that each step finds what was sent for
it, and finds it until the next one is sent.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor, cuda, empty, strided, zeros
from pagecore.arrays.devices import check_device, device_index
from pagecore.arrays.pinned import PinnedRing
from pagecore.arrays.streams import note_work, stream_handle
from pagecore.cache.step._staging import (
    COUNT_BYTES,
    ENTRY_BYTES,
    fix_plan,
    image_nbytes,
    image_offset,
    pack_changes,
    pack_image,
    pack_pairs,
    pack_plan,
    pad_slots,
    place_plan,
)
from pagecore.cache.step.arrays import arrays_of
from pagecore.cache.store import Store
from pagecore.errors import DeviceError
from pagecore.index import BlockTables, StepBuffers
from pagecore.ops import AttentionPlan
from pagecore.ops.cuda._moves import scatter_entries

# Room for changes beyond those of a usual step: rows that are forked or removed have many.
SPARE_ENTRIES = 1024
# Of the parts of a batch's memory.
ALIGNMENT = 256
PAIR_BYTES = 8


class Staging:
    """The device's copy of a cache's block tables, and the pinned memory that leads there.

    Attributes
    ----------
    device : int
    block_tables : list of Tensor
        int32 ``[max_sequences + 1, max_blocks]`` of each group, as of the last step that was sent.
    row_lengths : Tensor
        int32 ``[max_sequences + 1]``, as of then too.
    stream : int
        That the last step was given to; what follows waits for it, also where it is given to another.
    """

    def __init__(self, tables: BlockTables, device: str) -> None:
        index = device_index(device)
        assert index is not None
        check_device(index)
        self.device = index
        self.tables = tables
        self.runtime = cuda.runtime()
        self.ring = PinnedRing(self.runtime, index)
        self.stream = self.runtime.current_stream(index)
        self._passed = self.runtime.make_event(index)
        rows, width = tables.max_sequences + 1, tables.max_blocks_per_sequence
        tables.follow_changes()
        self.memory = zeros((tables.num_groups * rows * width + rows,), "int32", device)
        self.block_tables = [
            self.memory[first : first + rows * width].reshape(rows, width)
            for first in range(0, tables.num_groups * rows * width, rows * width)
        ]
        self.row_lengths = self.memory[tables.num_groups * rows * width :]
        self._is_lost = False

    def stream_of(self, stream: object) -> int:
        """The handle of the stream that a step is to be given to; None is CuPy's current one."""
        handle = stream_handle(stream, None, self.device)
        self.refuse_captured(handle)
        if handle != self.stream:
            self.refuse_captured(self.stream)
        return handle

    def refuse_captured(self, stream: int) -> None:
        """DeviceError where what the stream is given becomes part of a graph."""
        if self.runtime.is_capturing(stream):
            raise DeviceError(
                f"stream {stream:#x} is being captured: a graph holds what uses a step, and not what prepares, undoes "
                "or moves one; do that before the capture begins, or after it"
            )

    def switch_stream(self, stream: int) -> None:
        """Make `stream` current; its work waits for everything submitted to the previous stream."""
        if stream != self.stream:
            self._passed.record(self.stream)
            self.runtime.wait_event(stream, self._passed)
            self.stream = stream

    def begin_sending(self) -> None:
        """Changes are taken from now on; where some of them do not arrive, all tables are sent anew the next time."""
        if self._is_lost:
            self.runtime.fill(self.memory.pointer, 0, self.memory.nbytes, self.stream)
            self.tables.follow_changes()
        self._is_lost = True

    def end_sending(self) -> None:
        """All that was taken since is on its way."""
        self._is_lost = False

    def apply(self, address: int, capacity: int) -> None:
        """Write the changes that are on their way to a device address into the tables."""
        scatter_entries(address + COUNT_BYTES, address, capacity, self.memory, self.stream)


class StagedBatch:
    """A batch's memory on the device, and what is sent there.

        the arrays of StepBuffers, one image | plans | copies of each group | number of changes | changes

    Parameters
    ----------
    plans : list of (AttentionPlan, int)
        Of the groups that have one, with the width of their values.
    stream : int, optional
        That the batch is for, where it is made for the next step alone; None where it stays, for any.

    Attributes
    ----------
    arrays : StepArrays
        On the device, at addresses that never change.
    """

    def __init__(
        self, staging: Staging, buffers: StepBuffers, plans: Listed[tuple[AttentionPlan, int]], stream: int | None
    ) -> None:
        self._staging = staging
        self._buffers = buffers
        self._plans: list[tuple[AttentionPlan, int]] = []
        self._changes = aligned(image_nbytes(buffers))
        for plan, _ in plans:
            self._plans.append((plan, self._changes))
            self._changes += aligned(fix_plan(buffers, plan))
        # A row copies one block of a group at most: that which it goes on with.
        most = aligned(buffers.max_sequences * PAIR_BYTES)
        self._copies = [self._changes + group * most for group in range(buffers.num_groups)]
        self._changes += buffers.num_groups * most
        self._capacity = usual_changes(staging.tables, buffers) + SPARE_ENTRIES
        num_bytes = self._changes + COUNT_BYTES + self._capacity * ENTRY_BYTES
        # A batch of one step is for the work of its stream alone; any other waits once, until all may use its memory.
        self._memory = empty((num_bytes,), "uint8", f"cuda:{staging.device}", stream=stream)
        self.arrays = arrays_of(buffers, self._on_device)
        staging.ring.reserve(num_bytes)
        self._stream = staging.stream if stream is None else stream
        for (plan, value_dim), (_, offset) in zip(plans, self._plans, strict=True):
            place_plan(plan, self._memory.pointer + offset, value_dim, self._stream)
        if stream is None:
            self.send_image(0)
            staging.runtime.synchronize(self._stream, staging.device)

    def send(
        self, copies: Listed[NDArray[np.int32]], stale: Listed[NDArray[np.int32]], store: Store, stream: int
    ) -> None:
        """Send the step that was prepared, and what has changed of the tables, in the order of a stream.

        `copies` lists what each group of the store copies on write, and `stale` the blocks that it zeroes before, as
        pairs for `Store.zero`; a list is empty where no group does.
        """
        staging, target = self._staging, self._memory.pointer
        staging.switch_stream(stream)
        self._stream = stream
        slot, begin = staging.ring.take(), 0
        pack_image(self._buffers, slot.address)
        for plan, offset in self._plans:
            pack_plan(self._buffers, plan, slot.address + offset)
        copied = [(group, pairs) for group, pairs in enumerate(copies) if len(pairs)]
        for group, pairs in copied:
            assert len(pairs) <= self._buffers.max_sequences
            pack_pairs(pairs, slot.address + self._copies[group])
        staging.begin_sending()
        while True:
            count = pack_changes(staging.tables, slot.address + self._changes, self._capacity)
            slot.send(begin, self._changes + COUNT_BYTES + count * ENTRY_BYTES, target + begin, self._stream)
            if count:
                staging.apply(target + self._changes, self._capacity)
            if count < self._capacity:
                break
            slot, begin = staging.ring.take(), self._changes
        staging.end_sending()
        for group, pairs in enumerate(stale):
            if len(pairs):
                store.zero(group, pairs, self._stream)
        for group, pairs in copied:
            on_device = strided(self._memory, pairs.shape, None, self._copies[group], "int32")
            store.copy(group, on_device, self._stream)
        note_work(self._memory, self._stream)

    def check_reachable(self) -> None:
        """DeviceError where what is sent now would become part of a graph."""
        self._staging.refuse_captured(self._stream)

    def send_slots(self, first: int = 0, last: int = 0) -> None:
        """Send the slot mappings anew, in the order of the step's stream; those of tokens [first, last) as padding."""
        self.send_image(image_offset(self._buffers, self._buffers.slot_mappings[0]), first, last)

    def send_image(self, begin: int, first: int = 0, last: int = 0) -> None:
        """Send the arrays from a byte of their image on; the slots of tokens [first, last) as padding."""
        slot = self._staging.ring.take()
        pack_image(self._buffers, slot.address)
        pad_slots(self._buffers, slot.address, first, last)
        slot.send(begin, image_nbytes(self._buffers), self._memory.pointer + begin, self._stream)

    def _on_device(self, array: NDArray[Any]) -> Tensor:
        offset = image_offset(self._buffers, array)
        return strided(self._memory, array.shape, None, offset, str(array.dtype))


def aligned(num_bytes: int) -> int:
    """Where the next part may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def usual_changes(tables: BlockTables, buffers: StepBuffers) -> int:
    """Table entries that a step changes at most where all that happens besides is that windows let blocks go."""
    rows, tokens = buffers.max_sequences, buffers.max_tokens
    return rows + sum(3 * rows + tokens // size for size in tables.block_sizes)
