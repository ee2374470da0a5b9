"""Scratch rows of a batch, for work before the kernels that read the arrays of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pagecore.arrays import Tensor, cuda, empty, like
from pagecore.arrays.cuda.devices import device_index
from pagecore.arrays.tensors.results import new_result
from pagecore.errors import DeviceError
from pagecore.storage.checks import ceil_div


class RowScratch:
    """Arrays ``[capacity, heads, dim]``, each lent to one call at a time.

    The capacity is the number of tokens of the batch, or the next multiple of it for a call with more rows. A warm step
    allocates no arrays. A captured graph uses its arrays in every replay, so arrays live as long as the batch. Safe for
    several threads.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], list[Tensor]] = {}

    @contextmanager
    def lent(self, rows: Tensor, name: str, max_tokens: int, example: object, stream: int | None) -> Iterator[Tensor]:
        """Lend an array of the shape, dtype and device of `rows`, with undefined contents.

        The work that uses it is submitted to `stream`, and on the host is done, when the context ends.

        Parameters
        ----------
        rows : Tensor, [tokens, heads, dim]
        name : str
            Name of `rows` in messages.
        max_tokens : int
            Rows that the largest step of the batch has.
        example : object
            The caller's array, whose framework allocates the memory on a device.
        stream : int or None
            None on the host.

        Raises
        ------
        DeviceError
            The array has not been allocated yet, and `stream` is being captured.
        NotEnoughMemory
            The host or the device cannot allocate the array.
        """
        tokens, *inner = rows.shape
        step = max(max_tokens, 1)
        capacity = step * max(1, ceil_div(tokens, step))
        free = self._free.setdefault((rows.device, rows.dtype, type(example), capacity, *inner), [])
        try:
            held = free.pop()
        except IndexError:
            held = new_rows((capacity, *inner), rows, name, example, stream)
        try:
            yield held[:tokens]
        finally:
            free.append(held)


def new_rows(shape: tuple[int, ...], rows: Tensor, name: str, example: object, stream: int | None) -> Tensor:
    """Return a new array of the dtype and device of `rows`."""
    device = device_index(rows.device)
    if device is None or stream is None:
        return empty(shape, rows.dtype, rows.device)
    if cuda.runtime().is_capturing(stream):
        raise DeviceError(
            f"stream {stream:#x} is being captured, and the batch has no array for {shape[0]} rotated rows of {name} "
            "yet; run write and attend once with this batch and arrays of the same framework and dtype before the "
            "capture"
        )
    return new_result(shape, rows.dtype, example, device, stream)


def in_framework(rows: Tensor, example: Any) -> Any:
    """Return lent rows as an array of the framework of `example`, which allocated them on a device."""
    owner: Any = getattr(rows.allocation, "producer", rows.allocation)
    if type(owner) is type(example):
        return owner[: rows.shape[0]]
    return like(rows, example)
