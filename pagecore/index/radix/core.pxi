"""Base of the prefix tree: receipts, sizes, namespaces, and what the cache calls.

`RadixTree` is a chain of classes, each with one subject: `RadixCore`, `RadixLookup`, `RadixInsertion`, `RadixJournal`,
`RadixTree`. This module alone makes native trees, so that it alone is linked with them.

No method runs code of the caller once it has begun a lookup: arguments are converted first, keys of namespaces are of
built-in types, and objects that the garbage collector tracks (whose creation may run it) are made before. What can fail
comes before the first change; ids of results stay native until they are read. There are no list comprehensions: if
memory runs out inside one, Cython frees an element twice.
"""

cimport cython
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from pagecore.index._integers cimport as_int64
from pagecore.index._sealed cimport seal
from pagecore.index.radix._native cimport (
    HintRanges,
    Int32Pointer,
    NativeRadixTree,
    Options,
    Query,
    ReceiptPointer,
    ReceiptPointers,
    RetentionHint,
    States,
)
from pagecore.native.std cimport vector

from pagecore.errors import (
    DoubleFree,
    InvalidSequence,
    PagecoreError,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
    shown,
)

# RadixTree::kReservedIds: evict_raw evicts no more in one call, so that it allocates nothing.
cdef enum: MAX_EVICTED_AT_ONCE = 4096
# Roots of namespaces that a journal keeps before it forgets those that nothing needs any more.
cdef enum: FEW_ROOTS = 64


@cython.freelist(16)
@cython.no_gc_clear
cdef class Receipt:
    """A pin on a prefix, released exactly once; as a context manager it releases what is left.

    A receipt that is never released pins its prefix for the lifetime of the tree.

    Attributes
    ----------
    tree : RadixTree
    match : Match
        Result of the lookup that made it.
    """

    @property
    def num_tokens(self):
        """Tokens of the pinned prefix."""
        return self.depth() * self.tree.block_size

    @property
    def components(self):
        """Names of the components that the receipt still pins."""
        held = []
        for i, name in enumerate(self.tree.components):
            if self.native.components >> i & 1:
                held.append(name)
        return tuple(held)

    def release(self, component=None, *, time=None, rank=None):
        """Release the receipt, or one component of it; see `RadixTree.release`."""
        self.tree.unpin(self, component, time, rank)

    def fork(self):
        """Return a second receipt for the same prefix.

        Returns
        -------
        Receipt

        Raises
        ------
        DoubleFree
            The receipt was released.
        """
        cdef Receipt other
        self.tree._check_receipt(self)
        other = self.tree.blank_receipt(self.key)
        other.match = self.match
        other.native = self.tree.native.lock_again(self.native)
        return other

    cdef int64_t depth(self) noexcept:
        return self.tree.native.depth(self.native.node)

    cdef void drop(self, const RetentionHint& hint) noexcept:
        self.tree.native.unlock(self.native, self.tree.every_component, hint)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.native.components != 0:
            self.tree.unpin(self, None, None, None)


seal(Receipt)


cdef int refuse_receipt(object receipt) except -1:
    raise UnsupportedDtype(f"expected a Receipt (as returned by match_and_lock), got {type(receipt).__name__}")


cdef class RadixCore:
    """Construction, sizes and namespaces of a prefix tree, and its insertions and evictions for the cache."""

    def __cinit__(
        self, block_size=16, *, full=1, windows=(), chunks=(), sinks=(), states=False, state_interval=None,
        min_kept=0, policy="lru"
    ):
        cdef Options options = read_options(
            block_size, full, windows, chunks, sinks, states, state_interval, min_kept, policy
        )
        self.native = new NativeRadixTree(options)
        self.block_size = options.block_size
        self.windows = tuple(options.windows)
        self.chunks = tuple(options.chunks)
        self.sinks = tuple(options.sinks)
        names = ["full"]
        for i in range(len(self.windows)):
            names.append("window" if len(self.windows) == 1 else f"window{i}")
        self.components = (*names, "state") if options.has_states else tuple(names)
        self.policy = str(policy)
        self.has_states = options.has_states
        self.state_interval = options.state_interval if options.has_states else None
        self.min_kept = options.min_kept
        self.num_lanes = self.native.num_lanes()
        self.every_component = (1 << len(self.components)) - 1
        self.spaces = {}
        self.space_keys = [None]
        self.root_keys = {}
        self.most_root_keys = FEW_ROOTS

    def __dealloc__(self):
        del self.native

    # Sizes.

    def evictable(self, component="full"):
        """Return the number of blocks (or states) of a component that can be evicted now.

        Raises
        ------
        UnsupportedOption
            The tree has no such component.
        """
        return self.native.evictable(self._component(component))

    def protected(self, component="full"):
        """Return the number of blocks (or states) of a component that receipts pin.

        Raises
        ------
        UnsupportedOption
            The tree has no such component.
        """
        cdef int32_t which = self._component(component)
        return self.native.held(which) - self.native.evictable(which)

    def held_blocks(self, lane=0):
        """Return every block that the tree holds in one lane, for callers that recount references.

        Parameters
        ----------
        lane : int
            The lanes of the full component come first, then one for each window.

        Returns
        -------
        numpy.ndarray
            int32 [num_held], new, ascending.

        Raises
        ------
        ShapeError
            The tree has no such lane.
        UnsupportedDtype
            `lane` is not an integer.
        """
        return array_of(self.native.held_ids(self._lane(lane)))

    def held_states(self):
        """Return every state that the tree holds: int32 [num_held], new, ascending; empty without states."""
        return array_of(self.native.held_ids(self.num_lanes))

    @property
    def num_nodes(self):
        """Nodes of the tree."""
        return self.native.num_nodes()

    @property
    def num_receipts(self):
        """Receipts that have not been released."""
        return self.native.num_receipts()

    @property
    def num_namespaces(self):
        """Non-empty namespaces, not counting the default one."""
        return len(self.spaces)

    @property
    def nbytes(self):
        """Bytes of native memory."""
        return self.native.nbytes()

    def check_invariants(self):
        """Recount everything; for tests.

        Raises
        ------
        PagecoreError
            The tree is inconsistent, which is a defect of pagecore.
        """
        self.native.check_invariants()
        used = {space: key for space, key in enumerate(self.space_keys) if key is not None}
        if len(self.spaces) != len(used) or {space: key for key, space in self.spaces.items()} != used:
            raise PagecoreError("pagecore is inconsistent: namespaces and their numbers differ")

    # Arguments.

    cdef int32_t _component(self, object component) except -1:
        if not isinstance(component, str) or component not in self.components:
            raise UnsupportedOption(
                f"component {shown(component)} does not exist in this tree; use one of {', '.join(self.components)}"
            )
        return self.components.index(component)

    cdef int32_t _lane(self, object lane) except -1:
        cdef int64_t number = as_int64(lane, "lane")
        if not 0 <= number < self.num_lanes:
            raise ShapeError(f"lane {lane} does not exist in this tree; use 0 to {self.num_lanes - 1}")
        return <int32_t> number

    cdef int _check_receipt(self, Receipt receipt) except -1:
        if receipt.tree is not self:
            raise InvalidSequence("the receipt belongs to another tree; release it there")
        if receipt.native.components == 0:
            raise DoubleFree("the receipt was released already; release each receipt once")
        return 0

    # Namespaces.

    cdef int32_t _space(self, object key) except -1:
        """Return the number of a namespace, added if new; the caller drops it again if nothing is inserted."""
        cdef int32_t space
        if key is None:
            return 0
        space = self.spaces.get(key, -1)
        if space >= 0:
            return space
        if len(self.root_keys) >= self.most_root_keys:
            self._forget_roots()  # first, because the garbage collector may run
        space = self.native.add_namespace()
        try:
            while len(self.space_keys) <= space:
                self.space_keys.append(None)
            self.spaces[key] = space
            if self.native.has_journal():
                root = root_of(key)
                self.root_keys[root] = key
                self.native.set_root(space, root)
        except BaseException:
            self.spaces.pop(key, None)  # another key gets the number
            self._drop_space(space)
            raise
        self.space_keys[space] = key
        return space

    cdef int _forget_roots(self) except -1:
        """Forget the roots that neither a namespace nor a change in the journal has; logs keep the old dictionary."""
        cdef vector[uint64_t] pending
        cdef uint64_t root
        root_keys = {}
        for key in list(self.spaces):
            root_keys[root_of(key)] = key
        self.native.list_journal_roots(pending)
        for root in pending:
            key = self.root_keys.get(root)
            if key is not None:  # that of the nameless space
                root_keys[root] = key
        self.root_keys = root_keys
        self.most_root_keys = 2 * len(root_keys) + FEW_ROOTS
        return 0

    cdef int _find_space(self, Prefix prefix) except -1:
        """Set the number of a prefix's namespace; -1 if the tree does not know it."""
        if prefix.key is not None:
            prefix.space = self.spaces.get(prefix.key, -1)
        return 0

    cdef void _drop_space(self, int32_t space) noexcept:
        self.native.drop_namespace_if_empty(space)
        self._forget_dead()

    cdef void _forget_dead(self) noexcept:
        """Forget namespaces that have lost their last node; freeing a key may run code of the caller."""
        cdef int32_t space = self.native.dead_namespace()
        while space >= 0:
            key = None
            if space < len(self.space_keys):  # not if memory ran out while the namespace was added
                key = self.space_keys[space]
                self.space_keys[space] = None
            if key is not None:
                del self.spaces[key]
            self.native.forget_dead_namespace()
            key = None
            space = self.native.dead_namespace()

    # Releases. Receipts call them, too, without a method of Python in between.

    cdef int unpin(self, Receipt receipt, object component, object time, object rank) except -1:
        cdef uint32_t which = self.every_component
        cdef RetentionHint hint
        cdef double now = 0
        read_hint(&hint, &now, self.policy, time, None, None, rank)
        if component is not None:
            which = 1 << self._component(component)
        self._check_receipt(receipt)
        if receipt.native.components & which == 0:
            raise DoubleFree(f"the receipt does not pin {component!r}; it pins {receipt.components}")
        self._unlock(receipt, which, hint, now)
        self._forget_dead()
        return 0

    cdef void _unlock(self, Receipt receipt, uint32_t components, const RetentionHint& hint, double now) noexcept:
        self.native.advance(now)
        self.native.unlock(receipt.native, components, hint)

    # For the cache.

    cdef Receipt blank_receipt(self, object key):
        cdef Receipt receipt = Receipt.__new__(Receipt)
        receipt.tree = self
        receipt.key = key
        return receipt

    cdef int reserve_moves(self, int64_t num_moves) except -1:
        cdef vector[vector[int32_t]] gone
        if self.gone_raw.size() == 0:
            self.offer.lanes.resize(self.num_lanes)
            self.native.reserve_evicted(gone)
            self.gone_raw.swap(gone)  # last, because it says that all is reserved
        self.native.reserve(num_moves * self.native.nodes_to_move())
        return 0

    cdef int64_t evict_raw(self, int32_t component, int64_t amount) noexcept:
        return self.native.reserved_evict(component, min(amount, <int64_t> MAX_EVICTED_AT_ONCE), self.gone_raw)

    cdef int64_t evict_path_raw(self, Prefix prefix, int64_t keep, vector[vector[int32_t]]& gone) except -1:
        cdef int64_t blocks = keep // self.block_size + (keep % self.block_size != 0)
        self._find_space(prefix)
        if prefix.space < 0:
            gone.resize(<size_t>self.num_lanes + 1)
            return 0
        return self.native.evict_path(prefix.query(), prefix.limit, blocks, gone)

    cdef int64_t revoke_raw(
        self, const Query& query, int64_t valid, vector[ReceiptPointer]& receipts, vector[vector[int32_t]]& gone
    ) except -1:
        return self.native.revoke(query, valid, ReceiptPointers(receipts.data(), receipts.size()), gone)

    cdef int64_t evict_namespace_raw(self, object key, vector[vector[int32_t]]& gone) except -1:
        cdef int32_t space = 0 if key is None else self.spaces.get(key, -1)
        if space < 0:
            gone.resize(<size_t>self.num_lanes + 1)
            return 0
        return self.native.evict_namespace(space, gone)

    cdef bint try_extend_raw(
        self, Receipt receipt, const Query& query, const vector[Int32Pointer]& lanes
    ) noexcept:
        cdef RetentionHint no_hint
        cdef HintRanges no_ranges
        cdef States no_states
        self._offer_raw(query, lanes, no_states, no_hint, no_ranges, -INFINITY)
        return self.native.try_extend(self.offer, receipt.native, self.inserted)

    cdef bint try_insert_raw(
        self, Receipt receipt, const Query& query, const vector[Int32Pointer]& lanes, States states,
        const RetentionHint& hint, HintRanges ranges, double time
    ) noexcept:
        self._offer_raw(query, lanes, states, hint, ranges, time)
        return self.native.try_insert(self.offer, receipt.native, self.inserted)

    cdef void _offer_raw(
        self, const Query& query, const vector[Int32Pointer]& lanes, States states, const RetentionHint& hint,
        HintRanges ranges, double time
    ) noexcept:
        cdef size_t lane
        self.offer.query = query
        for lane in range(lanes.size()):  # reserve_moves() made room for them
            self.offer.lanes[lane] = lanes[lane]
        self.offer.states = states
        self.offer.hint = hint
        self.offer.ranges = ranges
        self.offer.time = time
