"""The prefix cache's tree: which blocks hold a prefix that was computed before."""

cimport cython
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from cython.operator cimport dereference as deref
from libc.math cimport INFINITY
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.index._integers cimport as_int64, new_int32
from pagecore.index._radix_query cimport (
    Entry,
    Int32Pointer,
    Offer,
    Prefix,
    Query,
    States,
    RetentionHint,
    as_time,
    own_entry,
    read_entry,
    read_prefix,
    read_hint,
)
from pagecore.index._radix_values cimport Evicted, Inserted, Match, array_of
from pagecore.index._sealed cimport seal

from collections.abc import Mapping

from pagecore.errors import (
    DoubleFree,
    InvalidBlock,
    InvalidSequence,
    PagecoreError,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)

# RadixTree::kReservedIds: evict_raw gives up no more in one call, so that it allocates nothing.
cdef enum: MAX_EVICTED_AT_ONCE = 4096

# No call of a tree runs code of the caller once it has begun to look something up: arguments are converted first, keys
# of namespaces are of built-in types, and objects that the garbage collector follows, whose making may run it, are made
# before. What can fail comes before the first change; the answer's ids stay native until they are read. There are no
# list comprehensions: where memory is short, Cython's frees an element twice.

POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "rank")


@cython.freelist(16)
@cython.no_gc_clear
cdef class Receipt:
    """A hold on a prefix, to be given back once; a context manager that gives back what is left.

    One that is forgotten holds its prefix for the tree's whole life.

    Attributes
    ----------
    tree : RadixTree
    match : Match
        What was found when it was made.
    """

    @property
    def num_tokens(self):
        """Tokens of the prefix that it holds."""
        return deref(self.tree.native).depth(self.native.node) * self.tree.block_size

    @property
    def components(self):
        """Names of the components that it still holds."""
        held = []
        for i, name in enumerate(self.tree.components):
            if self.native.components >> i & 1:
                held.append(name)
        return tuple(held)

    def release(self, component=None, *, time=None, rank=None):
        """Give it back, or one component of it; parameters and errors are those of `RadixTree.release`."""
        self.tree.release(self, component, time=time, rank=rank)

    def fork(self):
        """Another receipt for what this one holds.

        Returns
        -------
        Receipt

        Raises
        ------
        DoubleFree
            It was given back.
        """
        cdef Receipt other = Receipt.__new__(Receipt)
        self.tree._check_receipt(self)
        other.tree = self.tree
        other.match = self.match
        other.key = self.key
        other.native = deref(self.tree.native).lock_again(self.native)
        return other

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.native.components != 0:
            self.tree.release(self)


seal(Receipt)


cdef class RadixTree:
    """RadixTree(block_size=16, *, full=1, windows=(), states=False, state_interval=None, policy='lru')\n--\n\n\
The prefixes whose keys and values are still held.

    The tree decides and frees nothing: `insert` says which blocks it takes (the caller gives it a reference to each),
    `evict` which it gives up (the caller drops them). A call that fails changes nothing. Only whole blocks are held;
    tokens are compared one by one, so that a match is exact. Token and block ids are anything that NumPy makes a
    one-dimensional array of integers that fit 32 bits. There is one writer. It follows SGLang's radix cache, with the
    components of its unified tree, and TensorRT-LLM's priorities.

    A **lane** is one list of block ids: the lanes of the full component come first, then one for each window. Where
    there is one lane, blocks are an array; where there are several, a tuple of arrays.

    Parameters
    ----------
    block_size : int
        Tokens of a block.
    full : int
        Lanes of the full component: groups of layers that attend to every token; at most 64. 0 is for models without
        such layers and needs a window or states: the full component then counts blocks of tokens that hold nothing
        themselves, and a prefix goes with the last that its windows and states have of it.
    windows : sequence of int
        Tokens that each sliding window sees, at most 16; a prefix is reusable if the last `window` tokens before its
        end are there.
    states : bool
        A state, such as a state-space model's, may stand at the end of a prefix; then only prefixes with one are
        reusable.
    state_interval : int, optional
        Tokens between the states that the caller keeps, a multiple of `block_size`; by default 64, rounded up to one.
    policy : {"lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "rank"}
        What goes first: what was used longest ago; has fewest hits; was made first; used last; made last; what was
        never hit since it was made; has the lowest priority (0 to 100, 35 where none is given); or the lowest rank.

    Attributes
    ----------
    block_size : int
    components : tuple of str
        "full", then "window" (several: "window0", "window1" ...), then "state".
    windows : tuple of int
    policy : str
    state_interval : int or None

    Raises
    ------
    ShapeError
        A size is out of range.
    UnsupportedDtype
        A size is no integer, or `states` no bool.
    UnsupportedOption
        `policy` is unknown; or `state_interval` is given and `states` is False.

    Examples
    --------
    >>> tree = RadixTree(block_size=2)
    >>> tree.insert([1, 2, 3, 4, 5], [7, 8]).taken
    array([7, 8], dtype=int32)
    >>> with tree.match_and_lock([1, 2, 3, 9]) as receipt:
    ...     print(receipt.match.num_tokens, receipt.match.blocks, tree.protected("full"))
    2 [7] 1
    >>> tree.evict("full", 9).blocks
    array([8, 7], dtype=int32)
    """

    def __cinit__(self, block_size=16, *, full=1, windows=(), states=False, state_interval=None, policy="lru"):
        cdef Options options
        if not isinstance(policy, str) or policy not in POLICIES:
            raise UnsupportedOption(f"policy is {policy!r}; use one of {', '.join(POLICIES)}")
        if not isinstance(states, bool):
            raise UnsupportedDtype(f"states is {states!r}; use True or False")
        options.block_size = as_int64(block_size, "block_size")
        options.full_lanes = as_int64(full, "full")
        try:
            windows = tuple(windows)
        except TypeError:
            windows = (windows,)
        for window in windows:
            options.windows.push_back(as_int64(window, "a window"))
        options.has_states = states
        if states and options.block_size > 0:
            options.state_interval = (-(-64 // options.block_size) * options.block_size if state_interval is None
                                      else as_int64(state_interval, "state_interval"))
            self.state_interval = options.state_interval
        elif state_interval is not None:
            raise UnsupportedOption(f"state_interval is {state_interval} and the tree has no states; give states=True")
        cdef int position = POLICIES.index(policy)
        options.policy = <Policy> position
        self.native.reset(new NativeRadixTree(options))
        self.block_size = options.block_size
        self.windows = tuple(options.windows)
        names = ["full"]
        for i in range(len(windows)):
            names.append("window" if len(windows) == 1 else f"window{i}")
        self.components = (*names, "state") if states else tuple(names)
        self.policy = str(policy)
        self.has_states = states
        self.num_lanes = deref(self.native).num_lanes()
        self.every_component = (1 << len(self.components)) - 1
        self.spaces = {}
        self.space_keys = [None]

    # What a caller gives.

    cdef Prefix _prefix(self, object tokens, object namespace, object spans, object max_tokens):
        return read_prefix(self.block_size, tokens, namespace, spans, max_tokens)

    cdef int32_t _component(self, object component) except -1:
        try:
            return self.components.index(component)
        except ValueError:
            raise UnsupportedOption(
                f"component {component!r} is none of this tree's; use one of {', '.join(self.components)}"
            ) from None

    cdef int _check_receipt(self, Receipt receipt) except -1:
        if receipt.tree is not self:
            raise InvalidSequence("the receipt is another tree's; give it back there")
        if receipt.native.components == 0:
            raise DoubleFree("the receipt was given back already; give each back once")
        return 0

    # Looking up.

    def match(self, tokens, *, namespace=None, spans=None, max_tokens=None):
        """Find the longest prefix that the tree has; nothing changes, and nothing is held.

        Parameters
        ----------
        tokens : array_like of int
            [num_tokens].
        namespace : hashable, optional
            Different namespaces share no prefixes. Two are the same if they are equal in value and type, at every
            depth of tuples, named tuples, frozensets and data classes; an object of another type compares by ``==``.
        spans : list of (int, int, bytes or int), optional
            Positions [start, end) whose content is named by a digest (up to 32 bytes, or an int) and not by its tokens
            alone: an image, audio. Blocks that a span overlaps are equal only where it is.
        max_tokens : int, optional
            Look no further.

        Returns
        -------
        Match

        Raises
        ------
        ShapeError
            A rank, a length, a span or a token's size does not fit.
        UnsupportedDtype
            Tokens are not integers; or the namespace has a part without a hash, unequal to itself (NaN), or whose
            own parts cannot be seen (a slice, a weak reference).
        """
        return self._match(self._prefix(tokens, namespace, spans, max_tokens))

    cdef int _find(self, Prefix prefix, NativeMatch* found) except -1:
        if prefix.key is not None:
            prefix.space = self.spaces.get(prefix.key, -1)
        if prefix.space >= 0:
            found[0] = deref(self.native).match(prefix.query(), prefix.limit)
        return 0

    cdef Match _match(self, Prefix prefix):
        cdef NativeMatch found
        cdef Match match = self._new_match()
        self._find(prefix, &found)
        self._fill(match, found)
        return match

    cdef Match _new_match(self):
        cdef Match match = Match.__new__(Match)
        if self.num_lanes != 1:
            match.blocks = PyTuple_New(self.num_lanes)
        return match

    cdef int _fill(self, Match match, const NativeMatch& found) except -1:
        """Fill a new match; of Python's objects this makes only arrays and ints."""
        cdef int32_t* data = NULL
        cdef int32_t lane
        match.num_tokens = found.blocks * self.block_size
        match.num_full_tokens = found.full_blocks * self.block_size
        match.checkpoint = None if found.checkpoint == 0 else found.checkpoint
        match.state = None if found.state < 0 else found.state
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
        return 0

    def match_and_lock(self, tokens, *, namespace=None, spans=None, max_tokens=None, time=None):
        """Find the longest prefix, count the use, and hold what was found until the receipt is given back.

        Parameters
        ----------
        tokens, namespace, spans, max_tokens
            As in `match`.
        time : float, optional
            The caller's clock in seconds, by default the latest that was given; it never runs backwards.

        Returns
        -------
        Receipt
            Its `match` says what was found. What it holds: the path, the last window before its end, the state at its
            end.

        Raises
        ------
        ShapeError, UnsupportedDtype
            What `match` raises; or `time` is no finite number.
        """
        cdef double now = as_time(time)
        cdef NativeMatch found
        cdef Prefix prefix = self._prefix(tokens, namespace, spans, max_tokens)
        cdef Receipt receipt = self._new_receipt(prefix)
        self._find(prefix, &found)
        self._fill(receipt.match, found)
        receipt.native = deref(self.native).lock(found, self.every_component)
        deref(self.native).advance(now)
        return receipt

    cdef Receipt _new_receipt(self, Prefix prefix):
        cdef Receipt receipt = Receipt.__new__(Receipt)
        receipt.tree = self
        receipt.key = prefix.key
        receipt.match = self._new_match()
        return receipt

    def release(self, receipt, component=None, *, time=None, rank=None):
        """Give a receipt back, or one component of it; the path is held until the last one is back.

        Parameters
        ----------
        receipt : Receipt
        component : str, optional
            One of `components`; by default all that the receipt still holds.
        time, rank : float, optional
            As in `insert`; the rank is for what nobody holds any more.

        Raises
        ------
        DoubleFree
            It was given back before, or that component of it.
        InvalidSequence
            It is another tree's.
        UnsupportedOption
            The tree has no such component, or uses no rank.
        ShapeError, UnsupportedDtype
            `time` or `rank` is no finite number.
        """
        cdef Receipt held = as_receipt(receipt)
        cdef uint32_t which = self.every_component
        cdef RetentionHint hint
        cdef double now = 0
        read_hint(&hint, &now, self.policy, time, None, None, rank)
        if component is not None:
            which = 1 << self._component(component)
        self._check_receipt(held)
        if held.native.components & which == 0:
            raise DoubleFree(f"the receipt does not hold {component!r}; it holds {held.components}")
        deref(self.native).advance(now)
        deref(self.native).unlock(held.native, which, hint)
        self._forget_dead()

    # Keeping.

    def insert(self, tokens, blocks, *, states=None, namespace=None, spans=None, receipt=None, time=None,
               priority=None, time_to_live=None, rank=None):
        """Keep what a sequence has computed, as far as it fills blocks.

        Parameters
        ----------
        tokens : array_like of int
            [num_tokens], from the sequence's start.
        blocks : array_like of int, or one for each lane
            [>= num_tokens // block_size]. A window's lane may have null blocks where the sequence has none left.
        states : list of (int, int), optional
            (length, id), by length: a state after that many tokens, a multiple of the block size.
        namespace, spans
            As in `match`.
        receipt : Receipt, optional
            Moves to the end of what is kept now, so that a running sequence holds what it has published. The state
            that it held is given back.
        time : float, optional
            The caller's clock in seconds, by default the latest that was given; it never runs backwards.
        priority : float, optional
            0 to 100, of the whole prefix; the higher of two stays. For policy "priority".
        time_to_live : float, optional
            Seconds until the priority falls back to 35.
        rank : float, optional
            For policy "rank"; the later of two stays.

        Returns
        -------
        Inserted

        Raises
        ------
        InvalidBlock
            An id is negative, or null in the full component.
        DoubleFree
            The tree has a block already, at another place; or the receipt was given back.
        ShapeError
            There are fewer blocks than the tokens fill; a state stands elsewhere; what `match` raises.
        InvalidSequence
            The receipt is another tree's.
        UnsupportedOption
            A state, priority or rank that this tree does not use.
        UnsupportedDtype
            Ids are no integers, a time, priority or rank is no number, or what `match` raises so.
        """
        cdef Entry entry = self._entry(
            tokens, blocks, states=states, namespace=namespace, spans=spans, receipt=receipt, time=time,
            priority=priority, time_to_live=time_to_live, rank=rank
        )
        cdef Prefix prefix = entry.prefix
        cdef Inserted inserted = Inserted.__new__(Inserted)
        cdef NativeReceipt* moved = NULL
        entry.fill(&self.offer)
        if receipt is not None:
            self._check_receipt(<Receipt> receipt)
            moved = &(<Receipt> receipt).native
        prefix.space = self._space(prefix.key)
        self.offer.query.space = prefix.space
        try:
            deref(self.native).insert(self.offer, moved, self.inserted)
            self._hand_over(self.inserted, inserted)
        finally:
            self._drop_space(prefix.space)
        if receipt is not None and inserted.num_tokens > 0:
            (<Receipt> receipt).key = prefix.key
        return inserted

    cdef void _hand_over(self, NativeInserted& done, Inserted inserted) noexcept:
        inserted.num_tokens = done.blocks * self.block_size
        inserted.num_old_tokens = done.old_blocks * self.block_size
        inserted.taken_ids.swap(done.taken)
        inserted.duplicate_ids.swap(done.duplicates)

    cdef int32_t _space(self, object key) except -1:
        """Return the namespace's number; the caller drops it again where nothing comes of it."""
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
        except BaseException:
            self._drop_space(space)
            raise
        self.space_keys[space] = key
        return space

    cdef void _drop_space(self, int32_t space) noexcept:
        deref(self.native).drop_namespace_if_empty(space)
        self._forget_dead()

    def extend(self, tokens, blocks, receipt, *, time=None):
        """Keep what a sequence has computed since; the receipt says how far the tree has it, and moves to the end.

        What lies before the receipt's end is not looked at, so that the cost is that of the new blocks. They lie in
        the receipt's namespace, have no spans and no states, and are worth what the receipt's end is worth (priority
        and rank). Where nobody else uses that end, no node is added: it grows, its age and hits included.

        Parameters
        ----------
        tokens : array_like of int
            [num_tokens], of the whole sequence, from its start.
        blocks : array_like of int, or one for each lane
            [>= num_tokens // block_size], of the whole sequence. A window's lane may have null blocks.
        receipt : Receipt
            Of this sequence's prefix. The state that it held is given back.
        time : float, optional
            The caller's clock in seconds, as in `insert`.

        Returns
        -------
        Inserted
            `num_old_tokens` counts what the receipt held, too.

        Raises
        ------
        ShapeError
            There are fewer tokens than the receipt holds, or fewer blocks than they fill; or `time` is not finite.
        InvalidBlock, DoubleFree, InvalidSequence, UnsupportedDtype
            As in `insert`.
        """
        cdef Receipt held = as_receipt(receipt)
        cdef Entry entry = read_entry(self.block_size, self.num_lanes, tokens, blocks, None, None, None)
        cdef Inserted inserted = Inserted.__new__(Inserted)
        entry.time = as_time(time)
        self._check_receipt(held)
        own_entry(entry, self.block_size, deref(self.native).depth(held.native.node))
        entry.fill(&self.offer)
        self._extend(held)
        self._hand_over(self.inserted, inserted)
        return inserted

    cdef int _extend(self, Receipt receipt) except -1:
        cdef int32_t space = 0
        if receipt.key is not None and receipt.native.node < 0:
            space = self._space(receipt.key)
        self.offer.query.space = space
        try:
            deref(self.native).extend(self.offer, receipt.native, self.inserted)
        finally:
            self._drop_space(space)
        return 0

    cdef void _forget_dead(self) noexcept:
        """Forget the namespaces that have lost their last node; code of the caller may run as each key goes."""
        cdef int32_t space = deref(self.native).dead_namespace()
        while space >= 0:
            key = self.space_keys[space]
            self.space_keys[space] = None
            if key is not None:
                del self.spaces[key]
            deref(self.native).forget_dead_namespace()
            key = None
            space = deref(self.native).dead_namespace()

    # Blocks of a prefix that is held.

    cdef int32_t _lane(self, object lane) except -1:
        cdef int64_t number = as_int64(lane, "lane")
        if not 0 <= number < self.num_lanes:
            raise ShapeError(f"lane {lane} is none of this tree's; it has lanes 0 to {self.num_lanes - 1}")
        return <int32_t> number

    def block_at(self, receipt, index, lane=0):
        """The block that the tree has at a place of a prefix that is held; 0 where a window has none left.

        Parameters
        ----------
        receipt : Receipt
            Holds the prefix.
        index : int
            Blocks before it in the prefix.
        lane : int
            Which list of block ids.

        Returns
        -------
        int

        Raises
        ------
        DoubleFree, InvalidSequence, UnsupportedDtype
            As in `release`; or a number is no integer.
        ShapeError
            The receipt holds no such block, or the tree has no such lane.
        """
        cdef Receipt held = as_receipt(receipt)
        cdef int64_t place = as_int64(index, "index")
        cdef int32_t which = self._lane(lane)
        self._check_receipt(held)
        return deref(self.native).id_at(held.native.node, place, which)

    def replace(self, receipt, index, block, lane=0):
        """Let another block stand for the same tokens: a copy, such as a sequence that computed them too has.

        Parameters
        ----------
        receipt, index, lane
            As in `block_at`.
        block : int
            The tree holds it from now on, and the caller gives it a reference; 0, in a window's lane, is none.

        Returns
        -------
        int
            What stood there, whose reference the caller drops; 0 for none.

        Raises
        ------
        InvalidBlock
            The block is negative, or null in the full component.
        DoubleFree
            The tree has the block already, at another place; or the receipt was given back.
        InvalidSequence, ShapeError, UnsupportedDtype
            As in `block_at`.
        """
        cdef Receipt held = as_receipt(receipt)
        cdef int64_t place = as_int64(index, "index")
        cdef int64_t number = as_int64(block, "block")
        cdef int32_t which = self._lane(lane)
        if number > INT32_MAX:
            raise InvalidBlock(f"block {block} cannot be cached; ids run to {INT32_MAX}")
        self._check_receipt(held)
        cdef object old = deref(self.native).id_at(held.native.node, place, which)  # made before anything changes
        deref(self.native).replace_id(held.native.node, place, which, <int32_t> max(number, -1))
        return old

    # Giving up.

    def evict(self, component, amount, *, time=None):
        """Give up the worst `amount` of a component's blocks (or states), or all that can go.

        Full blocks go from the tails of leaves, with what windows and states have there; a window or a state goes
        alone and leaves a tombstone.

        Parameters
        ----------
        component : str
            One of `components`.
        amount : int
            Blocks (of each lane) or states.
        time : float, optional
            The caller's clock in seconds.

        Returns
        -------
        Evicted
            Exactly ``min(amount, evictable(component))`` of them; where `full` is 0, of the full component also what
            is then left without anything.

        Raises
        ------
        UnsupportedOption
            The tree has no such component.
        ShapeError
            `amount` is negative, or `time` is not finite.
        UnsupportedDtype
            `amount` is no integer, or `time` no number.
        """
        cdef int32_t which = self._component(component)
        cdef int64_t wanted = as_int64(amount, "amount")
        cdef double now = as_time(time)
        cdef Evicted evicted = Evicted.__new__(Evicted)
        if wanted < 0:
            raise ShapeError(f"{amount} cannot be evicted; ask for 0 or more")
        evicted.amount = deref(self.native).evict(which, wanted, evicted.gone, now)
        self._forget_dead()
        return evicted

    def evictable(self, component="full"):
        """Blocks (or states) of a component that can go now, an int; UnsupportedOption where there is none such."""
        return deref(self.native).evictable(self._component(component))

    def protected(self, component="full"):
        """Blocks (or states) of a component that receipts hold, an int; UnsupportedOption where there is none such."""
        cdef int32_t which = self._component(component)
        return deref(self.native).held(which) - deref(self.native).evictable(which)

    def held_blocks(self, lane=0):
        """Every block that the tree holds in one lane, for callers that recount.

        Parameters
        ----------
        lane : int
            The full component's lanes come first, then one for each window.

        Returns
        -------
        numpy.ndarray
            int32 [num_held], new, ascending.

        Raises
        ------
        ShapeError
            There is no such lane.
        UnsupportedDtype
            `lane` is no integer.
        """
        return array_of(deref(self.native).held_ids(self._lane(lane)))

    def held_states(self):
        """Every state that the tree holds: int32 [num_held], new, ascending; none where it has no states."""
        return array_of(deref(self.native).held_ids(self.num_lanes))

    # All sequences of a step.

    def match_all(self, prefixes, *, namespaces=None, spans=None, max_tokens=None):
        """`match` for every prefix of a list.

        Parameters
        ----------
        prefixes : iterable of array_like of int
        namespaces, spans, max_tokens : iterable, optional
            One of `match`'s for each prefix, or None.

        Returns
        -------
        list of Match

        Raises
        ------
        ShapeError
            There are more or fewer options than prefixes; or what `match` raises so.
        UnsupportedDtype
            As in `match`.
        """
        cdef list matches = []
        for prefix in self._prefixes(prefixes, namespaces, spans, max_tokens):
            matches.append(self._match(<Prefix> prefix))
        return matches

    def match_and_lock_all(self, prefixes, *, namespaces=None, spans=None, max_tokens=None, time=None):
        """`match_and_lock` for every prefix of a list: all, or none where one is refused.

        All are matched before the first is locked.

        Parameters
        ----------
        prefixes, namespaces, spans, max_tokens
            As in `match_all`.
        time : float, optional
            The caller's clock in seconds, as in `match_and_lock`.

        Returns
        -------
        list of Receipt

        Raises
        ------
        ShapeError, UnsupportedDtype
            As in `match_all`; or `time` is no finite number.
        """
        cdef double now = as_time(time)
        cdef Receipt receipt
        cdef vector[NativeMatch] found
        cdef Py_ssize_t i
        cdef list wanted = self._prefixes(prefixes, namespaces, spans, max_tokens)
        cdef list receipts = []
        for prefix in wanted:
            receipts.append(self._new_receipt(<Prefix> prefix))
        found.resize(len(receipts))
        for i in range(len(receipts)):
            self._find(<Prefix> wanted[i], &found[i])
            self._fill((<Receipt> receipts[i]).match, found[i])
        deref(self.native).reserve_locks(len(receipts))
        for i in range(len(receipts)):
            receipt = <Receipt> receipts[i]
            receipt.native = deref(self.native).lock(found[i], self.every_component)
        deref(self.native).advance(now)
        return receipts

    def release_all(self, receipts, *, time=None):
        """`release` for every receipt of a list: all, or none where one is refused.

        Parameters
        ----------
        receipts : iterable of Receipt
        time : float, optional
            The caller's clock in seconds, as in `release`.

        Raises
        ------
        DoubleFree
            One was given back before, or stands in the list twice.
        InvalidSequence
            One is another tree's.
        ShapeError, UnsupportedDtype
            One is no receipt; or `time` is no finite number.
        """
        cdef RetentionHint hint
        cdef double now = 0
        cdef Py_ssize_t i
        cdef list given = as_list(receipts, "receipts")
        read_hint(&hint, &now, self.policy, time, None, None, None)
        for each in given:
            if not isinstance(each, Receipt):
                raise UnsupportedDtype(f"a receipt is {type(each).__name__}; give what match_and_lock returned")
        num_different = len(set(map(id, given)))
        for i in range(len(given)):
            self._check_receipt(<Receipt> given[i])
        if num_different < len(given):
            raise DoubleFree("a receipt stands in the list twice; give each back once")
        deref(self.native).advance(now)
        for i in range(len(given)):
            deref(self.native).unlock((<Receipt> given[i]).native, self.every_component, hint)
        self._forget_dead()

    def insert_all(self, entries, *, time=None):
        """`insert` for every sequence of a step, in order: all, or none where one is refused.

        Parameters
        ----------
        entries : iterable of dict
            The arguments of `insert` but time, by name. Two may offer the same block for one prefix that they share.
        time : float, optional
            The caller's clock in seconds, as in `insert`.

        Returns
        -------
        list of Inserted
            One for each entry.

        Raises
        ------
        DoubleFree
            A block or state is offered for two prefixes of the list; or what `insert` raises so.
        InvalidBlock, InvalidSequence, ShapeError, UnsupportedDtype, UnsupportedOption
            As in `insert`.
        """
        cdef Entry entry
        cdef Receipt receipt
        cdef NativeReceipt* moved
        cdef NativeBatch batch
        cdef vector[Offer] offers
        cdef Py_ssize_t i
        cdef list checked = []
        cdef list done = []
        for each in as_list(entries, "entries"):
            if not isinstance(each, Mapping):
                raise UnsupportedDtype(f"an entry is {type(each).__name__}; give insert's arguments as a dict")
            checked.append(self._entry(time=time, **each))
        for _ in range(len(checked)):
            done.append(Inserted.__new__(Inserted))
        offers.resize(len(checked))
        for i in range(len(checked)):
            entry = <Entry> checked[i]
            entry.fill(&offers[i])
            if entry.receipt is not None:
                self._check_receipt(<Receipt> entry.receipt)
        try:
            for i in range(len(checked)):
                entry = <Entry> checked[i]
                entry.prefix.space = self._space(entry.prefix.key)
                offers[i].query.space = entry.prefix.space
            deref(self.native).prepare_all(Offers(offers.data(), offers.size()), batch)
            for i in range(len(checked)):  # nothing fails from here on
                entry = <Entry> checked[i]
                receipt = <Receipt> entry.receipt
                moved = NULL
                if receipt is not None:
                    moved = &receipt.native
                deref(self.native).insert(offers[i], moved, batch.answers[i], &batch.runs[i])
                self._hand_over(batch.answers[i], <Inserted> done[i])
        finally:
            for i in range(len(checked)):
                if (<Entry> checked[i]).prefix.space > 0:
                    deref(self.native).drop_namespace_if_empty((<Entry> checked[i]).prefix.space)
            self._forget_dead()
        for i in range(len(checked)):
            entry = <Entry> checked[i]
            if entry.receipt is not None and (<Inserted> done[i]).num_tokens > 0:
                (<Receipt> entry.receipt).key = entry.prefix.key
        return done

    def _entry(self, tokens, blocks, *, states=None, namespace=None, spans=None, receipt=None, time=None,
               priority=None, time_to_live=None, rank=None):
        cdef Entry entry = read_entry(self.block_size, self.num_lanes, tokens, blocks, states, namespace, spans)
        if receipt is not None and not isinstance(receipt, Receipt):
            raise UnsupportedDtype(f"receipt is {type(receipt).__name__}; give what match_and_lock returned")
        entry.receipt = receipt
        read_hint(&entry.hint, &entry.time, self.policy, time, priority, time_to_live, rank)
        own_entry(entry, self.block_size, 0)
        return entry

    def _prefixes(self, prefixes, namespaces, spans, max_tokens):
        prefixes = as_list(prefixes, "prefixes")
        columns = []
        for what, values in (("namespaces", namespaces), ("spans", spans), ("max_tokens", max_tokens)):
            values = [None] * len(prefixes) if values is None else as_list(values, what)
            if len(values) != len(prefixes):
                raise ShapeError(f"{len(values)} {what} are given for {len(prefixes)} prefixes; give one for each")
            columns.append(values)
        read = []
        for tokens, namespace, marked, most in zip(prefixes, *columns, strict=True):
            read.append(self._prefix(tokens, namespace, marked, most))
        return read

    # Changes that cannot fail, for the cache.

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

    cdef void copy_match_raw(self, const NativeMatch& found, int32_t lane, span[int32_t] out) noexcept:
        deref(self.native).copy_blocks(found.node, found.offset, lane, out)

    cdef void lock_raw(self, NativeMatch& found, Receipt receipt) noexcept:
        receipt.native = deref(self.native).reserved_lock(found, self.every_component)

    cdef void fork_raw(self, Receipt source, Receipt target) noexcept:
        target.native = deref(self.native).lock_again(source.native)

    cdef void shorten_raw(self, Receipt receipt, int64_t blocks) noexcept:
        deref(self.native).shorten(receipt.native, blocks)

    cdef void release_raw(self, Receipt receipt, const RetentionHint& hint) noexcept:
        deref(self.native).unlock(receipt.native, self.every_component, hint)

    cdef int64_t depth_raw(self, Receipt receipt) noexcept:
        return deref(self.native).depth(receipt.native.node)

    cdef int64_t evictable_raw(self, int32_t component) noexcept:
        return deref(self.native).evictable(component)

    cdef int32_t block_at_raw(self, Receipt receipt, int64_t index, int32_t lane) noexcept:
        return deref(self.native).known_id(receipt.native.node, index, lane)

    cdef int32_t num_pins_raw(self, Receipt receipt, int64_t index, int32_t component) noexcept:
        return deref(self.native).num_pins(receipt.native.node, index, component)

    cdef void copy_tail_raw(self, Receipt receipt, int32_t lane, span[int32_t] ids) noexcept:
        deref(self.native).known_tail(receipt.native.node, lane, ids)

    cdef int32_t replace_raw(self, Receipt receipt, int64_t index, int32_t block, int32_t lane) noexcept:
        return deref(self.native).reserved_replace(receipt.native.node, index, lane, block)

    cdef int64_t evict_raw(self, int32_t component, int64_t amount) noexcept:
        return deref(self.native).reserved_evict(component, min(amount, <int64_t> MAX_EVICTED_AT_ONCE), self.gone_raw)

    cdef bint try_extend_raw(
        self, Receipt receipt, const Query& query, const vector[Int32Pointer]& lanes
    ) noexcept:
        cdef RetentionHint no_hint
        self._offer_raw(query, lanes, no_hint, -INFINITY)
        return deref(self.native).try_extend(self.offer, receipt.native, self.inserted)

    cdef bint try_insert_raw(
        self, Receipt receipt, const Query& query, const vector[Int32Pointer]& lanes, const RetentionHint& hint, double time
    ) noexcept:
        self._offer_raw(query, lanes, hint, time)
        return deref(self.native).try_insert(self.offer, receipt.native, self.inserted)

    cdef void _offer_raw(
        self, const Query& query, const vector[Int32Pointer]& lanes, const RetentionHint& hint, double time
    ) noexcept:
        cdef States no_states
        self.offer.query = query
        self.offer.lanes = lanes  # as many as before: allocates nothing
        self.offer.states = no_states
        self.offer.hint = hint
        self.offer.time = time

    # What it tells.

    @property
    def num_nodes(self):
        """Nodes of the tree."""
        return deref(self.native).num_nodes()

    @property
    def num_receipts(self):
        """Receipts that are out."""
        return deref(self.native).num_receipts()

    @property
    def num_namespaces(self):
        """Namespaces with anything in them, beside the one without a name."""
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


cdef Receipt as_receipt(object receipt):
    if not isinstance(receipt, Receipt):
        raise UnsupportedDtype(f"the receipt is {type(receipt).__name__}; give one that match_and_lock returned")
    return <Receipt> receipt


cdef list as_list(object values, str what):
    try:
        return list(values)
    except TypeError:
        raise ShapeError(f"{what} is {type(values).__name__}; give a list") from None
