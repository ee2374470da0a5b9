"""The slots of each request, in one table."""

from cython.operator cimport dereference as deref
from libc.stdint cimport int32_t, int64_t
from libcpp.span cimport span

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
from pagecore.index._step_buffers cimport SlotType

from pagecore.errors import InvalidBlock, InvalidSequence, OutOfRows, ShapeError, UnsupportedDtype


cdef inline Int32s view(Integers values):
    return Int32s(values.data, <size_t> values.size)


cdef class RequestTable:
    """RequestTable(num_requests, max_context, dtype='int32')\n--\n\n\
A row of slots for each request.

    Rows are handed out lowest first and read 0 until they are written. A row remembers how far it was written: its
    length. A call that fails changes nothing, in no row. Rows, starts, counts and slots are taken as one int or as
    anything that NumPy makes a one-dimensional array of integers. There is one writer. It follows SGLang's
    request-to-token pool.

    Parameters
    ----------
    num_requests : int
        Rows.
    max_context : int
        Slots of a row.
    dtype : {"int32", "int64"}
        Of the slots; int32 cannot name slots from 2**31 on.

    Attributes
    ----------
    dtype : str

    Raises
    ------
    ShapeError
        A size is out of range.
    UnsupportedDtype
        `dtype` is another.
    NotEnoughMemory
        The table is larger than memory.

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
        """Take `n` rows, the lowest that are free.

        Returns
        -------
        numpy.ndarray
            int32 [n], new.

        Raises
        ------
        OutOfRows
            Fewer are free; none is taken.
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
        """Take `n` rows like `allocate`, or return None when fewer are free."""
        return self._try_allocate(as_int64(n, "n"))

    cdef object _try_allocate(self, int64_t count):
        cdef int32_t* data = NULL
        if count < 0:
            raise ShapeError(f"{count} rows cannot be allocated; ask for 0 or more")
        if count > deref(self.native).num_free():
            return None
        rows = new_int32(count, &data)
        return rows if deref(self.native).try_allocate(span[int32_t](data, <size_t> count)) else None

    def free(self, rows):
        """Give rows back; they read 0 when they are next taken.

        Raises
        ------
        InvalidSequence
            A row is not in use, or is named twice.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        deref(self.native).free(view(which))

    def write(self, rows, starts, slots, counts=None):
        """Write slots into rows, in one native call.

        Parameters
        ----------
        rows : int or array_like of int
            Rows in use; one may be named more than once.
        starts : int or array_like of int
            Where each row is written from; one int stands for all rows. What a write skips stays as it is.
        slots : int or array_like of int
            The slots of the first row, then those of the next.
        counts : int or array_like of int, optional
            Slots for each row; one int stands for all rows. By default one each, or all of them where there is one row.

        Raises
        ------
        InvalidSequence
            A row is not in use.
        ShapeError
            A start or count is negative, a row would be written past `max_context`, or `slots` has more or fewer than
            the rows take.
        InvalidBlock
            A slot does not fit the table's dtype.
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
            The row's length by default; positions from there on to `max_context` read 0.

        Returns
        -------
        numpy.ndarray
            `dtype` [stop - start], new.

        Raises
        ------
        InvalidSequence
            The row is not in use.
        ShapeError
            Not ``0 <= start <= stop <= max_context``.
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
        """How far a row was written: one past the highest position."""
        return deref(self.native).length(as_row(row))

    @property
    def table(self):
        """The whole table: `dtype` [num_requests, max_context], a read-only view that changes with the rows."""
        cdef Py_ssize_t[2] shape = [deref(self.native).num_requests(), deref(self.native).max_context()]
        return view_of(self, deref(self.native).table(), 2, shape, self.dtype == "int64", True)

    @property
    def num_requests(self):
        """Rows in all."""
        return deref(self.native).num_requests()

    @property
    def max_context(self):
        """Slots of a row."""
        return deref(self.native).max_context()

    @property
    def num_free(self):
        """Rows that can be had."""
        return deref(self.native).num_free()

    @property
    def num_used(self):
        """Rows in use."""
        return deref(self.native).num_used()

    @property
    def nbytes(self):
        """Bytes of the native structure; they are taken from the system as rows are first written."""
        return deref(self.native).nbytes()

    def check_invariants(self):
        """Recount everything; raise PagecoreError where the table contradicts itself."""
        deref(self.native).check_invariants()

    def __repr__(self):
        return (
            f"RequestTable({self.num_requests}, {self.max_context}, dtype={self.dtype!r}): {self.num_used} rows in use"
        )
