"""Twin of gather_blocks, scatter_blocks and transfer_blocks, one token at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """Cast through float32, as the kernels do; float32 represents every float16 and bfloat16."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32).astype(dtype)


def places(
    block_size: int, table: Array, lens: Sequence[int], rows: Sequence[int] | None = None
) -> Iterator[tuple[int, int, int]]:
    """Yield (packed position, block, offset in the block) of every token."""
    position = 0
    for i, length in enumerate(lens):
        row = table[i if rows is None else rows[i]]
        for token in range(length):
            yield position, int(row[token // block_size]), token % block_size
            position += 1


def gather(
    cache: Array,
    out: Array,
    table: Array,
    lens: Sequence[int],
    rows: Sequence[int] | None = None,
    null_block: bool = True,
) -> None:
    for position, block, offset in places(cache.shape[1], table, lens, rows):
        out[position] = 0 if null_block and block == 0 else cast(cache[block, offset], out.dtype)


def scatter(
    values: Array,
    cache: Array,
    table: Array,
    lens: Sequence[int],
    rows: Sequence[int] | None = None,
    null_block: bool = True,
) -> None:
    for position, block, offset in places(cache.shape[1], table, lens, rows):
        if not null_block or block != 0:
            cache[block, offset] = cast(values[position], cache.dtype)


def transfer(source: Array, target: Array, pairs: Iterable[tuple[int, int]]) -> None:
    for from_block, to_block in pairs:
        target[to_block] = cast(source[from_block], target.dtype)
