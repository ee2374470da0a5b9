"""Checked access to the fields of a `quantization_config`, for the readers of all methods."""

from __future__ import annotations

from typing import NoReturn

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.weights.formats import WEIGHT_FORMATS, WeightFormat, grouped

__all__ = ["group_size", "integers", "refuse"]


def refuse(fields: Fields, name: str) -> NoReturn:
    """Raise UnsupportedOption for a field whose bytes are unknown."""
    raise UnsupportedOption(
        f"{fields.source}: {fields.describe(name)}, whose bytes are unknown; pass weights= one of "
        f"{', '.join(WEIGHT_FORMATS)}, or bytes"
    )


def integers(fields: Fields, name: str, group: int, has_zeros: bool) -> WeightFormat:
    """Return integers with a scale of 16 bits for each group, and a zero of their own bits if they have zeros."""
    bits = fields.given(name)
    if type(bits) is not int or bits not in (2, 3, 4, 8):
        return refuse(fields, name)
    return grouped(f"int{bits}", bits, group, 16 + (bits if has_zeros else 0))


def group_size(given: object) -> int:
    """Return the elements that share a scale; 0 for a scale of each channel."""
    return given if isinstance(given, int) and given > 0 else 0
