"""Layers that read the keys and values of another layer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Alias"]


@dataclass(frozen=True)
class Alias:
    """A layer that stores nothing of its own and reads the planes of layer `layer` (cross-layer sharing).

    Parameters
    ----------
    layer : int
        Index of an earlier layer with a spec of its own. The cache checks it: ShapeError for a layer that is not
        earlier, UnsupportedOption for one that keeps a state.

    Examples
    --------
    >>> from pagecore import Alias, AttentionSpec, PagedKVCache
    >>> cache = PagedKVCache([AttentionSpec(2, 64), Alias(0)], num_blocks=9)
    >>> cache.key(0).pointer == cache.key(1).pointer
    True
    """

    layer: int
