"""Accepted paths: which tokens of the trees of a step stay, and their moves to the slots after the computed ones.

    slots of the step     13  14  15  20  21  22        path of the accepted tokens: 0, 2, 5
    tree                   a   b   c   d   e   f
    moves                      c <- 15  f <- 22         15 -> 14, then 22 -> 15
    after the commit      13  14  15 | 20  21  22       a c f; the rest is capacity
"""

from libc.stdint cimport int32_t, int64_t

from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.index._integers cimport Integers, as_integers
from pagecore.ops.moves._moves cimport SlotMoves

from pagecore.errors import ShapeError


cdef list as_paths(object accepted_path):
    if not isinstance(accepted_path, (list, tuple)):
        raise ShapeError(
            f"accepted_path is a {type(accepted_path).__name__}; give a list with one path for each sequence"
        )
    cdef list paths = []
    for each in accepted_path:
        path = None if each is None else as_integers(each, "index of accepted_path", ShapeError)
        if path is not None and (<Integers>path).is_scalar:
            raise ShapeError("accepted_path holds a number; give one list of indices for each sequence")
        paths.append(path)
    return paths


cdef int64_t parent_of(StepRecord step, int64_t first, int32_t index) noexcept:
    return index - 1 if step.tree is None else step.tree.parents[first + index]


cdef int read_paths(StepRecord step, list paths) except -1:
    cdef int32_t i, k
    cdef int64_t first = 0
    cdef Integers path
    if len(paths) != step.plan.num_sequences:
        raise ShapeError(
            f"accepted_path has {len(paths)} paths; give one for each of the {step.plan.num_sequences} sequences"
        )
    if step.plan.is_arrival:
        raise ShapeError("an arrival is committed whole; leave accepted_path out")
    step.path.resize(<size_t>step.plan.num_tokens)
    for i in range(step.plan.num_sequences):
        path = paths[i]
        if path is None:
            if step.tree is not None and not step.tree.is_chain(i):
                raise ShapeError(
                    f"accepted_path[{i}] is None and the sequence has a tree; give the indices of its accepted tokens"
                )
            step.accepted[i] = step.plan.counts[i]
            for k in range(step.plan.counts[i]):
                step.path[first + k] = k
        else:
            check_path(step, i, first, path)
            step.accepted[i] = <int32_t>path.size
            for k in range(<int32_t>path.size):
                step.path[first + k] = path.data[k]
        first += step.plan.counts[i]
    return 0


cdef int check_path(StepRecord step, int32_t sequence, int64_t first, Integers path) except -1:
    """Raise ShapeError unless each token is the child of the one before it, the first one without a parent."""
    cdef Py_ssize_t k
    cdef int32_t at, count = step.plan.counts[sequence]
    cdef int64_t parent, before = -1
    for k in range(path.size):
        at = path.data[k]
        if not 0 <= at < count:
            raise ShapeError(
                f"accepted_path[{sequence}][{k}] is {at}; the step brought {count} tokens of that sequence: give 0 to "
                f"{count - 1}"
            )
        if at == before:
            raise ShapeError(f"accepted_path[{sequence}] has {at} twice; list each accepted token once")
        parent = parent_of(step, first, at)
        if parent != before:
            relation = "has no parent" if parent < 0 else f"is a child of token {parent}"
            expected = "begin with a token without a parent"
            if before >= 0:
                expected = f"follow {before} with one of its children"
            raise ShapeError(f"accepted_path[{sequence}][{k}] is {at}, which {relation}; {expected}")
        before = at
    return 0


cdef bint stays(StepRecord step, int32_t index, int64_t first) noexcept:
    """Return True if the accepted tokens of a sequence are its first ones, or the sequence is gone."""
    cdef int32_t accepted = step.accepted[index]
    # Indices ascend, so the last one is in place only if all are.
    return not step.is_live(index) or accepted == 0 or step.path[first + accepted - 1] == accepted - 1


cdef list reserve_moves(StepRecord step, object moves):
    cdef int32_t i
    cdef int64_t first = 0, count = 0
    cdef size_t group
    for group in range(step.moved.size()):
        step.moved[group].clear()
    for i in range(step.plan.num_sequences):
        if not stays(step, i, first):
            count += step.accepted[i] + step.state.block_size
        first += step.plan.counts[i]
    if count == 0:
        return []
    step.moved.resize(<size_t>step.state.tables.num_groups)
    for group in range(step.moved.size()):
        step.moved[group].reserve(<size_t>(2 * count))
    cdef list listed = moves()
    for each in listed:
        (<SlotMoves>each).reserve(count)
    return listed


cdef void move_tokens(StepRecord step, list moves) noexcept:
    cdef size_t group
    for group in range(step.moved.size()):
        list_moves(step, group, <SlotMoves>moves[group] if moves else None)
        if moves:
            (<SlotMoves>moves[group]).run()


cdef void list_moves(StepRecord step, size_t group, SlotMoves moves) noexcept:
    """List the moves of a group, each sequence from the first slot of a block on, as renewed bounds require."""
    cdef int64_t size = step.state.block_size, first = 0, base, k, source, target
    cdef const int32_t* row
    cdef int32_t i
    for i in range(step.plan.num_sequences):
        if not stays(step, i, first):
            row = step.state.tables.row_raw((<Sequence>step.plan.sequences[i]).row, <int64_t>group).data()
            base = (<Sequence>step.plan.sequences[i]).computed
            for k in range(base // size * size - base, step.accepted[i]):
                source = base + (k if k < 0 else step.path[first + k])
                target = row[(base + k) // size] * size + (base + k) % size
                source = row[source // size] * size + source % size
                if moves is not None:
                    moves.add(source, target)
                if source != target:
                    step.moved[group].push_back(source)
                    step.moved[group].push_back(target)
        first += step.plan.counts[i]


cdef void keep_path_ids(StepRecord step, int32_t index) noexcept:
    cdef Sequence sequence = <Sequence>step.plan.sequences[index]
    cdef int32_t k, at, base = sequence.computed, known = 0
    cdef int64_t first = step.first_token(index)
    if step.accepted[index] == step.plan.counts[index]:  # a chain that is accepted whole; later ids stay known
        return
    for k in range(step.accepted[index]):
        at = base + step.path[first + k]
        if at >= sequence.known:
            break
        sequence.ids[base + k] = sequence.ids[at]
        known += 1
    sequence.known = min(sequence.known, base + known)
