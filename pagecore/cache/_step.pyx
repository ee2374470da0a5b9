"""One forward pass's way through the index: load, prepare, then commit or abandon."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint64_t

from pagecore.cache._sequence cimport Sequence, num_whole, require
from pagecore.index._block_tables cimport BlockCopy, BlockTables, StepBuffers
from pagecore.index._integers cimport Integers, as_int64, as_integers
from pagecore.ops._plan cimport AttentionPlan

import numpy as np

from pagecore.errors import InvalidSequence, ShapeError
from pagecore.index._integers import int32_array

# Every load has a number of its own; a sequence that already bears it is listed twice.
cdef uint64_t _loads = 0


cdef class Step:
    """The sequences of one forward pass and how many tokens each brings.

    States: idle -> loaded (load) -> in flight (prepare) -> idle (commit or abandon).
    """

    def __cinit__(self, StepBuffers buffers):
        self.buffers = buffers
        self.sequences = []
        size = max(1, buffers.max_sequences)
        self.rows_array, self.counts_array, self.lengths_array = (np.zeros(size, np.int32) for _ in range(3))
        self.rows = _address(self.rows_array)
        self.counts = _address(self.counts_array)
        self.lengths = _address(self.lengths_array)

    def load(self, owner, sequences, counts):
        """Check and take the sequences of a step, and how many tokens each brings (an int for all, or one each)."""
        global _loads
        cdef list given = list(sequences)
        cdef Sequence sequence
        cdef int32_t i
        if self.in_flight:
            raise InvalidSequence("the batch holds a step in flight; commit or abandon it before preparing another")
        if len(given) > self.buffers.max_sequences:
            raise ShapeError(f"{len(given)} sequences are given; the batch has room for {self.buffers.max_sequences}")
        self.count = <int32_t>len(given)
        self._take_counts(counts)
        _loads += 1
        for i in range(self.count):
            sequence = require(owner, given[i], True)
            if sequence.seen == _loads:
                raise InvalidSequence(f"sequence {sequence.id!r} is listed twice; give each once, with all its tokens")
            sequence.seen = _loads
            self.rows[i] = sequence.row
        self.owner = owner
        self.sequences = given

    cdef int _take_counts(self, object counts) except -1:
        cdef Integers given
        cdef int64_t total = 0
        cdef int32_t i
        if type(counts) is list or type(counts) is tuple:
            # One by one: for the few numbers of a step that is quicker than an array.
            self._check_size(len(counts))
            for i in range(self.count):
                self.counts[i] = self._checked(as_int64(counts[i], "count"))
        else:
            given = as_integers(counts, "count", ShapeError)
            if not given.is_scalar:
                self._check_size(given.size)
            for i in range(self.count):
                self.counts[i] = self._checked(given.data[0] if given.is_scalar else given.data[i])
        for i in range(self.count):
            total += self.counts[i]
        if total > self.buffers.max_tokens:
            raise ShapeError(f"the step has {total} tokens; the batch has room for {self.buffers.max_tokens}")
        return 0

    cdef int _check_size(self, Py_ssize_t size) except -1:
        if size != self.count:
            raise ShapeError(f"{size} counts are given for {self.count} sequences; give one for each")
        return 0

    cdef int32_t _checked(self, int64_t count) except -1:
        if not 0 <= count <= INT32_MAX:
            raise ShapeError(f"a count is {count}; counts are 0 to {INT32_MAX}")
        return <int32_t>count

    def prepare(self, BlockTables tables):
        """Take the blocks and fill the buffers; False, with nothing changed, where blocks are short."""
        cdef int32_t i
        cdef Sequence sequence
        if not tables.try_prepare_raw(self.rows, self.counts, self.count, self.buffers):
            return False
        for i in range(self.count):
            sequence = <Sequence>self.sequences[i]
            sequence.pending = self.counts[i]
            sequence.flight = self
            sequence.place = i
        self.in_flight = True
        return True

    def brings_tokens(self, Sequence sequence not None):
        """Whether the loaded step has tokens of a sequence."""
        cdef int32_t i
        for i in range(self.count):
            if self.sequences[i] is sequence:
                return self.counts[i] > 0
        return False

    def missing(self, BlockTables tables):
        """Blocks of each group that `prepare` lacks."""
        return tables.shortage(self.rows_array[: self.count], self.counts_array[: self.count])

    def replan(self, AttentionPlan plan):
        """Plan the attention of one group for the prepared step; padding rows have no queries."""
        cdef int32_t rows = self.buffers.max_sequences
        plan.replan(self.buffers.cu_query_lens_data, self.buffers.seq_lens_data, rows)

    def check_reachable(self):
        """DeviceError where what is undone now would be undone in a graph."""
        if self.staged is not None:
            self.staged.check_reachable()

    def skip(self, int32_t place):
        """Write nothing for a sequence that goes: its blocks may be another's before this step is written."""
        cdef int32_t first = sum_of(self.counts, place)
        self.buffers.native.skip_slots(first, first + self.counts[place])
        if self.staged is not None:
            self.staged.send_slots()

    def undo_copies(self, BlockTables tables, copies):
        """Have the rows of the prepared step hold again what they held before copy-on-write.

        `copies` lists (source, target) of each group, int32 ``[n, 2]``, as `BlockTables.take_copies` gave them.
        """
        cdef int32_t[:, ::1] pairs
        for group, pairs in enumerate(copies):
            if pairs.shape[0]:
                tables.undo_copies_raw(self.rows, self.count, group, <BlockCopy*>&pairs[0, 0], pairs.shape[0])

    def commit(self, BlockTables tables, accepted=None, windows=(), publish=None):
        """Lengths advance by what was accepted, and blocks that no later query sees are given back.

        `windows` lists (group, window) of the groups that have one. Rejected tokens keep their capacity. A sequence
        that was removed in flight is passed over. Before anything is given back, `publish` is called with the list of
        sequences that have full blocks which the prefix cache does not know yet, where there are any.
        """
        self._require_in_flight("committed")
        verdict = self._accepted(accepted)
        cdef int32_t live = self._settle(verdict)
        rows, lengths = self.rows_array[:live], self.lengths_array[:live]
        if verdict is not None:
            tables.truncate(rows, lengths, keep_capacity=True)
        fuller = self._fuller(tables.block_sizes[0]) if publish is not None else None
        try:
            if fuller:
                publish(fuller)
        finally:
            for group, window in windows:
                # A window may be larger than any length, and than int32.
                tables.release_before(rows, group, np.maximum(lengths - (min(window, INT32_MAX) - 1), 0))
            self.in_flight = False

    def abandon(self, BlockTables tables):
        """Give back what prepare took, as if it had not been; spare capacity of the sequences goes too.

        The buffers keep no slots: a late write must not find blocks that are another's by then.
        """
        self._require_in_flight("abandoned")
        self.check_reachable()
        cdef int32_t live = self._settle([0] * self.count)
        tables.truncate(self.rows_array[:live], self.lengths_array[:live])
        self.buffers.native.skip_slots(0, sum_of(self.counts, self.count))
        self.in_flight = False
        if self.staged is not None:
            self.staged.send_slots()

    cdef int32_t _settle(self, object verdict):
        """End the flight of each sequence that is still there; rows and lengths list them. None accepts everything."""
        cdef int32_t i, live = 0
        cdef Sequence sequence
        for i in range(self.count):
            sequence = <Sequence>self.sequences[i]
            if sequence.owner is not self.owner or sequence.pending < 0:
                continue
            sequence.computed += self.counts[i] if verdict is None else <int32_t>verdict[i]
            sequence.pending = -1
            sequence.flight = None
            self.rows[live] = sequence.row
            self.lengths[live] = sequence.computed
            live += 1
        return live

    cdef list _fuller(self, int32_t block_size):
        """The sequences with blocks that are full, known and not published."""
        cdef list fuller = []
        cdef Sequence sequence
        for sequence in self.sequences:
            if sequence.owner is self.owner and num_whole(sequence, block_size) > sequence._published:
                fuller.append(sequence)
        return fuller

    def _require_in_flight(self, verb):
        if not self.in_flight:
            raise InvalidSequence(f"the batch holds no step in flight; it can be {verb} once after each prepare")

    def _accepted(self, accepted):
        """`accepted` as a list of ints; None where everything is."""
        if accepted is None:
            return None
        array = int32_array(accepted, "accepted count", ShapeError)
        if array.shape != (self.count,):
            raise ShapeError(f"accepted has shape {array.shape}; give one for each of the {self.count} sequences")
        wrong = (array < 0) | (array > self.counts_array[: self.count])
        if wrong.any():
            i = int(wrong.argmax())
            raise ShapeError(f"accepted[{i}] is {array[i]}; the step brought {self.counts[i]} tokens of that sequence")
        return array.tolist()


def refuse(BlockTables tables):
    """Raise OutOfBlocks with the figures of the prepare or shortage that came last."""
    tables.fail_out_of_blocks()


cdef int32_t sum_of(const int32_t* counts, int32_t size) noexcept:
    cdef int32_t i, total = 0
    for i in range(size):
        total += counts[i]
    return total


cdef int32_t* _address(object array):
    cdef int32_t[::1] view = array
    return &view[0]
