"""The exceptions of pagecore.

Every one derives from `PagecoreError` and from the built-in exception that a caller would expect. A message names the
offending value, the limit it broke and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "CompileError",
    "DeviceError",
    "DoubleFree",
    "InvalidBlock",
    "InvalidSequence",
    "NotEnoughMemory",
    "OutOfBlocks",
    "OutOfRows",
    "PagecoreError",
    "ShapeError",
    "UnsupportedDtype",
    "UnsupportedOption",
]


class PagecoreError(Exception):
    """Base of every exception that pagecore raises on purpose."""


class OutOfBlocks(PagecoreError, MemoryError):
    """Fewer blocks are available than an operation needs; nothing was taken.

    Attributes
    ----------
    requested, available : int or tuple of int
        Blocks that the operation needs and blocks that could be had; a tuple holds one entry for each group.
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
    """Every row of a table is taken; nothing was changed."""


class NotEnoughMemory(PagecoreError, MemoryError):
    """The host, a device or a memory budget has not as much as is needed; nothing was taken."""


class InvalidBlock(PagecoreError, IndexError):
    """A block or slot id is outside its pool, or names the null block where a real one is needed."""


class DoubleFree(PagecoreError, ValueError):
    """A block is freed, shared or retired that nobody holds."""


class InvalidSequence(PagecoreError, LookupError):
    """A sequence or row is unknown, removed, foreign, duplicated, or in the wrong state for the call."""


class ShapeError(PagecoreError, ValueError):
    """A shape, stride, length or count does not fit."""


class UnsupportedDtype(PagecoreError, TypeError):
    """A dtype that the operation does not serve."""


class UnsupportedOption(PagecoreError, ValueError):
    """An option that this version or backend does not serve; it is refused by name, never ignored."""


class DeviceError(PagecoreError, RuntimeError):
    """A tensor is on the wrong device, or a device cannot be used."""


class CompileError(PagecoreError, RuntimeError):
    """A source that the compiler refuses: a fault of pagecore's, or of the compiler; the message ends with its log."""
