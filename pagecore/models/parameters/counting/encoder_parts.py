"""Parameters of encoders of images and sound, and of their projectors."""

from __future__ import annotations

from pagecore.models.parameters.counting.tally import Kind, Split, Tally

__all__ = ["encoder_add", "encoder_linear", "encoder_matrices"]


def encoder_linear(tally: Tally, inputs: int, outputs: int, *, bias: bool = False, copies: int = 1) -> None:
    """Add `copies` matrices of a tower or projector."""
    tally.linear(inputs, outputs, bias=bias, copies=copies, kind=Kind.VISION)


def encoder_add(tally: Tally, count: int) -> None:
    """Add `count` parameters of a tower or projector."""
    tally.add(count, Kind.VISION, Split.COPY)


def encoder_matrices(tally: Tally, count: int) -> None:
    """Add `count` elements of matrices of a tower or projector."""
    tally.add(count, Kind.VISION, Split.TENSOR)
