"""The division of a budget of bytes into lanes and files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import SupportsFloat

from pagecore.errors import NotEnoughMemory
from pagecore.storage import parse_memory, state_budget
from pagecore.storage.checks import require_int
from pagecore.storage.pools.state_pool import checked_ratio
from pagecore.tiers.disk.header import SlabHeader
from pagecore.tiers.keys.fingerprint import Fingerprint

BLOCKS_MAX = 2**31 - 1


def blocks_per_file(num_blocks: int, max_blocks_per_file: int) -> list[int]:
    """Return the slots of each file: full files, then the rest.

    Examples
    --------
    >>> blocks_per_file(70_000, 32_000)
    [32000, 32000, 6000]
    """
    full, rest = divmod(num_blocks, max_blocks_per_file)
    return [max_blocks_per_file] * full + ([rest] if rest else [])


def lane_headers(fingerprint: Fingerprint, lane: int, num_blocks: int, max_blocks_per_file: int) -> list[SlabHeader]:
    """Return the header of each file of a lane."""
    slots = blocks_per_file(num_blocks, max_blocks_per_file)
    payload = fingerprint.payload_bytes[lane]
    return [SlabHeader(fingerprint.digest, lane, number, count, payload) for number, count in enumerate(slots)]


def plan_slabs(
    fingerprint: Fingerprint, max_bytes: int | str, max_blocks_per_file: int, state_ratio: SupportsFloat
) -> list[list[SlabHeader]]:
    """Return the headers of the files of each lane, which take at most `max_bytes` together.

    Lanes of tokens have equal numbers of blocks. States have a share of the bytes of their own.

    Raises
    ------
    ShapeError
        An invalid number or ratio.
    NotEnoughMemory
        The budget does not hold one entry of every lane.
    """
    if isinstance(max_bytes, str):
        max_bytes = parse_memory(max_bytes, name="max_bytes")
    max_bytes = require_int("max_bytes", max_bytes, max=None)
    per_file = require_int("max_blocks_per_file", max_blocks_per_file)
    state_ratio = checked_ratio(state_ratio)
    tokens = list(range(fingerprint.num_lanes - fingerprint.has_states))
    states = list(range(len(tokens), fingerprint.num_lanes))
    for_states = state_budget(max_bytes, state_ratio) if states and tokens else 0 if tokens else max_bytes
    plan = _most_blocks(fingerprint, tokens, max_bytes - for_states, per_file, max_bytes)
    return plan + _most_blocks(fingerprint, states, for_states, per_file, max_bytes)


def _most_blocks(
    fingerprint: Fingerprint, lanes: Sequence[int], budget: int, per_file: int, max_bytes: int
) -> list[list[SlabHeader]]:
    """Return the headers of the most blocks whose files fit a budget."""

    def headers(num_blocks: int) -> list[list[SlabHeader]]:
        return [lane_headers(fingerprint, lane, num_blocks, per_file) for lane in lanes]

    def nbytes(num_blocks: int) -> int:
        total = 0
        for lane in lanes:
            full, rest = divmod(num_blocks, per_file)
            payload = fingerprint.payload_bytes[lane]
            total += full * SlabHeader(b"", lane, 0, per_file, payload).file_bytes
            total += SlabHeader(b"", lane, 0, rest, payload).file_bytes if rest else 0
        return total

    if not lanes:
        return []
    most = bisect_right(range(BLOCKS_MAX), budget, key=nbytes) - 1
    if most < 1:
        raise NotEnoughMemory(
            f"max_bytes is {max_bytes}, of which {budget} are for lanes {lanes[0]} to {lanes[-1]}; one entry of each "
            f"and its file take {nbytes(1)}: give more"
        )
    return headers(most)
