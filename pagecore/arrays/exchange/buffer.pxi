"""Import through the buffer protocol, and export of a tensor's bytes to NumPy."""

cimport cython
from cpython.buffer cimport (
    PyBUF_FULL_RO,
    Py_buffer,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from pagecore.arrays.views.array_view cimport (
    ArrayView,
    Extent,
    check_layout,
    checked_element_count,
    checked_extent,
    kMaxDims,
    set_contiguous_strides,
)

from pagecore.arrays.dtypes.dtype import DTYPES, DType
from pagecore.errors import ShapeError, UnsupportedDtype

# Format letters of the struct module. The size of an integer depends on its prefix and its platform, so the item size
# of the buffer is used.
cdef dict _KINDS = {letter: "int" for letter in "bhilqn"}
_KINDS.update({letter: "uint" for letter in "BHILQN"})
_KINDS.update({"e": "float", "f": "float", "?": "bool"})


cdef class Borrowed:
    """A buffer that is released to its exporter after the last view of it is freed."""

    def __dealloc__(self):
        PyBuffer_Release(&self.buffer)


cdef int dtype_code_of(Py_buffer* buffer) except -1:
    cdef str text = "B" if buffer.format == NULL else (<bytes>buffer.format).decode("utf-8", "replace")
    cdef str letter = text[1:] if text[:1] in ("@", "=", "<") else text
    kind = _KINDS.get(letter)
    cdef str name = "bool" if kind == "bool" else f"{kind}{buffer.itemsize * 8}"
    if kind is None or name not in DTYPES:
        raise UnsupportedDtype(
            f"the buffer's format is {text!r} with items of {buffer.itemsize} bytes; the dtypes are {', '.join(DTYPES)}"
        )
    return DType(name).code


cdef Borrowed import_buffer(object obj, ArrayView* view):
    """Fill `view` from an exporter of the buffer protocol, and return the owner of the buffer."""
    cdef Borrowed borrowed = Borrowed.__new__(Borrowed)
    cdef Py_buffer* buffer = &borrowed.buffer
    cdef int i
    PyObject_GetBuffer(obj, buffer, PyBUF_FULL_RO)
    if buffer.ndim < 0 or buffer.ndim > kMaxDims:
        raise ShapeError(f"the buffer has {buffer.ndim} axes; a tensor has at most {kMaxDims}")
    if buffer.suboffsets != NULL:
        raise ShapeError("the buffer has suboffsets (a table of pointers), which strides cannot express; copy it")
    view.dtype = dtype_code_of(buffer)
    view.data = <char*>buffer.buf
    view.ndim = buffer.ndim
    view.readonly = buffer.readonly
    if buffer.shape == NULL and buffer.ndim == 1:
        view.shape[0] = buffer.len // buffer.itemsize
    elif buffer.shape == NULL and buffer.ndim > 1:
        raise ShapeError(f"the buffer has {buffer.ndim} axes but no shape; its exporter is broken")
    else:
        for i in range(buffer.ndim):
            view.shape[i] = buffer.shape[i]
    checked_element_count(view.ndim, view.shape, buffer.itemsize)
    set_contiguous_strides(view[0])
    if buffer.strides != NULL:  # ctypes omits strides even if they are requested
        for i in range(buffer.ndim):
            view.strides[i] = buffer.strides[i]
    check_layout(view[0])
    return borrowed


@cython.no_gc_clear
cdef class Span:
    """The bytes that a tensor spans, as a buffer; the base object of ndarrays over the tensor."""

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.begin, self.nbytes, self.readonly, flags)

    def __reduce__(self):
        # Cython would pickle the address as a string.
        raise TypeError("the buffer of a tensor cannot be pickled or copied; copy the array over it")


cdef Span span_of(const ArrayView& view, object owner, Py_ssize_t* offset):
    """Return the bytes that a host view spans; `offset` receives the position of element 0 in them."""
    cdef Extent extent = checked_extent(view)
    cdef Span span = Span.__new__(Span)
    span.begin = view.data + extent.low
    span.nbytes = extent.high - extent.low
    span.readonly = view.readonly
    span.owner = owner
    offset[0] = -extent.low
    return span
