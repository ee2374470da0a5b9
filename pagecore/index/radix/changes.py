"""Changes of a prefix tree, as its journal reports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Change(NamedTuple):
    """Blocks that one component of a tree got or lost.

    Attributes
    ----------
    is_stored : bool
        The component got the blocks; False: it lost them.
    component : int
        Index into `RadixTree.components`.
    hashes : list of int
        Content hash of each block, 64 bits, see `chain_hashes`. A state has the hash of the block at whose end it is.
    first : int
        Index of the first block in its prefix. Only stored blocks have this and the following attributes.
    parent : int or None
        Hash of the block before the first; None for the first block of a prefix.
    tokens : list of int
        Tokens of all blocks.
    namespace : str, bytes or None
        The namespace if it is a string, otherwise an encoding of it; None for the default namespace.
    spans : list of (int, int, int, bytes or int)
        Block (counted from the first of the change), start and end relative to the block, and digest of each span.
    """

    is_stored: bool
    component: int
    hashes: list[int]
    first: int = 0
    parent: int | None = None
    tokens: Sequence[int] = ()
    namespace: str | bytes | None = None
    spans: Sequence[tuple[int, int, int, bytes | int]] = ()
