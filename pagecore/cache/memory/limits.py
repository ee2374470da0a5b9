"""Limits of a paged cache: checks of its options, and the number of blocks of each group."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any, Literal

import numpy as np

from pagecore.arrays.cuda.devices import device_name
from pagecore.cache.layers.groups import Group
from pagecore.cache.memory.demand import divide_memory, longest_sequence
from pagecore.errors import DeviceError, OutOfBlocks, ShapeError, UnsupportedOption
from pagecore.index import check_policy
from pagecore.storage import parse_memory
from pagecore.storage.checks import INT32_MAX, flag, require_pool, shown
from pagecore.storage.memory.budgets import Memory

# Tokens of a row by default in a cache whose layers all keep states: no pool limits it.
TOKENS_WITHOUT_BLOCKS = 1 << 20


def refuse_blocks(**options: object) -> None:
    """Raise UnsupportedOption for an option of blocks in a cache whose layers all keep states."""
    for name, value in options.items():
        if value is not None and not (isinstance(value, list) and not value):
            raise UnsupportedOption(
                f"{name} is {shown(value)}, but every layer keeps a state, and there are no blocks; give memory or "
                "num_states instead"
            )


def refuse_unserved(prefix_cache: bool, eviction_policy: str) -> None:
    """Raise UnsupportedOption for a `prefix_cache` or `eviction_policy` that this version does not serve."""
    flag("prefix_cache", prefix_cache)
    check_policy(eviction_policy, "eviction_policy")


def scrub_option(scrub: bool, device: str) -> bool:
    """Return `scrub` as a bool; raise UnsupportedOption for True with a cache that has no bytes to zero."""
    if flag("scrub", scrub) and device == "none":
        raise UnsupportedOption(
            "scrub is True, but device is 'none': such a cache has no bytes to zero; leave scrub out, and zero the "
            "blocks in the memory that holds them"
        )
    return bool(scrub)


def slot_dtype(index_dtype: object) -> Literal["int64", "int32"]:
    """Return the dtype of slot mappings by name; raise UnsupportedOption for any but int64 and int32."""
    try:
        name = str(index_dtype)
    except Exception:  # an int of thousands of digits, or an object whose __str__ fails
        name = ""
    if name == "int32":
        return "int32"
    if name == "int64":
        return "int64"
    raise UnsupportedOption(f"index_dtype is {shown(index_dtype)}; use 'int64' or 'int32'")


def cache_device(device: object) -> str:
    """Return the full name of a paged cache's device: "cpu", "cuda:0" or "none"."""
    if isinstance(device, str) and device == "none":
        return device
    try:
        return device_name(device)
    except DeviceError as error:
        raise DeviceError(f"{error}; or 'none' for a cache without bytes") from None


def out_of_blocks(needed: Listed[int], available: Listed[int], adjective: str, advice: str) -> OutOfBlocks:
    """Return the error for blocks of each group of which fewer are `adjective` ("free" or "available")."""
    text = ", ".join(
        f"{count} blocks are needed and {left} are {adjective}" + (f" in group {group}" if len(needed) > 1 else "")
        for group, (count, left) in enumerate(zip(needed, available, strict=True))
    )
    figures: Any = (tuple(needed), tuple(available)) if len(needed) > 1 else (needed[0], available[0])
    return OutOfBlocks(text + advice, *figures)


def short_of_blocks(refusal: OutOfBlocks, evictable: Listed[int]) -> OutOfBlocks:
    """Return the error of block tables with the remedies of a cache, and its evictable blocks counted as available."""
    wanted, free = np.atleast_1d(refusal.requested).tolist(), np.atleast_1d(refusal.available).tolist()
    if not any(evictable):
        return out_of_blocks(wanted, free, "free", "; remove a sequence, swap one out or make the cache larger")
    return with_evictable(refusal, evictable)


def with_evictable(refusal: OutOfBlocks, evictable: Listed[int]) -> OutOfBlocks:
    """Return the error with the evictable blocks of each group counted as available."""
    if not any(evictable):
        return refusal
    wanted, free = np.atleast_1d(refusal.requested).tolist(), np.atleast_1d(refusal.available).tolist()
    total = [count + more for count, more in zip(free, evictable, strict=True)]
    return out_of_blocks(
        wanted, total, "available", ", including cached ones; remove a sequence or make the pool larger"
    )


def count_blocks(
    groups: Listed[Group],
    block_size: int,
    num_blocks: int | Listed[int] | None,
    memory: Memory | None,
    device: str = "cpu",
    max_tokens: int | None = None,
) -> list[int]:
    """Return the blocks of each group: as listed, or as `divide_memory` divides `memory` among them.

    Without groups there are none.
    """
    if not groups:
        refuse_blocks(num_blocks=num_blocks)
        return []
    if (num_blocks is None) == (memory is None):
        raise ShapeError(f"num_blocks is {shown(num_blocks)} and memory is {shown(memory)}; give exactly one of them")
    if memory is not None:
        budget = parse_memory(memory, "cpu" if device == "none" else device)
        counted = divide_memory(groups, block_size, budget, max_tokens)
    else:
        given: Any = num_blocks
        if isinstance(given, np.ndarray):
            given = given.tolist()
        counted = list(given) if isinstance(given, list | tuple) else [given] * len(groups)
    if len(counted) != len(groups):
        raise ShapeError(
            f"num_blocks lists {len(counted)}; the layers form {len(groups)} groups: give one for each, or one for all"
        )
    counted = [require_pool("num_blocks", n, max=None) for n in counted]
    if max(counted) > INT32_MAX:
        raise ShapeError(
            f"a pool would have {shown(max(counted))} blocks; ids are int32, at most {INT32_MAX}: use larger blocks"
        )
    return counted


def row_capacity(groups: Listed[Group], blocks: Listed[int], block_size: int, max_tokens: int | None) -> int:
    """Return the tokens that a row has room for: `max_tokens`, or the longest sequence that the pools hold.

    If all groups have windows, which limit no sequence, the slots of the largest one do. Without groups nothing else
    limits it than `TOKENS_WITHOUT_BLOCKS`.
    """
    if max_tokens is not None:
        return max_tokens
    if not groups:
        return TOKENS_WITHOUT_BLOCKS
    available = [count - 1 for count in blocks]
    own = [count for group, count in zip(groups, available, strict=True) if not group.is_cross]
    return min(longest_sequence(groups, available, block_size), max(own, default=INT32_MAX) * block_size)


def check_slots(blocks: Listed[int], block_size: int, index_dtype: str) -> None:
    """Raise UnsupportedOption if an int32 slot mapping cannot number every slot."""
    slots = max(blocks, default=0) * block_size
    if index_dtype == "int32" and slots > INT32_MAX + 1:
        raise UnsupportedOption(f"the pool has {slots} slots, more than int32 can count; use index_dtype='int64'")


def check_length(num_tokens: int, capacity: int) -> None:
    """Raise ShapeError if a row with this capacity cannot hold a sequence of `num_tokens` tokens."""
    if num_tokens > capacity:
        raise ShapeError(
            f"tokens has {num_tokens} ids; a sequence has room for {capacity}: raise max_tokens_per_sequence or the "
            "number of blocks"
        )
