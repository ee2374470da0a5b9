"""The second half of a step: commit it, or undo everything that `take` did."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagecore.cache.prefix._prefix cimport number_namespaces, publish_one
from pagecore.cache.sequences._kept cimport KeptKeys, first_kept, first_seen, sink_blocks
from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.cache.state._state cimport CacheState, Held, Seals
from pagecore.index._integers cimport Integers, as_integers
from pagecore.index.tables._native cimport Int32s
from pagecore.ops.moves._moves cimport SlotMoves

from pagecore.errors import ShapeError


cdef int commit(StepRecord step, object accepted, object accepted_path, object moves, object save) except -1:
    cdef object given = None if accepted is None else as_integers(accepted, "accepted count", ShapeError)
    cdef list paths = None if accepted_path is None else as_paths(accepted_path)
    cdef list listed = []
    cdef list committed = None
    cdef Py_ssize_t live
    _guard = Held(step.state.lock)
    step.state.begin()
    step.require_in_flight("committed")
    step.state.wait_for(step)
    step.require_in_flight("committed")
    check_accepted(step, given, paths)
    if step.staged is not None:  # moves, checkpoints and later readers of the prefix follow the pass
        step.staged.join_stream()
    if paths is None:
        read_accepted(step, given)
    else:
        read_paths(step, paths)
        listed = reserve_moves(step, moves)
    if step.states is not None:
        select_paths(step, False)
    try:
        if step.states is not None and step.state.states.is_quantised():
            save_checkpoints(step, save)
        if step.state.seals is not None:
            seal_blocks(step, paths is not None)
        if step.state.prefix is not None:
            number_namespaces(step.state.prefix, step.live())
        if step.states is not None:
            check_states(step)
        if step.state.observer is not None:
            committed = step.live()
    except BaseException:
        if step.states is not None:
            select_paths(step, True)
        raise
    # From here on nothing fails.
    if step.state.seals is not None:
        note_sealed(step)
    if paths is not None:
        move_tokens(step, listed)
    live = step.list_live(True)
    if given is not None or paths is not None:
        step.state.tables.truncate_raw(step.live_rows.data(), step.lengths.data(), live, True)
        if step.states is not None:
            end_sharing(step)
    if step.states is not None:
        step.state.states.commit_raw(step.live_span(live), Int32s(step.positions.data(), <size_t>live))
    if step.plan.is_arrival:  # blocks that a window has passed were not written completely: they are not published
        release_windows(step, live)
    end_flight(step, True, paths is not None)
    if not step.plan.is_arrival:
        release_windows(step, live)
    for each in listed:
        (<SlotMoves>each).finish()
    if committed is not None:
        step.state.observer.committed(committed)
    return 0


cdef int check_accepted(StepRecord step, object accepted, list paths) except -1:
    if accepted is not None and paths is not None:
        raise ShapeError("accepted and accepted_path are both given; use one of them")
    if step.tree is not None and paths is None:
        raise ShapeError("the step has trees; pass accepted_path, the accepted tokens of each sequence, or abandon it")
    return 0


cdef int abandon(StepRecord step) except -1:
    _guard = Held(step.state.lock)
    step.state.begin()
    step.require_in_flight("abandoned")
    step.state.wait_for(step)
    step.require_in_flight("abandoned")
    reserve_returns(step)
    step.check_reachable()
    step.skip_on_device(0, step.plan.num_sequences)
    if step.staged is not None and step.cross is not None:
        step.cross.staged.send_slots((0, step.cross.buffers.num_tokens))
    undo_blocks(step, True)
    return 0


cdef int undo(StepRecord step) except -1:
    if not step.in_flight:
        return 0
    step.has_uncopied = True
    undo_blocks(step, False)
    if step.staged is not None:
        try:
            step.send_slots()  # padding by now
        except Exception:  # the device has failed already, which is why the step is undone
            pass
    return 0


cdef int give_up(StepRecord step) except -1:
    if not step.in_flight:
        return 0
    reserve_returns(step)
    undo_blocks(step, True)
    if step.staged is not None:
        try:
            step.staged.check_reachable()
            step.send_slots()
            step.staged.join_stream()
        except Exception:  # a stream that is captured or broken takes nothing; the batch is out of use anyway
            pass
    return 0


cdef int read_accepted(StepRecord step, object accepted) except -1:
    """Check and store the accepted count of each sequence; None accepts all tokens."""
    cdef Integers given = accepted
    cdef int32_t i, kept, count
    if given is not None and not given.is_scalar and given.size != step.plan.num_sequences:
        raise ShapeError(
            f"accepted has {given.size} counts; give one for each of the {step.plan.num_sequences} sequences"
        )
    for i in range(step.plan.num_sequences):
        count = step.plan.counts[i]
        kept = count if given is None else given.data[0 if given.is_scalar else i]
        if not 0 <= kept <= count:
            raise ShapeError(
                f"accepted[{i}] is {kept}; the step brought {count} tokens of that sequence: give 0 to {count}"
            )
        if step.plan.is_arrival and kept < count:
            raise ShapeError(
                f"accepted[{i}] is {kept} of the {count} tokens that arrived; an arrival has only the blocks that the "
                "token after all of them sees: commit it whole, or abandon it"
            )
        step.accepted[i] = kept
    return 0


cdef int release_windows(StepRecord step, Py_ssize_t live) except -1:
    """Release the blocks of each listed row that it does not keep; `lengths` has the rows' lengths.

    Next to sealed blocks, windows keep what the first token after those sees: later sequences may begin there.
    """
    cdef KeptKeys keys
    cdef size_t k
    for keys in step.state.kept:
        for k in range(<size_t>live):
            if step.state.seals is None:
                step.positions[k] = <int32_t>first_kept(keys, step.lengths[k])
            else:
                step.positions[k] = <int32_t>step.state.first_kept_of(
                    keys, <Sequence>step.state.by_row[step.live_rows[k]]
                )
        step.state.tables.release_before_raw(step.live_rows.data(), keys.group, step.positions.data(), live, keys.sinks)
    return 0


cdef void end_flight(StepRecord step, bint is_kept, bint has_paths=False) noexcept:
    """End the flight of each live sequence; rejected ids, and all ids after them, are forgotten."""
    cdef int32_t i
    cdef Sequence sequence
    for i in range(step.plan.num_sequences):
        if not step.is_live(i):
            continue
        sequence = <Sequence>step.plan.sequences[i]
        sequence.pending = -1
        sequence.flight = None
        if not is_kept:
            end_publish_limit(step.state, sequence, True)
        else:
            if has_paths:
                keep_path_ids(step, i)
            sequence.computed += step.accepted[i]
            if step.accepted[i] < step.plan.counts[i]:
                sequence.known = min(sequence.known, sequence.computed)
                end_publish_limit(step.state, sequence, False)
            if step.state.prefix is not None:
                publish_one(step.state.prefix, sequence, 0)
                if step.state.observer is None and step.accepted[i] > 0:
                    sequence.hold.is_new = False
    if step.cross is not None:
        step.cross.end(is_kept)
    step.in_flight = step.is_lost = step.is_device_stale = False


cdef void end_publish_limit(CacheState state, Sequence sequence, bint shares_ahead) noexcept:
    """Let a sequence publish all its blocks again if its row has none of the revoked ones any more.

    A row may share blocks past its computed tokens, unless tokens were rejected: it computes what it keeps then.
    """
    cdef int32_t group
    if state.prefix is None or sequence.computed > <int64_t>sequence.hold.publish_limit * state.block_size:
        return
    for group in range(state.tables.num_groups if shares_ahead else 0):
        if state.tables.row_raw(sequence.row, group).size() > <size_t>sequence.hold.publish_limit:
            return
    sequence.hold.publish_limit = INT32_MAX


cdef int undo_blocks(StepRecord step, bint has_run) except -1:
    """Give back the blocks and state slots that the step took; its slots on the host become padding."""
    cdef Py_ssize_t live
    if step.has_uncopied:
        undo_copies(step)
    live = step.list_live(False)
    if step.states is not None:
        if has_run and step.state.states.is_in_place:
            forget_unreachable(step, live)
        step.state.states.check_end_raw(step.live_span(live), has_run, step.lengths.data())
    step.state.tables.truncate_raw(step.live_rows.data(), step.lengths.data(), live, False)
    if step.states is not None:
        step.state.states.end_raw(step.live_span(live), has_run)
        step.states.native.skip(0, step.plan.num_sequences)
        return_sequences(step)
    step.buffers.native.skip_slots(0, step.buffers.num_tokens)
    end_flight(step, False)
    return 0


# -- sealed blocks -----------------------------------------------------------------------------------------------------


cdef int seal_blocks(StepRecord step, bint has_paths) except -1:
    """Seal the blocks of live sequences that `residual` newer tokens follow once the step is committed.

    Tokens that move to their place in an accepted path do so later: their blocks wait for another commit.
    """
    cdef int32_t i
    cdef Seals seals = step.state.seals
    step.sealed_pairs = None
    if step.plan.arriving_sealed >= 0:  # its sealed blocks are written
        if step.is_live(0):
            step.sealed_to[0] = step.plan.num_sealed()
        return 0
    if not set_reach(step, has_paths):
        return 0
    step.check_reachable()
    step.require_in_flight("committed")  # code of the caller may have run, and may run again in run()
    seals.begin()
    for i in range(step.plan.num_sequences):
        if step.is_live(i):
            seals.add(<Sequence>step.plan.sequences[i], step.sealed_to[i])
    step.sealed_pairs = seals.run()
    step.require_in_flight("committed")
    return 0


cdef bint set_reach(StepRecord step, bint has_paths) noexcept:
    """Set the tokens that each live sequence has in sealed blocks after the commit; return True if any grows."""
    cdef int32_t i
    cdef int64_t first = 0, length
    cdef Sequence sequence
    cdef bint grows = False
    for i in range(step.plan.num_sequences):
        if step.is_live(i):
            sequence = <Sequence>step.plan.sequences[i]
            length = <int64_t>sequence.computed + step.accepted[i]
            if has_paths and not stays(step, i, first):
                length = min(length, <int64_t>sequence.computed + step.state.seals.residual)
            step.sealed_to[i] = step.state.seals.reach(sequence, length)
            grows = grows or step.sealed_to[i] > sequence.sealed
        first += step.plan.counts[i]
    return grows


cdef void note_sealed(StepRecord step) noexcept:
    cdef int32_t i
    for i in range(step.plan.num_sequences):
        if step.is_live(i):
            (<Sequence>step.plan.sequences[i]).sealed = step.sealed_to[i]


# -- states ------------------------------------------------------------------------------------------------------------


cdef int check_states(StepRecord step) except -1:
    """Check that each live sequence has a state after its accepted tokens; write these counts to `positions`."""
    cdef Py_ssize_t live = step.list_live(True)
    cdef Py_ssize_t k = 0
    cdef int32_t i
    for i in range(step.plan.num_sequences):
        if step.is_live(i):
            step.positions[k] = step.accepted[i]
            k += 1
    step.state.states.check_commit_raw(step.live_span(live), Int32s(step.positions.data(), <size_t>live))
    return reserve_returns(step)


cdef void select_paths(StepRecord step, bint is_undone) noexcept:
    """Let each live sequence keep the states of the accepted tokens of its tree, or undo that."""
    cdef int32_t i
    cdef int64_t first = 0
    for i in range(step.plan.num_sequences if step.tree is not None else 0):
        if step.is_live(i) and step.plan.counts[i] <= 1 + step.state.states.draft_tokens:
            step.state.states.select_path_raw(
                (<Sequence>step.plan.sequences[i]).row,
                Int32s(step.path.data() + first, <size_t>step.accepted[i]), is_undone,
            )
        first += step.plan.counts[i]


cdef int save_checkpoints(StepRecord step, object save) except -1:
    """Quantise the checkpoints that the step keeps into the slots that it has reserved for them."""
    cdef Py_ssize_t live
    check_states(step)
    live = step.list_live(True)
    step.state.states.list_saves_raw(
        step.live_span(live), Int32s(step.positions.data(), <size_t>live), step.saves
    )
    step.states.native.set_saves(step.saves)
    if step.saves.size() > 0:
        save()
        step.require_in_flight("committed")  # code of the caller may have run
    return 0


cdef int reserve_returns(StepRecord step) except -1:
    """Reserve memory for prefixes that become shorter when the step ends."""
    if step.states is not None and step.state.prefix is not None:
        step.state.prefix.reserve_moves(2 * step.plan.num_sequences)
    return 0


cdef int end_sharing(StepRecord step) except -1:
    """Release the blocks past rejected tokens that a row shares with the tree, whose tokens may now differ."""
    cdef int32_t i, row, length
    cdef Sequence sequence
    if step.state.prefix is None:
        return 0
    for i in range(step.plan.num_sequences):
        sequence = <Sequence>step.plan.sequences[i]
        if not step.is_live(i) or step.accepted[i] == step.plan.counts[i]:
            continue
        length = sequence.computed + step.accepted[i]
        if step.state.prefix.num_held(sequence.hold) > length // step.state.block_size:
            row = sequence.row
            step.state.tables.truncate_raw(&row, &length, 1, False)
            step.state.prefix.truncate(sequence, length)
    return 0


cdef int forget_unreachable(StepRecord step, Py_ssize_t live) except -1:
    """Forget checkpoints to which rows cannot return, because a window has released keys that the next token sees."""
    cdef KeptKeys keys
    cdef Py_ssize_t k
    cdef int32_t length
    cdef Int32s blocks
    cdef size_t index
    for keys in step.state.kept:
        if keys.is_tail:  # a row that returns to a checkpoint has sealed blocks up to there, or no sealed ones after it
            continue
        for k in range(live):
            length = step.state.states.checkpoint_length_raw(step.live_rows[k])
            if length == 0:
                continue
            blocks = step.state.tables.row_raw(step.live_rows[k], keys.group)
            # The sinks before it are never released.
            index = <size_t>max(
                first_seen(keys, length) // step.state.block_size, sink_blocks(keys, step.state.block_size)
            )
            if index * step.state.block_size < <size_t>length and blocks.data()[index] == 0:
                step.state.states.forget_checkpoint_raw(step.live_rows[k])
    return 0


cdef int return_sequences(StepRecord step) except -1:
    """Take sequences back to the lengths of their states, which are in `lengths`."""
    cdef Py_ssize_t k = 0
    cdef int32_t i
    cdef Sequence sequence
    for i in range(step.plan.num_sequences):
        if not step.is_live(i):
            continue
        sequence = <Sequence>step.plan.sequences[i]
        if step.state.prefix is not None:
            step.state.prefix.truncate(sequence, step.lengths[k])
        sequence.computed = step.lengths[k]
        sequence.sealed = min(sequence.sealed, sequence.computed)  # checkpoints are at the ends of blocks
        sequence.cached = min(sequence.cached, sequence.computed)
        k += 1
    return 0


cdef int undo_copies(StepRecord step) except -1:
    """Restore the blocks that the rows held before copy-on-write, which has not run."""
    cdef size_t group
    for group in range(step.copies.size()):
        if step.copies[group].size() > 0:
            step.state.tables.undo_copies_raw(
                step.plan.rows.data(), step.plan.num_sequences, <int64_t>group, step.copies[group].data(),
                <Py_ssize_t>step.copies[group].size()
            )
            if step.copies_bytes(group):
                step.state.num_copied_blocks -= <int64_t>step.copies[group].size()
            step.copies[group].clear()
    step.has_uncopied = False
    return 0
