"""The exceptions of pagecore.

Each derives from `PagecoreError` and from the built-in exception that fits it. A message names the invalid value, the
limit, and the remedy. An operation that raises has changed nothing.
"""

from __future__ import annotations

__all__ = [
    "CompileError",
    "DeviceError",
    "DoubleFree",
    "InvalidBlock",
    "InvalidSequence",
    "NotEnoughMemory",
    "NotRegistered",
    "OutOfBlocks",
    "OutOfRows",
    "PagecoreError",
    "PeerError",
    "ShapeError",
    "StoreError",
    "UnsupportedDtype",
    "UnsupportedOption",
]


class PagecoreError(Exception):
    """Base class of the exceptions of pagecore; raised itself only for a defect of pagecore."""


class OutOfBlocks(PagecoreError, MemoryError):
    """Fewer blocks are available than the operation needs; nothing was allocated.

    Attributes
    ----------
    requested, available : int or tuple of int
        Blocks that the operation needs and blocks that were available, with one entry for each group in a tuple.
    """

    def __init__(
        self,
        message: str = "out of blocks",
        requested: int | tuple[int, ...] = 0,
        available: int | tuple[int, ...] = 0,
    ) -> None:
        super().__init__(message)
        self.requested = requested
        self.available = available

    def __reduce__(self) -> tuple[type[OutOfBlocks], tuple[object, ...]]:
        return type(self), (str(self), self.requested, self.available)


class OutOfRows(PagecoreError, MemoryError):
    """Every row of the table is in use; nothing was allocated."""


class NotEnoughMemory(PagecoreError, MemoryError):
    """Not enough host memory, device memory or budget for the request; nothing was allocated."""


class InvalidBlock(PagecoreError, IndexError):
    """A block or slot id is outside its pool, or is the null block where an allocated block is required."""


class DoubleFree(PagecoreError, ValueError):
    """A block that is not allocated was freed, shared or retired."""


class InvalidSequence(PagecoreError, LookupError):
    """A sequence or row is unknown, removed, foreign, duplicated, or in the wrong state for the call."""


class NotRegistered(PagecoreError, LookupError):
    """Nothing is registered under the device type and id."""


class PeerError(PagecoreError, ConnectionError):
    """Another process closed its connection, did not answer in time, or sent unexpected data."""


class ShapeError(PagecoreError, ValueError):
    """A shape, stride, length or count is invalid or does not match another argument."""


class UnsupportedDtype(PagecoreError, TypeError):
    """The operation does not support the dtype."""


class UnsupportedOption(PagecoreError, ValueError):
    """This version or backend does not support the option; options are never ignored silently."""


class DeviceError(PagecoreError, RuntimeError):
    """A tensor is on the wrong device, or the device cannot be used."""


class StoreError(PagecoreError, OSError):
    """A store of blocks cannot be opened or used: its URL, folder, server or contents are not as expected."""


class CompileError(PagecoreError, RuntimeError):
    """The compiler rejects a CUDA source: a defect of pagecore or of the compiler. The message ends with its log."""


def shown(value: object) -> str:
    """Return a repr for a message, on one line of at most 80 characters; only the type if `repr(value)` raises."""
    try:
        text = " ".join(line.strip() for line in repr(value).splitlines())
    except Exception:  # an int of thousands of digits, or an object whose __repr__ fails
        text = f"<{type(value).__name__} without a short repr>"
    return text if len(text) <= 80 else text[:77] + "..."
