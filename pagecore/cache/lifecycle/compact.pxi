"""Compact: keep some tokens of a sequence, in the order of their positions, and free the blocks of the others.

The plan checks the kept positions and reserves the moves; it may fail. The commit replaces the shared blocks that are
written, moves the tokens and shortens the sequence; nothing of it fails. Where blocks are sealed, the kept tokens are
written to new blocks before the commit; see `Repacked`.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memmove

from pagecore.cache.prefix._prefix cimport free_blocks, subtract_evictable
from pagecore.cache.sequences._kept cimport KeptKeys
from pagecore.cache.sequences._sequences cimport Sequence, require
from pagecore.cache.state._state cimport CacheState, Held, Seals
from pagecore.index._integers cimport Integers, as_integers
from pagecore.native.std cimport vector
from pagecore.ops.moves._moves cimport SlotMoves

from pagecore.errors import ShapeError, UnsupportedOption


cdef class Plan:
    """The kept positions of each group, and the blocks that held them."""
    cdef Sequence sequence
    cdef vector[vector[int32_t]] keep    # of each group
    cdef vector[vector[int32_t]] blocks  # of each group, before the commit
    cdef vector[int64_t] missing         # of each group
    cdef vector[int32_t] moved           # groups whose tokens move within the blocks of the row
    cdef vector[int32_t] replaced        # groups whose tokens get new blocks: sealed ones, and their tails
    cdef int32_t length
    cdef int32_t unmoved                 # leading tokens that stay in place in every group
    cdef int32_t sealed                  # tokens in sealed blocks afterwards


def compact(CacheState state not None, sequence, keep, moves):
    """Keep the computed tokens of a sequence at the positions `keep`; see `PagedKVCache.compact`.

    Parameters
    ----------
    keep : list
        Positions for all groups, or one entry for each group.
    moves : callable
        Returns one `SlotMoves` for each group of a list; an empty list for a cache without bytes.
    """
    converted = [as_integers(each, "kept position", ShapeError) for each in keep]
    _guard = Held(state.lock)
    while not try_compact(state, sequence, converted, moves):
        pass


cdef bint try_compact(CacheState state, sequence, list keep, moves) except -1:
    """Compact; return False, with nothing changed, if code of the caller has changed the cache meanwhile."""
    cdef Plan plan
    cdef Repacked repacked = None
    cdef list listed
    cdef size_t at
    state.begin()
    plan = make_plan(state, require(state, sequence, True), keep)
    if plan.length == plan.sequence.computed:
        return True
    listed = moves(list(plan.moved))
    for each in listed:
        (<SlotMoves>each).reserve(plan.length)
    if state.prefix is not None:
        state.prefix.reserve_moves(1)
    if state.seals is not None:
        repacked = Repacked(state, plan)
        if not repacked.fill():
            return False
    try:
        take_blocks(state, plan)
    except BaseException:
        if repacked is not None:
            repacked.give_back()
        raise
    # The row has changed: from here on nothing fails.
    if repacked is not None:
        repacked.place()
    for at in range(<size_t>len(listed)):
        move_tokens(state, plan, plan.moved[at], <SlotMoves>listed[at])
    shorten(state, plan)
    for each in listed:
        (<SlotMoves>each).finish()
    return True


cdef Plan make_plan(CacheState state, Sequence sequence, list keep):
    cdef Plan plan = Plan()
    cdef KeptKeys keys
    cdef size_t group, num_groups = <size_t>state.tables.num_groups
    cdef const int32_t* row
    cdef size_t count = <size_t>((sequence.computed + state.block_size - 1) // state.block_size)
    for keys in state.kept:
        if keys.is_tail:
            continue
        reach = f"window of {keys.window}" if keys.chunk == 0 else f"chunk of {keys.chunk}"
        raise UnsupportedOption(
            f"group {keys.group} has a {reach} tokens, which counts positions; "
            "compact serves caches whose groups see all tokens"
        )
    if state.states is not None:
        raise UnsupportedOption(
            f"sequence {sequence.id!r} has recurrent states, which cover every token; compact serves caches whose "
            "layers all attend"
        )
    if state.tenants is not None:
        raise UnsupportedOption(
            "compact does not zero blocks that change their namespace; make the cache without scrub=True"
        )
    plan.sequence = sequence
    plan.keep.resize(num_groups)
    plan.blocks.resize(num_groups)
    plan.missing.resize(num_groups)
    plan.unmoved = INT32_MAX
    for group in range(num_groups):
        read_keep(plan, keep[0 if len(keep) == 1 else group], group)
        row = state.tables.row_raw(sequence.row, <int64_t>group).data()
        plan.blocks[group].assign(row, row + count)
        if state.seals is None or not (state.seals.has_tail(<int32_t>group) or state.seals.has_sealed(<int32_t>group)):
            plan.moved.push_back(<int32_t>group)
    if state.seals is not None:
        plan_seals(state.seals, plan)
    return plan


cdef int plan_seals(Seals seals, Plan plan) except -1:
    """Set the groups that are replaced and the tokens in sealed blocks afterwards.

    These are whole blocks that `residual` tokens follow, and those after them that are sealed already.
    """
    cdef size_t tail
    cdef int32_t newest, sealed, size = seals.block_size
    for tail in range(seals.tails.size()):
        newest, sealed = seals.tails[tail], seals.sealed[tail]
        if not plan.keep[newest] == plan.keep[sealed]:
            raise ShapeError(
                f"keep has other positions for group {newest} than for group {sealed}, whose newest tokens it holds; "
                "give the same list for both"
            )
        plan.replaced.push_back(newest)
        plan.replaced.push_back(sealed)
    plan.sealed = max(0, plan.length - seals.residual) // size * size
    while is_sealed_block(seals, plan, plan.sealed):
        plan.sealed += size
    return 0


cdef bint is_sealed_block(Seals seals, Plan plan, int32_t start) noexcept:
    """Return True if the tokens from `start` on, in every group, are those of one sealed block."""
    cdef int32_t group, end = start + seals.block_size - 1
    if end >= plan.length:
        return False
    for group in seals.sealed:
        if plan.keep[group][start] % seals.block_size > 0 or plan.keep[group][end] >= plan.sequence.sealed:
            return False
        if plan.keep[group][end] - plan.keep[group][start] != end - start:
            return False
    return True


cdef int read_keep(Plan plan, Integers given, size_t group) except -1:
    """Check and copy the kept positions of a group."""
    cdef Sequence sequence = plan.sequence
    cdef Py_ssize_t i
    cdef int32_t before = -1, unmoved = 0
    if given.is_scalar:
        raise ShapeError("keep is a single number; give a list of positions")
    if group > 0 and given.size != plan.length:
        raise ShapeError(
            f"keep has {given.size} positions for group {group} and {plan.length} for group 0; give equal numbers"
        )
    plan.length = <int32_t>given.size
    for i in range(given.size):
        if not 0 <= given.data[i] < sequence.computed:
            give = f"0 to {sequence.computed - 1}" if sequence.computed > 0 else "an empty list"
            raise ShapeError(
                f"keep[{i}] is {given.data[i]}; sequence {sequence.id!r} has {sequence.computed} computed tokens: give "
                f"{give}"
            )
        if given.data[i] <= before:
            raise ShapeError(f"keep[{i}] is {given.data[i]} after {before}; positions must ascend: sort them")
        before = given.data[i]
        plan.keep[group].push_back(before)
        if before == i:
            unmoved += 1
    plan.unmoved = min(plan.unmoved, unmoved)
    return 0


cdef int take_blocks(CacheState state, Plan plan) except -1:
    """Give the sequence blocks of its own for the tokens that move, evicting cached blocks if free ones are short."""
    cdef bint is_saved = False
    while not state.tables.try_compact_raw(
        plan.sequence.row, plan.unmoved, plan.length, plan.missing, plan.replaced
    ):
        if not make_room(state, plan.missing, &is_saved):
            state.tables.fail_out_of_blocks()
    return 0


cdef bint make_room(CacheState state, vector[int64_t]& missing, bint* is_saved) except -1:
    """Evict cached blocks for those that are missing; return False if they are too few."""
    cdef vector[int64_t] left
    cdef vector[int32_t] none
    cdef size_t group
    if state.prefix is None:
        return False
    left.assign(missing.begin(), missing.end())
    subtract_evictable(state.prefix, left, [], none)
    for group in range(left.size()):
        if left[group] > 0:
            return False
    if state.observer is not None and not is_saved[0]:
        is_saved[0] = True
        state.observer.evicting(list(missing))
        return True
    return free_blocks(state.prefix, missing) > 0


cdef void move_tokens(CacheState state, Plan plan, size_t group, SlotMoves moves) noexcept:
    """Move the kept tokens of a group together, from the first block that changes on."""
    cdef int64_t size = state.block_size
    cdef const int32_t* new = state.tables.row_raw(plan.sequence.row, <int64_t>group).data()
    cdef const int32_t* old = plan.blocks[group].data()
    cdef int64_t i, position
    if plan.unmoved == plan.length:
        return
    for i in range(plan.unmoved // size * size, plan.length):
        position = plan.keep[group][i]
        moves.add(old[position // size] * size + position % size, new[i // size] * size + i % size)
    moves.run()


cdef void shorten(CacheState state, Plan plan) noexcept:
    """Keep the ids of the kept tokens and of those that are not computed, and leave the prefix cache past `unmoved`."""
    cdef Sequence sequence = plan.sequence
    cdef int32_t known = 0, cached = 0, i, position, published
    cdef int32_t waiting = max(0, sequence.known - sequence.computed)
    for i in range(plan.length):
        position = plan.keep[0][i]
        if position < sequence.known:
            sequence.ids[known] = sequence.ids[position]
            known += 1
        cached += position < sequence.cached
    if waiting > 0:
        memmove(sequence.ids + known, sequence.ids + sequence.computed, waiting * sizeof(int32_t))
    sequence.known = known + waiting
    sequence.cached = cached
    sequence.dropped += sequence.computed - plan.length
    sequence.computed = sequence.compacted = plan.length
    if state.seals is not None:
        sequence.sealed = plan.sealed
    if state.prefix is None:
        return
    sequence.hold.is_ended = True
    state.prefix.truncate(sequence, plan.unmoved)
    state.prefix.renew_version(sequence.hold)  # `computed` is already that of the compacted sequence
    if plan.unmoved < plan.length or state.seals is not None:
        # The block of the first moved token is the sequence's own by now.
        published = min(sequence.hold.published, plan.unmoved // state.block_size)
        state.prefix.shorten(sequence.hold, published)
