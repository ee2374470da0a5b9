"""Move pieces of memory through sockets, and sum their bytes, without the GIL."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from pagecore.native.std cimport span

from pagecore.errors import ShapeError

import numpy as np


cdef extern from "pagecore/tiers/handover/vectors.hpp" namespace "pagecore::tiers" nogil:
    cdef cppclass Piece:
        pass

    ctypedef span[Piece] Pieces "std::span<const pagecore::tiers::Piece>"
    ctypedef span[int64_t] Ends "std::span<const int64_t>"
    ctypedef span[uint64_t] Seeds "std::span<const uint64_t>"

    int native_send "pagecore::tiers::send_pieces"(int descriptor, Pieces pieces, int64_t deadline, uint64_t& moved)
    int native_receive "pagecore::tiers::receive_pieces"(
        int descriptor, Pieces pieces, int64_t deadline, uint64_t& moved
    )
    void native_scatter "pagecore::tiers::scatter_pieces"(const void* source, Pieces pieces)
    void native_sums "pagecore::tiers::sum_units"(Pieces pieces, Ends ends, Seeds seeds, span[uint64_t] out)


def send_pieces(int descriptor, const uint64_t[:, ::1] pieces not None, int64_t deadline):
    """Send all bytes of `pieces`; return a status (0 done, -1 timed out, -2 closed, or an errno) and the bytes sent.

    Parameters
    ----------
    descriptor : int
        A connected stream socket, blocking or not.
    pieces : uint64 [n, 2]
        Address and bytes of each piece.
    deadline : int
        Nanoseconds of `time.monotonic_ns`.
    """
    cdef uint64_t moved = 0
    cdef int status = 0
    cdef Pieces listed = as_pieces(pieces)
    with nogil:
        status = native_send(descriptor, listed, deadline, moved)
    return status, moved


def receive_pieces(int descriptor, const uint64_t[:, ::1] pieces not None, int64_t deadline):
    """Receive all bytes of `pieces` into their memory; as `send_pieces`."""
    cdef uint64_t moved = 0
    cdef int status = 0
    cdef Pieces listed = as_pieces(pieces)
    with nogil:
        status = native_receive(descriptor, listed, deadline, moved)
    return status, moved


def sum_units(
    const uint64_t[:, ::1] pieces not None, const int64_t[::1] ends not None, const uint64_t[::1] seeds not None
):
    """Return the XXH3 (64 bits) of each unit, seeded by `seeds`: uint64 ``[n]``.

    Parameters
    ----------
    pieces : uint64 [m, 2]
    ends : int64 [n]
        Number of pieces up to the end of each unit, ascending; the last is m.
    seeds : uint64 [n]
    """
    cdef Py_ssize_t i, n = ends.shape[0]
    cdef int64_t before = 0
    cdef Pieces listed = as_pieces(pieces)
    cdef Ends last
    cdef Seeds seeded
    cdef uint64_t[::1] view
    if seeds.shape[0] != n:
        raise ShapeError(f"{seeds.shape[0]} seeds are given for {n} units; give one for each")
    for i in range(n):
        if ends[i] < before or ends[i] > pieces.shape[0]:
            raise ShapeError(f"ends has {ends[i]} after {before}; expected ascending numbers up to {pieces.shape[0]}")
        before = ends[i]
    sums = np.empty(n, np.uint64)
    if n:
        view = sums
        last = Ends(&ends[0], <size_t>n)
        seeded = Seeds(&seeds[0], <size_t>n)
        with nogil:
            native_sums(listed, last, seeded, span[uint64_t](&view[0], <size_t>n))
    return sums


def scatter_pieces(const uint8_t[::1] source not None, const uint64_t[:, ::1] pieces not None):
    """Copy the bytes of `source`, one after the other, to the memory of the pieces; `source` has all their bytes."""
    cdef Pieces listed = as_pieces(pieces)
    cdef uint64_t total = 0
    cdef Py_ssize_t i
    for i in range(pieces.shape[0]):
        total += pieces[i, 1]
    if total > <uint64_t>source.shape[0]:
        raise ShapeError(f"the pieces have {total} bytes and source has {source.shape[0]}; pass memory for all of them")
    if total > 0:
        with nogil:
            native_scatter(&source[0], listed)


cdef Pieces as_pieces(const uint64_t[:, ::1] pieces) except *:
    if pieces.shape[1] != 2:
        raise ShapeError(f"pieces has {pieces.shape[1]} columns; expected 2, address and bytes")
    if pieces.shape[0] == 0:
        return Pieces()
    return Pieces(<const Piece*>&pieces[0, 0], <size_t>pieces.shape[0])
