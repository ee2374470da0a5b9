"""Prefix tree: finds the blocks that hold a prefix computed before, pins them, and chooses what to evict."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t

from pagecore.index._integers cimport as_int64
from pagecore.index.radix._namespace_key cimport key_of
from pagecore.index.radix._radix_batch cimport insert_each, lock_each, match_each, read_prefixes, release_each
from pagecore.index.radix._radix_core cimport RadixCore, Receipt, as_receipt
from pagecore.index.radix._radix_native cimport NativeMatch
from pagecore.index.radix._radix_query cimport Insertion, Prefix, RetentionHint, as_time, read_insertion, read_hint
from pagecore.index.radix._radix_values cimport Evicted, Inserted

from pagecore.errors import DoubleFree, InvalidBlock, ShapeError


cdef class RadixTree(RadixCore):
    """RadixTree(block_size=16, *, full=1, windows=(), chunks=(), sinks=(), states=False, \
state_interval=None, policy='lru')\n--\n\n\
Radix tree over token prefixes and the blocks that hold their keys and values.

    The tree only keeps account of blocks. `insert` returns the blocks that the tree takes, and the caller adds a
    reference to each; `evict` returns the blocks that it removes, and the caller drops these references. A call that
    fails changes nothing. Only whole blocks are held, and tokens are compared one by one, so that a match is exact.
    Token and block ids are anything that NumPy converts to a one-dimensional array of integers that fit 32 bits. The
    tree has one writer. The design follows SGLang's radix cache with the components of its unified tree, and
    TensorRT-LLM's priorities.

    A **lane** is one list of block ids: the lanes of the full component come first, then one lane for each window. With
    one lane, blocks are an array; with several, a tuple of arrays.

    Parameters
    ----------
    block_size : int
        Tokens in a block.
    full : int
        Lanes of the full component, one for each group of layers that attend to every token; at most 64. 0 is for
        models without such layers and needs a window or states. The full component then counts blocks of tokens
        without ids, and a prefix is removed with the last id that its windows and states have of it.
    windows : sequence of int
        Tokens that each sliding window sees; at most 16 windows. A prefix is reusable if the last `window` tokens
        before its end are cached.
    chunks : sequence of int or None, optional
        Chunk of each window, in tokens, for layers with chunked local attention; None or 0 for a window without chunks.
        The tokens that must be cached then begin where the chunk of the first of them begins. With a window of 0, a
        prefix that ends with a chunk needs none.
    sinks : sequence of int or None, optional
        First tokens that each window needs in addition; None or 0 for a window without. A prefix is reusable if they
        are cached, too.
    states : bool
        Prefixes can end with a state, such as that of a state-space model; only prefixes that do are reusable.
    state_interval : int, optional
        Tokens between the states that the caller keeps, a multiple of `block_size`; by default 64, rounded up to a
        multiple.
    policy : {"lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "rank"}
        Eviction order. The first to be evicted is: the least recently used; the one with the fewest hits; the oldest;
        the most recently used; the newest; one without a hit since its insertion; the lowest priority (0 to 100, by
        default 35); the lowest rank. Ties are broken by the least recent use.

    Attributes
    ----------
    block_size : int
    components : tuple of str
        "full", then "window" (several: "window0", "window1" ...), then "state".
    windows, chunks, sinks : tuple of int
    policy : str
    state_interval : int or None

    Raises
    ------
    ShapeError
        A size is out of range.
    UnsupportedDtype
        A size is not an integer, or `states` is not a bool.
    UnsupportedOption
        `policy` is unknown, or `state_interval` is given and `states` is False.

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

    # Lookup.

    def match(self, tokens, *, namespace=None, spans=None, max_tokens=None):
        """Find the longest reusable prefix; nothing changes and nothing is pinned.

        Parameters
        ----------
        tokens : array_like of int
            [num_tokens].
        namespace : hashable, optional
            Prefixes are shared only within a namespace. Two namespaces are the same if they are equal in value and
            type, at every depth of tuples, named tuples, frozensets and data classes; objects of other types are
            compared by ``==``.
        spans : list of (int, int, bytes or int), optional
            Positions [start, end) whose content (an image, audio) is named by a digest, up to 32 bytes or an int, in
            addition to its tokens. Blocks that a span overlaps match only with the same span.
        max_tokens : int, optional
            Longest prefix to look for.

        Returns
        -------
        Match

        Raises
        ------
        ShapeError
            A rank, a length, a span or a token is out of range.
        UnsupportedDtype
            Tokens are not integers; or the namespace has a part that is not hashable, is unequal to itself (NaN), or
            hides its own parts (a slice, a weak reference).
        """
        return self._match(self._prefix(tokens, namespace, spans, max_tokens))

    def match_and_lock(self, tokens, *, namespace=None, spans=None, max_tokens=None, time=None):
        """Find the longest reusable prefix, count the hit, and pin the prefix until the receipt is released.

        Parameters
        ----------
        tokens, namespace, spans, max_tokens
            As in `match`.
        time : float, optional
            The caller's clock in seconds, by default the latest time given; it never runs backwards.

        Returns
        -------
        Receipt
            Pins the path, the last window before its end, and the state at its end. Its `match` is the result of the
            lookup.

        Raises
        ------
        ShapeError, UnsupportedDtype
            As in `match`; or `time` is not a finite number.
        """
        cdef double now = as_time(time)
        cdef NativeMatch found
        cdef Prefix prefix = self._prefix(tokens, namespace, spans, max_tokens)
        cdef Receipt receipt = self._new_receipt(prefix)
        self._find(prefix, &found)
        self._fill(receipt.match, found)
        self._lock(found, receipt, now)
        return receipt

    def release(self, receipt, component=None, *, time=None, rank=None):
        """Release a receipt, or one component of it; the path stays pinned until the last component is released.

        Parameters
        ----------
        receipt : Receipt
        component : str, optional
            One of `components`; by default all that the receipt still pins.
        time, rank : float, optional
            As in `insert`; the rank applies to nodes that no other receipt pins.

        Raises
        ------
        DoubleFree
            The receipt, or that component of it, was released before.
        InvalidSequence
            The receipt belongs to another tree.
        UnsupportedOption
            The tree has no such component, or its policy does not use ranks.
        ShapeError, UnsupportedDtype
            `time` or `rank` is not a finite number.
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
            raise DoubleFree(f"the receipt does not pin {component!r}; it pins {held.components}")
        self._unlock(held, which, hint, now)
        self._forget_dead()

    # Insertion.

    def insert(self, tokens, blocks, *, states=None, namespace=None, spans=None, receipt=None, time=None,
               priority=None, time_to_live=None, rank=None):
        """Add the whole blocks of a sequence that the tree lacks.

        Parameters
        ----------
        tokens : array_like of int
            [num_tokens], from the start of the sequence.
        blocks : array_like of int, or one for each lane
            [>= num_tokens // block_size]. The lane of a window may have null blocks for what the sequence has released.
        states : list of (int, int), optional
            (length, id) in ascending order: a state after `length` tokens, a multiple of the block size.
        namespace, spans
            As in `match`.
        receipt : Receipt, optional
            Moves to the end of the inserted prefix, so that a running sequence pins what it has published. A state that
            it pinned is released.
        time : float, optional
            The caller's clock in seconds, by default the latest time given; it never runs backwards.
        priority : float, optional
            0 to 100, for the whole prefix; the higher of two is kept. For policy "priority".
        time_to_live : float, optional
            Seconds until the priority falls back to 35.
        rank : float, optional
            For policy "rank"; the later of two is kept.

        Returns
        -------
        Inserted

        Raises
        ------
        InvalidBlock
            An id is negative, or null in the full component.
        DoubleFree
            The tree has a block already, at another place; or the receipt was released.
        ShapeError
            There are fewer blocks than the tokens fill, or a state has another length; or as in `match`.
        InvalidSequence
            The receipt belongs to another tree.
        UnsupportedOption
            A state, priority or rank is given to a tree that does not use it.
        UnsupportedDtype
            Ids are not integers; a time, priority or rank is not a number; or as in `match`.
        """
        cdef Insertion insertion = self._insertion(
            time, tokens, blocks, states=states, namespace=namespace, spans=spans, receipt=receipt, priority=priority,
            time_to_live=time_to_live, rank=rank
        )
        cdef Inserted inserted = Inserted.__new__(Inserted)
        self._insert(insertion, inserted)
        return inserted

    def extend(self, tokens, blocks, receipt, *, time=None):
        """Add the blocks that a sequence has computed past the end of its receipt, and move the receipt to the end.

        Blocks before the end of the receipt are not compared again, so that the cost is that of the new blocks. The new
        blocks belong to the receipt's namespace, have no spans and no states, and inherit priority and rank from the
        receipt's end. If no other receipt or prefix uses that end, its node grows and keeps its age; otherwise, and
        with "lfu" and "slru" after a hit, a node is added.

        Parameters
        ----------
        tokens : array_like of int
            [num_tokens], of the whole sequence, from its start.
        blocks : array_like of int, or one for each lane
            [>= num_tokens // block_size], of the whole sequence. The lane of a window may have null blocks.
        receipt : Receipt
            Pins a prefix of this sequence. A state that it pinned is released.
        time : float, optional
            The caller's clock in seconds, as in `insert`.

        Returns
        -------
        Inserted
            `num_old_tokens` includes the tokens that the receipt pinned.

        Raises
        ------
        ShapeError
            There are fewer tokens than the receipt pins, or fewer blocks than the tokens fill; or `time` is not finite.
        InvalidBlock, DoubleFree, InvalidSequence, UnsupportedDtype
            As in `insert`.
        """
        cdef Receipt held = as_receipt(receipt)
        cdef Insertion insertion = read_insertion(self.block_size, self.num_lanes, tokens, blocks, None, None, None)
        cdef Inserted inserted = Inserted.__new__(Inserted)
        insertion.time = as_time(time)
        self._check_receipt(held)
        self._extend(insertion, held, inserted)
        return inserted

    # Single blocks of a pinned prefix.

    def block_at(self, receipt, index, lane=0):
        """Return the block that the tree has at one place of a pinned prefix; 0 where a window has none.

        Parameters
        ----------
        receipt : Receipt
            Pins the prefix.
        index : int
            Index of the block in the prefix.
        lane : int
            Lane of block ids.

        Returns
        -------
        int

        Raises
        ------
        DoubleFree, InvalidSequence, UnsupportedDtype
            As in `release`; or a number is not an integer.
        ShapeError
            The prefix has no such block, or the tree has no such lane.
        """
        cdef Receipt held = as_receipt(receipt)
        cdef int64_t place = as_int64(index, "index")
        cdef int32_t which = self._lane(lane)
        self._check_receipt(held)
        return self._block_at(held, place, which)

    def replace(self, receipt, index, block, lane=0):
        """Replace a block of a pinned prefix by another with the same content, such as a sequence's own duplicate.

        Parameters
        ----------
        receipt, index, lane
            As in `block_at`.
        block : int
            The new block, to which the caller adds a reference; 0, in the lane of a window, for none.

        Returns
        -------
        int
            The old block, whose reference the caller drops; 0 for none.

        Raises
        ------
        InvalidBlock
            The block is negative, or null in the full component.
        DoubleFree
            The tree has the block already, at another place; or the receipt was released.
        InvalidSequence, ShapeError, UnsupportedDtype
            As in `block_at`.
        """
        cdef Receipt held = as_receipt(receipt)
        cdef int64_t place = as_int64(index, "index")
        cdef int64_t number = as_int64(block, "block")
        cdef int32_t which = self._lane(lane)
        if number > INT32_MAX:
            raise InvalidBlock(f"block {block} cannot be cached; use 0 to {INT32_MAX}")
        self._check_receipt(held)
        cdef object old = self._block_at(held, place, which)  # made before anything changes
        self._replace(held, place, which, <int32_t> max(number, -1))
        return old

    # Eviction.

    def evict(self, component, amount, *, time=None):
        """Evict up to `amount` blocks (or states) of a component, in the order of the policy.

        Full blocks are taken from the tails of leaves, along with the ids that windows and states have there. A window
        or a state is evicted alone and leaves a hole.

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
            Exactly ``min(amount, evictable(component))`` of them. If `full` is 0, evicting the full component also
            counts the blocks that are left without any id.

        Raises
        ------
        UnsupportedOption
            The tree has no such component.
        ShapeError
            `amount` is negative, or `time` is not finite.
        UnsupportedDtype
            `amount` is not an integer, or `time` is not a number.
        """
        cdef int32_t which = self._component(component)
        cdef int64_t wanted = as_int64(amount, "amount")
        cdef double now = as_time(time)
        cdef Evicted evicted = Evicted.__new__(Evicted)
        if wanted < 0:
            raise ShapeError(f"amount is {amount}; use 0 or more")
        self._evict(which, wanted, now, evicted)
        return evicted

    def evict_path(self, tokens, *, keep=0, namespace=None, spans=None):
        """Evict the end of one prefix, whatever the policy, except for what others need.

        Blocks go from the last one that the tree has of `tokens`, along with the ids that windows and states have
        there, until a block that is pinned or that another prefix continues.

        Parameters
        ----------
        tokens, namespace, spans
            As in `match`.
        keep : int
            Tokens at the beginning that stay, in whole blocks.

        Returns
        -------
        Evicted
            `amount` is the number of blocks.

        Raises
        ------
        ShapeError
            As in `match`, or `keep` is negative.
        UnsupportedDtype
            As in `match`, or `keep` is not an integer.
        """
        cdef Prefix prefix = self._prefix(tokens, namespace, spans, None)
        cdef int64_t kept = as_int64(keep, "keep")
        cdef Evicted evicted = Evicted.__new__(Evicted)
        if kept < 0:
            raise ShapeError(f"keep is {keep}; use 0 or more")
        evicted.amount = self.evict_path_raw(prefix, kept, evicted.gone)
        self._forget_dead()
        return evicted

    def evict_namespace(self, namespace):
        """Evict all prefixes of a namespace, whatever the policy, except for what is pinned.

        Takes time linear in the nodes of the tree.

        Parameters
        ----------
        namespace : hashable
            As in `match`; None is the namespace of prefixes without one.

        Returns
        -------
        Evicted
            `amount` is the number of blocks.

        Raises
        ------
        UnsupportedDtype
            As in `match`.
        """
        cdef Evicted evicted = Evicted.__new__(Evicted)
        evicted.amount = self.evict_namespace_raw(None if namespace is None else key_of(namespace), evicted.gone)
        self._forget_dead()
        return evicted

    # All sequences of a step.

    def match_all(self, prefixes, *, namespaces=None, spans=None, max_tokens=None):
        """Call `match` for every prefix of a list.

        Parameters
        ----------
        prefixes : iterable of array_like of int
        namespaces, spans, max_tokens : iterable, optional
            One argument of `match` for each prefix, or None.

        Returns
        -------
        list of Match

        Raises
        ------
        ShapeError
            There are more or fewer arguments than prefixes; or as in `match`.
        UnsupportedDtype
            As in `match`.
        """
        return match_each(self, read_prefixes(self, prefixes, namespaces, spans, max_tokens))

    def match_and_lock_all(self, prefixes, *, namespaces=None, spans=None, max_tokens=None, time=None):
        """Call `match_and_lock` for every prefix of a list; if one is refused, none is pinned.

        All prefixes are matched before the first is pinned.

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
            As in `match_all`; or `time` is not a finite number.
        """
        cdef double now = as_time(time)
        return lock_each(self, read_prefixes(self, prefixes, namespaces, spans, max_tokens), now)

    def release_all(self, receipts, *, time=None):
        """Call `release` for every receipt of a list; if one is refused, none is released.

        Parameters
        ----------
        receipts : iterable of Receipt
        time : float, optional
            The caller's clock in seconds, as in `release`.

        Raises
        ------
        DoubleFree
            A receipt was released before, or is in the list twice.
        InvalidSequence
            A receipt belongs to another tree.
        ShapeError, UnsupportedDtype
            An entry is not a Receipt; or `time` is not a finite number.
        """
        release_each(self, receipts, time)

    def insert_all(self, entries, *, time=None):
        """Call `insert` for every sequence of a step, in order; if one is refused, nothing is inserted.

        Parameters
        ----------
        entries : iterable of dict
            Arguments of `insert` by name, without `time`. Two entries may offer the same block for a prefix that they
            share.
        time : float, optional
            The caller's clock in seconds, as in `insert`.

        Returns
        -------
        list of Inserted
            One for each entry.

        Raises
        ------
        DoubleFree
            A block or state is offered for two different prefixes; or as in `insert`.
        InvalidBlock, InvalidSequence, ShapeError, UnsupportedDtype, UnsupportedOption
            As in `insert`.
        """
        return insert_each(self, entries, time)

    def __repr__(self):
        name = f"RadixTree({self.block_size}, policy={self.policy!r}, components={self.components})"
        return f"{name}: {self.num_nodes} nodes, {self.num_receipts} receipts"
