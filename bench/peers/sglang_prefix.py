"""SGLang's radix trees as sides of bench/index/prefix.py: 0.5.23's native core and, if installed, 0.5.9's.

Arguments are made beforehand. The native core's match returns where a prefix ends; a second call returns the slots of
its tokens. 0.5.9's tree is written in Python.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.harness.targets import SGLANG_RATIO_MIN
from bench.index.prefix_load import Load
from bench.index.prefix_sides import Side
from bench.peers import HOME, add_to_path, unimportable
from bench.peers.hollow import hollowed
from bench.peers.sglang import FOLDER, NAME, RECIPE, UNNEEDED
from bench.peers.sglang import load as load_allocators

OLD_VERSION, OLD_FOLDER = "0.5.9", "sglang-0.5.9"
# Modules that are imported but never called by the trees.
UNNEEDED_NATIVE = (
    *UNNEEDED,
    "sglang.kernels",
    "sglang.srt.configs",
    "sglang.srt.distributed",
    "sglang.srt.layers",
    "sglang.srt.managers.cache_controller",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "sglang.srt.observability.metrics_collector",
    "sglang.srt.session.streaming_session",
)
UNNEEDED_OLD = (
    "sglang.srt.configs",
    "sglang.srt.distributed",
    "sglang.srt.layers",
    "sglang.srt.metrics.collector",
    "sgl_kernel",
)
# Keys are lists of Python integers, and each eviction sorts all leaves.
OLD_SEQUENCES_MAX = 10_000


def sides(load: Load) -> list[Side]:
    """Return SGLang's trees with this load."""
    found: list[Side] = [Native(load)]
    if _load_old() is not None and load.num_sequences <= OLD_SEQUENCES_MAX:
        found.append(Old(load))
    return found


@cache
def load() -> Any:
    """Return the names of the native tree; load the old tree first, since both packages are called sglang."""
    _load_old()
    load_allocators()
    try:
        with hollowed(*UNNEEDED_NATIVE):
            from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
            from sglang.srt.mem_cache.cache_init_params import CacheInitParams
            from sglang.srt.mem_cache.radix_cache import RadixKey
            from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
            from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    except ImportError as error:
        raise unimportable(NAME, FOLDER, error, RECIPE) from error
    return SimpleNamespace(
        insert=InsertParams,
        match=MatchPrefixParams,
        options=CacheInitParams,
        key=RadixKey,
        tree=RustUnifiedTreeCore,
        component=ComponentType,
    )


@cache
def _load_old() -> Any:
    """Return the names of 0.5.9's tree, or None if it is missing; the name sglang is free again afterwards."""
    if not (HOME / OLD_FOLDER).is_dir() or "sglang" in sys.modules:
        return None
    add_to_path(f"SGLang {OLD_VERSION}", OLD_FOLDER, RECIPE)
    try:
        with hollowed(*UNNEEDED_OLD):
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
            from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
    except ImportError:
        return None
    finally:
        sys.path.remove(str(HOME / OLD_FOLDER))
        for name in [name for name in sys.modules if name.split(".")[0] in ("sglang", "sgl_kernel")]:
            del sys.modules[name]
    return SimpleNamespace(
        evict=EvictParams, insert=InsertParams, match=MatchPrefixParams, tree=RadixCache, key=RadixKey
    )


class _NoAllocator:
    """An allocator that discards what a tree frees, at no cost."""

    device = "cpu"

    def free(self, _slots: object) -> None: ...

    free_group_begin = free_group_end = lambda _self: None


class _Tree(Side):
    """Common part of both trees."""

    def __init__(self, load: Load, theirs: Any, tree: Any) -> None:
        self.theirs, self.tree = theirs, tree
        super().__init__(load)
        self.offers = self._offers()
        self.fill()

    def _offers(self) -> list[Any]:
        """Return the insert call of each sequence, with the slots of its tokens."""
        import torch

        size = self.load.block_size
        slots = (self.load.blocks.astype(np.int64)[:, :, None] * size + np.arange(size)).reshape(
            len(self.load.blocks), -1
        )
        values = torch.from_numpy(slots)
        return [
            self.theirs.insert(key=params.key, value=value)
            for params, value in zip(self.keys["hit"], values, strict=True)
        ]

    def fill(self) -> None:
        """Insert every sequence and use each once more, since a split makes the first of a group look too new."""
        super().fill()
        self.match(self.keys["hit"])

    def glance(self, count: int) -> None:
        """Do nothing: a match makes what it finds the most recently used."""

    def match(self, keys: list[Any]) -> None:
        match = self.tree.match_prefix
        for params in keys:
            match(params)

    def hold(self, keys: list[Any]) -> list[Any]:
        return [self._lock(self.tree.match_prefix(params).last_device_node) for params in keys]

    def _lock(self, node: Any) -> Any:
        """Pin a path; return the arguments that unpin it."""
        self.tree.inc_lock_ref(node)
        return (node,)

    def release(self, held: list[Any]) -> None:
        for receipt in held:
            self.tree.dec_lock_ref(*receipt)

    def lock_again(self, held: list[Any]) -> None:
        lock, unlock = self._lock, self.tree.dec_lock_ref
        for receipt in held:
            unlock(*lock(receipt[0]))

    def match_and_lock(self, keys: list[Any]) -> None:
        match, lock, unlock = self.tree.match_prefix, self._lock, self.tree.dec_lock_ref
        for params in keys:
            unlock(*lock(match(params).last_device_node))

    @property
    def leaf_tokens(self) -> int:
        return self.load.leaf_blocks * self.load.block_size

    @abstractmethod
    def _evict(self, tokens: int) -> None: ...

    def evict_leaves(self, count: int) -> None:
        for _ in range(count):
            self._evict(self.leaf_tokens)

    def evict_at_once(self, count: int) -> None:
        self._evict(count * self.leaf_tokens)

    def drain(self) -> None:
        self._evict(self.load.num_blocks * self.load.block_size)


class Native(_Tree):
    """The unified tree's native core, driven like UnifiedRadixCache; freed slots are discarded."""

    name = NAME
    other_match = f"{NAME}, with slots", "match_slots"
    targets = SGLANG_RATIO_MIN

    def __init__(self, load_: Load) -> None:
        theirs = load()
        options = theirs.options(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=_NoAllocator(),
            page_size=load_.block_size,
        )
        self.full = theirs.component.FULL
        options.tree_components = (self.full,)
        tree = theirs.tree(options)
        self.root = tree.root_node_handle()
        super().__init__(load_, theirs, tree)

    def key(self, tokens: NDArray[np.int32]) -> Any:
        ids = array("q")
        ids.frombytes(tokens.astype(np.int64).tobytes())
        return self.theirs.match(key=self.theirs.key(ids))

    def insert(self, numbers: Iterable[int]) -> None:
        tree, offers = self.tree, self.offers
        for number in numbers:
            step = tree.begin_insert(offers[number])
            while step.result is None:
                step = tree.resume_insert()
            tree.end_insert()

    def lengths(self, keys: list[Any]) -> list[int]:
        return [self.tree.match_prefix(params).device_prefix_len for params in keys]

    def match_slots(self, keys: list[Any]) -> None:
        tree, root = self.tree, self.root
        for params in keys:
            tree.collect_full_device_indices(tree.match_prefix(params).last_device_node, root)

    def _lock(self, node: Any) -> Any:
        return node, self.tree.inc_lock_ref(node).to_dec_params()

    def _evict(self, tokens: int) -> None:
        tree, full = self.tree, self.full
        totals: defaultdict[Any, int] = defaultdict(int)
        tree.evict_device_start(full, tokens)
        while True:
            step = tree.evict_device_next_node(full, totals)
            node, moved = step.node_id, step.made_progress
            _drop(step, totals)
            if node is not None:
                _drop(tree.evict_device_leaf(node, False), totals)
            elif not moved:
                break
        tree.evict_device_end(full)
        assert totals[full] == tokens, totals


def _drop(step: Any, totals: dict[Any, int]) -> None:
    """Count and release what a step of an eviction has freed."""
    for component, count in step.tracker.items():
        totals[component] += count
    step.device_frees.clear()
    step.host_frees.clear()
    step.cache_actions.clear()


class Old(_Tree):
    """0.5.9's RadixCache."""

    name = f"SGLang {OLD_VERSION}, Python"

    def __init__(self, load_: Load) -> None:
        theirs = _load_old()
        tree = theirs.tree.create_simulated(mock_allocator=_NoAllocator(), page_size=load_.block_size)
        super().__init__(load_, theirs, tree)

    def key(self, tokens: NDArray[np.int32]) -> Any:
        return self.theirs.match(key=self.theirs.key(tokens.tolist()))

    def insert(self, numbers: Iterable[int]) -> None:
        insert, offers = self.tree.insert, self.offers
        for number in numbers:
            insert(offers[number])

    def lengths(self, keys: list[Any]) -> list[int]:
        return [len(self.tree.match_prefix(params).device_indices) for params in keys]

    def _evict(self, tokens: int) -> None:
        assert self.tree.evict(self.theirs.evict(num_tokens=tokens)).num_tokens_evicted == tokens
