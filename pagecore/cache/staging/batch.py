"""Transfer of a step to CUDA: one pinned copy, and a kernel that applies the changed table entries.

    host      arrays of the step, plans, copies on write, changed table entries ──► a slot of pinned memory
    device                                                                               │ one copy
              all of it at the batch's fixed addresses                             ◄─────┘
              key and value              ◄── transfer_blocks ──── zeros for blocks of another namespace, with scrub
              key and value              ◄── copy_blocks ──────── copies on write
              states                     ◄── StatePool ────────── slots to zero, and copies of shared states
              block tables, row lengths  ◄── scatter_entries ──── changed entries

If more entries have changed than a batch has room for, further rounds send only changes. All work goes to one stream,
or to another stream that waits for it, and the host does not wait. Each step therefore reads the data that was sent for
it, until the next step is sent.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor, empty, strided
from pagecore.arrays.cuda.pinned import room_for
from pagecore.arrays.tensors.streams import note_work
from pagecore.cache.memory.store import Store
from pagecore.cache.staging._packing import (
    COUNT_BYTES,
    ENTRY_BYTES,
    fix_plan,
    image_nbytes,
    image_offset,
    pack_changes,
    pack_image,
    pack_pairs,
    pack_plan,
    pack_states,
    pad_slots,
    pad_states,
    place_plan,
    states_nbytes,
    states_offset,
)
from pagecore.cache.staging.arrays import arrays_of
from pagecore.cache.staging.tables import Staging
from pagecore.index import BlockTables, StateBuffers, StepBuffers
from pagecore.ops import AttentionPlan
from pagecore.storage.checks import ceil_div

# Entries in addition to those of a usual step: forked and removed rows change many.
SPARE_ENTRIES = 1024
# Alignment of the parts of a batch's memory, in bytes.
ALIGNMENT = 256
PAIR_BYTES = 8


class StagedBatch:
    """A batch's memory on the device, in one allocation; implements `StagedPart`.

        image of the StepBuffers arrays | states | plans | copies of each group | number of changes | changes

    Parameters
    ----------
    staging : Staging
    buffers : StepBuffers
    plans : list of (AttentionPlan, int)
        Plan and value width of each group that has a plan.
    stream : int, optional
        Stream of the only step of the batch; None for a batch of any number of steps.
    states : StateBuffers, optional
        State slots of the step.
    queries : StepBuffers, optional
        The queries that the plans attend with, if they are not the tokens of `buffers`; filled before `send`.

    Attributes
    ----------
    arrays : StepArrays
        Arrays on the device, at fixed addresses.
    """

    def __init__(
        self,
        staging: Staging,
        buffers: StepBuffers,
        plans: Listed[tuple[AttentionPlan, int]],
        stream: int | None,
        states: StateBuffers | None = None,
        queries: StepBuffers | None = None,
    ) -> None:
        self._staging = staging
        self._buffers = buffers
        self._states = states
        self._queries = buffers if queries is None else queries
        self._plans: list[tuple[AttentionPlan, int]] = []
        self._first_state = aligned(image_nbytes(buffers))
        self._image_nbytes = self._first_state + (0 if states is None else states_nbytes(states))
        self._changes = aligned(self._image_nbytes)
        for plan, _ in plans:
            self._plans.append((plan, self._changes))
            self._changes += aligned(fix_plan(self._queries, plan))
        # A row copies at most one block of a group: the block to which it appends.
        most = aligned(buffers.max_sequences * PAIR_BYTES)
        self._copies = [self._changes + group * most for group in range(buffers.num_groups)]
        self._changes += buffers.num_groups * most
        self._capacity = usual_changes(staging.tables, buffers) + SPARE_ENTRIES
        num_bytes = self._changes + COUNT_BYTES + self._capacity * ENTRY_BYTES
        # The memory of a single-step batch is used by one stream. For any other batch the host waits once, below, so
        # that every stream may use the memory.
        self._memory = empty((num_bytes,), "uint8", f"cuda:{staging.device}", stream=stream)
        self.arrays = arrays_of(buffers, self._on_device, states, self._state_on_device)
        staging.ring.reserve(room_for(num_bytes))  # steps often grow one by one
        self._stream = staging.stream if stream is None else stream
        for (plan, value_dim), (_, offset) in zip(plans, self._plans, strict=True):
            place_plan(plan, self._memory.pointer + offset, value_dim, self._stream)
        if stream is None:
            self.send_image(0)
            staging.runtime.synchronize(self._stream, staging.device)

    def send(
        self, copies: Listed[NDArray[np.int32]], stale: Listed[NDArray[np.int32]], store: Store, stream: int
    ) -> None:
        """Submit the prepared step, the changed table entries and the block copies to a stream.

        Parameters
        ----------
        copies : list of int32 [n, 2]
            Copies on write of each group, for `Store.copy`; the list may be empty.
        stale : list of int32 [n, 2]
            Blocks of each group to zero before the copies, for `Store.zero`; the list may be empty.
        """
        staging, target = self._staging, self._memory.pointer
        staging.switch_stream(stream)
        self._stream = stream
        slot, begin = staging.ring.take(), 0
        self._pack(slot.address)
        for plan, offset in self._plans:
            pack_plan(self._buffers, plan, slot.address + offset, self._queries)
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
        if self._states is not None:
            pairs = self._states.copies
            store.move_states(self._states, self._state_on_device(pairs), self._stream)
        note_work(self._memory, self._stream)

    def check_reachable(self) -> None:
        """Raise DeviceError if work that is submitted now would be recorded in a graph."""
        self._staging.refuse_captured(self._stream)

    def join_stream(self) -> None:
        """Let later work of the cache wait for the pass of the step, if it runs on another stream than the last."""
        if self._stream != self._staging.stream:
            self._staging.await_stream(self._stream)

    def send_slots(self, tokens: tuple[int, int] = (0, 0), sequences: tuple[int, int] = (0, 0)) -> None:
        """Send the slot mappings and state slots again, with padding for some tokens and sequences [first, last)."""
        slots = self._buffers.slot_mappings  # empty in a cache of states alone
        self.send_image(image_offset(self._buffers, slots[0]) if slots else self._first_state, tokens, sequences)

    def send_image(self, begin: int, tokens: tuple[int, int] = (0, 0), sequences: tuple[int, int] = (0, 0)) -> None:
        """Send the image of the arrays from byte `begin` on, with padding as in `send_slots`."""
        slot = self._staging.ring.take()
        self._pack(slot.address)
        pad_slots(self._buffers, slot.address, *tokens)
        if self._states is not None:
            pad_states(self._states, slot.address + self._first_state, *sequences)
        slot.send(begin, self._image_nbytes, self._memory.pointer + begin, self._stream)

    def _pack(self, address: int) -> None:
        pack_image(self._buffers, address)
        if self._states is not None:
            pack_states(self._states, address + self._first_state)

    def _state_on_device(self, array: NDArray[Any]) -> Tensor:
        assert self._states is not None
        offset = self._first_state + states_offset(self._states, array)
        return strided(self._memory, array.shape, None, offset, "int32")

    def _on_device(self, array: NDArray[Any]) -> Tensor:
        offset = image_offset(self._buffers, array)
        return strided(self._memory, array.shape, None, offset, str(array.dtype))


def aligned(num_bytes: int) -> int:
    """Return a size rounded up to `ALIGNMENT`."""
    return ceil_div(num_bytes, ALIGNMENT) * ALIGNMENT


def usual_changes(tables: BlockTables, buffers: StepBuffers) -> int:
    """Return the maximum number of table entries that a step and the release of window blocks change."""
    rows, tokens = buffers.max_sequences, buffers.max_tokens
    return rows + sum(3 * rows + tokens // size for size in tables.block_sizes)
