"""Insertions into the prefix tree: one sequence, the growth of a pinned one, and all sequences of a step."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagecore.index._integers cimport as_int64
from pagecore.index.radix._native cimport NativeInserted, NativeReceipt, Offer, Offers, Prepared
from pagecore.native.std cimport vector

from collections.abc import Mapping

from pagecore.errors import InvalidBlock, UnsupportedDtype, UnsupportedOption


cdef class RadixInsertion(RadixLookup):
    """Methods that add blocks, and replace single blocks of a pinned prefix."""

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
            time, tokens, blocks, states, namespace, spans, receipt, priority, time_to_live, rank
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
        UnsupportedOption
            An entry lacks tokens or blocks, or has an unknown argument; or as in `insert`.
        InvalidBlock, InvalidSequence, ShapeError, UnsupportedDtype
            As in `insert`.
        """
        cdef vector[Prepared] batch
        cdef vector[Offer] offers
        cdef Py_ssize_t i
        cdef list checked = []
        cdef list done = []
        for each in as_list(entries, "entries"):
            checked.append(self._entry(time, each))
        offers.resize(len(checked))
        for i in range(len(checked)):
            done.append(Inserted.__new__(Inserted))
            (<Insertion> checked[i]).fill(&offers[i])
            self._check_moved(<Insertion> checked[i])
        try:
            for i in range(len(checked)):
                offers[i].query.space = self._add_space(<Insertion> checked[i])
            self.native.prepare_all(Offers(offers.data(), offers.size()), batch)
            for i in range(len(checked)):  # nothing fails from here on
                self.native.insert_prepared(offers[i], moved_receipt(<Insertion> checked[i]), batch[i])
                self._hand_over(batch[i].answer, <Inserted> done[i])
        finally:
            for i in range(len(checked)):
                if (<Insertion> checked[i]).prefix.space > 0:
                    self.native.drop_namespace_if_empty((<Insertion> checked[i]).prefix.space)
            self._forget_dead()
        for i in range(len(checked)):
            move_key(<Insertion> checked[i], <Inserted> done[i])
        return done

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
        return self.native.id_at(held.native.node, place, which)

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
        cdef object old = self.native.id_at(held.native.node, place, which)  # made before anything changes
        self.native.replace_id(held.native.node, place, which, <int32_t> max(number, -1))
        return old

    # Calls with converted arguments.

    cdef Insertion _insertion(
        self, object time, object tokens, object blocks, object states, object namespace, object spans, object receipt,
        object priority, object time_to_live, object rank
    ):
        cdef Insertion insertion = read_insertion(
            self.block_size, self.num_lanes, tokens, blocks, states, namespace, spans
        )
        insertion.receipt = None if receipt is None else as_receipt(receipt)
        read_hint(&insertion.hint, &insertion.time, self.policy, time, priority, time_to_live, rank)
        own_insertion(insertion, self.block_size, 0)
        return insertion

    cdef Insertion _entry(self, object time, object entry):
        """Return the Insertion of one entry of a batch. A call with keywords takes half as long as an insertion."""
        cdef dict given
        cdef bint has_tokens = False
        cdef bint has_blocks = False
        tokens = blocks = states = namespace = spans = receipt = priority = time_to_live = rank = None
        if type(entry) is not dict and not isinstance(entry, Mapping):
            raise UnsupportedDtype(f"expected a dict of insert's arguments, got {type(entry).__name__}")
        given = entry if type(entry) is dict else dict(entry)
        for name, value in given.items():
            if name == "tokens":
                tokens, has_tokens = value, True
            elif name == "blocks":
                blocks, has_blocks = value, True
            elif name == "states":
                states = value
            elif name == "namespace":
                namespace = value
            elif name == "spans":
                spans = value
            elif name == "receipt":
                receipt = value
            elif name == "priority":
                priority = value
            elif name == "time_to_live":
                time_to_live = value
            elif name == "rank":
                rank = value
            else:
                raise UnsupportedOption(f"an entry has {name!r}; use the arguments of insert other than time")
        if not (has_tokens and has_blocks):
            raise UnsupportedOption(f"an entry has only {list(given)}; give tokens and blocks")
        return self._insertion(
            time, tokens, blocks, states, namespace, spans, receipt, priority, time_to_live, rank
        )

    cdef int _check_moved(self, Insertion insertion) except -1:
        if insertion.receipt is not None:
            self._check_receipt(<Receipt> insertion.receipt)
        return 0

    cdef int32_t _add_space(self, Insertion insertion) except -1:
        insertion.prefix.space = self._space(insertion.prefix.key)
        return insertion.prefix.space

    cdef int _insert(self, Insertion insertion, Inserted inserted) except -1:
        insertion.fill(&self.offer)
        self._check_moved(insertion)
        self.offer.query.space = self._add_space(insertion)
        try:
            self.native.insert(self.offer, moved_receipt(insertion), self.inserted)
            self._hand_over(self.inserted, inserted)
        finally:
            self._drop_space(insertion.prefix.space)
        move_key(insertion, inserted)
        return 0

    cdef int _extend(self, Insertion insertion, Receipt receipt, Inserted inserted) except -1:
        cdef int32_t space = 0
        own_insertion(insertion, self.block_size, receipt.depth())
        insertion.fill(&self.offer)
        if receipt.key is not None and receipt.native.node < 0:
            space = self._space(receipt.key)
        self.offer.query.space = space
        try:
            self.native.extend(self.offer, receipt.native, self.inserted)
        finally:
            self._drop_space(space)
        self._hand_over(self.inserted, inserted)
        return 0

    cdef void _hand_over(self, NativeInserted& done, Inserted inserted) noexcept:
        inserted.num_tokens = done.blocks * self.block_size
        inserted.num_old_tokens = done.old_blocks * self.block_size
        inserted.taken_ids.swap(done.taken)
        inserted.duplicate_ids.swap(done.duplicates)


cdef NativeReceipt* moved_receipt(Insertion insertion) noexcept:
    if insertion.receipt is None:
        return NULL
    return &(<Receipt> insertion.receipt).native


cdef void move_key(Insertion insertion, Inserted inserted) noexcept:
    """Give a receipt that has moved its new namespace; freeing the key of the old one may run code of the caller."""
    if insertion.receipt is not None and inserted.num_tokens > 0:
        (<Receipt> insertion.receipt).key = insertion.prefix.key
