from libc.stdint cimport int32_t, int64_t, uint8_t

from pagecore.index._integers cimport Integers, const_int32
from pagecore.native.std cimport span, vector

ctypedef const int32_t* Int32Pointer


cdef extern from "pagecore/index/radix/retention/claims.hpp" namespace "pagecore::radix" nogil:
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

    cdef cppclass HintRange:
        int64_t end
        RetentionHint hint

    ctypedef span[HintRange] HintRanges "std::span<const pagecore::radix::HintRange>"


cdef extern from "pagecore/index/radix/retention/claims.hpp" namespace "pagecore::radix" nogil:
    cdef cppclass State:
        int64_t blocks
        int32_t id

    ctypedef span[State] States "std::span<const pagecore::radix::State>"

    cdef cppclass Offer:
        Query query
        vector[Int32Pointer] lanes
        States states
        RetentionHint hint
        HintRanges ranges
        double time


# Arguments of a lookup, checked and converted: tokens, spans and namespace.
cdef class Prefix:
    cdef Integers tokens
    cdef vector[Mark] marks
    cdef object key       # of the namespace
    cdef int32_t space    # number of the namespace; -1: unknown to the tree
    cdef int64_t limit    # blocks

    cdef Query query(self) noexcept


cdef class Insertion:
    """Arguments of an insertion, checked and converted."""
    cdef Prefix prefix
    cdef list lanes
    cdef vector[State] states
    cdef RetentionHint hint
    cdef double time
    cdef object receipt  # a Receipt of the tree, or None

    # The offer borrows memory of the insertion, which must outlive it.
    cdef int fill(self, Offer* offer) except -1


# A list of the elements of an iterable argument.
cdef list as_list(object values, str name)

# A finite float; `what` names it in messages.
cdef double as_number(object value, str what) except? -1

# The caller's clock: -inf, which advances nothing, for None.
cdef double as_time(object time) except? -1

# Reads the arguments of a lookup. The namespace stays a key, with number -1: the tree finds the number when no more
# code of the caller can run. Tokens may still be the caller's memory.
cdef Prefix read_prefix(int64_t block_size, object tokens, object namespace, object spans, object max_tokens)

# Appends the marks of spans in the first `blocks` blocks.
cdef int read_marks(object spans, int64_t block_size, int64_t blocks, vector[Mark]& marks) except -1

# Checks and converts the retention arguments. The caller advances the clock to `now` after the last step that can fail.
cdef int read_hint(RetentionHint* hint, double* now, str policy, object time, object priority, object time_to_live,
                   object rank) except -1

# Reads the arguments of an insertion except receipt, hint and time. Tokens and blocks may be the caller's memory until
# own_insertion() copies them from block `first` on.
cdef int own_insertion(Insertion insertion, int64_t block_size, int64_t first) except -1
cdef Insertion read_insertion(
    int64_t block_size, int32_t num_lanes, object tokens, object blocks, object states, object namespace, object spans
)
