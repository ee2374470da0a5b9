"""The trees of a step: the parents of its tokens, checked, and their bits and positions in the step's buffers."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.index._integers cimport Slots, as_slots
from pagecore.index.states._states cimport StateBuffers
from pagecore.index.tables._tables cimport StepBuffers
from pagecore.ops.arguments._arguments cimport first_wrong_parent, write_chain, write_tree

from pagecore.errors import ShapeError, UnsupportedOption

cdef enum:
    WORD_BITS = 64


cdef class StepTree:
    """The parents of the new tokens of each sequence of a step; see `PagedKVCache.prepare`.

    Parameters
    ----------
    parents : list
        For each sequence an array of parents, or None for tokens without branches.
    """

    def __cinit__(self, parents):
        if not isinstance(parents, (list, tuple)):
            raise ShapeError(
                f"parents is a {type(parents).__name__}; give a list with one entry for each sequence: its parents, or "
                "None"
            )
        self.given = []
        for each in parents:
            slots = None if each is None else as_slots(each, "parent", ShapeError)
            if slots is not None and (<Slots>slots).is_scalar:
                raise ShapeError("parents holds a number; give one list of parents for each sequence")
            self.given.append(slots)

    def num_words(self, StepPlan plan not None):
        """Return the words of a row of bits that the longest sequence of a plan needs."""
        cdef int32_t i, most = 1
        for i in range(plan.num_sequences):
            most = max(most, plan.counts[i])
        return (most + WORD_BITS - 1) // WORD_BITS

    cdef int check(self, StepPlan plan, StepBuffers buffers) except -1:
        cdef int32_t i
        cdef int64_t count, wrong, k
        cdef Slots given
        if plan.is_arrival:
            raise ShapeError("an arrival has no tree; leave parents out")
        if len(self.given) != plan.num_sequences:
            raise ShapeError(
                f"parents has {len(self.given)} entries; give one for each of the {plan.num_sequences} sequences"
            )
        self.parents.clear()
        self.parents.reserve(<size_t>plan.num_tokens)
        self.depths.resize(<size_t>plan.num_tokens)
        for i in range(plan.num_sequences):
            count = plan.counts[i]
            if count > WORD_BITS * buffers.native.tree_words():
                raise ShapeError(
                    f"sequence {i} of the step has {count} tokens and the batch room for trees of "
                    f"{WORD_BITS * buffers.native.tree_words()}; make it with max_tree_tokens={count}, or leave out "
                    "the batch"
                )
            given = self.given[i]
            if given is None:
                for k in range(count):
                    self.parents.push_back(k - 1)
                continue
            if given.size != count:
                raise ShapeError(f"parents[{i}] has {given.size} entries; the sequence has {count} new tokens")
            wrong = first_wrong_parent(given.data, count)
            if wrong < count:
                raise ShapeError(
                    f"parents[{i}][{wrong}] is {given.data[wrong]}; a parent is an earlier token of the step, below "
                    f"{wrong}, or -1"
                )
            if plan.state.states is not None:
                self.check_states(plan, i, given)
            for k in range(count):
                self.parents.push_back(given.data[k])
        return 0

    cdef int check_states(self, StepPlan plan, int32_t index, Slots given) except -1:
        """Raise UnsupportedOption unless every token of a tree can have a state of its own."""
        cdef Sequence sequence = <Sequence>plan.sequences[index]
        cdef int32_t drafts = plan.state.states.draft_tokens
        cdef int64_t k
        if given.size > 1 + drafts:
            raise UnsupportedOption(
                f"sequence {index} of the step has a tree of {given.size} tokens, and layers that keep states have "
                f"slots for 1 + {drafts}; make the specs with draft_tokens={given.size - 1}, or pass None for a chain"
            )
        for k in range(1, given.size if plan.state.states.is_in_place else 0):
            if given.data[k] < 0:
                raise UnsupportedOption(
                    f"parents[{index}][{k}] is -1, and token 0 overwrites the state before both; let all tokens "
                    "descend from token 0, or make the specs with in_place=False"
                )
        if plan.state.prefix is not None and (
            plan.state.prefix.num_held(sequence.hold) * <int64_t>plan.state.block_size > sequence.computed
        ):
            raise UnsupportedOption(
                f"sequence {sequence.id!r} shares keys and values past its {sequence.computed} computed tokens; "
                "compute the tokens of these before a tree"
            )
        return 0

    cdef void fill(self, StepPlan plan, StepBuffers buffers) noexcept:
        cdef int64_t words = buffers.native.tree_words(), first = 0, count, k
        cdef uint64_t* rows = buffers.native.tree_mask()
        cdef int32_t i
        for i in range(plan.num_sequences):
            count = plan.counts[i]
            if self.is_chain(i):
                write_chain(count, words, rows + first * words)
            else:
                write_tree(self.parents.data() + first, count, words, rows + first * words, self.depths.data())
                for k in range(count):
                    buffers.positions_data[first + k] += self.depths[k] - <int32_t>k
            first += count

    cdef void fill_states(self, StepPlan plan, StateBuffers states) noexcept:
        cdef int32_t* reads
        cdef int32_t* writes
        cdef int32_t i
        cdef int64_t first = 0, k
        for i in range(plan.num_sequences):
            if plan.counts[i] > 1 and not self.is_chain(i):
                reads, writes = states.native.draft_read(<size_t>i), states.native.draft_write(<size_t>i)
                for k in range(plan.counts[i]):
                    reads[k] = reads[0] if self.parents[first + k] < 0 else writes[self.parents[first + k]]
                states.native.checkpoint_write()[i] = states.native.checkpoint_lengths()[i] = 0
            first += plan.counts[i]

    cdef bint is_chain(self, int32_t index) noexcept:
        return self.given[index] is None
