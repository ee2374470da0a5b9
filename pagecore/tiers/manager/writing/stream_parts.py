"""The parts of streams: prefixes, those that have passed, their owners, and windows of leased blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.manager.hits.origins import PrefixIdentity, PrefixIndex
from pagecore.tiers.manager.port import Flags, Positions, Spans, StagedBlocks
from pagecore.tiers.store import Keys

__all__ = ["Owner", "Passed", "Stream", "StreamedPrefix", "Window"]


@dataclass(frozen=True, slots=True, eq=False)
class StreamedPrefix:
    """The whole blocks of a sequence that are to be stored."""

    tokens: NDArray[np.int32]
    namespace: Hashable
    spans: Spans | None


class Passed:
    """The newest prefixes of which the stores were given everything, by token."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._sizes = block_size, num_blocks
        self._index: PrefixIndex | None = None

    def match(self, tokens: NDArray[np.int32], identity: PrefixIdentity) -> int:
        """Return the tokens at the beginning of `tokens` that are known."""
        return 0 if self._index is None else self._index.match(tokens, identity)

    def add(self, tokens: NDArray[np.int32], identity: PrefixIdentity) -> None:
        """Remember a prefix."""
        if self._index is None:
            self._index = PrefixIndex(*self._sizes)
        self._index.add(tokens, identity)

    def forget(self) -> None:
        """Forget all prefixes: what is computed again is streamed again."""
        self._index = None


@dataclass(slots=True, eq=False)
class Owner:
    """A sequence whose prefix is streamed."""

    limit: int  # tokens of the prefix that the host's tree is to have
    prefix: StreamedPrefix  # the last one that was offered: all of its blocks were given to a stream, or are known
    version: int  # changes when the owner has other tokens in place of some of the prefix
    stream: Stream | None = None

    def num_done(self, prefix: StreamedPrefix) -> int:
        """Return the tokens at the beginning of a prefix that were offered; the owner may have been truncated."""
        before = self.prefix.tokens[: len(prefix.tokens)]
        return len(before) if np.array_equal(before, prefix.tokens[: len(before)]) else 0


@dataclass(slots=True, eq=False)
class Stream:
    """The blocks of a prefix from `next` to `end`, and the windows that were staged before them."""

    prefix: StreamedPrefix
    keys: Callable[[int, Positions], Keys]
    next: int  # the first block that was not staged
    end: int
    last: list[int]  # of each lane: the position of the entry that the next one follows, below 0 for none
    windows: list[Window] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """True if nothing is staged, or will be."""
        return self.next >= self.end and not self.windows


@dataclass(slots=True, eq=False)
class Window:
    """A part of a stream; the object is the reader of its writes."""

    ended: Callable[[Window], None]
    stream: Stream
    prefix: StreamedPrefix
    keys: Callable[[int, Positions], Keys]
    blocks: StagedBlocks
    begin: int
    end: int
    is_submitted: bool = False
    num_failed: int = 0
    num_saved: int = 0

    def saved(self, ok: Flags) -> None:
        """Take the answer of a store."""
        self.num_saved += bool(ok.all())
        self.num_failed += not ok.all()

    def release(self) -> None:
        """Give the host blocks back: the stores have read them."""
        self.blocks.release()
        self.ended(self)
