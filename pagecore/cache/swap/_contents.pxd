from pagecore.cache.state._state cimport CacheState
from pagecore.cache.swap._transfer cimport Transfer

# Plans the transfer of the outputs whose last sequences on the device are among those that leave it.
cdef Transfer plan_departure(CacheState state, list sequences, space, tuple pools)
cdef void store_contents(CacheState state, Transfer transfer) noexcept

# The way back: plan_contents(), then add_content_rows(), and take_back_contents() or remove_content_rows().
cdef list plan_contents(CacheState state, list coming)
cdef int add_content_rows(CacheState state, list transfers) except -1
cdef void remove_content_rows(CacheState state, list transfers) noexcept
cdef void take_back_contents(CacheState state, list transfers) noexcept
