"""The encoder side of a step: the contents that it writes, and the contents that its queries attend to.

    sequences of the step      a (new)   b (decoding)   c (new, the encoder output of a)
    rows of contents           4         1              4
    seq_lens                   1500      900            1500      encoder tokens that the queries see
    query_lens                 1500      0              0         encoder tokens that the step writes
    slots                      those of the 1,500 tokens of content 4
"""

from libc.stdint cimport int32_t, int64_t

from pagecore.cache.sequences._sequences cimport CrossContent, CrossContents, Sequence
from pagecore.index.tables._native cimport Int32s, SlotType
from pagecore.index.tables._tables cimport StepBuffers
from pagecore.ops.planning._plan cimport AttentionPlan

import numpy as np

from pagecore.errors import InvalidSequence, ShapeError


cdef class CrossStep:
    """The encoder side of a step; a part of `StepRecord`.

    Parameters
    ----------
    contents : CrossContents
    buffers : StepBuffers
        For the encoder tokens that a step writes, and the rows of contents that its sequences attend to.
    plans : list of AttentionPlan
    """

    def __cinit__(self, CrossContents contents not None, StepBuffers buffers not None, list plans not None):
        self.contents = contents
        self.buffers = buffers
        self.plans = plans
        self.written = []

    cdef bint take(self, list sequences, const int32_t* counts) except -1:
        cdef list coming = contents_to_write(self.contents, sequences, counts)
        cdef int64_t total = num_tokens_of(coming)
        if total > self.buffers.native.max_tokens():
            raise ShapeError(
                f"the step writes {total} encoder tokens; the batch has room for {self.buffers.native.max_tokens()}: "
                "make it with a larger max_cross_tokens"
            )
        if not self.contents.take(coming):
            return False
        self.written = coming
        return True

    cdef void give_back(self) noexcept:
        for content in self.written:
            self.contents.free(<CrossContent>content)
        del self.written[:]

    cdef void begin(self, object step, list sequences, int32_t n) noexcept:
        cdef CrossContent content
        cdef int32_t null_row = self.contents.tables.max_sequences
        cdef int32_t i, total = 0
        for one in self.written:
            content = <CrossContent>one
            content.writer = step
            content.first_slot = -1
        for i in range(n):
            content = (<Sequence>sequences[i]).cross
            self.buffers.cu_query_lens_data[i] = total
            self.buffers.query_lens_data[i] = 0
            if content is None or content.row < 0:  # a sequence without queries in the step
                self.buffers.rows_data[i] = null_row
                self.buffers.seq_lens_data[i] = 0
                continue
            self.buffers.rows_data[i] = content.row
            self.buffers.seq_lens_data[i] = content.num_tokens
            # As in `contents_to_write`, a sequence without new tokens does not count: its `pending` is 0.
            if content.writer is step and content.first_slot < 0 and (<Sequence>sequences[i]).pending > 0:
                content.first_slot = total
                self.buffers.query_lens_data[i] = content.num_tokens
                self.write_slots(content, total)
                total += content.num_tokens
        self.buffers.cu_query_lens_data[n] = total
        self.buffers.native.pad(n, total, null_row)

    cdef void write_slots(self, CrossContent content, int32_t first) noexcept:
        cdef Int32s blocks
        cdef size_t group
        cdef int32_t k, size = self.contents.block_size
        cdef int64_t slot
        cdef void* slots
        for k in range(content.num_tokens):
            self.buffers.positions_data[first + k] = k
            self.buffers.token_ids_data[first + k] = -1
        for group in range(self.buffers.native.num_groups()):
            blocks = self.contents.tables.row_raw(content.row, <int64_t>group)
            slots = self.buffers.native.slots(group)
            for k in range(content.num_tokens):
                slot = <int64_t>blocks[k // size] * size + k % size
                if self.buffers.native.slot_type() == SlotType.Int64:
                    (<int64_t*>slots)[first + k] = slot
                else:
                    (<int32_t*>slots)[first + k] = <int32_t>slot

    cdef int replan(self, StepBuffers queries) except -1:
        for plan in self.plans:
            (<AttentionPlan>plan).replan(
                queries.cu_query_lens_data, self.buffers.seq_lens_data, queries.max_sequences
            )
        return 0

    cdef void end(self, bint is_kept) noexcept:
        cdef CrossContent content
        for one in self.written:
            content = <CrossContent>one
            if content.num_holders == 0:  # its blocks are free already
                content.writer = None
                continue
            content.writer = None
            content.is_written = is_kept
            if not is_kept:
                self.contents.free(content)
        if not is_kept:
            self.buffers.native.skip_slots(0, self.buffers.native.num_tokens())
        del self.written[:]

    cdef int skip_on_device(self, CrossContent content) except -1:
        if self.staged is not None:
            self.staged.send_slots((content.first_slot, content.first_slot + content.num_tokens))
        return 0

    cdef void skip(self, CrossContent content) noexcept:
        self.buffers.native.skip_slots(content.first_slot, content.first_slot + content.num_tokens)

    # -- for Python ------------------------------------------------------------------------------------------------

    def taken_pairs(self):
        """Return the blocks of the contents that the step writes, for `Store.zero`: int32 [n, (1, block)] per group."""
        listed = []
        for group in range(self.contents.tables.num_groups):
            rows = [self.contents.tables.blocks((<CrossContent>content).row, group) for content in self.written]
            blocks = np.concatenate([np.zeros(0, np.int32), *rows])
            listed.append(np.stack([np.ones_like(blocks), blocks], axis=1))
        return listed


cdef list contents_to_write(CrossContents contents, list sequences, const int32_t* counts):
    cdef Sequence sequence
    cdef CrossContent content
    cdef list coming = []
    cdef Py_ssize_t i
    contents.num_lists += 1
    for i in range(len(sequences)):
        sequence = <Sequence>sequences[i]
        content = sequence.cross
        if counts[i] == 0:
            continue
        if content is None:
            raise ShapeError(
                f"sequence {sequence.id!r} has no number of encoder tokens, and the cache has cross-attention layers; "
                "pass cross_tokens to add_sequence, or call set_cross_tokens"
            )
        if content.is_written or content.num_tokens == 0 or content.mark == contents.num_lists:
            continue
        if content.writer is not None:
            raise InvalidSequence(
                f"the encoder tokens of sequence {sequence.id!r} are being written by a step in flight; commit or "
                "abandon its batch first"
            )
        content.mark = contents.num_lists
        coming.append(content)
    return coming


cdef int64_t num_tokens_of(list contents) noexcept:
    cdef int64_t total = 0
    for content in contents:
        total += (<CrossContent>content).num_tokens
    return total
