"""The steps of block tables: blocks and slots of new tokens, copies on write, changed entries."""

from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport Integers, address_of, as_counts, as_int64, as_integers, writable
from pagecore.index.tables._native cimport BlockCopy, ChangedEntry, SlotType, SlotsOut
from pagecore.native.std cimport span, vector

import numpy as np

from pagecore.errors import InvalidSequence, ShapeError, UnsupportedDtype

# A longer step checks for blocks before it allocates an array for the slots.
cdef enum: MAX_UNCHECKED_TOKENS = 1 << 16


cdef class TableSteps(TablesCore):
    """The steps of `BlockTables`."""

    def extend(self, rows, counts, out=None):
        """Make room for ``counts[i]`` more tokens in ``rows[i]`` and advance the lengths.

        A row uses its spare capacity first. A shared block that the row would write is replaced by a new one; if the
        old block holds tokens of the row, `take_copies` returns the copy.

        Parameters
        ----------
        rows : int or array_like of int
            Distinct rows.
        counts : int or array_like of int
            Tokens for each row, 0 or more; one int applies to all rows.
        out : numpy.ndarray, optional
            int64 or int32, contiguous, [>= sum(counts)]; with groups, a sequence of one for each.

        Returns
        -------
        numpy.ndarray
            int64 [sum(counts)], slots of the new tokens, row after row: new, or a view of `out`. With groups, a tuple
            of one for each.

        Raises
        ------
        OutOfBlocks
            A pool has fewer free blocks than the rows need.
        ShapeError
            A count is negative, a row would exceed its limit, or `out` is too small or too narrow for the slots.
        InvalidSequence
            A row is unused or repeated.
        """
        return self._extend(rows, counts, out, True)

    def try_extend(self, rows, counts, out=None):
        """Call `extend`, but return None if blocks are short."""
        return self._extend(rows, counts, out, False)

    cdef object _extend(self, object rows, object counts, object out, bint must):
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers added = as_counts(counts, which.size, "count")
        cdef int64_t num_tokens = self._check_step(view(which), view(added))
        cdef vector[SlotsOut] targets
        cdef SlotsOut target
        if num_tokens > MAX_UNCHECKED_TOKENS and self._is_short(which, added):
            if must:
                self.fail_out_of_blocks()
            return None
        slots = []
        for array in self._slot_targets(out, num_tokens):
            target.data = address_of(array)
            target.size = array.size
            target.type = SlotType.Int64 if array.itemsize == 8 else SlotType.Int32
            targets.push_back(target)
            slots.append(array if array.size == num_tokens else array[:num_tokens])
        result = tuple(slots) if self.is_grouped else slots[0]
        if not self._try_extend(view(which), view(added), targets):
            if must:
                self.fail_out_of_blocks()
            return None
        return result

    cdef list _slot_targets(self, object out, int64_t num_tokens):
        cdef list targets = []
        if out is None:
            for _ in range(len(self.pools)):
                targets.append(np.empty(num_tokens, np.int64))
            return targets
        for array in as_tuple(out, "out") if self.is_grouped else (out,):
            targets.append(writable(array, 1, "out", True))
        return targets

    def shortage(self, rows, counts, first_blocks=None):
        """Return the number of blocks that `extend` would lack; 0 if it will succeed. Nothing changes.

        Parameters
        ----------
        rows, counts
            As in `extend`.
        first_blocks : int or array_like of int, optional
            As in `prepare`: return the blocks that `prepare` would lack.

        Returns
        -------
        int
            With groups, a tuple; groups that share a pool are counted in order.

        Raises
        ------
        ShapeError, InvalidSequence
            As in `extend`.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers added = as_counts(counts, which.size, "count")
        cdef vector[int64_t] missing
        cdef vector[int32_t] firsts
        missing.resize(len(self.pools))
        self._read_first_blocks(first_blocks, firsts)
        self.shortage_raw(which.data, added.data, which.size, missing, firsts)
        return tuple(missing) if self.is_grouped else missing[0]

    cdef bint _is_short(self, Integers rows, Integers counts) except -1:
        cdef vector[int64_t] missing
        cdef vector[int32_t] all_blocks
        missing.resize(len(self.pools))
        self.shortage_raw(rows.data, counts.data, rows.size, missing, all_blocks)
        for lacking in missing:
            if lacking > 0:
                return True
        return False

    cdef int _read_first_blocks(self, object first_blocks, vector[int32_t]& out) except -1:
        if first_blocks is not None:
            given = as_counts(first_blocks, len(self.pools), "first block", "group")
            out.assign(given.data, given.data + given.size)
        return 0

    def prepare(self, rows, counts, buffers, first_blocks=None):
        """Extend rows and fill the buffers of a step in one native call that allocates nothing.

        Parameters
        ----------
        rows, counts
            As in `extend`.
        buffers : StepBuffers
            Overwritten; unchanged if the call fails.
        first_blocks : int or array_like of int, optional
            For tokens that were computed elsewhere and have left a window: the index in each row of the first block to
            allocate, for each group; one int applies to all groups. Before it, the row keeps the blocks that it has,
            and the others are holes; slots of tokens there are -1. By default all blocks are allocated.

        Raises
        ------
        OutOfBlocks, ShapeError, InvalidSequence
            As in `extend`. ShapeError also if the buffers are too small, have another number of groups, or have int32
            slots and a pool has more than 2**31 slots; or if a first block is negative.
        """
        if not self.try_prepare(rows, counts, buffers, first_blocks):
            self.fail_out_of_blocks()

    def try_prepare(self, rows, counts, buffers, first_blocks=None):
        """Call `prepare` and return True; return False, with nothing changed, if blocks are short."""
        if not isinstance(buffers, StepBuffers):
            raise UnsupportedDtype(f"expected StepBuffers, got {type(buffers).__name__}")
        cdef StepBuffers steps = <StepBuffers> buffers
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers added = as_counts(counts, which.size, "count")
        cdef vector[int32_t] firsts
        self._read_first_blocks(first_blocks, firsts)
        return self.try_prepare_raw(which.data, added.data, which.size, steps, firsts)

    def refuse(self):
        """Raise OutOfBlocks with the figures of the last step or shortage that was counted."""
        self.fail_out_of_blocks()

    def take_copies(self, group=None):
        """Return the copies that copy-on-write has required since the last call.

        Run them in the given order, before anything is written. Copies whose target has been freed are left out.

        Parameters
        ----------
        group : int, optional
            Return an array of the copies of one group.

        Returns
        -------
        numpy.ndarray
            int32 [n, 2], rows of (source, target); with groups, a tuple of one for each.
        """
        cdef int64_t one = -1 if group is None else as_int64(group, "group")
        cdef int64_t i
        cdef vector[void*] targets
        cdef vector[size_t] sizes
        cdef bint is_tuple = group is None and self.is_grouped
        result = PyTuple_New(len(self.pools)) if is_tuple else None
        # All arrays are made before the copies of the first group are taken.
        for i in range(len(self.pools) if is_tuple else 1):
            sizes.push_back(<size_t> self._settle_copies(i if group is None else one))
            array = np.empty((sizes.back(), 2), np.int32)
            targets.push_back(address_of(array))
            if is_tuple:
                Py_INCREF(array)
                PyTuple_SET_ITEM(result, i, array)
            else:
                result = array
        for i in range(<int64_t> targets.size()):
            if <size_t> self._settle_copies(i if group is None else one) != sizes[i]:
                return self.take_copies(group)  # the garbage collector ran code that used the tables
        for i in range(<int64_t> targets.size()):
            self._take_copies(i if group is None else one, span[BlockCopy](<BlockCopy*> targets[i], sizes[i]))
        return result

    def follow_changes(self):
        """Record changed entries from now on, for a mirror of the tables, such as one on a device.

        The mirror is one array that starts as zeros: ``table(0)`` flat, then the tables of the other groups, then
        `row_lengths`. Without this call nothing is recorded.

        Raises
        ------
        ShapeError
            The mirror has more entries than int32 can index.
        """
        self._follow_changes()

    def take_changes(self, out):
        """Write the entries that changed since the last call, each once, in ascending order.

        Parameters
        ----------
        out : numpy.ndarray
            int64 [n, 2], contiguous. Receives rows of (index in the mirror, value).

        Returns
        -------
        int
            The number of rows written. A return value equal to n means that more may be pending.

        Raises
        ------
        UnsupportedOption
            `follow_changes` was not called.
        ShapeError
            `out` has another shape or is not contiguous.
        """
        target = writable(out, 2, "out", True)
        if target.dtype != np.int64:
            raise UnsupportedDtype(f"expected out of dtype int64, got {target.dtype}")
        if target.shape[1] != 2 or not target.flags.c_contiguous:
            raise ShapeError(f"expected a contiguous out of shape [n, 2], got shape {target.shape}")
        cdef ChangedEntry* entries = <ChangedEntry*> address_of(target)
        cdef Py_ssize_t count = self.take_changes_raw(entries, target.shape[0])
        try:
            return count
        except MemoryError:  # converting the count allocates an int
            self._put_back_changes(entries, count)
            raise
