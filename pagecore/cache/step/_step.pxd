from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.cache.sequences._kept cimport KeptKeys
from pagecore.cache.sequences._sequences cimport CrossContent, CrossContents, Sequence
from pagecore.cache.state._state cimport CacheState
from pagecore.index._integers cimport Slots
from pagecore.index.states._states cimport StateBuffers
from pagecore.index.tables._native cimport BlockCopy, Int32s
from pagecore.index.tables._tables cimport StepBuffers
from pagecore.native.std cimport vector


# cross.pxi

cdef class CrossStep:
    cdef readonly CrossContents contents
    cdef readonly StepBuffers buffers   # rows, lengths and slots of encoder tokens
    cdef public list plans              # AttentionPlan of each cross group that has one
    cdef public object staged           # StagedPart of a batch on a device; None on the host
    cdef list written                   # contents that the step writes, in the order of their slots

    # Takes the blocks of the contents that the step writes; returns False, with nothing changed, if blocks are short.
    # Raises ShapeError or InvalidSequence for sequences that cannot attend.
    cdef bint take(self, list sequences, const int32_t* counts) except -1
    # Takes the blocks back before `begin`.
    cdef void give_back(self) noexcept
    # Marks the contents as written by `step`, and fills the buffers for `n` sequences.
    cdef void begin(self, object step, list sequences, int32_t n) noexcept
    cdef void write_slots(self, CrossContent content, int32_t first) noexcept
    # Plans the attention of each group for the queries of the step.
    cdef int replan(self, StepBuffers queries) except -1
    # The contents are written, or their blocks are taken back and their slots become padding.
    cdef void end(self, bint is_kept) noexcept
    # The slots of a content that loses its last holder become padding: first those on the device, then on the host.
    cdef int skip_on_device(self, CrossContent content) except -1
    cdef void skip(self, CrossContent content) noexcept


# Returns the contents that a step of these sequences writes, each once, in the order of their first sequences.
cdef list contents_to_write(CrossContents contents, list sequences, const int32_t* counts)
cdef int64_t num_tokens_of(list contents) noexcept


# plan.pxi

cdef class StepPlan:
    cdef readonly CacheState state
    cdef list sequences
    cdef readonly int32_t num_sequences
    cdef readonly int64_t num_tokens
    cdef readonly bint is_arrival
    cdef readonly int32_t arriving_sealed  # tokens in sealed blocks after an arrival; -1 if its commit seals them
    cdef uint64_t num_fills
    # One entry for each sequence; the vectors may be longer.
    cdef vector[int32_t] rows
    cdef vector[int32_t] counts
    cdef vector[int32_t] first_blocks  # of an arrival: the first block that each group takes; else empty
    cdef vector[int64_t] missing       # of each group
    cdef int64_t missing_slots         # of states; 0 in a cache without states
    cdef vector[int64_t] limits        # the most blocks of a row in each group, for tokens of several steps; else empty
    cdef vector[int64_t] lacking       # scratch of `count_lacking`
    cdef vector[int32_t] converted     # scratch of `fill` and `count_lacking`

    cdef int reserve(self, size_t num_sequences) except -1
    # Checks and stores the sequences of a step and their counts.
    cdef int fill(
        self, list sequences, object counts, bint is_arrival, object num_sealed, int64_t max_sequences,
        int64_t max_tokens
    ) except -1
    # Checks the stored sequences again, after code of the caller may have run.
    cdef int recheck(self) except -1
    cdef int32_t num_sealed(self) noexcept
    cdef int64_t convert(self, object counts, int32_t num_sequences) except -1
    cdef int list_rows(self) except -1
    # The sequences with new tokens that were truncated inside a block which they share with the tree.
    cdef list list_writers(self)
    # Counts the blocks that each group lacks; a row takes no more than its group's limit leaves.
    cdef int count_lacking(self) except -1
    # The blocks of encoder tokens that each cross group lacks.
    cdef list missing_cross(self)
    cdef int cap_counts(self, const KeptKeys& keys) except -1
    cdef int64_t num_own(self, int32_t index, int32_t group, int64_t first, int64_t end) noexcept
    # Counts the blocks that each group lacks and the state slots, evictable ones subtracted; returns True if none lack.
    cdef bint count_missing(self, list writers) except -1
    cdef int count_missing_slots(self) except -1
    # The slots that a step without checkpoints lacks if other rows take `others` slots; see count_missing_slots().
    cdef int64_t least_slots(self, int64_t others) except -1
    cdef Int32s row_span(self) noexcept
    cdef Int32s count_span(self) noexcept


# draft_ids.pxi: ids of the drafts of a step.

cdef class DraftIds:
    cdef list given  # of each sequence: Integers, or None without drafts

    # Raises ShapeError unless the drafts are new tokens of the plan's sequences whose ids they do not know.
    cdef int check(self, StepPlan plan) except -1
    # Writes the ids over those of the step's tokens.
    cdef void fill(self, StepPlan plan, StepBuffers buffers) noexcept


# tree.pxi: trees of a step.

cdef class StepTree:
    cdef list given               # of each sequence: an int64 array, or None for a chain
    cdef vector[int64_t] parents  # of all tokens of the step, counted within their sequence
    cdef vector[int32_t] depths   # scratch of `fill`

    # Raises ShapeError unless the trees are those of the plan's sequences, and the buffers have room for their bits.
    cdef int check(self, StepPlan plan, StepBuffers buffers) except -1
    # Writes the bits of the step's tokens, and moves their positions to their depths.
    cdef void fill(self, StepPlan plan, StepBuffers buffers) noexcept
    # Lets each draft read the state of its parent; trees keep no checkpoint before they are accepted.
    cdef void fill_states(self, StepPlan plan, StateBuffers states) noexcept
    cdef int check_states(self, StepPlan plan, int32_t index, Slots given) except -1
    cdef bint is_chain(self, int32_t index) noexcept


# record.pxi

cdef class StepRecord:
    cdef readonly StepBuffers buffers
    cdef readonly StateBuffers states  # None in a cache without states
    cdef readonly CacheState state
    cdef StepPlan plan             # of the last load
    cdef readonly bint in_flight   # prepared, and neither committed nor abandoned yet
    cdef readonly bint is_lost     # its batch was collected
    cdef bint has_uncopied         # its copies on write have not run yet
    cdef bint is_device_stale      # the device may have padding for slots that the host still has
    cdef public object staged      # StagedPart of a batch on a device; None on the host
    cdef public CrossStep cross    # of a cache with cross attention; else None
    # Scratch of max_sequences entries each, so that a step does not allocate.
    cdef vector[int32_t] accepted
    cdef vector[int32_t] live_rows
    cdef vector[int32_t] lengths
    cdef vector[int32_t] positions
    cdef vector[vector[BlockCopy]] copies  # copies on write of each group
    cdef vector[int32_t] held              # in a cache that scrubs: blocks of the rows before the step, see `Tenants`
    cdef vector[vector[BlockCopy]] stale   # blocks of each group to be zeroed, as targets of a copy
    cdef public StepTree offered           # trees of the step that is taken next; None without trees
    cdef public DraftIds offered_ids       # ids of the drafts of that step; None if there are none
    cdef StepTree tree                     # of the last step
    cdef vector[int32_t] path              # accepted tokens of each sequence, at its first token in the flat arrays
    cdef vector[vector[int64_t]] moved     # of each group: slots that the last commit moved, source and target
    cdef vector[int32_t] sealed_to         # of each sequence: its sealed tokens after the step
    cdef readonly list sealed_pairs        # of each tail: blocks that the last commit sealed; None for none
    cdef vector[BlockCopy] saves           # scratch: quantised checkpoints of the step that is committed
    cdef vector[size_t] users              # threads that currently write or attend with the step

    cdef list pair_arrays(self, const vector[vector[BlockCopy]]& pairs)
    # False for a group of sealed blocks: a step shares those that it does not seal itself, and reads no others. With
    # `scrub` the copy replaces the bytes of another namespace.
    cdef bint copies_bytes(self, size_t group) noexcept
    cdef bint has_stale(self) noexcept
    # True if state slots must be zeroed, copied or loaded before the pass.
    cdef bint has_state_moves(self) noexcept
    # The rows of the first `live` entries of `live_rows`.
    cdef Int32s live_span(self, Py_ssize_t live) noexcept
    # True if the step writes encoder tokens.
    cdef bint writes_cross(self) noexcept
    cdef int require_in_flight(self, str verb) except -1
    cdef bint is_live(self, int32_t index) noexcept
    cdef list live(self)
    # Writes the rows of the live sequences and their lengths after the step; returns their number.
    cdef Py_ssize_t list_live(self, bint is_kept) noexcept
    # Index of the first token of a sequence in the flat arrays of the step.
    cdef int32_t first_token(self, int32_t index) noexcept
    # Raises DeviceError if changes of the step would now be recorded in a graph.
    cdef int check_reachable(self) except -1
    # Sends the slots of the host again.
    cdef int send_slots(self) except -1
    # Sends padding for sequences [first, last) of the step to the device; the host's slots follow after that.
    cdef int skip_on_device(self, int32_t first, int32_t last) except -1
    # The slots of an encoder output that loses its last holder become padding: on the device, then on the host.
    cdef int skip_content_on_device(self, CrossContent content) except -1
    cdef void skip_content(self, CrossContent content) noexcept
    # The slots of a sequence that is removed become padding: first those on the device, then those on the host.
    cdef int skip_sequence_on_device(self, Sequence sequence) except -1
    cdef void skip_sequence(self, Sequence sequence) noexcept


# path.pxi

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


# end.pxi

# Each of these does nothing, or ends the flight of the step; see the methods of `Step` with these names.
cdef int commit(StepRecord step, object accepted, object accepted_path, object moves, object save) except -1
cdef int abandon(StepRecord step) except -1
cdef int undo(StepRecord step) except -1
cdef int give_up(StepRecord step) except -1


# take.pxi

# Takes the blocks of the loaded step, fills its buffers and plans its attention; returns False, with nothing changed,
# if blocks are short. See `Step.take`.
cdef bint take(StepRecord step, list plans, copy) except -1


# step.pxi

cdef class Step(StepRecord):
    cdef void _leave(self, size_t thread) noexcept


cdef class BatchTicket:
    cdef Step step
