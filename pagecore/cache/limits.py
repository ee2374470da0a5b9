"""What a cache can be: options that this version serves, and how many blocks each group gets."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any, Literal

import numpy as np

from pagecore.arrays.devices import device_name
from pagecore.cache.layers import Group
from pagecore.errors import DeviceError, OutOfBlocks, ShapeError, UnsupportedOption
from pagecore.index import POLICIES
from pagecore.storage import parse_memory
from pagecore.storage.checks import INT32_MAX, flag, require_int, shown
from pagecore.storage.memory import Memory
from pagecore.storage.pool import blocks_within


def refuse_unserved(prefix_cache: bool, eviction_policy: str) -> None:
    """Refuse by name what this version does not serve."""
    flag("prefix_cache", prefix_cache)
    if not (isinstance(eviction_policy, str) and eviction_policy in POLICIES):
        raise UnsupportedOption(f"eviction_policy is {shown(eviction_policy)}; use one of {', '.join(POLICIES)}")


def scrub_option(scrub: bool, device: str) -> bool:
    """Return whether blocks are zeroed; UnsupportedOption where the cache has no bytes to zero."""
    if flag("scrub", scrub) and device == "none":
        raise UnsupportedOption(
            "scrub is True, but device is 'none': such a cache has no bytes to zero; leave scrub out, and zero blocks "
            "where their bytes are"
        )
    return bool(scrub)


def slot_dtype(index_dtype: object) -> Literal["int64", "int32"]:
    """Return the name of the dtype of slot mappings; UnsupportedOption for any but int64 and int32."""
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
    """The whole name of the device that a paged cache is on: "cpu", "cuda:0"; "none" where it has no bytes."""
    if isinstance(device, str) and device == "none":
        return device
    try:
        return device_name(device)
    except DeviceError as error:
        raise DeviceError(f"{error}; or 'none' for a cache without bytes") from None


def out_of_blocks(needed: Listed[int], available: Listed[int], can: str, advice: str) -> OutOfBlocks:
    """The refusal to take blocks of each group where fewer "are free" or "can be had"."""
    text = ", ".join(
        f"{count} blocks are needed and {left} {can}" + (f" in group {group}" if len(needed) > 1 else "")
        for group, (count, left) in enumerate(zip(needed, available, strict=True))
    )
    figures: Any = (tuple(needed), tuple(available)) if len(needed) > 1 else (needed[0], available[0])
    return OutOfBlocks(text + advice, *figures)


def with_evictable(refusal: OutOfBlocks, evictable: Listed[int]) -> OutOfBlocks:
    """Return a refusal that counts the blocks of each group which eviction would free as available."""
    if not any(evictable):
        return refusal
    wanted, free = np.atleast_1d(refusal.requested).tolist(), np.atleast_1d(refusal.available).tolist()
    total = [count + more for count, more in zip(free, evictable, strict=True)]
    return out_of_blocks(
        wanted, total, "can be had", ", cached ones included; remove a sequence or make the pool larger"
    )


def count_blocks(
    groups: Listed[Group],
    block_size: int,
    num_blocks: int | Listed[int] | None,
    memory: Memory | None,
    device: str = "cpu",
) -> list[int]:
    """Blocks of each group: as listed, or as many for each as fit into `memory` of a device together."""
    if (num_blocks is None) == (memory is None):
        raise ShapeError(f"num_blocks is {shown(num_blocks)} and memory is {shown(memory)}; give exactly one of them")
    if memory is not None:
        one = sum(group.bytes_per_block(block_size) for group in groups)
        counted = [blocks_within(parse_memory(memory, "cpu" if device == "none" else device), one)] * len(groups)
    else:
        given: Any = num_blocks
        if isinstance(given, np.ndarray):
            given = given.tolist()
        counted = list(given) if isinstance(given, list | tuple) else [given] * len(groups)
    if len(counted) != len(groups):
        raise ShapeError(
            f"num_blocks lists {len(counted)}; the layers form {len(groups)} groups: give one for each, or one for all"
        )
    counted = [require_int("num_blocks", n, min=2, max=None) for n in counted]
    if max(counted) > INT32_MAX:
        raise ShapeError(
            f"a pool would have {shown(max(counted))} blocks; ids are int32, at most {INT32_MAX}: use larger blocks"
        )
    return counted


def row_capacity(blocks: Listed[int], block_size: int, max_tokens: int | None) -> int:
    """Tokens that a row has room for: `max_tokens`, or all that the smallest pool can hold."""
    if max_tokens is not None:
        return require_int("max_tokens_per_sequence", max_tokens, max=None)
    return min((min(blocks) - 1) * block_size, INT32_MAX)


def check_slots(blocks: Listed[int], block_size: int, index_dtype: str) -> None:
    """A slot mapping of int32 must be able to name every slot; it never wraps."""
    slots = max(blocks) * block_size
    if index_dtype == "int32" and slots > INT32_MAX + 1:
        raise UnsupportedOption(f"the pool has {slots} slots, more than int32 can count; use index_dtype='int64'")
