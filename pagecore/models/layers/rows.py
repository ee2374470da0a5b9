"""Rows that layers store next to keys and values, or latents: options, and rings of tokens that wait to become rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pagecore.arrays import DType, as_dtype
from pagecore.models.config_files.fields import Fields
from pagecore.models.layers.states.recurrent import INTERVAL
from pagecore.storage import Plane, RowSpec, StateSpec
from pagecore.storage.checks import ceil_div

__all__ = ["LayerRows", "RowOptions", "Rows", "ring"]


@dataclass(frozen=True)
class RowOptions:
    """Dtype and format of the rows, and the block size of the cache; None for the least one that suits all rows."""

    dtype: DType
    format: str | None
    block_size: int | None

    def size_for(self, rates: Sequence[int]) -> int:
        """Return the block size of rows of the given numbers of tokens, 0 for no rows."""
        return self.block_size or math.lcm(BLOCK_SIZE, *(rate for rate in rates if rate))


LayerRows = tuple[RowSpec | StateSpec, ...]
Rows = Callable[[Fields, int, RowOptions], Sequence[LayerRows]]
BLOCK_SIZE = 16


def ring(rows: int, widths: Mapping[str, int], dtype: DType | str, chunk: int) -> StateSpec:
    """Return the last rows of each sequence, of which every rank has a copy; after each chunk no row is needed."""
    planes = tuple(Plane(name, (rows, width), as_dtype(dtype), per="sequence") for name, width in widths.items())
    return StateSpec(planes, chunk=chunk, interval=ceil_div(INTERVAL, chunk) * chunk, split=partial(_copied, planes))


def _copied(planes: tuple[Plane, ...], **_ranks: int) -> tuple[Plane, ...]:
    return planes
