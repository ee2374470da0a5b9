from libc.stdint cimport int32_t, int64_t

from pagecore.cache.prefix._cache cimport PrefixCache
from pagecore.native.std cimport vector

# Subtract from `missing` the blocks of each group that eviction can free for a step in which `writers` write to the
# blocks inside which they were truncated; `first_blocks` as in `StepPlan`.
cdef void subtract_evictable(
    PrefixCache prefix, vector[int64_t]& missing, list writers, const vector[int32_t]& first_blocks
) noexcept

# Evict until `left` blocks of each group are freed or nothing more can be evicted; subtract the freed blocks from
# `left`, and return the number of blocks that the tree evicted.
cdef int64_t free_blocks(PrefixCache prefix, vector[int64_t]& left) noexcept

# Evict up to `amount` blocks of a component; subtract the freed blocks of each group from `left`, and return the number
# of blocks that the tree evicted.
cdef int64_t evict(PrefixCache prefix, int32_t component, int64_t amount, vector[int64_t]& left) noexcept

# Drop the references to what the tree evicted, by lane, states last; subtract the freed blocks of each group from
# `left`.
cdef void free_gone(PrefixCache prefix, const vector[vector[int32_t]]& gone, vector[int64_t]& left) noexcept

# Evict states until `wanted` slots are freed or no state is left; return the number of freed slots. A state that a row
# holds too frees none.
cdef int64_t free_slots(PrefixCache prefix, int64_t wanted) noexcept

# Evict up to `amount` states, also those that idle rows keep as their checkpoints; return the number of slots that this
# freed, or -1 if no state is left.
cdef int64_t evict_states(PrefixCache prefix, int64_t amount) noexcept

# The number of states that only the tree holds.
cdef int64_t num_unused_states(PrefixCache prefix) except -1

# Evict every block that no row uses, and every state; return the number of freed blocks.
cdef int64_t clear(PrefixCache prefix) noexcept
