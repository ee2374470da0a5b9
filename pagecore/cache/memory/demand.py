"""Blocks that a sequence needs at once in each group; pools, limits, admission and plans all count by these functions.

A group without a window holds the blocks of every token. A group with a window of W tokens holds the keys that the next
tokens see: after each step it releases whole blocks before them. Next to sealed blocks it holds the keys that the first
token after those sees. The tail of sealed blocks holds what is not sealed yet, as a window of ``residual + 1`` tokens.

    W = 6, blocks of 4, steps of 3     tokens  0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14
                                               released   ^ seen by 12         ^ step of 3: three blocks at once

A window begins anywhere in a block, so that its demand is that of the worst place. A chunk begins only at multiples of
its size.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed

from pagecore.cache.layers.groups import Group
from pagecore.errors import NotEnoughMemory
from pagecore.storage.checks import INT32_MAX, ceil_div
from pagecore.storage.pools.pool import blocks_within

# Tokens of the sequence by whose demand a memory is divided among groups: windows save most of a long sequence, and
# a division by a longer one would leave short sequences without room in the windows.
TYPICAL_TOKENS = 8192
# Tokens of a prompt for which a division leaves room in windows, and which admission waits for.
PROMPT_TOKENS = 512


def blocks_at_once(group: Group, num_tokens: int, block_size: int, step_tokens: int = 1) -> int:
    """Return the most blocks of a group that a sequence holds while it grows to `num_tokens`.

    Cross attention holds the blocks of its encoder tokens from the first step on: `max_tokens` of the spec, or
    `num_tokens` if the spec does not limit them.

    Parameters
    ----------
    group : Group
    num_tokens, block_size : int
    step_tokens : int
        Tokens that the sequence computes in one step; its next step begins after windows have released blocks.
    """
    if group.is_cross:
        num_tokens = group.max_cross_tokens or num_tokens
    blocks = ceil_div(num_tokens, block_size)
    limit = block_limit(group, block_size, step_tokens)
    return blocks if limit is None else min(blocks, limit)


def block_limit(group: Group, block_size: int, step_tokens: int) -> int | None:
    """Return `blocks_at_once` of a sequence of any length; None without a window."""
    keys = group.kept
    return keys.most_blocks(step_tokens, block_size) if keys.is_limited else None


def longest_sequence(groups: Listed[Group], available: Listed[int], block_size: int) -> int:
    """Return the tokens of the longest sequence that `available` blocks of each group hold, however it is computed.

    Groups with windows limit it only if they cannot hold one window. Cross attention does not grow, and does not limit
    it. If no group limits it, it is the largest int32.
    """
    lengths = [
        blocks * block_size
        for group, blocks in zip(groups, available, strict=True)
        if not group.is_cross and ((limit := block_limit(group, block_size, 1)) is None or limit > blocks)
    ]
    return min([*lengths, INT32_MAX])


def longest_step(groups: Listed[Group], available: Listed[int], block_size: int, num_tokens: int) -> int:
    """Return the most tokens that a sequence of up to `num_tokens` can always compute in one step.

    Parameters
    ----------
    groups : list of Group
    available : list of int
        Blocks of each group, all for this sequence.
    block_size : int
    num_tokens : int
        At most `longest_sequence`.
    """
    most = num_tokens
    for group, blocks in zip(groups, available, strict=True):
        if not group.is_cross and ceil_div(num_tokens, block_size) > blocks:
            most = min(most, group.kept.most_tokens(blocks, block_size))
    return most


def divide_memory(groups: Listed[Group], block_size: int, memory: int, max_tokens: int | None) -> list[int]:
    """Return the blocks of each group, null blocks counted, that a memory of `memory` bytes holds.

    The first sequence has room for steps of `PROMPT_TOKENS` tokens; what is left is divided in proportion to the blocks
    that a further sequence needs at once. If not even the first fits, it is taken as short as necessary.

    Parameters
    ----------
    groups : list of Group
    block_size, memory : int
    max_tokens : int or None
        The longest sequence, if it is known; sequences of up to `TYPICAL_TOKENS` tokens are counted.

    Raises
    ------
    NotEnoughMemory
        Fewer than two blocks of every group fit.
    """
    bytes_of = [group.bytes_per_block(block_size) for group in groups]
    blocks_within(memory, sum(bytes_of))
    left = memory - sum(bytes_of)

    def demand(num_tokens: int, step_tokens: int) -> list[int]:
        return [blocks_at_once(group, num_tokens, block_size, step_tokens) for group in groups]

    def price(blocks: Listed[int]) -> int:
        return sum(count * size for count, size in zip(blocks, bytes_of, strict=True))

    if price(demand(1, 1)) > left:
        raise NotEnoughMemory(
            f"memory is {memory} bytes; the null blocks and one sequence with its encoder tokens take "
            f"{memory - left + price(demand(1, 1))}: give more memory, or make max_tokens of the CrossSpec smaller"
        )
    # Up to `fits` tokens fit, and `too_many` do not or are not wanted.
    fits, too_many = 1, min(TYPICAL_TOKENS, max_tokens or TYPICAL_TOKENS) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if price(demand(middle, PROMPT_TOKENS)) <= left:
            fits = middle
        else:
            too_many = middle
    first, further = demand(fits, PROMPT_TOKENS), demand(fits, 1)
    left -= price(first)
    return [1 + one + left * each // price(further) for one, each in zip(first, further, strict=True)]
