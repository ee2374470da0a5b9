# Keys of a group with a window or chunks: those that a token sees, and those that its sequences keep.
#
#   window 6, lookahead 2, length 9     tokens  0 1 | 2 3 | 4 5 6 7 8 | 9, the next
#                                          released  kept   seen
#   chunk 4, lookahead 2, length 9      tokens  0 1 2 3 | 4 5 6 7 | 8 | 9, the next
#                                          released       kept     seen
#   window 4, 3 sinks, length 12        tokens  0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12, the next
#                                          kept      released    seen with 0 1 2
from libc.stdint cimport INT32_MAX, int32_t, int64_t


cdef struct KeptKeys:
    int32_t group
    int64_t window     # keys that a token sees, its own included; 1 with chunks
    int64_t chunk      # 0 without chunks
    int64_t lookahead  # earlier keys that are kept in addition, for a sequence that is shortened
    int64_t sinks      # first keys that every token sees
    bint is_tail       # newest tokens next to sealed blocks: sequences keep those that are not sealed


# The first position that the token at position `length` sees.
cdef inline int64_t first_seen(const KeptKeys& keys, int64_t length) noexcept:
    cdef int64_t first = max(0, length - (keys.window - 1))
    return first // keys.chunk * keys.chunk if keys.chunk > 0 else first


# The first position whose key a sequence of `length` tokens keeps.
cdef inline int64_t first_kept(const KeptKeys& keys, int64_t length) noexcept:
    return first_seen(keys, max(0, length - keys.lookahead))


# The blocks of the sinks.
cdef inline int64_t sink_blocks(const KeptKeys& keys, int64_t block_size) noexcept:
    return (keys.sinks + block_size - 1) // block_size


# `attended` is an AttendedKeys with a limit.
cdef inline KeptKeys kept_keys(int32_t group, object attended, bint is_tail=False):
    cdef KeptKeys keys
    keys.group = group
    keys.chunk = attended.chunk or 0
    keys.window = min(attended.window or 1, INT32_MAX)
    keys.lookahead = min(attended.lookahead, INT32_MAX)
    keys.sinks = attended.sink_tokens
    keys.is_tail = is_tail
    return keys
