"""Refusals that Python itself expects under one name and pagecore under another."""

from __future__ import annotations

from pagecore.errors import ShapeError, UnsupportedOption

__all__ = ["ExportRefused", "IndexOutOfRange"]


class IndexOutOfRange(ShapeError, IndexError):
    """An index lies outside its axis; as an IndexError it also ends an iteration."""


class ExportRefused(UnsupportedOption, BufferError):
    """A tensor cannot be exported as its consumer asks; DLPack and the buffer protocol expect a BufferError."""
