"""The first half of a step: take its blocks, copy on write, fill its buffers and plan its attention."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagecore.cache.prefix._prefix cimport free_blocks, free_slots, give_up_truncated, num_unused_states
from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.index.states._states cimport StateTable
from pagecore.ops.planning._plan cimport AttentionPlan


cdef bint take(StepRecord step, list plans, copy) except -1:
    cdef bint is_taken
    cdef DraftIds drafts = step.offered_ids
    step.offered_ids = None
    if drafts is not None:
        drafts.check(step.plan)
    read_tree(step, plans)
    cdef list writers = step.plan.list_writers()
    if step.state.prefix is not None and (writers or step.states is not None):
        # A step that is undone shortens the prefixes that its sequences share past their states.
        step.state.prefix.reserve_moves(
            2 * len(writers) + (0 if step.states is None else 2 * step.plan.num_sequences)
        )
    if step.state.tenants is not None:
        step.state.tenants.note_held(step.plan.sequences, step.held)
    if step.cross is not None and not step.cross.take(step.plan.sequences, step.plan.counts.data()):
        return False
    try:
        is_taken = take_blocks(step, writers)
    except BaseException:
        if step.cross is not None:
            step.cross.give_back()
        raise
    if not is_taken:
        if step.cross is not None:
            step.cross.give_back()
        return False
    # `writers` is empty if their truncated blocks had to be evicted to make room. Otherwise that comes last, so that
    # a step which is undone leaves the prefix cache unchanged.
    begin_flight(step)
    if drafts is not None:
        drafts.fill(step.plan, step.buffers)
    try:
        if step.state.tenants is not None:
            step.state.tenants.list_stale(step.plan.sequences, step.held, step.copies, step.stale)
        if (
            step.staged is not None or step.has_uncopied or step.has_stale() or step.has_state_moves()
            or step.writes_cross()
        ):
            copy(step.copied(), step.pair_arrays(step.stale))
        if step.state.tenants is not None:
            step.state.tenants.settle(step.plan.sequences, step.stale)
        if step.staged is None:
            for plan in plans:
                replan(step, plan)
            if step.cross is not None and not step.plan.is_arrival:
                step.cross.replan(step.buffers)
    except BaseException:
        undo(step)
        raise
    for writer in writers:
        give_up_truncated(step.state.prefix, <Sequence>writer)
    step.has_uncopied = False
    step.moved.clear()
    step.sealed_pairs = None
    return True


cdef int read_tree(StepRecord step, list plans) except -1:
    """Check the trees that were offered for the step, and note in the plans whether it has any."""
    cdef StepTree tree = step.offered
    step.offered = None
    if tree is not None:
        tree.check(step.plan, step.buffers)
    step.tree = tree
    for plan in plans:
        (<AttentionPlan?>plan).set_tree(tree is not None)
    return 0


cdef bint take_blocks(StepRecord step, list writers) except -1:
    """Take the blocks of every group, evicting cached blocks where free ones are short; all or nothing."""
    cdef StepPlan plan = step.plan
    cdef bint keeps = not plan.is_arrival  # the states of an arrival are not computed here
    if try_prepare(step, keeps):
        count_hits(step)
        return True
    if (step.state.prefix is None and step.states is None) or not plan.count_missing(writers):
        return False
    # Enough blocks can be freed: from here on nothing fails.
    count_hits(step)
    for writer in writers:
        give_up_truncated(step.state.prefix, <Sequence>writer)
    del writers[:]
    if step.states is not None:
        keeps = keeps and free_for_checkpoints(step)
        if not keeps:
            free_for_step(step)
    while not try_prepare(step, keeps):
        step.state.tables.shortage_raw(
            plan.rows.data(), plan.counts.data(), plan.num_sequences, plan.missing, plan.first_blocks
        )
        if step.state.prefix is None or free_blocks(step.state.prefix, plan.missing) == 0:
            return False
    return True


cdef void count_hits(StepRecord step) noexcept:
    """Count the prefixes of tentative sequences whose first step this is, before it evicts others."""
    cdef int32_t i
    if step.state.prefix is None or step.state.prefix.num_tentative == 0:
        return
    for i in range(step.plan.num_sequences):
        if step.plan.counts[i] > 0:
            step.state.prefix.count_first(<Sequence>step.plan.sequences[i], step.plan.rows[i])


cdef bint try_prepare(StepRecord step, bint keeps) except -1:
    """Take the blocks and slots of a step, all or none; with `keeps` also those of its checkpoints."""
    cdef StepPlan plan = step.plan
    cdef StateTable states = step.state.states
    cdef bint has_blocks
    if states is None:
        return step.state.tables.try_prepare_raw(
            plan.rows.data(), plan.counts.data(), plan.num_sequences, step.buffers, plan.first_blocks
        )
    if not states.try_reserve_raw(plan.row_span(), plan.count_span(), step.states, keeps):
        return False
    try:
        has_blocks = step.state.tables.try_prepare_raw(
            plan.rows.data(), plan.counts.data(), plan.num_sequences, step.buffers, plan.first_blocks
        )
    except BaseException:
        states.give_back_raw()
        raise
    if not has_blocks:
        states.give_back_raw()
        return False
    states.take_raw(plan.row_span(), plan.count_span(), step.states)
    return True


cdef bint free_for_checkpoints(StepRecord step) except -1:
    """Evict states that only the tree holds until a step with checkpoints has slots; return False if too few are."""
    cdef StateTable states = step.state.states
    cdef int64_t lacking = states.shortage_raw(step.plan.row_span(), step.plan.count_span(), True)
    if states.is_quantised():
        if lacking > 0:
            return False  # no cached state has the slot of a running one
        lacking = states.checkpoint_shortage_raw()
    if lacking > 0 and (step.state.prefix is None or num_unused_states(step.state.prefix) < lacking):
        return False
    if lacking > 0:
        free_slots(step.state.prefix, lacking)
    return True


cdef int free_for_step(StepRecord step) except -1:
    """Make slots free for a step without new checkpoints, those of idle rows' checkpoints if necessary."""
    cdef StateTable states = step.state.states
    cdef int64_t lacking = states.shortage_raw(step.plan.row_span(), step.plan.count_span(), False)
    if lacking == 0:
        return 0
    if step.state.prefix is None or num_unused_states(step.state.prefix) < lacking:
        states.drop_all_checkpoints_raw()
        lacking = states.shortage_raw(step.plan.row_span(), step.plan.count_span(), False)
    if lacking > 0 and step.state.prefix is not None:
        free_slots(step.state.prefix, lacking)
    return 0


cdef int begin_flight(StepRecord step) except -1:
    cdef size_t group
    cdef int32_t i
    cdef Sequence sequence
    step.in_flight = True
    step.has_uncopied = False
    for i in range(step.plan.num_sequences):
        sequence = <Sequence>step.plan.sequences[i]
        sequence.pending = step.plan.counts[i]
        sequence.flight = step
        sequence.step_index = i
        if step.state.seals is not None:
            step.buffers.sealed_lens_data[i] = sequence.sealed
    for group in range(step.copies.size()):
        step.state.tables.take_copies_raw(<int64_t>group, step.copies[group])
        step.has_uncopied = step.has_uncopied or step.copies[group].size() > 0
        if step.copies_bytes(group):
            step.state.num_copied_blocks += <int64_t>step.copies[group].size()
    if step.cross is not None:
        step.cross.begin(step, step.plan.sequences, step.plan.num_sequences)
    fill_token_ids(step)
    if step.tree is not None:
        step.tree.fill(step.plan, step.buffers)
        if step.states is not None:
            step.tree.fill_states(step.plan, step.states)
    return 0


cdef void fill_token_ids(StepRecord step) noexcept:
    """Write the ids of the step's tokens, -1 for ids that are not known yet; positions count dropped tokens."""
    cdef int32_t* out = step.buffers.token_ids_data
    cdef int32_t* positions = step.buffers.positions_data
    cdef int32_t i, k, count, known
    cdef Sequence sequence
    for i in range(step.plan.num_sequences):
        sequence = <Sequence>step.plan.sequences[i]
        count = step.plan.counts[i]
        known = max(0, min(count, sequence.known - sequence.computed))
        if known > 0:
            memcpy(out, sequence.ids + sequence.computed, known * sizeof(int32_t))
        for k in range(known, count):
            out[k] = -1
        if sequence.dropped > 0:
            for k in range(count):
                positions[k] += sequence.dropped
        out += count
        positions += count


cdef int replan(StepRecord step, AttentionPlan plan) except -1:
    """Plan the attention of one group for the prepared step; padding rows have no queries."""
    plan.replan(step.buffers.cu_query_lens_data, step.buffers.seq_lens_data, step.buffers.max_sequences)
    return 0
