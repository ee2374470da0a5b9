"""Reorder: each sequence becomes a copy of its parent, as in beam search."""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from pagecore.cache.prefix._prefix cimport number_namespaces, publish
from pagecore.cache.sequences._sequences cimport CrossContent, PrefixHold, Sequence, require, require_each
from pagecore.cache.state._state cimport CacheState, Held
from pagecore.index.radix._native cimport RetentionHint
from pagecore.index.tables._native cimport Int32s
from pagecore.native.std cimport vector

from pagecore.cache.sequences._sequences import as_list
from pagecore.errors import InvalidSequence, NotEnoughMemory, ShapeError


def reorder(CacheState state not None, sequences, parents):
    """Make each sequence a copy of its parent as it was before the call; see `PagedKVCache.reorder`."""
    cdef list children, sources
    cdef list heirs = []
    cdef Heir heir
    cdef vector[int32_t] rows, parent_rows
    cdef RetentionHint none
    sequences, parents = as_list(sequences), as_list(parents)
    if len(sequences) != len(parents):
        raise ShapeError(f"{len(parents)} parents are given for {len(sequences)} sequences; give one for each")
    _guard = Held(state.lock)
    state.begin()
    if state.observer is not None and state.prefix is not None:
        announce_copies(state, sequences, parents)
    sources = []
    for parent in parents:
        sources.append(require(state, parent, True))
    if state.prefix is not None:
        number_namespaces(state.prefix, sources)
    children = require_each(state, sequences, True)
    require_unwritten(children)
    for child, parent in zip(children, sources):
        rows.push_back((<Sequence>child).row)
        parent_rows.push_back((<Sequence>parent).row)
        if child is not parent:
            heir = Heir()
            heir.child, heir.parent = child, parent
            heir.copy_ids()
            if state.prefix is not None:
                heir.hold = heir.parent.hold.blank_copy()
            heirs.append(heir)
    if state.states is not None:
        state.states.check_reorder_raw(
            Int32s(rows.data(), rows.size()), Int32s(parent_rows.data(), parent_rows.size())
        )
    if state.prefix is not None:
        publish(state.prefix, sources)
    state.tables.reorder_raw(rows.data(), parent_rows.data(), <Py_ssize_t>rows.size())
    # The rows have changed: from here on nothing fails.
    if state.states is not None:
        state.states.reorder_raw(Int32s(rows.data(), rows.size()), Int32s(parent_rows.data(), parent_rows.size()))
    if state.prefix is not None:
        for each in heirs:
            # The parent's row may have other blocks by now; those that it began with are in the child's.
            state.prefix.count_first((<Heir>each).parent, (<Heir>each).child.row)
    for each in heirs:
        (<Heir>each).read_parent()
    for each in heirs:
        (<Heir>each).write_child(state)
    for each in heirs:
        if (<Heir>each).old_cross is not None:
            state.cross.release((<Heir>each).old_cross)
    if state.prefix is not None:
        for each in heirs:
            (<Heir>each).old_hold.receipt.drop(none)
            state.prefix.release_ahead((<Heir>each).old_hold)


cdef int announce_copies(CacheState state, list sequences, list parents) except -1:
    """Report the parents that other sequences become copies of to the observer, which may run code of the caller."""
    cdef list sources = []
    cdef list children = require_each(state, sequences, True)
    for child, parent in zip(children, parents):
        require(state, parent, True)
        if child is not parent:
            sources.append(parent)
    require_unwritten(children)
    if sources:
        state.observer.copying(sources)
    return 0


cdef int require_unwritten(list children) except -1:
    """Raise InvalidSequence if the encoder output of a sequence, which it may be the last to hold, is in flight."""
    cdef Sequence child
    for child in children:
        if child.cross is not None and child.cross.writer is not None:
            raise InvalidSequence(
                f"the encoder tokens of sequence {child.id!r} are being written by a step in flight; commit or abandon "
                "its batch first"
            )
    return 0


cdef class Heir:
    """A sequence of a reorder and the state of its parent before the call."""
    cdef Sequence child, parent
    cdef PrefixHold old_hold, hold, parent_hold
    cdef int32_t* ids           # a copy of the parent's, for the child
    cdef int32_t known, computed, sealed, dropped, compacted, cached, published
    cdef int64_t tenant
    cdef object namespace, origin
    cdef bint has_duplicates
    cdef CrossContent cross, old_cross

    def __dealloc__(self):
        free(self.ids)

    cdef int copy_ids(self) except -1:
        self.known = self.parent.known
        self.ids = <int32_t*>malloc(max(self.known, 1) * sizeof(int32_t))
        if self.ids == NULL:
            raise NotEnoughMemory(f"not enough memory for {self.known} token ids; remove a sequence")
        if self.known > 0:
            memcpy(self.ids, self.parent.ids, self.known * sizeof(int32_t))
        return 0

    cdef void read_parent(self) noexcept:
        self.tenant = self.parent.tenant
        self.namespace = self.parent.namespace
        self.cross, self.old_cross = self.parent.cross, self.child.cross
        self.computed = self.parent.computed
        self.sealed = self.parent.sealed
        self.dropped, self.compacted = self.parent.dropped, self.parent.compacted
        self.cached = self.parent.cached
        self.old_hold = self.child.hold
        self.parent_hold = self.parent.hold
        if self.parent_hold is not None:
            self.published = self.parent_hold.published
            self.has_duplicates = self.parent_hold.has_duplicates
            self.origin = self.parent_hold.origin

    cdef void write_child(self, CacheState state) noexcept:
        cdef int32_t* old = self.child.ids
        self.child.ids = self.ids
        self.ids = old
        self.child.known = self.known
        self.child.ids_capacity = max(self.known, 1)
        self.child.tenant = self.tenant
        self.child.namespace = self.namespace
        self.child.computed = self.computed
        self.child.sealed = self.sealed
        self.child.dropped, self.child.compacted = self.dropped, self.compacted
        self.child.cached = self.cached
        self.child.cross = self.cross
        if self.cross is not None:
            state.cross.hold(self.cross)
        if state.prefix is not None:
            state.prefix.inherit(self.child, self.hold, self.parent_hold, self.published, self.has_duplicates)
            self.hold.origin = self.origin
