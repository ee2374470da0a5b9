"""The ids of the drafts of a step, which the batch has and the sequences do not know."""

from libc.stdint cimport int32_t
from libc.string cimport memcpy

from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.index._integers cimport Integers, as_integers
from pagecore.index.tables._tables cimport StepBuffers

from pagecore.errors import ShapeError


cdef class DraftIds:
    """The ids of the last new tokens of each sequence of a step; see `PagedKVCache.prepare`.

    Parameters
    ----------
    draft_ids : list
        For each sequence an array of ids, or None for a sequence without drafts.
    """

    def __cinit__(self, draft_ids):
        if not isinstance(draft_ids, (list, tuple)):
            raise ShapeError(
                f"draft_ids is a {type(draft_ids).__name__}; give a list with one entry for each sequence: the ids of "
                "its drafts, or None"
            )
        self.given = []
        for each in draft_ids:
            ids = None if each is None else as_integers(each, "draft id", ShapeError)
            if ids is not None and (<Integers>ids).is_scalar:
                raise ShapeError("draft_ids holds a number; give one list of ids for each sequence")
            self.given.append(ids)

    cdef int check(self, StepPlan plan) except -1:
        cdef Sequence sequence
        cdef int32_t i, known
        if len(self.given) != plan.num_sequences:
            raise ShapeError(
                f"draft_ids has {len(self.given)} entries; give one for each of the {plan.num_sequences} sequences"
            )
        for i in range(plan.num_sequences):
            if self.given[i] is None:
                continue
            sequence = <Sequence>plan.sequences[i]
            known = max(0, min(plan.counts[i], sequence.known - sequence.computed))
            if (<Integers>self.given[i]).size > plan.counts[i] - known:
                raise ShapeError(
                    f"draft_ids[{i}] has {(<Integers>self.given[i]).size} ids; of the {plan.counts[i]} new tokens of "
                    f"that sequence {known} have known ids: give at most {plan.counts[i] - known}"
                )
        return 0

    cdef void fill(self, StepPlan plan, StepBuffers buffers) noexcept:
        cdef int32_t* end = buffers.token_ids_data
        cdef Integers ids
        cdef int32_t i
        for i in range(plan.num_sequences):
            end += plan.counts[i]
            ids = self.given[i]
            if ids is not None and ids.size > 0:
                memcpy(end - ids.size, ids.data, ids.size * sizeof(int32_t))
