"""Native side of the prefix tree: receipts, namespaces, and the C interface that the cache calls.

`_radix_tree.RadixTree` adds the public methods. This module alone calls the native tree, so that the native library is
linked once.

No method runs code of the caller once it has begun a lookup: arguments are converted first, keys of namespaces are of
built-in types, and objects that the garbage collector tracks (whose creation may run it) are made before. What can fail
comes before the first change; ids of results stay native until they are read. There are no list comprehensions: if
memory runs out inside one, Cython frees an element twice.
"""

cimport cython
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from cython.operator cimport dereference as deref
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.index._integers cimport as_int64, new_int32
from pagecore.index._sealed cimport seal
from pagecore.index.radix._radix_journal cimport ChangeLog, root_of
from pagecore.index.radix._radix_native cimport (
    NativeBatch,
    NativeInserted,
    NativeMatch,
    NativeRadixTree,
    NativeReceipt,
    Offers,
    Options,
)
from pagecore.index.radix._radix_options cimport read_options
from pagecore.index.radix._radix_query cimport (
    HintRanges,
    Insertion,
    Int32Pointer,
    Mark,
    Offer,
    Prefix,
    Query,
    RetentionHint,
    States,
    own_insertion,
    read_insertion,
    read_hint,
    read_prefix,
)
from pagecore.index.radix._radix_values cimport Evicted, Inserted, Match, array_of

from pagecore.errors import (
    DoubleFree,
    InvalidSequence,
    PagecoreError,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.index.radix._radix_options import POLICIES

# RadixTree::kReservedIds: evict_raw evicts no more in one call, so that it allocates nothing.
cdef enum: MAX_EVICTED_AT_ONCE = 4096


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
        return self.tree.depth_raw(self) * self.tree.block_size

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
        self.tree.release(self, component, time=time, rank=rank)

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
        cdef Receipt other = Receipt.__new__(Receipt)
        self.tree._check_receipt(self)
        other.tree = self.tree
        other.match = self.match
        other.key = self.key
        self.tree.fork_raw(self, other)
        return other

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.native.components != 0:
            self.tree.release(self)


seal(Receipt)


cdef int refuse_receipt(object receipt) except -1:
    raise UnsupportedDtype(f"expected a Receipt (as returned by match_and_lock), got {type(receipt).__name__}")


cdef class RadixCore:
    """Base of `RadixTree`: construction, sizes, and calls with converted arguments."""

    def __cinit__(
        self, block_size=16, *, full=1, windows=(), chunks=(), sinks=(), states=False, state_interval=None,
        policy="lru"
    ):
        cdef Options options = read_options(
            block_size, full, windows, chunks, sinks, states, state_interval, policy
        )
        self.native.reset(new NativeRadixTree(options))
        self.block_size = options.block_size
        self.windows = tuple(options.windows)
        self.chunks = tuple(options.chunks)
        self.sinks = tuple(options.sinks)
        names = ["full"]
        for i in range(len(self.windows)):
            names.append("window" if len(self.windows) == 1 else f"window{i}")
        self.components = (*names, "state") if options.has_states else tuple(names)
        self.policy = POLICIES[<int> options.policy]
        self.has_states = options.has_states
        self.state_interval = options.state_interval if options.has_states else None
        self.num_lanes = deref(self.native).num_lanes()
        self.every_component = (1 << len(self.components)) - 1
        self.spaces = {}
        self.space_keys = [None]
        self.root_keys = {}

    # Sizes.

    def evictable(self, component="full"):
        """Return the number of blocks (or states) of a component that can be evicted now.

        Raises
        ------
        UnsupportedOption
            The tree has no such component.
        """
        return deref(self.native).evictable(self._component(component))

    def protected(self, component="full"):
        """Return the number of blocks (or states) of a component that receipts pin.

        Raises
        ------
        UnsupportedOption
            The tree has no such component.
        """
        cdef int32_t which = self._component(component)
        return deref(self.native).held(which) - deref(self.native).evictable(which)

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
        return array_of(deref(self.native).held_ids(self._lane(lane)))

    def held_states(self):
        """Return every state that the tree holds: int32 [num_held], new, ascending; empty without states."""
        return array_of(deref(self.native).held_ids(self.num_lanes))

    @property
    def num_nodes(self):
        """Nodes of the tree."""
        return deref(self.native).num_nodes()

    @property
    def num_receipts(self):
        """Receipts that have not been released."""
        return deref(self.native).num_receipts()

    @property
    def num_namespaces(self):
        """Non-empty namespaces, not counting the default one."""
        return len(self.spaces)

    @property
    def nbytes(self):
        """Bytes of native memory."""
        return deref(self.native).nbytes()

    def check_invariants(self):
        """Recount everything; for tests.

        Raises
        ------
        PagecoreError
            The tree is inconsistent, which is a defect of pagecore.
        """
        deref(self.native).check_invariants()
        used = {space: key for space, key in enumerate(self.space_keys) if key is not None}
        if {space: key for key, space in self.spaces.items()} != used:
            raise PagecoreError("pagecore is inconsistent: namespaces and their numbers differ")

    # Journal.

    @property
    def has_journal(self):
        """The tree keeps a journal of its changes."""
        return deref(self.native).has_journal()

    def start_journal(self, *, max_bytes=64 << 20):
        """Record every change from now on, for readers outside of the process.

        Each block gets a content hash (see `chain_hashes`), 8 bytes of memory that stay with the tree. What the tree
        holds already is not in the journal; see `list_contents`.

        Parameters
        ----------
        max_bytes : int
            Size of changes that are not taken. A journal that would grow beyond it drops them; `take_changes` then
            reports an overflow.

        Raises
        ------
        NotEnoughMemory
            The hashes do not fit in memory.
        ShapeError
            `max_bytes` is not positive.
        UnsupportedOption
            The tree has a journal.
        """
        cdef int64_t limit = as_int64(max_bytes, "max_bytes")
        cdef vector[uint64_t] roots
        if limit < 1:
            raise ShapeError(f"max_bytes is {max_bytes}; use 1 or more")
        root_keys = {}
        for key in self.space_keys:
            roots.push_back(root_of(key))
            root_keys[roots.back()] = key
        deref(self.native).start_journal(<size_t> limit, roots)
        self.root_keys = root_keys

    def stop_journal(self):
        """Stop recording, and drop what was not taken."""
        deref(self.native).stop_journal()
        self.root_keys = {}

    def take_changes(self):
        """Return the changes since the last call as a ChangeLog; the journal is empty then.

        The call moves memory and converts nothing. A tree without a journal has no changes.
        """
        cdef ChangeLog log = ChangeLog.__new__(ChangeLog)
        log.block_size = self.block_size
        log.keys = self.root_keys
        deref(self.native).take_changes(log.native)
        self._forget_roots()
        return log

    def list_contents(self):
        """Return everything that the tree holds as a ChangeLog of stored blocks, parents before their children.

        Raises
        ------
        UnsupportedOption
            The tree has no journal, and therefore no hashes.
        """
        cdef ChangeLog log = ChangeLog.__new__(ChangeLog)
        log.block_size = self.block_size
        log.keys = self.root_keys
        deref(self.native).list_contents(log.native)
        return log

    cdef void _forget_roots(self) except *:
        """Forget roots of namespaces that are gone, now and then; logs keep the old dictionary."""
        if len(self.root_keys) > 2 * len(self.spaces) + 64:
            self.root_keys = {root_of(key): key for key in self.spaces}

    # Arguments.

    cdef Prefix _prefix(self, object tokens, object namespace, object spans, object max_tokens):
        return read_prefix(self.block_size, tokens, namespace, spans, max_tokens)

    cdef int32_t _component(self, object component) except -1:
        try:
            return self.components.index(component)
        except ValueError:
            raise UnsupportedOption(
                f"component {component!r} does not exist in this tree; use one of {', '.join(self.components)}"
            ) from None

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

    def _insertion(self, time, /, tokens, blocks, *, states=None, namespace=None, spans=None, receipt=None,
                   priority=None, time_to_live=None, rank=None):
        """Return the arguments of `insert` as an Insertion."""
        cdef Insertion insertion = read_insertion(
            self.block_size, self.num_lanes, tokens, blocks, states, namespace, spans
        )
        insertion.receipt = None if receipt is None else as_receipt(receipt)
        read_hint(&insertion.hint, &insertion.time, self.policy, time, priority, time_to_live, rank)
        own_insertion(insertion, self.block_size, 0)
        return insertion

    # Namespaces.

    cdef int32_t _space(self, object key) except -1:
        """Return the number of a namespace, added if new; the caller drops it again if nothing is inserted."""
        cdef int32_t space
        if key is None:
            return 0
        space = self.spaces.get(key, -1)
        if space >= 0:
            return space
        space = deref(self.native).add_namespace()
        try:
            while len(self.space_keys) <= space:
                self.space_keys.append(None)
            self.spaces[key] = space
            if deref(self.native).has_journal():
                root = root_of(key)
                self.root_keys[root] = key
                deref(self.native).set_root(space, root)
        except BaseException:
            self._drop_space(space)
            raise
        self.space_keys[space] = key
        return space

    cdef void _drop_space(self, int32_t space) noexcept:
        deref(self.native).drop_namespace_if_empty(space)
        self._forget_dead()

    cdef void _forget_dead(self) noexcept:
        """Forget namespaces that have lost their last node; freeing a key may run code of the caller."""
        cdef int32_t space = deref(self.native).dead_namespace()
        while space >= 0:
            key = self.space_keys[space]
            self.space_keys[space] = None
            if key is not None:
                del self.spaces[key]
            deref(self.native).forget_dead_namespace()
            key = None
            space = deref(self.native).dead_namespace()

    # Calls with converted arguments.

    cdef Match _new_match(self):
        cdef Match match = Match.__new__(Match)
        if self.num_lanes != 1:
            match.blocks = PyTuple_New(self.num_lanes)
        return match

    cdef Receipt _new_receipt(self, Prefix prefix):
        cdef Receipt receipt = Receipt.__new__(Receipt)
        receipt.tree = self
        receipt.key = prefix.key
        receipt.match = self._new_match()
        return receipt

    cdef int _find(self, Prefix prefix, NativeMatch* found) except -1:
        if prefix.key is not None:
            prefix.space = self.spaces.get(prefix.key, -1)
        if prefix.space >= 0:
            found[0] = deref(self.native).match(prefix.query(), prefix.limit)
        return 0

    cdef int _fill(self, Match match, const NativeMatch& found) except -1:
        """Fill a new match; the only Python objects made are arrays and ints."""
        cdef int32_t* data = NULL
        cdef int32_t lane
        match.num_tokens = found.blocks * self.block_size
        match.num_full_tokens = found.full_blocks * self.block_size
        match.checkpoint = None if found.checkpoint == 0 else found.checkpoint
        match.state = None if found.state < 0 else found.state
        match.num_shared_tokens = found.shared_blocks * self.block_size
        for lane in range(self.num_lanes):
            array = new_int32(found.blocks, &data)
            if found.blocks > 0:
                deref(self.native).copy_blocks(
                    found.node, found.offset, lane, span[int32_t](data, <size_t> found.blocks)
                )
            if self.num_lanes == 1:
                match.blocks = array
            else:
                Py_INCREF(array)
                PyTuple_SET_ITEM(match.blocks, lane, array)
        if found.shared_blocks > found.blocks:
            self._fill_shared(match, found)
        else:
            match.shared_blocks = match.blocks
        return 0

    cdef int _fill_shared(self, Match match, const NativeMatch& found) except -1:
        cdef int32_t* data = NULL
        cdef int32_t lane
        if self.num_lanes != 1:
            match.shared_blocks = PyTuple_New(self.num_lanes)
        for lane in range(self.num_lanes):
            array = new_int32(found.shared_blocks, &data)
            deref(self.native).copy_blocks(
                found.shared_node, found.shared_offset, lane, span[int32_t](data, <size_t> found.shared_blocks)
            )
            if self.num_lanes == 1:
                match.shared_blocks = array
            else:
                Py_INCREF(array)
                PyTuple_SET_ITEM(match.shared_blocks, lane, array)
        return 0

    cdef Match _match(self, Prefix prefix):
        cdef NativeMatch found
        cdef Match match = self._new_match()
        self._find(prefix, &found)
        self._fill(match, found)
        return match

    cdef int _reserve_locks(self, Py_ssize_t count) except -1:
        deref(self.native).reserve_locks(count)
        return 0

    cdef int _lock(self, NativeMatch& found, Receipt receipt, double now) except -1:
        receipt.native = deref(self.native).lock(found, self.every_component)
        deref(self.native).advance(now)
        return 0

    cdef int _unlock(self, Receipt receipt, uint32_t components, const RetentionHint& hint, double now) except -1:
        deref(self.native).advance(now)
        deref(self.native).unlock(receipt.native, components, hint)
        return 0

    cdef int _insert(self, Insertion insertion, Inserted inserted) except -1:
        cdef Prefix prefix = insertion.prefix
        cdef Receipt receipt = <Receipt> insertion.receipt
        cdef NativeReceipt* moved = NULL
        insertion.fill(&self.offer)
        if receipt is not None:
            self._check_receipt(receipt)
            moved = &receipt.native
        prefix.space = self._space(prefix.key)
        self.offer.query.space = prefix.space
        try:
            deref(self.native).insert(self.offer, moved, self.inserted)
            self._hand_over(self.inserted, inserted)
        finally:
            self._drop_space(prefix.space)
        if receipt is not None and inserted.num_tokens > 0:
            receipt.key = prefix.key
        return 0

    cdef int _extend(self, Insertion insertion, Receipt receipt, Inserted inserted) except -1:
        cdef int32_t space = 0
        own_insertion(insertion, self.block_size, self.depth_raw(receipt))
        insertion.fill(&self.offer)
        if receipt.key is not None and receipt.native.node < 0:
            space = self._space(receipt.key)
        self.offer.query.space = space
        try:
            deref(self.native).extend(self.offer, receipt.native, self.inserted)
        finally:
            self._drop_space(space)
        self._hand_over(self.inserted, inserted)
        return 0

    cdef int _prepare_all(self, Offers offers, NativeBatch& batch) except -1:
        deref(self.native).prepare_all(offers, batch)
        return 0

    cdef int _insert_prepared(
        self, const Offer& offer, Receipt receipt, NativeBatch& batch, Py_ssize_t which, Inserted inserted
    ) except -1:
        cdef NativeReceipt* moved = NULL
        if receipt is not None:
            moved = &receipt.native
        deref(self.native).insert(offer, moved, batch.answers[which], &batch.storages[which])
        self._hand_over(batch.answers[which], inserted)
        return 0

    cdef void _hand_over(self, NativeInserted& done, Inserted inserted) noexcept:
        inserted.num_tokens = done.blocks * self.block_size
        inserted.num_old_tokens = done.old_blocks * self.block_size
        inserted.taken_ids.swap(done.taken)
        inserted.duplicate_ids.swap(done.duplicates)

    cdef int32_t _block_at(self, Receipt receipt, int64_t index, int32_t lane) except -1:
        return deref(self.native).id_at(receipt.native.node, index, lane)

    cdef int _replace(self, Receipt receipt, int64_t index, int32_t lane, int32_t block) except -1:
        deref(self.native).replace_id(receipt.native.node, index, lane, block)
        return 0

    cdef int _evict(self, int32_t component, int64_t amount, double time, Evicted evicted) except -1:
        evicted.amount = deref(self.native).evict(component, amount, evicted.gone, time)
        self._forget_dead()
        return 0

    # The raw interface.

    cdef int reserve_raw(self, int64_t num_moves) except -1:
        if self.gone_raw.size() == 0:
            deref(self.native).reserve_evicted(self.gone_raw)
            self.offer.lanes.resize(self.num_lanes)
        deref(self.native).reserve(num_moves * deref(self.native).nodes_to_move())
        return 0

    cdef int reserve_ids_raw(self, int32_t lane, int32_t num_ids) except -1:
        deref(self.native).reserve_ids(lane, num_ids)
        return 0

    cdef Receipt blank_receipt(self, object key):
        cdef Receipt receipt = Receipt.__new__(Receipt)
        receipt.tree = self
        receipt.key = key
        return receipt

    cdef int match_raw(self, const Query& query, int64_t limit, NativeMatch* found) except -1:
        if query.space >= 0:
            found[0] = deref(self.native).match(query, limit)
        return 0

    cdef int32_t space_raw(self, Receipt receipt) except -1:
        return self._space(receipt.key)

    cdef void drop_space_raw(self, int32_t space) noexcept:
        deref(self.native).drop_namespace_if_empty(space)

    cdef void advance_raw(self, double time) noexcept:
        deref(self.native).advance(time)

    cdef void copy_shared_raw(self, const NativeMatch& found, int32_t lane, span[int32_t] out) noexcept:
        deref(self.native).copy_blocks(found.shared_node, found.shared_offset, lane, out)

    cdef void lock_shared_raw(self, NativeMatch& found, Receipt receipt) noexcept:
        receipt.native = deref(self.native).reserved_lock_shared(found)

    cdef void copy_ahead_raw(self, const NativeMatch& found, int32_t lane, span[int32_t] out) noexcept:
        deref(self.native).copy_ahead(found, lane, out)

    cdef void lock_ahead_raw(self, NativeMatch& found, Receipt receipt) noexcept:
        receipt.native = deref(self.native).reserved_lock_ahead(found)

    cdef void lock_full_raw(self, NativeMatch& found, Receipt receipt) noexcept:
        receipt.native = deref(self.native).reserved_lock_full(found)

    cdef void fork_raw(self, Receipt source, Receipt target) noexcept:
        target.native = deref(self.native).lock_again(source.native)

    cdef void shorten_raw(self, Receipt receipt, int64_t blocks) noexcept:
        deref(self.native).shorten(receipt.native, blocks)

    cdef void release_raw(self, Receipt receipt, const RetentionHint& hint) noexcept:
        deref(self.native).unlock(receipt.native, self.every_component, hint)

    cdef int64_t depth_raw(self, Receipt receipt) noexcept:
        return deref(self.native).depth(receipt.native.node)

    cdef int64_t first_needed_raw(self, int32_t component, int64_t end) noexcept:
        return deref(self.native).first_needed(component, end)

    cdef int64_t evictable_raw(self, int32_t component) noexcept:
        return deref(self.native).evictable(component)

    cdef int list_states_raw(self, vector[int32_t]& out) except -1:
        out = deref(self.native).held_ids(self.num_lanes)
        return 0

    cdef int32_t block_at_raw(self, Receipt receipt, int64_t index, int32_t lane) noexcept:
        return deref(self.native).known_id(receipt.native.node, index, lane)

    cdef int32_t num_pins_raw(self, Receipt receipt, int64_t index, int32_t component) noexcept:
        return deref(self.native).num_pins(receipt.native.node, index, component)

    cdef void copy_tail_raw(self, Receipt receipt, int32_t lane, span[int32_t] ids) noexcept:
        deref(self.native).known_tail(receipt.native.node, lane, ids)

    cdef int32_t replace_raw(self, Receipt receipt, int64_t index, int32_t block, int32_t lane) noexcept:
        return deref(self.native).reserved_replace(receipt.native.node, index, lane, block)

    cdef int32_t next_victim_raw(self, int32_t component, int32_t* count) noexcept:
        cdef int32_t node = deref(self.native).next_victim(component)
        count[0] = 0 if node < 0 else deref(self.native).num_ids_of(node, component)
        return node

    cdef int32_t copy_path_raw(
        self, int32_t node, vector[int32_t]& tokens, vector[Mark]& marks, vector[vector[int32_t]]& ids
    ) except -2:
        cdef int32_t space = deref(self.native).copy_path(node, tokens, marks)
        cdef size_t lane
        ids.resize(<size_t> self.num_lanes)
        for lane in range(ids.size()):
            ids[lane].resize(tokens.size() // <size_t> self.block_size)
            deref(self.native).known_tail(node, <int32_t> lane, span[int32_t](ids[lane].data(), ids[lane].size()))
        return space

    cdef int32_t state_of_raw(self, int32_t node) noexcept:
        return deref(self.native).state_of(node)

    cdef int64_t evict_raw(self, int32_t component, int64_t amount) noexcept:
        return deref(self.native).reserved_evict(component, min(amount, <int64_t> MAX_EVICTED_AT_ONCE), self.gone_raw)

    cdef int64_t evict_path_raw(self, Prefix prefix, int64_t keep, vector[vector[int32_t]]& gone) except -1:
        cdef int64_t blocks = keep // self.block_size + (keep % self.block_size != 0)
        if prefix.key is not None:
            prefix.space = self.spaces.get(prefix.key, -1)
        if prefix.space < 0:
            gone.resize(<size_t>self.num_lanes + 1)
            return 0
        return deref(self.native).evict_path(prefix.query(), prefix.limit, blocks, gone)

    cdef int64_t evict_namespace_raw(self, object key, vector[vector[int32_t]]& gone) except -1:
        cdef int32_t space = 0 if key is None else self.spaces.get(key, -1)
        if space < 0:
            gone.resize(<size_t>self.num_lanes + 1)
            return 0
        return deref(self.native).evict_namespace(space, gone)

    cdef bint try_extend_raw(
        self, Receipt receipt, const Query& query, const vector[Int32Pointer]& lanes
    ) noexcept:
        cdef RetentionHint no_hint
        cdef HintRanges no_ranges
        cdef States no_states
        self._offer_raw(query, lanes, no_states, no_hint, no_ranges, -INFINITY)
        return deref(self.native).try_extend(self.offer, receipt.native, self.inserted)

    cdef bint try_insert_raw(
        self, Receipt receipt, const Query& query, const vector[Int32Pointer]& lanes, States states,
        const RetentionHint& hint, HintRanges ranges, double time
    ) noexcept:
        self._offer_raw(query, lanes, states, hint, ranges, time)
        return deref(self.native).try_insert(self.offer, receipt.native, self.inserted)

    cdef void _offer_raw(
        self, const Query& query, const vector[Int32Pointer]& lanes, States states, const RetentionHint& hint,
        HintRanges ranges, double time
    ) noexcept:
        self.offer.query = query
        self.offer.lanes = lanes  # the number of lanes never changes: allocates nothing
        self.offer.states = states
        self.offer.hint = hint
        self.offer.ranges = ranges
        self.offer.time = time
