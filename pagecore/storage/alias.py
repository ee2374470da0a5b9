"""Layers that read the keys and values of another layer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Alias"]


@dataclass(frozen=True)
class Alias:
    """A layer that stores nothing of its own and reads the planes of layer `layer` (cross-layer sharing)."""

    layer: int
