"""Keys that the queries of a layer see, where the layer's spec limits them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage.checks import ceil_div, require_int
from pagecore.storage.specs.spec import Spec, window_of


@dataclass(frozen=True, slots=True)
class AttendedKeys:
    """Limits of the keys that a query sees; without any, it sees all keys up to its own.

    Attributes
    ----------
    window : int or None
        Number of keys that a query sees, including its own.
    chunk : int or None
        The query at position p sees key j only if ``j // chunk == p // chunk``. There is no window then.
    lookahead : int
        Keys before the first seen one that are kept in addition; 0 without limits.
    sink_tokens : int
        First keys that every query sees in addition to its window.
    """

    window: int | None = None
    chunk: int | None = None
    lookahead: int = 0
    sink_tokens: int = 0

    @property
    def is_limited(self) -> bool:
        """True if keys can be released before the sequence ends."""
        return self.window is not None or self.chunk is not None

    def first_kept(self, length: int) -> int:
        """Return the first position, sinks apart, whose key a sequence of `length` tokens keeps."""
        first = max(0, length - self.lookahead - ((self.window or 1) - 1))
        return first // self.chunk * self.chunk if self.chunk is not None else first

    def most_blocks(self, step_tokens: int, block_size: int) -> int:
        """Return the most blocks whose keys are held at once while `step_tokens` tokens are computed."""
        window = ceil_div(self._unused(block_size) + self._span + step_tokens, block_size)
        return window + ceil_div(self.sink_tokens, block_size)

    def most_tokens(self, blocks: int, block_size: int) -> int:
        """Return the most tokens that can always be computed at once in `blocks` blocks; below 1 for too few."""
        blocks -= ceil_div(self.sink_tokens, block_size)
        return blocks * block_size - self._unused(block_size) - self._span

    @property
    def _span(self) -> int:
        """Keys that are held before a step, at most."""
        reach = self.window if self.chunk is None else self.chunk
        assert reach is not None
        return reach - 1 + self.lookahead

    def _unused(self, block_size: int) -> int:
        """Return the most slots of the first block that precede the held keys: chunks begin at some places only."""
        return block_size - (1 if self.chunk is None else math.gcd(self.chunk, block_size))


def attended_keys(spec: Spec) -> AttendedKeys:
    """Return the limits of a spec.

    Raises
    ------
    ShapeError
        A size below 1, or a lookahead longer than the window or chunk.
    UnsupportedOption
        Both a window and a chunk, or sink tokens without a window.
    """
    window, chunk = window_of(spec), chunk_of(spec)
    lookahead = lookahead_of(spec)
    if window is not None and chunk is not None:
        raise UnsupportedOption(
            f"a {type(spec).__name__} has window {window} and chunk {chunk}; a layer has one of the two: leave one out"
        )
    reach = window if chunk is None else chunk
    if reach is not None and lookahead > reach:
        raise ShapeError(
            f"lookahead of a {type(spec).__name__} is {lookahead}; it must be at most {reach}, its window or chunk"
        )
    sinks = sink_tokens_of(spec)
    if sinks and window is None:
        raise UnsupportedOption(
            f"a {type(spec).__name__} has {sinks} sink tokens and no window; sink tokens belong to a window: "
            "set window, or leave sink_tokens out"
        )
    return AttendedKeys(window, chunk, lookahead if window is not None or chunk is not None else 0, sinks)


def chunk_of(spec: Spec) -> int | None:
    """Return the chunk of a spec; None if it has no attribute `chunk`, or None there."""
    chunk = getattr(spec, "chunk", None)
    return None if chunk is None else require_int(f"chunk of a {type(spec).__name__}", chunk)


def sink_tokens_of(spec: Spec) -> int:
    """Return the sink tokens of a spec; 0 if it has no attribute `sink_tokens`."""
    return require_int(f"sink_tokens of a {type(spec).__name__}", getattr(spec, "sink_tokens", 0), min=0)


def lookahead_of(spec: Spec) -> int:
    """Return the lookahead of a spec; 0 if it has no attribute `lookahead`."""
    return require_int(f"lookahead of a {type(spec).__name__}", getattr(spec, "lookahead", 0), min=0)
