"""PagedKVCache: the cache that an inference engine uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import NoReturn, SupportsFloat, SupportsIndex

from pagecore.cache.build import build_parts
from pagecore.cache.layers.groups import Layers
from pagecore.cache.methods.arrays import ArrayMethods
from pagecore.cache.methods.compaction import CompactMethods
from pagecore.cache.methods.lifecycle import LifecycleMethods
from pagecore.cache.methods.prefix import PrefixMethods
from pagecore.cache.methods.queries import QueryMethods
from pagecore.cache.methods.reading import CacheReader
from pagecore.cache.methods.saver import SaverMethods
from pagecore.cache.methods.step import StepMethods
from pagecore.cache.methods.swap import SwapMethods
from pagecore.errors import UnsupportedOption
from pagecore.storage import KVLayout, TensorParallel
from pagecore.storage.memory.budgets import Memory
from pagecore.storage.pools.allocation import Allocator


class PagedKVCache(
    LifecycleMethods,
    StepMethods,
    SwapMethods,
    CompactMethods,
    PrefixMethods,
    SaverMethods,
    ArrayMethods,
    QueryMethods,
    CacheReader,
):
    """The keys and values of many sequences, in blocks of shared memory; every call takes the cache's lock.

    Parameters
    ----------
    layers : spec or list of specs
        One spec for all layers (with `num_layers`), or a list with one spec or `Alias` per model layer. Pass the specs
        of the whole model, also for one rank of several. Layers with equal planes, window and number of query heads
        form a group; each group has its own block pool, block table and slot mapping. An operation takes blocks in all
        groups or in none. Layers of a `StateSpec` keep one state for each sequence, in slots that all of them share;
        see Notes. Groups of `CrossSpec` layers come last: their blocks hold encoder tokens, see `set_cross_tokens`. A
        spec without the planes key and value is stored only: use `plane` and your own kernels.
    num_layers : int, optional
        Number of layers for a single spec; 1 by default.
    block_size : int, optional
        Tokens per block. By default those that the planes of a spec require, such as the sealed blocks of "kivi2", or
        16.
    num_blocks : int or list of int
        Blocks of each group, including the null block; a list has one entry per group. Exclusive with `memory`. By
        default with `buffers`: the number of blocks that the buffers of each group hold.
    memory : int, str or float
        Memory budget of this rank for all groups: bytes, "8GiB", or a fraction of the free memory. It is divided by
        what a sequence needs at once in each group, so that groups with windows get fewer blocks. Counted is a sequence
        of 8192 tokens, or of `max_tokens_per_sequence` if that is less; pass `num_blocks` for another division, such
        as the best split of `pagecore plan`.
    num_states : int, optional
        Slots for states, including the null slot 0, for models with StateSpec layers. By default what `state_ratio`
        gives of `memory`, or with `num_blocks` ``1 + max_sequences * n``: n is the slots that a sequence needs, one for
        its state (two with ``in_place=False``), one for each draft token, and one for its checkpoint.
    state_ratio : float, optional
        Bytes of states over bytes of blocks, 0.9 by default, for the division of `memory` in a model with StateSpec
        layers. Refused where nothing is divided: without such layers or `memory`, and with `num_states`.
    num_checkpoints : int, optional
        Slots for quantised checkpoints, including the null slot 0, if the StateSpecs have a `checkpoint_format`. By
        default `num_states`, if that is given, the bytes that running states leave of `memory`, or with
        `num_blocks` ``1 + 2 * max_sequences``.
    max_sequences : int
        Number of rows of the block tables.
    max_tokens_per_sequence : int, optional
        Capacity of a row; by default the longest sequence that the pools hold. On CUDA the block tables take 4 bytes of
        device memory per row, group and block.
    device : str
        "cpu", "cuda" (short for "cuda:0"), another CUDA device, or "none": a cache without bytes, for simulation and
        for engines that own their memory. Such a cache serves everything except plane, key, value, write and attend.
    layout : str or KVLayout, optional
        Memory layout of the pools; "layerwise" by default.
    parallel : TensorParallel, optional
        The rank that this cache serves: its pools, `write` and `attend` use the rank's heads only.
    prefix_cache : bool
        Keep computed blocks until they are evicted, and reuse them for sequences with the same prefix. If False,
        `eviction_policy` and `clock` have no effect.
    eviction_policy : {"lru", "lfu", "fifo", "mru", "filo", "slru", "slru:SHARE", "priority", "rank"}
        Order in which cached blocks are evicted; see `pagecore.RadixTree`.
    index_dtype : {"int64", "int32"}
        Dtype of slot mappings; int32 is refused for pools with more slots than it can number.
    clock : callable
        Returns the time in seconds; only the policy "priority" calls it, for time_to_live.
    buffers : optional
        Memory of the caller on `device`, adopted instead of allocated, in the order that `layout` describes: for one
        group the `buffers` of `KVPool`, for several groups a list with one such entry per group. The cache aliases the
        arrays and keeps them alive. It does not write to them before the first step, unless `scrub` is True.
    allocator : callable, optional
        Returns the memory of blocks and states for ``allocator(bytes, device)``: any array that `as_tensor` accepts, of
        at least that number of bytes, contiguous and aligned to 64 bytes, from a framework's pool or memory that NVLink
        or NVSHMEM reaches. It is called once for each buffer of a pool, while the cache is made. The cache keeps the
        arrays alive. Exclusive with `buffers`.
    memory_saver : bool
        Allocate memory whose pages `release_memory` gives back to the system, or on CUDA to the device. On CUDA each
        buffer takes whole pages, of 2 MiB on most devices. Exclusive with `buffers` and `allocator`.
    scrub : bool
        Keep the values of one namespace out of the blocks of every other one; see Notes. Refused for ``device="none"``.
    recompute_last_block : bool
        A prefix hit drops its last block, whose tokens are computed again: EAGLE's draft model needs their hidden
        states, which no cache keeps. (vLLM)

    Attributes
    ----------
    block_size, max_sequences, max_tokens_per_sequence : int
    device, eviction_policy, index_dtype : str
    scrub : bool
    parallel : TensorParallel

    Raises
    ------
    ShapeError, UnsupportedOption, UnsupportedDtype, DeviceError
        Invalid sizes, specs, layout, device, buffers or number of ranks.
    NotEnoughMemory
        The budget holds fewer than two blocks of every group, or the allocation failed.

    Notes
    -----
    Without `scrub`, a new block contains what the heap, `buffers` or removed sequences of any namespace left there. A
    step that writes before it attends reads none of it: `attend` never reads past the length of a sequence, and
    prefixes are reused within a namespace only. Code that reads unwritten slots or whole blocks (`plane`, a swap space,
    a kernel of your own) does read it. With `scrub`, all memory is zeroed when the cache is made, `buffers` included,
    and a block that another namespace used last is zeroed in every plane and layer before a step takes it. On CUDA
    blocks are zeroed on the stream of the step; the host does not wait.

    A step of a cache with states reads and writes the slots of `Batch.state_read` and `Batch.state_write`, and keeps
    checkpoints (`Batch.checkpoint_write`), from which alone a prefix can be reused; docs/states.md explains the rules.

    Blocks, block tables and copy-on-write follow PagedAttention: Kwon et al., "Efficient Memory Management for Large
    Language Model Serving with PagedAttention", 2023.

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
        block_size: int | None = None,
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
        recompute_last_block: bool = False,
        num_states: SupportsIndex | None = None,
        state_ratio: SupportsFloat | None = None,
        num_checkpoints: SupportsIndex | None = None,
        allocator: Allocator | None = None,
        memory_saver: bool = False,
    ) -> None:
        super().__init__(
            build_parts(
                layers,
                num_layers=num_layers,
                block_size=block_size,
                num_blocks=num_blocks,
                memory=memory,
                max_sequences=max_sequences,
                max_tokens_per_sequence=max_tokens_per_sequence,
                device=device,
                layout=layout,
                parallel=parallel,
                prefix_cache=prefix_cache,
                eviction_policy=eviction_policy,
                index_dtype=index_dtype,
                clock=clock,
                buffers=buffers,
                scrub=scrub,
                recompute_last_block=recompute_last_block,
                num_states=num_states,
                state_ratio=state_ratio,
                num_checkpoints=num_checkpoints,
                allocator=allocator,
                memory_saver=memory_saver,
            )
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise UnsupportedOption: a cache cannot be copied or pickled."""
        raise UnsupportedOption(
            "a PagedKVCache cannot be copied or pickled; make one in each process, from a PagedCacheConfig, and hand "
            "sequences over with export_sequence"
        )
