from libc.stdint cimport int32_t, int64_t, uint8_t
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.index._integers cimport Integers, const_int32

ctypedef const int32_t* Int32Pointer


cdef extern from "pagecore/index/radix/claims.hpp" namespace "pagecore::radix" nogil:
    ctypedef span[const_int32] Int32s "std::span<const int32_t>"

    cdef cppclass Bytes32 "std::array<uint8_t, 32>":
        uint8_t* data()

    cdef cppclass Digest:
        Digest()
        int32_t kind
        Bytes32 bytes

    cdef cppclass Mark:
        int32_t block
        int64_t start
        int64_t end
        Digest digest

    ctypedef span[Mark] Marks "std::span<const pagecore::radix::Mark>"

    cdef cppclass Query:
        Int32s tokens
        Marks marks
        int32_t space

    cdef cppclass RetentionHint:
        double priority
        double expiry
        double rank


cdef extern from "pagecore/index/radix/claims.hpp" namespace "pagecore::radix" nogil:
    cdef cppclass State:
        int64_t blocks
        int32_t id

    ctypedef span[State] States "std::span<const pagecore::radix::State>"

    cdef cppclass Offer:
        Query query
        vector[Int32Pointer] lanes
        States states
        RetentionHint hint
        double time


# What a call looks up: tokens, spans and namespace, checked and converted.
cdef class Prefix:
    cdef Integers tokens
    cdef vector[Mark] marks
    cdef object key       # of the namespace
    cdef int32_t space    # -1: the tree has none such
    cdef int64_t limit    # blocks

    cdef Query query(self) noexcept


cdef class Entry:
    """One insertion, checked and converted."""
    cdef Prefix prefix
    cdef list lanes
    cdef vector[State] states
    cdef RetentionHint hint
    cdef double time
    cdef object receipt  # a Receipt of the tree, or None

    # Borrows from the entry, which must outlive the offer.
    cdef int fill(self, Offer* offer) except -1


# A finite float; `what` names it in errors.
cdef double as_number(object value, str what) except? -1

# The caller's clock: -inf, which advances nothing, for None.
cdef double as_time(object time) except? -1

# What to look up. The namespace is left as a key, and its number -1: the tree finds it once no code of the caller can
# run any more. Tokens may be the caller's memory still.
cdef Prefix read_prefix(int64_t block_size, object tokens, object namespace, object spans, object max_tokens)

# The marks of spans in the first `blocks` blocks.
cdef int read_marks(object spans, int64_t block_size, int64_t blocks, vector[Mark]& marks) except -1

# Checks all of them and converts each once; the clock is advanced by the caller, once nothing can fail.
cdef int read_hint(RetentionHint* hint, double* now, str policy, object time, object priority, object time_to_live,
                   object rank) except -1

# What to insert, but for its receipt, hint and time. Tokens and blocks may be the caller's memory until own_entry()
# copies them from block `first` on.
cdef int own_entry(Entry entry, int64_t block_size, int64_t first) except -1
cdef Entry read_entry(
    int64_t block_size, int32_t num_lanes, object tokens, object blocks, object states, object namespace, object spans
)
