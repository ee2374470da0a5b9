"""Requests of recorded traffic, and the units of their numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import require_int, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BAILIAN_FIELD",
    "HASH_BLOCK",
    "MILLISECONDS",
    "REQUEST_TOKENS_MAX",
    "SkippedRows",
    "TraceRequest",
    "TraceUnits",
]

HASH_BLOCK = 512
# Tokens of a hash id in a Qwen-Bailian trace, and a field that its lines have.
BAILIAN_BLOCK, BAILIAN_FIELD = 16, "parent_chat_id"
HASH_BLOCK_MAX = 1 << 16
# Longer than the context of any model, and small enough to bound the memory of one request.
REQUEST_TOKENS_MAX = 1 << 24
MILLISECONDS = {"ms": 1, "s": 1000}


@dataclass(frozen=True, slots=True)
class TraceUnits:
    """Units of the numbers in a trace.

    Parameters
    ----------
    hash_block : int, optional
        Tokens that one hash id names, 1 to 65,536; by default 512, as in a Mooncake trace, and 16 in a line of a
        Qwen-Bailian trace, which has a `parent_chat_id`.
    time_unit : {"ms", "s"}, optional
        Unit of timestamps; by default milliseconds in JSON, and seconds in CSV and in a line of a Qwen-Bailian trace.

    Raises
    ------
    ShapeError
        `hash_block` is out of range.
    UnsupportedOption
        `time_unit` is neither "ms" nor "s".
    """

    hash_block: int | None = None
    time_unit: str | None = None

    def __post_init__(self) -> None:
        if self.hash_block is not None:
            object.__setattr__(self, "hash_block", require_int("hash_block", self.hash_block, 1, HASH_BLOCK_MAX))
        unit = self.time_unit
        if unit is not None and (not isinstance(unit, str) or unit not in MILLISECONDS):
            raise UnsupportedOption(f"time_unit is {shown(unit)}; expected 'ms' or 's'")

    def of_line(self, fields: Mapping[str, Any]) -> tuple[int, TraceUnits]:
        """Return the tokens of a hash id, and the units of the time, of a line with these fields."""
        if BAILIAN_FIELD not in fields:
            return self.hash_block or HASH_BLOCK, self
        return self.hash_block or BAILIAN_BLOCK, self if self.time_unit else TraceUnits(self.hash_block, "s")

    def milliseconds(self, timestamp: Any, default: str = "ms") -> float | None:
        """Return a timestamp in milliseconds; None if it is not a finite number, 0 or more."""
        if isinstance(timestamp, bool) or not isinstance(timestamp, int | float | np.integer | np.floating):
            return None
        number = float(timestamp) if -1 < timestamp < 2**63 else math.inf
        # NaN and infinity fail the comparison too.
        return number * MILLISECONDS[self.time_unit or default] if 0 <= number < 2**63 else None

    def time_name(self, default: str = "ms") -> str:
        """Return the name of the unit of timestamps, for messages."""
        return "milliseconds" if (self.time_unit or default) == "ms" else "seconds"


@dataclass(slots=True)
class SkippedRows:
    """Number of the rows of a CSV trace that a reader has skipped because their prompts have no tokens."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; `number` counts requests from 0, `line` counts lines or records from 1.

    `token_ids` are the prompt, if the trace has it. If `hash_ids` is None, too, the trace has lengths only, and nothing
    is known of the content of the prompt. Requests of different namespaces share nothing. `chat` is the id of the
    request in its conversation, or that of the conversation, and `earlier_chat` that of the request before it.
    """

    number: int
    line: int
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] | None
    hash_block: int = HASH_BLOCK
    token_ids: NDArray[np.int32] | None = field(default=None, repr=False, compare=False)
    namespace: str | None = None
    chat: int | str | None = None
    earlier_chat: int | str | None = None

    def prompt(self) -> NDArray[np.int32]:
        """Return token ids, int32 `[input_length]`, such that equal prefixes have equal ids.

        The token at `offset` of a hash id has the id `hash id * hash_block + offset`. All tokens of a prompt of unknown
        content have the number of the request as their id, so that no two of these prompts begin alike.
        """
        if self.token_ids is not None:
            return self.token_ids
        if self.hash_ids is None:
            return np.full(self.input_length, self.number, np.int32)
        offsets: NDArray[np.int32] = np.arange(self.hash_block, dtype=np.int32)
        starts = np.array(self.hash_ids, dtype=np.int32) * self.hash_block
        return (starts[:, None] + offsets).reshape(-1)[: self.input_length]
