from libc.stdint cimport int32_t

from pagecore.cache.prefix._cache cimport PrefixCache
from pagecore.cache.sequences._sequence cimport Sequence

# Release the tree's claim on the block inside which a sequence was truncated, before the sequence writes to it.
cdef void give_up_truncated(PrefixCache prefix, Sequence sequence) noexcept

# Return True if the sequence will be the only holder of its truncated block of a lane once all `writers` gave theirs
# up, so that its write needs no copy.
cdef bint becomes_exclusive(PrefixCache prefix, Sequence sequence, int32_t lane, list writers) noexcept
