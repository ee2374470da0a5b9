"""Request table: the slots of the tokens of each request."""

from cython.operator cimport dereference as deref
from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport (
    Integers,
    Slots,
    as_counts,
    as_int64,
    as_integers,
    as_row,
    as_slots,
    as_width,
    new_int32,
    new_int64,
)
from pagecore.index._native_view cimport view_of
from pagecore.index.tables._native cimport SlotType
from pagecore.native.std cimport span

from pagecore.errors import InvalidBlock, InvalidSequence, OutOfRows, ShapeError, UnsupportedDtype


cdef inline Int32s view(Integers values):
    return Int32s(values.data, <size_t> values.size)


cdef class RequestTable:
    """RequestTable(num_requests, max_context, dtype='int32')\n--\n\n\
Table with one row of slots for each request.

    Rows are allocated lowest first. Unwritten positions are 0; the length of a row is one past the last position
    written. A call that fails changes nothing, in no row. Rows, starts, counts and slots are one int or anything that
    NumPy converts to a one-dimensional array of integers. The table has one writer. The design follows SGLang's
    request-to-token pool.

    Parameters
    ----------
    num_requests : int
        Number of rows.
    max_context : int
        Slots in a row.
    dtype : {"int32", "int64"}
        Type of the slots; int32 is limited to slots below 2**31.

    Attributes
    ----------
    dtype : str

    Raises
    ------
    ShapeError
        A size is out of range.
    UnsupportedDtype
        `dtype` is neither int32 nor int64.
    NotEnoughMemory
        The table does not fit in memory.

    Examples
    --------
    >>> requests = RequestTable(2, max_context=6)
    >>> row, = requests.allocate(1)
    >>> requests.write(row, 0, [42, 17, 88])
    >>> requests.write(row, 3, [5, 9])
    >>> requests.read(row)
    array([42, 17, 88,  5,  9], dtype=int32)
    """

    def __cinit__(self, num_requests, max_context, dtype="int32"):
        self.dtype = as_width(dtype, "dtype", UnsupportedDtype)
        self.native.reset(new NativeRequestTable(
            as_int64(num_requests, "num_requests"), as_int64(max_context, "max_context"),
            SlotType.Int64 if self.dtype == "int64" else SlotType.Int32,
        ))

    def allocate(self, n):
        """Take the `n` lowest free rows.

        Returns
        -------
        numpy.ndarray
            int32 [n], new.

        Raises
        ------
        OutOfRows
            Fewer than `n` rows are free; none is taken.
        ShapeError
            `n` is negative.
        """
        cdef int64_t count = as_int64(n, "n")
        rows = self._try_allocate(count)
        if rows is None:
            raise OutOfRows(
                f"{count} rows are needed and {self.num_free} of {self.num_requests} are free; "
                "free some or make the table larger"
            )
        return rows

    def try_allocate(self, n):
        """Call `allocate`, but return None if fewer than `n` rows are free."""
        return self._try_allocate(as_int64(n, "n"))

    cdef object _try_allocate(self, int64_t count):
        cdef int32_t* data = NULL
        if count < 0:
            raise ShapeError(f"n is {count}; use 0 or more")
        if count > deref(self.native).num_free():
            return None
        rows = new_int32(count, &data)
        return rows if deref(self.native).try_allocate(span[int32_t](data, <size_t> count)) else None

    def free(self, rows):
        """Free rows and zero them.

        Raises
        ------
        InvalidSequence
            A row is unused or repeated.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        deref(self.native).free(view(which))

    def write(self, rows, starts, slots, counts=None):
        """Write slots to rows in one native call.

        Parameters
        ----------
        rows : int or array_like of int
            Used rows; they may repeat.
        starts : int or array_like of int
            First position to write in each row; one int applies to all rows. Positions before it are unchanged.
        slots : int or array_like of int
            The slots of the first row, then of the next, and so on.
        counts : int or array_like of int, optional
            Slots for each row; one int applies to all rows. By default one for each row, or all slots for a single row.

        Raises
        ------
        InvalidSequence
            A row is unused.
        ShapeError
            A start or count is negative, a write exceeds `max_context`, or the length of `slots` differs from the sum
            of the counts.
        InvalidBlock
            A slot does not fit `dtype`.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers first = as_counts(starts, which.size, "start")
        cdef Slots values = as_slots(slots, "slot", InvalidBlock)
        if counts is None:
            counts = values.size if which.size == 1 else 1
        cdef Integers each = as_counts(counts, which.size, "count")
        deref(self.native).write(view(which), view(first), view(each), SlotIds(values.data, <size_t> values.size))

    def read(self, row, *bounds, start=None, stop=None):
        """Copy slots of a row: ``read(row)``, ``read(row, stop)`` or ``read(row, start, stop)``, as `range` takes them.

        Parameters
        ----------
        row : int
        start : int
            0 by default.
        stop : int
            By default the length of the row; positions from there to `max_context` are 0.

        Returns
        -------
        numpy.ndarray
            `dtype` [stop - start], new.

        Raises
        ------
        InvalidSequence
            The row is unused.
        ShapeError
            The bounds violate ``0 <= start <= stop <= max_context``.
        """
        if len(bounds) > 2 or (bounds and (start is not None or stop is not None)):
            raise TypeError("read takes row, row and stop, or row, start and stop")
        if bounds:
            start, stop = bounds if len(bounds) == 2 else (None, bounds[0])
        cdef int32_t which = as_row(row)
        cdef int64_t first = 0 if start is None else as_int64(start, "start")
        cdef int64_t last = deref(self.native).length(which) if stop is None else as_int64(stop, "stop")
        deref(self.native).check_range(which, first, last)
        cdef int32_t* narrow = NULL
        cdef int64_t* wide = NULL
        if deref(self.native).type() == SlotType.Int64:
            values = new_int64(last - first, &wide)
            deref(self.native).read(which, first, last, wide)
        else:
            values = new_int32(last - first, &narrow)
            deref(self.native).read(which, first, last, narrow)
        return values

    def length(self, row):
        """Return one past the last position written in a row."""
        return deref(self.native).length(as_row(row))

    @property
    def table(self):
        """The whole table: `dtype` [num_requests, max_context], a read-only view that changes with the rows."""
        cdef Py_ssize_t[2] shape = [deref(self.native).num_requests(), deref(self.native).max_context()]
        return view_of(self, deref(self.native).table(), 2, shape, self.dtype == "int64", True)

    @property
    def num_requests(self):
        """Number of rows."""
        return deref(self.native).num_requests()

    @property
    def max_context(self):
        """Slots in a row."""
        return deref(self.native).max_context()

    @property
    def num_free(self):
        """Rows that can be allocated."""
        return deref(self.native).num_free()

    @property
    def num_used(self):
        """Used rows."""
        return deref(self.native).num_used()

    @property
    def nbytes(self):
        """Bytes of the native structure; the system commits them as rows are first written."""
        return deref(self.native).nbytes()

    def check_invariants(self):
        """Recount everything; raise PagecoreError if the table is inconsistent."""
        deref(self.native).check_invariants()

    def __repr__(self):
        return (
            f"RequestTable({self.num_requests}, {self.max_context}, dtype={self.dtype!r}): {self.num_used} rows in use"
        )
