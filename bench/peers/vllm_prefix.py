"""vLLM 0.33's prefix cache, a dictionary of block hashes over a pool of blocks, as a side of bench/index/prefix.py.

The calls of allocate_slots and free on the pool are made directly: cache_full_blocks, touch, free_blocks, and
get_new_blocks, which evicts. Block hashes are made with the request; only the figure that says so includes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.index.prefix_load import LENGTH, SHARED, Load
from bench.index.prefix_sides import Side
from bench.peers import unimportable
from bench.peers.vllm import FOLDER, NAME, RECIPE
from bench.peers.vllm import load as load_vllm

# Requests are lists of Python integers: more sequences take gigabytes, and smaller blocks minutes of hashing.
SEQUENCES_MAX = 10_000
BLOCK_SIZE_MIN = 16


def load() -> None:
    """Import the timed names."""
    load_vllm()
    try:
        import vllm.utils.hashing
        import vllm.v1.core.kv_cache_utils  # noqa: F401
    except ImportError as error:
        raise unimportable(NAME, FOLDER, error, RECIPE) from error


def sides(load: Load) -> list[Side]:
    """Return vLLM's cache with this load; [] if the load is too large."""
    return [Vllm(load)] if load.num_sequences <= SEQUENCES_MAX and load.block_size >= BLOCK_SIZE_MIN else []


class Vllm(Side):
    """KVCacheManager and its BlockPool."""

    name = NAME
    other_match = f"{NAME}, with hashing", "match_hashing"

    def __init__(self, load: Load) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils

        self.vllm = load_vllm()
        kv_cache_utils.init_none_hash(sha256)
        self.hasher = kv_cache_utils.get_request_block_hasher(load.block_size, sha256)
        self.num_keys = 0
        super().__init__(load)
        self.manager = self._manager()
        self.pool = self.manager.block_pool
        self.shared_blocks = SHARED // load.block_size
        self.heads: dict[int, list[Any]] = {}
        self.spare = self.pool.get_new_blocks(load.num_blocks)
        self.fill()

    def _manager(self) -> Any:
        vllm, block_size = self.vllm, self.load.block_size
        spec = vllm.spec(block_size=block_size, num_kv_heads=8, head_size=128, dtype=vllm.torch.bfloat16)
        config = vllm.config(
            num_blocks=self.load.num_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[vllm.group(["layer"], spec)],
        )
        return vllm.manager(
            config,
            max_model_len=2 * LENGTH,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_caching=True,
            log_stats=False,
        )

    def key(self, tokens: NDArray[np.int32]) -> Any:
        """Return a request with one more token, since vLLM never matches the last one."""
        sampling = self.vllm.sampling(max_tokens=1)
        sampling.update_from_generation_config({}, eos_token_id=100)
        self.num_keys += 1
        return self.vllm.request(
            request_id=str(self.num_keys),
            prompt_token_ids=[*tokens.tolist(), 1],
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            lora_request=None,
            block_hasher=self.hasher,
        )

    def fill(self) -> None:
        """Insert every sequence; each holds its head, which the first sequence of its group has made."""
        self.heads = {}
        total, groups = self.load.num_sequences, self.load.num_groups
        self.insert(range(total))
        for number in range(groups, total):
            self.pool.touch(self.heads[number % groups])
        self.settle()
        self.oldest = 0

    def note_missing(self, count: int) -> None:
        """Record the missing sequences, and hold their heads as their requests would."""
        super().note_missing(count)
        for number in self.missing:
            self.pool.touch(self.heads[number % self.load.num_groups])

    def insert(self, numbers: Iterable[int]) -> None:
        publish, size, half = self.pool.cache_full_blocks, self.load.block_size, self.shared_blocks
        spare, leaf, start = self.spare, self.load.leaf_blocks, 0
        keys, heads, groups = self.keys["hit"], self.heads, self.load.num_groups
        for number in numbers:
            head = heads.get(number % groups)
            if head is None:
                head = heads[number % groups] = spare[start : start + half]
                start += half
                publish(keys[number], head, 0, half, size, 0)
            blocks = head + spare[start : start + leaf]
            start += leaf
            publish(keys[number], blocks, half, len(blocks), size, 0)
            self.unsettled.append(blocks)

    def settle(self) -> None:
        """Free each request, its last block first."""
        for blocks in self.unsettled:
            self.pool.free_blocks(reversed(blocks))
        self.spare = []
        super().settle()

    def evict_leaves(self, count: int) -> None:
        take, leaf = self.pool.get_new_blocks, self.load.leaf_blocks
        for _ in range(count):
            self.spare += take(leaf)

    def evict_at_once(self, count: int) -> None:
        self.spare += self.pool.get_new_blocks(count * self.load.leaf_blocks)

    def drain(self) -> None:
        self.spare += self.pool.get_new_blocks(self.load.num_blocks)

    def match(self, keys: list[Any]) -> None:
        match = self.manager.get_computed_blocks
        for request in keys:
            match(request)

    def match_hashing(self, keys: list[Any]) -> None:
        match = self.manager.get_computed_blocks
        for request in keys:
            request.block_hashes = []
            request.update_block_hashes()
            match(request)

    def _find(self, request: Any) -> list[Any]:
        blocks: list[Any] = self.manager.get_computed_blocks(request)[0].blocks[0]
        return blocks

    def lengths(self, keys: list[Any]) -> list[int]:
        return [self.manager.get_computed_blocks(request)[1] for request in keys]

    def hold(self, keys: list[Any]) -> list[Any]:
        held = [self._find(request) for request in keys]
        for blocks in held:
            self.pool.touch(blocks)
        return held

    def release(self, held: list[Any]) -> None:
        for blocks in held:
            self.pool.free_blocks(reversed(blocks))

    def lock_again(self, held: list[Any]) -> None:
        touch, free = self.pool.touch, self.pool.free_blocks
        for blocks in held:
            touch(blocks)
            free(reversed(blocks))

    def match_and_lock(self, keys: list[Any]) -> None:
        touch, free = self.pool.touch, self.pool.free_blocks
        for request in keys:
            blocks = self._find(request)
            touch(blocks)
            free(reversed(blocks))
