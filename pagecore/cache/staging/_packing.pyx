"""Packing of a staging slot: the bytes of a step, in the layout that the device reads."""

from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.string cimport memcpy, memset

from pagecore.index.states._states cimport StateBuffers
from pagecore.index.tables._native cimport ChangedEntry
from pagecore.index.tables._tables cimport BlockTables, StepBuffers
from pagecore.ops.plan cimport PlanBatch
from pagecore.ops.planning._plan cimport AttentionPlan

cdef extern from *:
    """
    #include <bit>
    #include "cuda_src/abi/moves.h"
    #include "pagecore/index/tables/changed_entries.hpp"
    using pagecore::ChangedEntry;
    static_assert(std::endian::native == std::endian::little && sizeof(PcTableEntry) == sizeof(ChangedEntry) &&
                  offsetof(PcTableEntry, block) == offsetof(ChangedEntry, value),
                  "changed entries have the layout that the kernel reads");
    """

# Bytes of the number of entries, padded so that the entries begin at a multiple of 16.
cdef enum:
    BEFORE_ENTRIES = 16

COUNT_BYTES = BEFORE_ENTRIES
ENTRY_BYTES = sizeof(ChangedEntry)


def image_nbytes(StepBuffers buffers not None):
    """Return the size of all arrays of a step in bytes."""
    return <Py_ssize_t>buffers.native.image_nbytes()


def image_offset(StepBuffers buffers not None, array):
    """Return the byte offset of an array within the image of the step."""
    return <int64_t>array.ctypes.data - <int64_t>buffers.native.image()


def pack_image(StepBuffers buffers not None, uintptr_t target):
    """Copy all arrays of a step to an address."""
    memcpy(<void*>target, buffers.native.image(), buffers.native.image_nbytes())


def pad_slots(StepBuffers buffers not None, uintptr_t image, int32_t first, int32_t last):
    """Overwrite the slots of tokens [first, last) in a packed image with padding."""
    cdef size_t group
    cdef size_t width = 8 if buffers.slot_dtype == "int64" else 4
    cdef char* slots
    for group in range(buffers.native.num_groups()):
        slots = <char*>image + (<char*>buffers.native.slots(group) - <char*>buffers.native.image())
        memset(slots + first * width, 0xFF, <size_t>(last - first) * width)  # -1


def states_nbytes(StateBuffers states not None):
    """Return the size of all state arrays of a step in bytes."""
    return <Py_ssize_t>states.native.image_nbytes()


def states_offset(StateBuffers states not None, array):
    """Return the byte offset of an array within the image of the state arrays."""
    return <int64_t>array.ctypes.data - <int64_t>states.native.image()


def pack_states(StateBuffers states not None, uintptr_t target):
    """Copy all state arrays of a step to an address."""
    memcpy(<void*>target, states.native.image(), states.native.image_nbytes())


def pad_states(StateBuffers states not None, uintptr_t image, int32_t first, int32_t last):
    """Overwrite the slots of sequences [first, last) in a packed image with the null slot."""
    cdef Py_ssize_t width = states.native.draft_tokens() + 1
    pad_values(states, image, states.native.state_read() + first, last - first)
    pad_values(states, image, states.native.state_write() + first, last - first)
    pad_values(states, image, states.native.checkpoint_write() + first, last - first)
    pad_values(states, image, states.native.checkpoint_lengths() + first, last - first)
    if width > 1:
        pad_values(states, image, states.native.draft_read(first), (last - first) * width)
        pad_values(states, image, states.native.draft_write(first), (last - first) * width)


cdef void pad_values(StateBuffers states, uintptr_t image, int32_t* begin, Py_ssize_t count) noexcept:
    cdef int64_t offset = <char*>begin - <char*>states.native.image()
    memset(<char*>image + offset, 0, count * sizeof(int32_t))


def pack_pairs(const int32_t[:, ::1] pairs, uintptr_t target):
    """Copy the (source, target) blocks of copies on write to an address."""
    memcpy(<void*>target, &pairs[0, 0], pairs.shape[0] * 2 * sizeof(int32_t))


def fix_plan(StepBuffers buffers not None, AttentionPlan plan not None):
    """Size a plan for every step of the buffers; return its bytes, whose memory the caller supplies."""
    plan.cuda.fix(
        plan.plan.options, plan.num_workers_given, buffers.native.max_sequences(), buffers.native.max_tokens()
    )
    return plan.cuda.num_bytes


def place_plan(AttentionPlan plan not None, uintptr_t address, int64_t value_dim, size_t stream):
    """Bind a plan to a device address, and reserve the workspace for partial results of its calls."""
    plan.cuda.bind(address)
    plan.cuda.reserve_workspace(value_dim, stream)


def pack_plan(
    StepBuffers buffers not None, AttentionPlan plan not None, uintptr_t target, StepBuffers queries not None
):
    """Write the plan of a step to an address: the queries of one step over the lengths of `buffers`.

    Both have equally many sequences; padding rows have no queries.
    """
    cdef PlanBatch batch
    batch.cu_query_lens = queries.cu_query_lens_data
    batch.seq_lens = buffers.seq_lens_data
    batch.num_sequences = buffers.native.max_sequences()
    plan.cuda.plan_into(batch, <void*>target)


def pack_changes(BlockTables tables not None, uintptr_t target, Py_ssize_t capacity):
    """Write the count of changed entries followed by up to `capacity` entries; return the count.

    A return value equal to `capacity` means that more may be pending.
    """
    cdef Py_ssize_t count = tables.take_changes_raw(<ChangedEntry*>(target + BEFORE_ENTRIES), capacity)
    (<int32_t*>target)[0] = <int32_t>count
    return count
