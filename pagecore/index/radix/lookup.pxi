"""Lookups of the prefix tree: matches, pins, and their release."""

from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport new_int32
from pagecore.index.radix._native cimport Matches, NativeMatch, ReceiptPointer, ReceiptPointers, RetentionHint
from pagecore.native.std cimport span, vector

from pagecore.errors import DoubleFree, ShapeError


cdef class RadixLookup(RadixCore):
    """Methods that find and pin prefixes, and release them."""

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
        return self._match(read_prefix(self.block_size, tokens, namespace, spans, max_tokens))

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
        cdef Prefix prefix = read_prefix(self.block_size, tokens, namespace, spans, max_tokens)
        cdef Receipt receipt = self._new_receipt(prefix)
        self._find(prefix, &found)
        self._fill(receipt.match, found)
        self.lock(found, receipt, now)
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
        self.unpin(as_receipt(receipt), component, time, rank)

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
        cdef list matches = []
        for prefix in self._read_prefixes(prefixes, namespaces, spans, max_tokens):
            matches.append(self._match(<Prefix> prefix))
        return matches

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
        cdef list read = self._read_prefixes(prefixes, namespaces, spans, max_tokens)
        cdef vector[NativeMatch] found
        cdef vector[ReceiptPointer] pointers
        cdef Py_ssize_t i
        cdef list receipts = []
        for prefix in read:
            receipts.append(self._new_receipt(<Prefix> prefix))
            pointers.push_back(&(<Receipt> receipts[len(receipts) - 1]).native)
        found.resize(len(receipts))
        for i in range(len(receipts)):
            self._find(<Prefix> read[i], &found[i])
            self._fill((<Receipt> receipts[i]).match, found[i])
        self.native.lock_all(
            Matches(found.data(), found.size()), self.every_component,
            ReceiptPointers(pointers.data(), pointers.size())
        )
        self.native.advance(now)
        return receipts

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
        cdef RetentionHint hint
        cdef double now = 0
        cdef list given = as_list(receipts, "receipts")
        read_hint(&hint, &now, self.policy, time, None, None, None)
        for each in given:
            as_receipt(each)
        num_different = len(set(map(id, given)))
        for each in given:
            self._check_receipt(<Receipt> each)
        if num_different < len(given):
            raise DoubleFree("a receipt is in the list twice; release each receipt once")
        self.native.advance(now)  # also for an empty list
        for each in given:
            self._unlock(<Receipt> each, self.every_component, hint, now)
        self._forget_dead()

    # Calls with converted arguments.

    cdef list _read_prefixes(self, object prefixes, object namespaces, object spans, object max_tokens):
        cdef list listed = as_list(prefixes, "prefixes")
        cdef list columns = []
        cdef list read = []
        for name, values in (("namespaces", namespaces), ("spans", spans), ("max_tokens", max_tokens)):
            values = [None] * len(listed) if values is None else as_list(values, name)
            if len(values) != len(listed):
                raise ShapeError(f"expected {len(listed)} {name}, one for each prefix, got {len(values)}")
            columns.append(values)
        for tokens, namespace, marked, most in zip(listed, *columns, strict=True):
            read.append(read_prefix(self.block_size, tokens, namespace, marked, most))
        return read

    cdef Match _new_match(self):
        """A match to fill, with its tuples: creating them may run the garbage collector, and so the caller's code."""
        cdef Match match = Match.__new__(Match)
        if self.num_lanes != 1:
            match.blocks = PyTuple_New(self.num_lanes)
            if self.has_states:
                match.shared_blocks = PyTuple_New(self.num_lanes)
        return match

    cdef Receipt _new_receipt(self, Prefix prefix):
        cdef Receipt receipt = self.blank_receipt(prefix.key)
        receipt.match = self._new_match()
        return receipt

    cdef int _find(self, Prefix prefix, NativeMatch* found) except -1:
        self._find_space(prefix)
        found[0] = self.native.match(prefix.query(), prefix.limit)
        return 0

    cdef int _fill(self, Match match, const NativeMatch& found) except -1:
        """Fill a new match; the only Python objects made are arrays and ints."""
        match.num_tokens = found.blocks * self.block_size
        match.num_full_tokens = found.full_blocks * self.block_size
        match.checkpoint = None if found.checkpoint == 0 else found.checkpoint
        match.state = None if found.state < 0 else found.state
        match.num_shared_tokens = found.shared_blocks * self.block_size
        match.blocks = self._copy_blocks(match.blocks, found.node, found.offset, found.blocks)
        if found.shared_blocks > found.blocks:
            match.shared_blocks = self._copy_blocks(
                match.shared_blocks, found.shared_node, found.shared_offset, found.shared_blocks
            )
        else:
            match.shared_blocks = match.blocks
        return 0

    cdef object _copy_blocks(self, object lanes, int32_t node, int32_t offset, int64_t count):
        """Return the ids of a prefix: an array for one lane, and for several `lanes` a new tuple of arrays."""
        cdef int32_t* data = NULL
        cdef int32_t lane
        for lane in range(self.num_lanes):
            array = new_int32(count, &data)
            if count > 0:
                self.native.copy_blocks(node, offset, lane, span[int32_t](data, <size_t> count))
            if self.num_lanes == 1:
                return array
            Py_INCREF(array)
            PyTuple_SET_ITEM(lanes, lane, array)
        return lanes

    cdef Match _match(self, Prefix prefix):
        cdef NativeMatch found
        cdef Match match = self._new_match()
        self._find(prefix, &found)
        self._fill(match, found)
        return match

    cdef int lock(self, NativeMatch& found, Receipt receipt, double now) except -1:
        receipt.native = self.native.lock(found, self.every_component)
        self.native.advance(now)
        return 0
