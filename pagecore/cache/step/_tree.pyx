"""The trees of a step: the parents of its tokens, checked, and their bits and positions in the step's buffers."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.cache.step._plan cimport StepPlan
from pagecore.index._block_tables cimport StepBuffers
from pagecore.index._integers cimport Slots, as_slots
from pagecore.ops._tree cimport first_wrong_parent, write_chain, write_tree

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
        if plan.state.states is not None:
            raise UnsupportedOption(
                "parents is given to a cache with layers that keep states, which follow one chain of tokens; verify a "
                "chain, with StateSpec(draft_tokens=), or fork the sequence for each branch"
            )
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
            for k in range(count):
                self.parents.push_back(given.data[k])
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

    cdef bint is_chain(self, int32_t index) noexcept:
        return self.given[index] is None
