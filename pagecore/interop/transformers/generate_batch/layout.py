"""Rows, lengths and block tables of one batch of `generate_batch`, from the indices that transformers prepares.

transformers passes, for each group of layers that share blocks, the physical index of every cached token that a request
reads and of every new token, one request after the other. Indices of one block are consecutive. The blocks of a
request with a sliding window are a ring of `window` slots; the token at position p is in slot ``p % window``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]

GATHER_BLOCK = 64


@dataclass(frozen=True)
class GroupLayout:
    """Blocks of a group of layers: token `offset` of block b has the index ``b * stride + offset``.

    `window` is the number of slots of a ring, or None for layers that attend to all tokens.
    """

    block_size: int
    stride: int
    window: int | None

    def slots(self, indices: Indices) -> Indices:
        """Return ``block * block_size + offset`` of physical indices."""
        blocks, offsets = np.divmod(indices, self.stride)
        slots: Indices = blocks * self.block_size + offsets
        return slots


@dataclass(frozen=True)
class Part:
    """Requests of a batch whose keys are read with one call, as arguments of `pagecore.paged_attention`.

    `tokens` are their rows of the query, None for all rows.
    """

    tokens: Indices | None
    cu_query_lens: Indices
    seq_lens: Indices
    block_table: NDArray[np.int32]
    window: int | None = None


@dataclass(frozen=True)
class Gathered:
    """Requests whose new tokens overwrite keys of the ring that others of them attend to.

    Their keys are copied first: cached token i from slot ``old_slots[i]`` of the ring to slot ``old_targets[i]`` of
    `num_blocks` blocks of GATHER_BLOCK tokens, and row ``part.tokens[i]`` of the new keys to ``new_targets[i]``.
    """

    part: Part
    num_blocks: int
    old_slots: Indices
    old_targets: Indices
    new_targets: Indices


@dataclass(frozen=True)
class GroupBatch:
    """One batch in the blocks of a group of layers.

    `slots` has the slot of each new token, -1 for tokens that are not stored. New tokens are written before the keys
    of `in_place` are read, and after those of `gathered` are.
    """

    slots: Indices
    in_place: Part | None
    gathered: Gathered | None


@dataclass(frozen=True)
class Requests:
    """New tokens of a batch: request i has the rows ``starts[i]`` to ``starts[i + 1] - 1``, after `past[i]` tokens."""

    starts: Indices
    past: Indices

    @property
    def counts(self) -> Indices:
        """Number of new tokens of each request; 0 for padding."""
        counts: Indices = np.diff(self.starts)
        return counts


def lay_out(layout: GroupLayout, requests: Requests, read: Indices, read_starts: Indices, write: Indices) -> GroupBatch:
    """Return a batch in the blocks of one group of layers.

    Parameters
    ----------
    layout : GroupLayout
    requests : Requests
    read : integers, [indices]
        Physical indices of the keys of each request, or empty if no request has cached tokens. Without a window they
        include the new tokens; with one they are the last ``min(past, window - 1)`` cached tokens, oldest first,
        and one placeholder for each new token.
    read_starts : integers, [requests + 1]
        Where the indices of each request begin in `read`.
    write : integers, [tokens]
        Physical index of each new token.
    """
    counts, window = requests.counts, layout.window
    lens = requests.past + counts
    is_live = counts > 0
    stored = layout.slots(write)
    if window is None:
        listed = lens if len(read) else np.zeros_like(lens)
        first = np.zeros_like(lens)
        in_place = is_live
    else:
        listed = np.minimum(requests.past, window - 1)
        first = np.where(requests.past < window, 0, (requests.past + 1) % window)
        in_place = is_live & ((lens <= window) | (counts == 1))
        lens = np.minimum(lens, window)
        # The first tokens of a prompt longer than the window have left it already.
        rows = np.arange(requests.starts[-1]) - np.repeat(requests.starts[:-1], counts)
        stored[: requests.starts[-1]][rows < np.repeat(counts - window, counts)] = -1
    stored[requests.starts[-1] :] = -1
    chosen = np.flatnonzero(in_place)
    part = None
    if len(chosen):
        table = _block_table(layout, requests, chosen, lens, listed, first, read, read_starts, write)
        part = Part(_rows(requests, chosen), _starts(counts[chosen]), lens[chosen], table)
    late = np.flatnonzero(is_live & ~in_place)
    gathered = _gather(layout, requests, late, listed, read, read_starts) if len(late) else None
    return GroupBatch(stored, part, gathered)


def _block_table(
    layout: GroupLayout,
    requests: Requests,
    chosen: Indices,
    lens: Indices,
    listed: Indices,
    first: Indices,
    read: Indices,
    read_starts: Indices,
    write: Indices,
) -> NDArray[np.int32]:
    """Return the blocks of the chosen requests, found by the index of the first token of each block.

    Slot `first` of a request is the first of the `listed` ones in `read`; the slots after those are new tokens.
    """
    longest = int(lens[chosen].max())
    slots = np.arange(0, longest, layout.block_size)[None, :]
    own, begin = listed[chosen, None], first[chosen, None]
    place = slots - begin if layout.window is None else (slots - begin) % layout.window
    has_block = slots < lens[chosen, None]
    is_read = has_block & (place < own)
    is_new = has_block & ~is_read
    found = np.zeros(has_block.shape, np.int64)
    found[is_read] = read[(read_starts[chosen, None] + place)[is_read]]
    found[is_new] = write[(requests.starts[chosen, None] + place - own)[is_new]]
    return (found // layout.stride).astype(np.int32)


def _gather(
    layout: GroupLayout, requests: Requests, late: Indices, listed: Indices, read: Indices, read_starts: Indices
) -> Gathered:
    counts, old = requests.counts[late], listed[late]
    lens = old + counts
    blocks = -(-lens // GATHER_BLOCK)
    first_block = _starts(blocks)
    table = (first_block[:-1, None] + np.arange(blocks.max())[None, :]) * (np.arange(blocks.max()) < blocks[:, None])
    begin = first_block[:-1] * GATHER_BLOCK
    part = Part(_rows(requests, late), _starts(counts), lens, table.astype(np.int32), layout.window)
    old_slots = layout.slots(read[_spread(read_starts[late], old)]) if old.any() else np.zeros(0, np.int64)
    return Gathered(part, int(blocks.sum()), old_slots, _spread(begin, old), _spread(begin + old, counts))


def _rows(requests: Requests, chosen: Indices) -> Indices | None:
    """Return the rows of the chosen requests, None for those of all requests."""
    rows = _spread(requests.starts[chosen], requests.counts[chosen])
    return None if len(rows) == requests.starts[-1] else rows


def _starts(counts: Indices) -> Indices:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _spread(begin: Indices, counts: Indices) -> Indices:
    """Return ``begin[i]``, ``begin[i] + 1`` ... for `counts[i]` numbers of each i."""
    spread: Indices = np.arange(counts.sum()) + np.repeat(begin - _starts(counts)[:-1], counts)
    return spread
