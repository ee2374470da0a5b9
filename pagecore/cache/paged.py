"""The paged cache: what an inference engine holds."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Listed
from functools import partial
from typing import Any

from numpy.typing import ArrayLike

from pagecore.arrays import Tensor, as_tensor
from pagecore.cache import _lifecycle as lifecycle
from pagecore.cache._lock import Held
from pagecore.cache._prefix import PrefixCache
from pagecore.cache._sequence import Sequence, as_list, token_ids
from pagecore.cache._state import CacheState
from pagecore.cache._step import take_step
from pagecore.cache.adopted import buffers_of, count_adopted
from pagecore.cache.batch import Batch
from pagecore.cache.block_map import BlockMap, map_blocks
from pagecore.cache.layers import Layer, Layers, arrange, group_number, layer_number
from pagecore.cache.limits import (
    cache_device,
    check_slots,
    count_blocks,
    refuse_unserved,
    row_capacity,
    scrub_option,
    slot_dtype,
)
from pagecore.cache.occupancy import measure
from pagecore.cache.retention import Spans, checked_rank, retention_options, reusable
from pagecore.cache.sequences import Sequences
from pagecore.cache.staging import Staging
from pagecore.cache.stats import CacheStats
from pagecore.cache.stepping import new_batch, ready, refusal
from pagecore.cache.store import Store
from pagecore.cache.swap import NONE, SwapSpace
from pagecore.cache.swap_ops import move_in, move_out, shortage_with_swapped
from pagecore.errors import InvalidSequence, ShapeError
from pagecore.index import BlockPool, BlockTables
from pagecore.storage import KVLayout, Spec, TensorParallel
from pagecore.storage.checks import require_int
from pagecore.storage.memory import Memory
from pagecore.storage.parallel import as_parallel


class PagedKVCache:
    """Key and value of many sequences in blocks of one memory.

    Parameters
    ----------
    layers : spec or list of specs
        One spec for all layers (with `num_layers`), or a list with one spec or `Alias` for each model layer: the whole
        model's, also where ranks share it. Layers whose planes, window and query heads are equal form a group, which
        has a block pool, a block table and a slot mapping of its own; taking blocks is all-or-nothing over the groups.
    num_layers : int, optional
        How often a single spec is repeated; 1 by default.
    block_size : int
        Tokens a block.
    num_blocks : int or list of int
        Blocks of each group, the null block counted; a list has one entry a group. Exclusive with `memory`. With
        `buffers` it may be left out: each group has as many as its buffers hold.
    memory : int, str or float
        Budget for all groups of this rank: bytes, "8GiB", or the fraction of what is free. Every group gets as many
        blocks as fit.
    max_sequences : int
        Rows of the block tables.
    max_tokens_per_sequence : int, optional
        Room of a row; by default all that the smallest pool holds. On CUDA the block tables take device memory beside
        the pools: 4 bytes for each block that each row of each group may have.
    device : str
        "cpu", "cuda" (which is "cuda:0"), another CUDA device, or "none": the cache without bytes, for simulation and
        for engines that own their memory, where everything works but key, value, write and attend.
    layout : str or KVLayout, optional
        How the pools lie in memory; "layerwise" by default.
    index_dtype : {"int64", "int32"}
        Dtype of slot mappings; int32 is refused where a pool has slots that it cannot count.
    parallel : TensorParallel, optional
        Which rank of how many this cache serves: its pools hold, `write` takes and `attend` reads the rank's heads.
    prefix_cache : bool
        Keep what sequences have computed, as far as blocks are left, and let others that begin alike reuse it. Where
        it is False, the next two have no effect.
    eviction_policy : {"lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "rank"}
        Which cached blocks go first when blocks are short; see `pagecore.RadixTree`.
    clock : callable
        Gives the time in seconds; asked by the policy "priority" alone, whose priorities may have a time to live.
    buffers : optional
        Memory of the caller on `device`, adopted instead of allocated: for one group what `KVPool` takes as `buffers`,
        for several a list with that for each group. `layout` describes it: "CBNHD" is one array for each layer,
        "BNHD" one for each plane of each layer. The cache aliases the arrays and keeps them alive, and writes nothing
        to them before the first step, unless `scrub` is True.
    scrub : bool
        Keep the numbers of one namespace from every other one in memory, too. All memory is zeroed when the cache is
        made, `buffers` too, and a block that another namespace used last is zeroed before a step takes it, in every
        plane and layer. A row's blocks then hold zeros and numbers of its own namespace only, in slots that were not
        written yet, too. On CUDA blocks are zeroed in the order of the step's stream; the host waits for nothing. What
        holds without it is in Notes. Refused with ``device="none"``: such a cache has no bytes to zero.

    Attributes
    ----------
    block_size, max_sequences, max_tokens_per_sequence : int
    device, eviction_policy : str
    scrub : bool
    index_dtype : {"int64", "int32"}
    parallel : TensorParallel

    Raises
    ------
    ShapeError, UnsupportedOption, UnsupportedDtype, DeviceError
        Sizes, specs, a layout, a device, buffers or a number of ranks that do not fit.
    NotEnoughMemory
        The budget holds fewer than two blocks of every group, or the system has not that much.

    One writer at a time: every call takes the cache's lock.

    Notes
    -----
    Without `scrub`, blocks hold what was there before: whatever the heap or `buffers` held, then what removed sequences
    of any namespace wrote, until it is overwritten. `attend` never reads past the length of a sequence, and prefixes
    are reused within a namespace only, so a step that writes before it attends meets none of that. What attends before
    it writes, or reads whole blocks (`key`, `value`, a swap space, a kernel of the user's own), does.

    Blocks, block tables and copy-on-write are those of PagedAttention: Kwon et al., "Efficient Memory Management for
    Large Language Model Serving with PagedAttention", 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from pagecore import AttentionSpec, PagedKVCache
    >>> cache = PagedKVCache(AttentionSpec(1, 8, dtype="float32"), num_blocks=9)
    >>> sequence = cache.add_sequence(range(20))
    >>> batch = cache.prepare([sequence], 20)
    >>> tokens = np.ones((20, 1, 8), np.float32)  # [tokens, heads, dim]
    >>> cache.write(0, tokens, tokens, batch)
    >>> cache.attend(0, tokens, batch).shape
    (20, 1, 8)
    >>> cache.commit(batch)
    >>> sequence.num_computed_tokens, cache.num_available
    (20, 6)
    """

    def __init__(
        self,
        layers: Layers,
        *,
        num_layers: int | None = None,
        block_size: int = 16,
        num_blocks: int | Listed[int] | None = None,
        memory: Memory | None = None,
        max_sequences: int = 256,
        max_tokens_per_sequence: int | None = None,
        device: str = "cpu",
        layout: str | KVLayout | None = None,
        parallel: TensorParallel | None = None,
        prefix_cache: bool = True,
        eviction_policy: str = "lru",
        index_dtype: str = "int64",
        clock: Callable[[], float] = time.monotonic,
        buffers: object = None,
        scrub: bool = False,
    ) -> None:
        refuse_unserved(prefix_cache, eviction_policy)
        self.parallel = as_parallel(parallel)
        self.eviction_policy = str(eviction_policy)
        self.block_size = require_int("block_size", block_size)
        self.max_sequences = require_int("max_sequences", max_sequences, max=None)
        self.device = cache_device(device)
        self.scrub = scrub_option(scrub, self.device)
        self.index_dtype = slot_dtype(index_dtype)
        self._layers, self._groups = arrange(layers, num_layers, self.parallel, attends=self.device != "none")
        given = buffers_of(buffers, self._groups, self.block_size, layout, memory, self.device)
        if given is not None and num_blocks is None:
            blocks = count_adopted(given, self._groups, self.block_size, layout)
        else:
            blocks = count_blocks(self._groups, self.block_size, num_blocks, memory, self.device)
        check_slots(blocks, self.block_size, self.index_dtype)
        self.max_tokens_per_sequence = row_capacity(blocks, self.block_size, max_tokens_per_sequence)
        self._block_pools = [BlockPool(n) for n in blocks]
        self._tables = BlockTables(
            self._block_pools,
            block_sizes=[self.block_size] * len(blocks),
            max_sequences=self.max_sequences,
            max_blocks_per_sequence=-(-self.max_tokens_per_sequence // self.block_size),
        )
        self._table_views = [as_tensor(self._tables.table(group)) for group in range(len(blocks))]
        self._staging = Staging(self._tables, self.device) if self.device.startswith("cuda") else None
        self._shown_tables = self._table_views if self._staging is None else self._staging.block_tables
        self._store = Store(self._layers, self._groups, blocks, self.block_size, layout, self.device, given, self.scrub)
        policy = self.eviction_policy if prefix_cache else None
        windows = [group.window for group in self._groups]
        self._state = CacheState(self._tables, windows, policy, clock, lifecycle.remove, self.scrub)
        self._swap_spaces: weakref.WeakSet[SwapSpace] = weakref.WeakSet()
        if self.scrub:
            self._store.zero_adopted()  # last: a cache that cannot be made leaves the caller's memory as it is

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Model layers, aliases among them."""
        return len(self._layers)

    @property
    def num_groups(self) -> int:
        """Groups of layers that share a pool."""
        return len(self._groups)

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group, the null block counted."""
        return tuple(pool.num_blocks for pool in self._block_pools)

    @property
    def num_available(self) -> int:
        """Blocks of the scarcest group that are free, or cached and unused."""
        return min(lifecycle.available(self._state))

    @property
    def has_prefix_cache(self) -> bool:
        """True if sequences reuse what others have computed."""
        return self._prefix is not None

    @property
    def num_sequences(self) -> int:
        """Sequences in the cache, those that are swapped out included."""
        return self._state.num_live

    @property
    def sequences(self) -> Sequences:
        """The sequences in the cache by id, those that are swapped out included: a read-only mapping."""
        return Sequences(self._state)

    @property
    def nbytes(self) -> int:
        """Bytes of key and value in all pools, of this rank."""
        return self._store.nbytes

    def group_of(self, layer: int) -> int:
        """The group that model layer `layer` is in."""
        return self._layer(layer).group

    def spec(self, layer: int) -> Spec:
        """What this rank stores and attends of a model layer; an alias has the spec of the layer that it shares."""
        return self._layer(layer).spec

    def key(self, layer: int) -> Tensor:
        """Keys of a model layer, ``[num_blocks, block_size, num_kv_heads, head_dim]``; aliases the pool."""
        return self._store.key(self._layer(layer))

    def value(self, layer: int) -> Tensor:
        """Values of a model layer, ``[num_blocks, block_size, num_kv_heads, v_head_dim]``; aliases the pool."""
        return self._store.value(self._layer(layer))

    def block_table(self, group: int = 0) -> Tensor:
        """The block table of a group, for attention kernels that the user brings.

        Returns
        -------
        Tensor
            int32 ``[max_sequences + 1, max_blocks]``, read-only; it aliases the index and changes with the cache. On
            CUDA it is a copy on the device, which each prepare brings up to date. `Sequence.row` is a sequence's row
            of it. Entries past a row's blocks are 0, holes that a window left too; so is the whole last row, which
            padding points at.

        Raises
        ------
        ShapeError
            There is no such group.
        """
        return self._shown_tables[group_number(group, self.num_groups)]

    @property
    def row_lengths(self) -> Tensor:
        """Tokens of each row whose slots are taken, those of a step in flight included.

        int32 ``[max_sequences + 1]``, read-only; it aliases the index and changes with the cache, or is a copy on the
        device, as `block_table`. Rows that are not in use are 0, and so is the last, which padding points at.
        """
        return as_tensor(self._tables.row_lengths) if self._staging is None else self._staging.row_lengths

    # -- sequences -----------------------------------------------------------------------------------------------

    def add_sequence(
        self,
        tokens: ArrayLike,
        id: object = None,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
        priority: float | None = None,
        time_to_live: float | None = None,
        rank: float | None = None,
    ) -> Sequence:
        """A new sequence that knows `tokens`; more blocks than those it reuses are taken by `prepare`.

        What the prefix cache has of its tokens is shared at once and held until the sequence is removed: whole blocks,
        and never the last token, whose output is still to be computed. `Sequence.num_cached_tokens` says how much.

        Parameters
        ----------
        tokens : array_like of int
            ``[num_tokens]``, may be empty.
        id : hashable, optional
            The caller's name for it; a number is made up where it is None.
        namespace : hashable, optional
            Sequences of different namespaces (adapters, tenants) share nothing. Equal means equal in type too,
            also within tuples.
        spans : iterable of (int, int, bytes or int), optional
            Positions [start, end) whose content is named by a digest and not by its tokens alone: an image, audio.
        max_tokens : int, optional
            Reuse no more tokens than this.
        priority, time_to_live : float, optional
            For the policy "priority": 0 to 100 (35 where none is given) of what the sequence computes, and the seconds
            after which that falls back to 35.
        rank : float, optional
            For the policy "rank": what has the lowest goes first.

        Raises
        ------
        InvalidSequence
            A sequence of that id is there.
        OutOfRows
            `max_sequences` are there.
        ShapeError
            More tokens than a row has room for; spans, a priority or a number that do not fit.
        UnsupportedDtype
            A namespace or digest that cannot be compared.
        UnsupportedOption
            A priority or rank that the policy does not use; a time_to_live without a priority.

        Without a prefix cache nothing is looked up; digests are not looked at, and `namespace` only with `scrub`.
        """
        ids = token_ids(tokens)
        options = retention_options(self.eviction_policy, namespace, spans, priority, time_to_live, rank)
        most = reusable(len(ids), max_tokens)
        if len(ids) > self.max_tokens_per_sequence:
            raise ShapeError(
                f"tokens has {len(ids)} ids; a sequence has room for {self.max_tokens_per_sequence}: raise "
                "max_tokens_per_sequence or the number of blocks"
            )
        return lifecycle.add(self._state, id, ids, options, most)

    def match_length(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
    ) -> int:
        """Tokens that `add_sequence` would reuse, whole blocks; nothing is held, and nothing counts as used.

        `tokens`, `namespace`, `spans` and `max_tokens` are those of `add_sequence`, as are ShapeError and
        UnsupportedDtype; 0 without a prefix cache.
        """
        ids = token_ids(tokens)
        options = retention_options(self.eviction_policy, namespace, spans)
        most = reusable(len(ids), max_tokens)
        with Held(self._state.lock):
            return 0 if self._prefix is None else self._prefix.match_length(ids, options, most)

    def append_tokens(self, sequences: Sequence | Iterable[Sequence], ids: ArrayLike | Iterable[ArrayLike]) -> None:
        """Make the ids of sampled tokens known; all or nothing.

        It may come after the step that computes those tokens was prepared, or even committed.

        Parameters
        ----------
        sequences : Sequence or iterable of Sequence
        ids : array_like of int
            ``[num_sequences]``, one for each sequence; ``[num_sequences, k]``, k for each; or a list with a list of
            ids for each, of any lengths.

        Raises
        ------
        ShapeError, UnsupportedDtype
            Ids that do not fit int32, or not one row of them for each sequence.
        InvalidSequence
            An object that is not a sequence of this cache.
        """
        lifecycle.append(self._state, sequences, ids)

    def fork(self, sequence: Sequence, id: object = None) -> Sequence:
        """Add a sequence with the same tokens, which shares every block until one of the two writes into it.

        Raises
        ------
        InvalidSequence
            `sequence` is not idle in this cache, or `id` is taken.
        OutOfRows
            `max_sequences` are there.
        """
        return lifecycle.fork(self._state, sequence, id)

    def reorder(self, sequences: Iterable[Sequence], parents: Iterable[Sequence]) -> None:
        """Let each sequence become what its parent was before the call (beam search); parents may repeat."""
        lifecycle.reorder(self._state, sequences, parents)

    def truncate(self, sequences: Sequence | Iterable[Sequence], lengths: ArrayLike) -> None:
        """Forget the tokens past a length, and give back the blocks that only they needed; all or nothing.

        Parameters
        ----------
        sequences : Sequence or iterable of Sequence
        lengths : int or list of int
            Tokens to keep, of those that are known or computed: one number for all sequences, or one for each.

        Raises
        ------
        ShapeError
            A sequence has fewer tokens.
        UnsupportedOption
            A group with a window has released keys that the next token would see; truncate to 0 and compute again.
        """
        lifecycle.truncate(self._state, sequences, lengths)

    def remove(self, sequence: Sequence, *, rank: float | None = None) -> None:
        """Drop a sequence and its hold on its blocks, tail first; also while its step is in flight.

        That step then writes nothing for it, since its blocks may be another's by then, and what it attends to for the
        sequence is of no use. A sequence that is swapped out gives back what its swap space holds. What the prefix
        cache knows of it stays, until blocks are short.

        Parameters
        ----------
        rank : float, optional
            For the policy "rank": of the blocks that nobody uses from now on.

        Raises
        ------
        InvalidSequence
            No sequence of this cache.
        UnsupportedOption
            A rank that the policy does not use.
        """
        lifecycle.remove(self._state, sequence, checked_rank(self.eviction_policy, rank))

    def clear_prefix_cache(self) -> int:
        """Forget what no sequence uses of the prefix cache; returns how many blocks became free."""
        return lifecycle.clear(self._state)

    # -- swapping ------------------------------------------------------------------------------------------------

    def swap_out(self, sequences: Sequence | Iterable[Sequence], space: SwapSpace) -> None:
        """Move the computed blocks of sequences into `space` and give up their own, and their rows; all or nothing.

        A sequence keeps its id, its tokens and how many are computed; it may learn more tokens, and be removed. For
        everything else it must be swapped in first. Blocks that several of `sequences` share are stored once, and
        shared again by those that come back together; what they share with others is stored for them alone.

        Parameters
        ----------
        sequences : Sequence or iterable of Sequence
        space : SwapSpace
            Of this cache.

        Raises
        ------
        OutOfBlocks
            The space lacks blocks; nothing was changed.
        InvalidSequence
            A sequence that is not of this cache, listed twice, in flight or swapped out; a space of another cache.
        """
        refusal = move_out(self, sequences, space)
        if refusal is not None:
            raise refusal

    def try_swap_out(self, sequences: Sequence | Iterable[Sequence], space: SwapSpace) -> bool:
        """`swap_out`, with False instead of `OutOfBlocks`."""
        return move_out(self, sequences, space) is None

    def swap_in(self, sequences: Sequence | Iterable[Sequence]) -> None:
        """Move sequences back into rows and blocks of the cache, from whichever space holds them; all or nothing.

        Raises
        ------
        OutOfBlocks, OutOfRows
            Blocks or rows are short; nothing was changed.
        InvalidSequence
            A sequence that is not of this cache, listed twice, or not swapped out.
        """
        refusal = move_in(self, sequences)
        if refusal is not None:
            raise refusal

    def try_swap_in(self, sequences: Sequence | Iterable[Sequence]) -> bool:
        """`swap_in`, with False instead of `OutOfBlocks` and `OutOfRows`."""
        return move_in(self, sequences) is None

    # -- a step --------------------------------------------------------------------------------------------------

    def make_batch(self, max_sequences: int | None = None, max_tokens: int | None = None) -> Batch:
        """A batch to be used again for every step, its arrays at fixed addresses.

        `max_sequences` is the cache's by default; `max_tokens`, the new tokens of a step, is one a sequence by default.
        """
        sequences = (
            self.max_sequences if max_sequences is None else require_int("max_sequences", max_sequences, max=None)
        )
        tokens = sequences if max_tokens is None else require_int("max_tokens", max_tokens, max=None)
        return new_batch(self, sequences, tokens)

    def prepare(
        self, sequences: Listed[Sequence], counts: ArrayLike, out: Batch | None = None, *, stream: object = None
    ) -> Batch:
        """Take the blocks of the next `counts` tokens of each sequence and fill a batch; all or nothing.

        Copy-on-write is done here. `counts` is an int for all, or one integer for each; ids need not be known yet.

        Parameters
        ----------
        out : Batch, optional
            From `make_batch`; a batch of just the right size is made where it is None.
        stream : int or a stream, optional
            Of a cache on CUDA, CuPy's current one by default: the stream that the step will run on. It waits for that
            of the step before, the host for nothing, and nothing is allocated where `out` is given; see `Batch`. A
            handle must stay good until a prepare is given another; swaps, and what undoes the step, use it too.

        Raises
        ------
        OutOfBlocks
            Blocks are short; nothing was changed.
        InvalidSequence, ShapeError
            A sequence that is not of this cache, listed twice or in flight; counts that do not fit.
        UnsupportedOption, DeviceError
            What is no stream, or one that is being captured: a graph holds a step, and not its preparation.
        """
        plan = partial(ready, self, sequences, counts, out, stream)
        return take_step(self._state, plan, partial(refusal, self))

    def try_prepare(
        self, sequences: Listed[Sequence], counts: ArrayLike, out: Batch | None = None, *, stream: object = None
    ) -> Batch | None:
        """`prepare`, with None instead of `OutOfBlocks`."""
        return take_step(self._state, partial(ready, self, sequences, counts, out, stream), None)

    def prepare_arrival(
        self, sequence: Sequence, num_tokens: int, out: Batch | None = None, *, stream: object = None
    ) -> Batch:
        """Prepare a step of one sequence whose next `num_tokens` tokens were computed elsewhere.

        Write their keys and values with `write`, or to the batch's slots, then commit; the batch does not attend. In a
        group with a window, blocks are taken only for tokens that the token after the arrival sees: the others are
        holes (block 0) whose slots are -1, so that `write` skips them. Commit publishes what was taken, and a later
        sequence reuses the prefix only up to where its windows are complete. Blocks that the sequence held before and
        that leave a window are given back by commit, and stay where the step is abandoned: until then the window's pool
        holds both. A sequence that was added with ``max_tokens=0`` holds none.

        Parameters
        ----------
        sequence : Sequence
            Idle, with its ids known. What it reuses of the prefix cache it has: give the tokens that follow
            `num_computed_tokens`.
        num_tokens : int
        out, stream
            As `prepare`.

        Raises
        ------
        OutOfBlocks
            Blocks are short; nothing was changed.
        InvalidSequence, ShapeError, UnsupportedOption, DeviceError
            As `prepare`.

        Examples
        --------
        The cache that computed the tokens still has those from `held_from` on:

        >>> import numpy as np
        >>> from pagecore import AttentionSpec, PagedKVCache, gather_blocks
        >>> spec = AttentionSpec(1, 8, dtype="float32", window=16)
        >>> sender = PagedKVCache(spec, block_size=4, num_blocks=17)
        >>> receiver = PagedKVCache(spec, block_size=4, num_blocks=6, max_tokens_per_sequence=64)
        >>> sent = sender.add_sequence(range(40))
        >>> with sender.prepare([sent], 40) as batch:
        ...     sender.write(0, *np.ones((2, 40, 1, 8), np.float32), batch)
        ...     sender.commit(batch)
        >>> sender.held_from(sent)
        24
        >>> planes = [sender.key(0), sender.value(0)]
        >>> key, value = gather_blocks(planes, sender.block_table(), [40], rows=[sent.row])
        >>> received = receiver.add_sequence(range(40))
        >>> with receiver.prepare_arrival(received, 40) as batch:
        ...     receiver.write(0, key, value, batch)
        ...     receiver.commit(batch)
        >>> received.num_computed_tokens, receiver.held_from(received), receiver.num_available
        (40, 24, 1)
        """
        plan = partial(ready, self, [sequence], num_tokens, out, stream, True)
        return take_step(self._state, plan, partial(refusal, self))

    def try_prepare_arrival(
        self, sequence: Sequence, num_tokens: int, out: Batch | None = None, *, stream: object = None
    ) -> Batch | None:
        """`prepare_arrival`, with None instead of `OutOfBlocks`."""
        return take_step(self._state, partial(ready, self, [sequence], num_tokens, out, stream, True), None)

    def held_from(self, sequence: Sequence, group: int = 0) -> int:
        """Return the first token of a sequence whose key and value a group still has.

        The group has every computed token from there on. It is a multiple of the block size, and 0 in a group without a
        window. In a group with a window it may be `num_computed_tokens`, and then the group has none.

        Raises
        ------
        InvalidSequence
            A sequence that is not of this cache, or that is swapped out.
        ShapeError
            There is no such group.
        """
        return lifecycle.held_from(self._state, sequence, group_number(group, self.num_groups))

    def shortage(self, sequences: Listed[Sequence], counts: ArrayLike) -> int:
        """Blocks that a prepare would lack in the scarcest group; 0 means that it succeeds.

        For sequences that are swapped out: what one `swap_in` of them all, and then the prepare, would lack.
        """
        with Held(self._state.lock):
            listed = as_list(sequences)
            if any(isinstance(one, Sequence) and one.is_swapped for one in listed):
                self._state.give_up_lost()
                return shortage_with_swapped(self, listed, counts)
            return max(lifecycle.shortage(self._state, listed, counts))

    def commit(self, batch: Batch, accepted: ArrayLike | None = None) -> None:
        """Count the tokens of a step as computed.

        `accepted` says how many of each sequence's tokens are kept, all by default; the rest (rejected drafts) is
        forgotten, but its blocks stay with the sequence for what comes next. Blocks that are full now, and whose ids
        are known, are from now on found by others that begin alike, up to the first that another sequence shares.
        Blocks that have left every window of their group are given back.
        """
        self._own(batch)._step.commit(accepted)

    def abandon(self, batch: Batch | Sequence | Iterable[Sequence]) -> None:
        """Undo a prepare whose forward pass failed.

        Blocks that it copied on write stay copied, and capacity that rejected tokens had left is given back too. The
        batch's slot mappings become padding, so that a late write finds nothing to overwrite.

        Parameters
        ----------
        batch : Batch, Sequence or iterable of Sequence
            The batch; or, where it is not at hand, sequences whose steps are abandoned, each with all of its sequences.

        Raises
        ------
        InvalidSequence
            The batch or a sequence has no step in flight, or belongs to another cache.
        """
        if isinstance(batch, Batch):
            self._own(batch)._step.abandon()
        else:
            lifecycle.abandon(self._state, batch)

    def write(self, layer: int, key: Any, value: Any, batch: Batch, *, stream: object = None) -> None:
        """Write the step's keys ``[T, num_kv_heads, head_dim]`` and values ``[T, num_kv_heads, v_head_dim]``.

        T is the batch's `num_tokens`, or more; floats are cast to the cache's dtype; `stream` is that of the prepare.

        Raises
        ------
        ShapeError, UnsupportedDtype
            Arrays that do not fit; nothing was written.
        DeviceError
            Arrays that are not where the cache is, or a cache of ``device="none"``.
        InvalidSequence
            A batch of another cache.
        """
        step = self._own(batch)._step
        step.run(self._store.write, self._layer(layer), key, value, batch, stream)

    def attend(self, layer: int, query: Any, batch: Batch, **options: Any) -> Any:
        """Attention of the step's queries ``[T, num_query_heads, head_dim]`` to their sequences.

        T is the batch's `num_tokens`, or more with padding behind, whose output is 0. Takes every option of
        `paged_attention` but `rows` and `cu_query_lens`, which the batch says; window, scale, softcap and sinks default
        to the layer's spec. Returns ``[T, num_query_heads, v_head_dim]`` in the framework and dtype of the query.

        Raises
        ------
        As `write`, and what `paged_attention` refuses of its options; InvalidSequence for a batch of `prepare_arrival`,
        too.
        """
        step = self._own(batch)._step
        return step.run(self._attend, layer, query, batch, options)

    # -- state ---------------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """How full the cache is at this moment."""
        with Held(self._state.lock):
            self._state.give_up_lost()
            return measure(
                self._tables,
                self._state.listed(),
                self._swap_spaces,
                self._prefix,
                num_copied_blocks=self._state.num_copied_blocks,
                num_scrubbed_blocks=self._state.num_scrubbed_blocks,
                nbytes=self.nbytes,
            )

    def block_map(self, group: int = 0) -> BlockMap:
        """Which sequence holds which block of a group at this moment; works with every device, "none" included.

        Raises
        ------
        ShapeError
            There is no such group.
        """
        number = group_number(group, self.num_groups)
        with Held(self._state.lock):
            self._state.give_up_lost()
            known = NONE if self._prefix is None else self._prefix.cached(number)
            return map_blocks(number, self._tables, self._state.listed(), known)

    def check_invariants(self) -> None:
        """Recount every block from its holders; raises `PagecoreError` where the index contradicts itself."""
        with Held(self._state.lock):
            self._state.give_up_lost()
            sequences = self._state.listed()
            self._tables.check_invariants(exclusive=self._prefix is None)
            if self._prefix is not None:
                self._prefix.check_invariants(sequences)
            if self._state.tenants is not None:
                self._state.tenants.check_invariants(sequences)
            for sequence in sequences:
                if not sequence.is_swapped and sequence.num_computed_tokens > self._tables.length(sequence.row):
                    raise InvalidSequence(f"{sequence!r} is inconsistent with its row {sequence.row}")
            if len(sequences) != self.num_sequences:
                raise InvalidSequence(f"{len(sequences)} sequences are listed, and {self.num_sequences} are counted")
            for space in self._swap_spaces:
                space.check_invariants()

    def __repr__(self) -> str:
        used = sum(pool.num_used for pool in self._block_pools)
        blocks = sum(self.num_blocks) - self.num_groups
        return (
            f"PagedKVCache({self.num_layers} layers in {self.num_groups} groups on {self.device!r}, "
            f"{self.num_sequences} sequences, {used} of {blocks} blocks of {self.block_size} tokens in use)"
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def _attend(self, layer: int, query: Any, batch: Batch, options: dict[str, Any]) -> Any:
        batch._step.require_computed_here()
        return self._store.attend(layer, self._layer(layer), query, batch, options)

    def _layer(self, layer: int) -> Layer:
        return self._layers[layer_number(layer, len(self._layers))]

    @property
    def _prefix(self) -> PrefixCache | None:
        return self._state.prefix

    def _own(self, batch: Batch) -> Batch:
        if not isinstance(batch, Batch) or batch._step.state is not self._state:
            raise InvalidSequence(f"expected a batch of this cache (from prepare or make_batch), got {batch!r}")
        return batch
