"""Scratch rows of a batch, for work before the kernels that read the arrays of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pagecore.arrays import Tensor, empty


class RowScratch:
    """Arrays ``[rows, heads, dim]``, each lent to one call at a time.

    A warm step allocates none. A graph that was captured with an array reads and writes it in every replay, so that on
    a device arrays live as long as the batch. Safe for several threads.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], list[Tensor]] = {}
        self._outgrown: list[Tensor] = []

    @contextmanager
    def lent(self, example: Tensor, stream: int | None) -> Iterator[Tensor]:
        """Lend an array of the shape, dtype and device of an example, with any numbers.

        The work that uses it is submitted to `stream`, and on the host is done, when the context ends.
        """
        rows, *inner = example.shape
        free = self._free.setdefault((example.device, example.dtype, *inner), [])
        held = free.pop() if free else None
        if held is None or held.shape[0] < rows:
            if held is not None and stream is not None:
                self._outgrown.append(held)
            # Powers of two, so that the arrays of growing steps take at most twice the largest.
            capacity = 1 << max(rows - 1, 0).bit_length()
            held = empty((capacity, *inner), example.dtype, example.device, stream=stream)
        try:
            yield held[:rows]
        finally:
            free.append(held)
