from libc.stdint cimport int32_t

from pagecore.cache.step._record cimport StepRecord

# Converts the accepted paths of a caller: a list with an Integers, or None, for each sequence.
cdef list as_paths(object accepted_path)
# Checks and stores the paths, and the number of accepted tokens of each sequence.
cdef int read_paths(StepRecord step, list paths) except -1
# Reserves the moves of the paths' tokens: `moves()` returns a SlotMoves for each group, or none for a cache without
# bytes. Returns an empty list if every token stays in place.
cdef list reserve_moves(StepRecord step, object moves)
# Moves the tokens of live sequences in every group, and notes the moved slots.
cdef void move_tokens(StepRecord step, list moves) noexcept
# The known ids of a sequence become those of its path. Call it before the computed tokens are counted.
cdef void keep_path_ids(StepRecord step, int32_t index) noexcept
