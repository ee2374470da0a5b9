"""Refusals that Python itself expects under one name and pagecore under another."""

from __future__ import annotations

from pagecore.errors import ShapeError, UnsupportedOption

__all__ = ["ExportRefused", "IndexOutOfRange", "brief"]


def brief(value: object) -> str:
    """Return a repr for a message: at most 80 characters, and the type alone if `value` has no repr."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


class IndexOutOfRange(ShapeError, IndexError):
    """An index lies outside its axis; as an IndexError it also ends an iteration."""


class ExportRefused(UnsupportedOption, BufferError):
    """A tensor cannot be exported as its consumer asks; DLPack and the buffer protocol expect a BufferError."""
