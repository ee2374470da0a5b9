"""Content keys and sums of payloads, by xxHash."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

import numpy as np

from pagecore.errors import ShapeError

from pagecore.native.std cimport span
from pagecore.native.translate cimport raise_python_error

ctypedef const uint8_t const_uint8
ctypedef const int32_t const_int32
ctypedef const int64_t const_int64

cdef extern from "pagecore/tiers/keys/xxh3.hpp" namespace "pagecore::tiers" nogil:
    const size_t kSecretBytes
    const size_t kHashBytes
    const size_t kKeyBytes
    uint64_t xxh3_64(const void* data, size_t nbytes, uint64_t seed)
    uint64_t seed_of(const uint8_t* key)

cdef extern from "pagecore/tiers/keys/content_chain.hpp" namespace "pagecore::tiers" nogil:
    cdef cppclass PackedSpans:
        span[const_int64] blocks
        span[const_int64] ends
        span[const_uint8] bytes
    cdef cppclass ChainStart:
        span[const_uint8] header
        span[const_uint8] space
        const uint8_t* secret
    void hash_chain(const ChainStart& start, span[const_int32] ids, int64_t block_size, const PackedSpans& spans,
                    uint8_t* out) except +raise_python_error

SECRET_BYTES = <int> kSecretBytes


def chain_xxh3(const uint8_t[::1] header, const uint8_t[::1] space, const uint8_t[::1] secret, const int32_t[::1] ids,
               int64_t block_size, const int64_t[::1] span_blocks, const int64_t[::1] span_ends,
               const uint8_t[::1] span_bytes):
    """Return the hashes of the whole blocks of `ids`, uint8 ``[blocks, 16]``; content_chain.hpp has the message."""
    cdef ChainStart start
    cdef PackedSpans spans
    cdef span[const_int32] tokens
    cdef uint8_t[:, ::1] view
    if <size_t> secret.shape[0] != kSecretBytes:
        raise ShapeError(f"the secret has {secret.shape[0]} bytes; give {kSecretBytes}")
    if block_size < 1:
        raise ShapeError(f"block_size is {block_size}; use 1 or more")
    out = np.empty((ids.shape[0] // block_size, kHashBytes), np.uint8)
    if out.shape[0] == 0:
        return out
    view = out
    start.header = span[const_uint8](&header[0] if header.shape[0] else NULL, header.shape[0])
    start.space = span[const_uint8](&space[0] if space.shape[0] else NULL, space.shape[0])
    start.secret = &secret[0]
    spans.blocks = span[const_int64](&span_blocks[0] if span_blocks.shape[0] else NULL, span_blocks.shape[0])
    spans.ends = span[const_int64](&span_ends[0] if span_ends.shape[0] else NULL, span_ends.shape[0])
    spans.bytes = span[const_uint8](&span_bytes[0] if span_bytes.shape[0] else NULL, span_bytes.shape[0])
    tokens = span[const_int32](&ids[0], ids.shape[0])
    with nogil:
        hash_chain(start, tokens, block_size, spans, &view[0, 0])
    return out


def payload_sums(const uint8_t[:, ::1] keys, const uint64_t[:, ::1] pieces):
    """Return the sum of each payload: XXH3_64 of its bytes, seeded by its key. The GIL is released.

    Parameters
    ----------
    keys : ndarray of uint8
        ``[n, 17]``, content keys.
    pieces : ndarray of uint64
        ``[n, 2]``, address and bytes of each payload. The caller keeps the memory alive and unchanged.

    Returns
    -------
    ndarray of uint64
        ``[n]``, new.

    Raises
    ------
    ShapeError
        Keys of another length, or another number of pieces.
    """
    cdef Py_ssize_t i, count = keys.shape[0]
    cdef uint64_t[::1] view
    if <size_t> keys.shape[1] != kKeyBytes or pieces.shape[0] != count or pieces.shape[1] != 2:
        raise ShapeError(f"expected keys [n, {kKeyBytes}] and pieces [n, 2], got [{count}, {keys.shape[1]}] and "
                         f"[{pieces.shape[0]}, {pieces.shape[1]}]")
    sums = np.empty(count, np.uint64)
    view = sums
    with nogil:
        for i in range(count):
            view[i] = xxh3_64(<const void*> pieces[i, 0], pieces[i, 1], seed_of(&keys[i, 0]))
    return sums
