"""The plan of a step: its sequences, their numbers of new tokens, and the blocks that those need."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint64_t

from pagecore.cache.prefix._prefix cimport num_unused_states, subtract_evictable
from pagecore.cache.sequences._kept cimport KeptKeys, sink_blocks
from pagecore.cache.sequences._sequences cimport CrossContents, Sequence, require_each
from pagecore.cache.state._state cimport CacheState, Held
from pagecore.index._integers cimport Integers, as_int64, as_integers
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.states._states cimport StateTable
from pagecore.index.tables._native cimport Int32s
from pagecore.native.std cimport vector

from pagecore.cache.sequences._sequences import as_list
from pagecore.errors import InvalidSequence, ShapeError, UnsupportedDtype, UnsupportedOption


cdef class StepPlan:
    """The sequences of a step and the number of tokens that each brings.

    Attributes
    ----------
    num_sequences, num_tokens : int
    is_arrival : bool
        The step is one sequence whose tokens were computed elsewhere.
    arriving_sealed : int
        Tokens of that sequence that are in sealed blocks after the step; -1 if its commit seals them.
    """

    def __cinit__(self, CacheState state not None):
        self.state = state
        self.sequences = []
        self.first_blocks.reserve(<size_t>state.tables.num_groups)
        self.missing.resize(<size_t>state.tables.num_groups)

    cdef int reserve(self, size_t num_sequences) except -1:
        if num_sequences > self.rows.size():
            self.rows.resize(num_sequences)
            self.counts.resize(num_sequences)
            self.converted.resize(num_sequences)
        return 0

    cdef int fill(
        self, list sequences, object counts, bint is_arrival, object num_sealed, int64_t max_sequences,
        int64_t max_tokens
    ) except -1:
        cdef list checked
        cdef int64_t num_tokens, sealed = -1 if num_sealed is None else as_int64(num_sealed, "num_sealed_tokens")
        cdef uint64_t number
        cdef int32_t i
        if len(sequences) > max_sequences:
            raise ShapeError(f"{len(sequences)} sequences are given; the batch has room for {max_sequences}")
        self.reserve(len(sequences))
        self.num_fills += 1
        number = self.num_fills
        num_tokens = self.convert(counts, <int32_t>len(sequences))
        if num_tokens > max_tokens:
            raise ShapeError(f"the step has {num_tokens} tokens; the batch has room for {max_tokens}")
        checked = require_each(self.state, sequences, True)
        if num_sealed is not None:
            check_sealed(self.state, <Sequence>checked[0], num_tokens, sealed)
        elif is_arrival:
            check_whole(self.state)
        if self.num_fills != number:
            raise InvalidSequence("converting the counts prepared the same batch; pass plain integers as counts")
        self.sequences = checked
        self.num_sequences = <int32_t>len(checked)
        self.num_tokens = num_tokens
        self.is_arrival = is_arrival
        self.arriving_sealed = <int32_t>sealed
        for i in range(self.num_sequences):
            self.counts[i] = self.converted[i]
        return self.list_rows()

    cdef int recheck(self) except -1:
        require_each(self.state, self.sequences, True)
        if self.arriving_sealed >= 0:
            check_sealed(self.state, <Sequence>self.sequences[0], self.num_tokens, self.arriving_sealed)
        elif self.is_arrival:
            check_whole(self.state)
        return self.list_rows()

    cdef int list_rows(self) except -1:
        cdef Sequence sequence
        cdef int64_t length
        cdef int32_t i
        for i in range(self.num_sequences):
            sequence = <Sequence>self.sequences[i]
            self.rows[i] = sequence.row
            if self.state.states is not None and self.state.prefix is not None:
                # The ids of the step's tokens may follow later.
                length = max(<int64_t>sequence.known, <int64_t>sequence.computed + self.counts[i])
                length = min(length, <int64_t>INT32_MAX)
                self.state.states.set_end_raw(self.rows[i], self.state.prefix.max_match_length(<int32_t>length))
        self.first_blocks.clear()
        if self.is_arrival:
            self.state.list_first_kept(
                <int64_t>(<Sequence>self.sequences[0]).computed + self.counts[0], self.num_sealed(), self.first_blocks
            )
        return 0

    cdef int32_t num_sealed(self) noexcept:
        """Return the tokens in sealed blocks after an arrival; -1 if its commit seals them."""
        return -1 if self.arriving_sealed < 0 else max(self.arriving_sealed, (<Sequence>self.sequences[0]).sealed)

    cdef int64_t convert(self, object counts, int32_t num_sequences) except -1:
        """Convert the counts, an int for all sequences or one for each; return their sum."""
        cdef Integers given
        cdef int64_t total = 0
        cdef int32_t i
        if type(counts) is list or type(counts) is tuple:
            # One by one: for the few numbers of a step that is faster than an array.
            check_size(len(counts), num_sequences)
            try:
                for i in range(num_sequences):
                    self.converted[i] = checked_count(as_int64(counts[i], "count"))
            except UnsupportedDtype:
                as_integers(counts, "count", ShapeError)  # raises ShapeError for nested lists
                raise
        else:
            given = as_integers(counts, "count", ShapeError)
            if not given.is_scalar:
                check_size(given.size, num_sequences)
            for i in range(num_sequences):
                self.converted[i] = checked_count(given.data[0] if given.is_scalar else given.data[i])
        for i in range(num_sequences):
            total += self.converted[i]
        return total

    cdef list list_writers(self):
        cdef list writers = []
        cdef int32_t i
        if self.state.prefix is not None and self.state.prefix.num_truncated:
            for i in range(self.num_sequences):
                if self.counts[i] > 0 and (<Sequence>self.sequences[i]).hold.truncated_inside_block:
                    writers.append(self.sequences[i])
        return writers

    cdef int count_lacking(self) except -1:
        cdef KeptKeys keys
        cdef size_t group
        self.state.tables.shortage_raw(
            self.rows.data(), self.counts.data(), self.num_sequences, self.missing, self.first_blocks
        )
        if self.limits.empty():
            return 0
        self.lacking.resize(self.missing.size())
        for keys in self.state.kept:
            group = <size_t>keys.group
            self.cap_counts(keys)
            self.state.tables.shortage_raw(
                self.rows.data(), self.converted.data(), self.num_sequences, self.lacking, self.first_blocks
            )
            self.missing[group] = self.lacking[group]
        return 0

    cdef int cap_counts(self, const KeptKeys& keys) except -1:
        """Write to `converted` the tokens for which a row of a group with a window takes blocks up to the limit.

        Blocks that the row does not keep are released before the last of those tokens, and do not count. Nor do blocks
        that another row holds too, which do not become free when this row releases them.
        """
        cdef int32_t i
        cdef int64_t length, blocks, held, passed, sinks
        for i in range(self.num_sequences):
            length = (<Sequence>self.sequences[i]).computed
            blocks = <int64_t>self.state.tables.row_raw(self.rows[i], keys.group).size()
            passed = self.state.first_kept_of(keys, <Sequence>self.sequences[i]) // self.state.block_size
            sinks = min(passed, sink_blocks(keys, self.state.block_size))
            held = self.num_own(i, keys.group, 0, sinks) + self.num_own(i, keys.group, passed, blocks)
            self.converted[i] = <int32_t>min(
                <int64_t>self.counts[i],
                (blocks + max(0, self.limits[keys.group] - held)) * self.state.block_size - length,
            )
        return 0

    cdef int64_t num_own(self, int32_t index, int32_t group, int64_t first, int64_t end) noexcept:
        """Return the number of blocks of a row, from index `first` to before `end`, that no other row holds."""
        cdef Sequence sequence = <Sequence>self.sequences[index]
        cdef Int32s blocks = self.state.tables.row_raw(self.rows[index], group)
        cdef BlockPool pool = <BlockPool>self.state.tables.pools[group]
        cdef int64_t at, own = 0
        cdef int32_t others, lane
        for at in range(first, end):
            others = pool.ref_count_raw(blocks.data()[at]) - 1 if blocks.data()[at] != 0 else 0
            if others == 1 and self.state.prefix is not None and group < self.state.prefix.num_lanes:
                lane = self.state.prefix.lane_of[group]
                if self.state.prefix.tree_block(sequence, <int32_t>at, lane) == blocks.data()[at]:
                    others = 0
            own += others == 0
        return own

    cdef bint count_missing(self, list writers) except -1:
        cdef size_t group
        self.state.lacks_slots = False
        if self.state.cross is not None:
            self.state.cross.is_short = False
        self.count_lacking()
        if self.state.prefix is not None:
            subtract_evictable(self.state.prefix, self.missing, writers, self.first_blocks)
        self.count_missing_slots()
        for group in range(self.missing.size()):
            if self.missing[group] > 0:
                return False
        self.state.lacks_slots = self.missing_slots > 0
        return not self.state.lacks_slots

    cdef int count_missing_slots(self) except -1:
        """Count the slots that a step without checkpoints lacks: cached states and checkpoints of idle rows can go."""
        cdef StateTable states = self.state.states
        self.missing_slots = 0
        if states is None or states.shortage_raw(self.row_span(), self.count_span(), False) == 0:
            return 0
        self.missing_slots = self.least_slots(0)
        return 0

    cdef int64_t least_slots(self, int64_t others) except -1:
        cdef vector[int32_t] cached
        if self.state.prefix is not None:
            cached = self.state.prefix.tree.native.held_ids(self.state.prefix.tree.num_lanes)
        return self.state.states.least_shortage_raw(
            self.row_span(), self.count_span(), Int32s(cached.data(), cached.size()), others
        )

    cdef Int32s row_span(self) noexcept:
        return Int32s(self.rows.data(), <size_t>self.num_sequences)

    cdef Int32s count_span(self) noexcept:
        return Int32s(self.counts.data(), <size_t>self.num_sequences)

    def num_cross_tokens(self):
        """Return the number of encoder tokens that the step writes."""
        if self.state.cross is None:
            return 0
        return num_tokens_of(contents_to_write(self.state.cross, self.sequences, self.counts.data()))

    cdef list missing_cross(self):
        cdef CrossContents contents = self.state.cross
        if contents is None:
            return []
        contents.count_needed(contents_to_write(contents, self.sequences, self.counts.data()))
        missing = []
        for needed, free in zip(contents.needed, contents.available()):
            missing.append(max(0, needed - free))
        return missing

    def has_room(self):
        """Return True if the blocks and slots of the step are free or can be freed by eviction."""
        return self.count_missing(self.list_writers())


cdef int check_size(Py_ssize_t size, int32_t num_sequences) except -1:
    if size != num_sequences:
        raise ShapeError(f"{size} counts are given for {num_sequences} sequences; give one for each")
    return 0


cdef int check_sealed(CacheState state, Sequence sequence, int64_t count, int64_t sealed) except -1:
    """Raise an error unless `sealed` tokens of a sequence can arrive in sealed blocks."""
    if state.seals is None:
        raise UnsupportedOption(
            "num_sealed_tokens is given, but no layer has sealed blocks (format kivi2 or kivi4); leave it out"
        )
    if not 0 <= sealed <= sequence.computed + count or sealed % state.block_size:
        raise ShapeError(
            f"num_sealed_tokens is {sealed}; with {sequence.computed} computed tokens and {count} that arrive it must "
            f"be a multiple of block_size, {state.block_size}, up to {sequence.computed + count}"
        )
    if sealed > sequence.sealed and sequence.computed > sequence.sealed:
        raise UnsupportedOption(
            f"num_sealed_tokens is {sealed}, but sequence {sequence.id!r} has {sequence.computed} computed tokens, of "
            f"which {sequence.sealed} are sealed; sealed blocks can only follow sealed blocks: add the sequence again"
        )
    return 0


cdef int check_whole(CacheState state) except -1:
    """Raise UnsupportedOption if an arrival of numbers would seal blocks of which a window has left only a part."""
    cdef KeptKeys keys
    for keys in state.kept:
        if state.seals is not None and state.seals.has_sealed(keys.group):
            raise UnsupportedOption(
                f"group {keys.group} has sealed blocks and a window, so an arrival of numbers cannot seal the blocks "
                "before the window; pass num_sealed_tokens and copy codes and scales"
            )
    return 0


cdef int32_t checked_count(int64_t count) except -1:
    if not 0 <= count <= INT32_MAX:
        raise ShapeError(f"a count is {count}; counts are 0 to {INT32_MAX}")
    return <int32_t>count


def plan_step(CacheState state not None, list sequences not None, counts, bint is_arrival=False, num_sealed=None):
    """Return the plan of a step of any size; call it under the lock of the cache."""
    cdef StepPlan plan = StepPlan(state)
    plan.fill(sequences, counts, is_arrival, num_sealed, INT32_MAX, INT32_MAX)
    return plan


def shortage(CacheState state not None, sequences, counts, list limits=None):
    """Return the number of blocks that each group lacks for a step, counting free and evictable blocks.

    In a cache with states the last entry is the number of slots that the step lacks.

    With `limits`, the counts are computed in several steps, between which windows release blocks: a row then holds at
    most `limits[group]` blocks of a group with a window. The entries of other groups are not used.
    """
    cdef list listed = as_list(sequences)
    _guard = Held(state.lock)
    state.sweep()
    plan = limited_plan(state, listed, counts, limits)
    plan.has_room()
    missing = missing_of(plan) + plan.missing_cross()
    return missing if state.states is None else [*missing, plan.missing_slots]


def lacked(CacheState state not None, list sequences not None, counts, list limits=None):
    """Return `shortage` without eviction: the blocks that each group lacks of its free ones. Hold the lock."""
    cdef StepPlan plan = limited_plan(state, sequences, counts, limits)
    plan.count_lacking()
    return missing_of(plan)


def lacked_slots(CacheState state not None, list sequences not None, counts):
    """Return a list of the cached states that a step must evict, or [] in a cache without states. Hold the lock.

    Slots for checkpoints are included if eviction can free them.
    """
    cdef StepPlan plan
    cdef int64_t slots
    if state.states is None:
        return []
    plan = plan_step(state, sequences, counts)
    slots = state.states.shortage_raw(plan.row_span(), plan.count_span(), True)
    if state.states.is_quantised():  # cached states have slots of checkpoints alone
        slots = state.states.checkpoint_shortage_raw() if slots == 0 else 0
        return [slots if slots <= 0 or (state.prefix is not None and num_unused_states(state.prefix) >= slots) else 0]
    if slots > 0 and (state.prefix is None or num_unused_states(state.prefix) < slots):
        slots = state.states.shortage_raw(plan.row_span(), plan.count_span(), False)
    return [max(0, slots)]


def least_slots(CacheState state not None, list sequences not None, counts, int64_t others):
    """Return the state slots that a step without checkpoints lacks after all eviction. Hold the lock.

    `others` slots are for sequences that have no rows yet.
    """
    cdef StepPlan plan = plan_step(state, sequences, counts)
    return plan.least_slots(others)


cdef StepPlan limited_plan(CacheState state, list sequences, object counts, list limits):
    cdef StepPlan plan = plan_step(state, sequences, counts)
    for limit in limits or ():
        plan.limits.push_back(INT32_MAX if limit is None else min(limit, INT32_MAX))
    return plan


cdef list missing_of(StepPlan plan):
    cdef int64_t count
    cdef list missing = []
    for count in plan.missing:
        missing.append(max(0, count))
    return missing
