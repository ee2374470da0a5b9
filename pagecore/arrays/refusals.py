"""Errors that derive from an error of pagecore and from the one that a Python protocol expects."""

from __future__ import annotations

from pagecore.errors import ShapeError, UnsupportedOption

__all__ = ["ExportRefused", "IndexOutOfRange"]


class IndexOutOfRange(ShapeError, IndexError):
    """An index is outside its axis; as an IndexError it also ends an iteration."""


class ExportRefused(UnsupportedOption, BufferError):
    """A tensor cannot be exported as its consumer requests; DLPack and the buffer protocol expect a BufferError."""
