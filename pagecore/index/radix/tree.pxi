"""Prefix tree: finds the blocks that hold a prefix computed before, pins them, and chooses what to evict."""

from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport as_int64
from pagecore.index.radix._native cimport ReceiptPointer
from pagecore.native.std cimport vector

from pagecore.errors import ShapeError


cdef class RadixTree(RadixJournal):
    """RadixTree(block_size=16, *, full=1, windows=(), chunks=(), sinks=(), states=False, \
state_interval=None, min_kept=0, policy='lru')\n--\n\n\
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
    min_kept : int
        Blocks of a window that a node keeps while others have more than they need, even if it needs fewer: 2 is for
        callers that shorten each match by a block.
    policy : {"lru", "lfu", "fifo", "mru", "filo", "slru", "slru:SHARE", "priority", "rank"}
        Eviction order. The first to be evicted is: the least recently used; the one with the fewest hits; the oldest;
        the most recently used; the newest; one that is not protected; the lowest priority (0 to 100, by default 35);
        the lowest rank. Ties are broken by the least recent use. "slru" (R. Karedla, J. S. Love and B. G. Wherry, 1994)
        protects prefixes that were hit, the last ones first, until they have a share of the blocks, 0.1 by default or
        as in "slru:0.2". Others are as if they had just been inserted, until their next hit. States have no limit.

        A window keeps every block that a sequence passed through, and few of them are reused. Unless the policy is
        "fifo", "mru" or "filo", nodes that differ only in their last use give up first the blocks more than 1024 tokens
        in front of what a prefix needs that ends with the node, then the others in front of that, then the rest.

    Attributes
    ----------
    block_size : int
    components : tuple of str
        "full", then "window" (several: "window0", "window1" ...), then "state".
    windows, chunks, sinks : tuple of int
    policy : str
    state_interval : int or None
    min_kept : int

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
        evicted.amount = self.native.evict(which, wanted, evicted.gone, now)
        self._forget_dead()
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
        cdef Prefix prefix = read_prefix(self.block_size, tokens, namespace, spans, None)
        cdef int64_t kept = as_int64(keep, "keep")
        cdef Evicted evicted = Evicted.__new__(Evicted)
        if kept < 0:
            raise ShapeError(f"keep is {keep}; use 0 or more")
        evicted.amount = self.evict_path_raw(prefix, kept, evicted.gone)
        self._forget_dead()
        return evicted

    def revoke(self, tokens, *, valid=0, receipts=(), namespace=None, spans=None):
        """Evict what cannot be trusted: the block after the first valid tokens of a prefix, and all that continues it.

        For a block whose content turned out to be wrong while it is cached and pinned. Takes time linear in the nodes
        of the tree.

        Parameters
        ----------
        tokens, namespace, spans
            As in `match`.
        valid : int
            Tokens at the beginning whose blocks stay: the block that has token `valid` goes.
        receipts : iterable of Receipt
            Receipts that are shortened to the blocks that stay, if they pin what goes. What others pin stays.

        Returns
        -------
        Evicted
            `amount` is the number of blocks.

        Raises
        ------
        ShapeError
            As in `match`, or `valid` is negative.
        UnsupportedDtype
            As in `match`; `valid` is not an integer, or an entry is not a Receipt.
        InvalidSequence, DoubleFree
            A receipt of another tree, or one that was released.
        """
        cdef Prefix prefix = read_prefix(self.block_size, tokens, namespace, spans, None)
        cdef int64_t blocks = as_int64(valid, "valid")
        cdef list given = as_list(receipts, "receipts")
        cdef vector[ReceiptPointer] pointers
        cdef Evicted evicted = Evicted.__new__(Evicted)
        if blocks < 0:
            raise ShapeError(f"valid is {valid}; use 0 or more")
        blocks //= self.block_size
        for each in given:
            self._check_receipt(as_receipt(each))
            pointers.push_back(&(<Receipt> each).native)
        self._find_space(prefix)
        if prefix.space < 0 or blocks >= prefix.limit:
            evicted.gone.resize(<size_t> self.num_lanes + 1)
            return evicted
        evicted.amount = self.revoke_raw(prefix.query(), blocks, pointers, evicted.gone)
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

    def __repr__(self):
        name = f"RadixTree({self.block_size}, policy={self.policy!r}, components={self.components})"
        return f"{name}: {self.num_nodes} nodes, {self.num_receipts} receipts"
