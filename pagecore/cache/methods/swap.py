"""The methods of a paged cache that move sequences to and from swap spaces."""

from __future__ import annotations

from collections.abc import Iterable

from pagecore.cache.parts import PartsOwner
from pagecore.cache.sequences._sequences import Sequence
from pagecore.cache.swap.moves import move_in, move_out
from pagecore.cache.swap.space import SwapSpace


class SwapMethods(PartsOwner):
    """`PagedKVCache.swap_out`, `swap_in` and their variants that return a bool."""

    def swap_out(self, sequences: Sequence | Iterable[Sequence], space: SwapSpace) -> None:
        """Move the computed blocks of sequences into `space`, and release their own blocks and rows; all or nothing.

        A swapped sequence keeps its id, its tokens and its number of computed tokens. It accepts more tokens and can be
        removed; every other operation requires a swap_in first. Blocks that several of `sequences` share are stored
        once, and shared again by those that are swapped in together. Blocks that other sequences share too are copied.
        An encoder output moves with the last of its sequences, and comes back with the first.

        Parameters
        ----------
        sequences : Sequence or iterable of Sequence
        space : SwapSpace
            A space of this cache.

        Raises
        ------
        OutOfBlocks
            The space has too few blocks; nothing was changed.
        InvalidSequence
            A sequence that is not of this cache, listed twice, in flight or swapped out; a space of another cache.
        """
        error = move_out(self._parts, sequences, space)
        if error is not None:
            raise error

    def try_swap_out(self, sequences: Sequence | Iterable[Sequence], space: SwapSpace) -> bool:
        """Call `swap_out`; return False instead of raising `OutOfBlocks`."""
        return move_out(self._parts, sequences, space) is None

    def swap_in(self, sequences: Sequence | Iterable[Sequence]) -> None:
        """Move sequences back into rows and blocks of the cache, each from its own space; all or nothing.

        Raises
        ------
        OutOfBlocks, OutOfRows
            Blocks or rows are short; nothing was changed.
        InvalidSequence
            A sequence that is not of this cache, listed twice, or not swapped out.
        """
        error = move_in(self._parts, sequences)
        if error is not None:
            raise error

    def try_swap_in(self, sequences: Sequence | Iterable[Sequence]) -> bool:
        """Call `swap_in`; return False instead of raising `OutOfBlocks` or `OutOfRows`."""
        return move_in(self._parts, sequences) is None
