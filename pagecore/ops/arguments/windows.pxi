"""Windows, chunks and sink tokens as keys to the left and right of a query."""

from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, int64_t

from pagecore.errors import UnsupportedOption, shown

cdef extern from "Python.h":
    Py_ssize_t PyNumber_AsSsize_t(object value, PyObject* overflow) except? -1


cdef Py_ssize_t clipped(object number, str name, object given, str expected) except? -1:
    """Return an integer of the argument `given`, cut to the range of the C type."""
    try:
        if isinstance(number, bool):
            raise TypeError("a bool is not an integer")
        return PyNumber_AsSsize_t(number, NULL)
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedOption(f"{name} is {shown(given)}; it counts keys and must {expected}") from error


cdef int64_t read_side(object number, object window) except? -1:
    """Return one side of a window; -1 for None, and for bounds past the longest sequence."""
    cdef int64_t side
    if number is None:
        return -1
    side = clipped(number, "window", window, "hold integers or None")
    if side < -1:
        raise UnsupportedOption(f"window is {shown(window)}; a side must be at least 0, or None or -1 for no bound")
    return side if side < INT32_MAX else -1


cdef int read_window(object window, int64_t* left, int64_t* right) except -1:
    left[0] = right[0] = -1
    if window is None:
        return 0
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise UnsupportedOption(f"window is {shown(window)}; it must be a number of keys, or (left, right)")
        left[0] = read_side(window[0], window)
        right[0] = read_side(window[1], window)
        return 0
    if clipped(window, "window", window, "be an integer, (left, right) or None") < 1:
        raise UnsupportedOption(f"window is {shown(window)}; it must be at least 1, the query's own key, or None")
    left[0] = read_side(window, window)
    left[0] -= left[0] > 0
    return 0


cdef int read_reach(object window, object chunk, int64_t* left, int64_t* right) except -1:
    """Read a window, or chunks: those are a left side below -1, as in key_range.hpp."""
    cdef Py_ssize_t size
    read_window(window, left, right)
    if chunk is None:
        return 0
    if window is not None:
        raise UnsupportedOption(f"chunk is {shown(chunk)} and window is {shown(window)}; use one of them")
    size = clipped(chunk, "chunk", chunk, "be an integer or None")
    if size < 1:
        raise UnsupportedOption(f"chunk is {shown(chunk)}; it must be at least 1, or None for no chunks")
    if size < INT32_MAX:  # longer than any sequence otherwise
        left[0] = -1 - <int64_t>size
    return 0


cdef int64_t read_sink_tokens(object sink_tokens, object chunk, int64_t left) except -1:
    cdef Py_ssize_t count
    if sink_tokens is None:
        return 0
    count = clipped(sink_tokens, "sink_tokens", sink_tokens, "be an integer or None")
    if count < 0:
        raise UnsupportedOption(f"sink_tokens is {shown(sink_tokens)}; it must be at least 0")
    if count > 0 and chunk is not None:
        raise UnsupportedOption(
            f"sink_tokens is {shown(sink_tokens)} and chunk is {shown(chunk)}; sink tokens belong to a window: pass "
            "window, or leave sink_tokens out"
        )
    if count > 0 and left == -1:
        raise UnsupportedOption(
            f"sink_tokens is {shown(sink_tokens)} and the window is unbounded to the left, so that all earlier keys "
            "are attended to; pass window, or leave sink_tokens out"
        )
    return min(<int64_t>count, <int64_t>INT32_MAX)


cdef object chunk_of(int64_t left):
    """Return the chunk of the left side of a window; None if it has none."""
    return -1 - left if left < -1 else None
