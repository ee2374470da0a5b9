"""Work on copies of its arrays in turns, as a model works on its layers, so that calls read memory and not a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np

from bench.harness.arrays import bits, huge_empty
from bench.harness.machine import available_memory, last_level_cache
from bench.harness.runner import Bench, Work

# Copies exceed the last-level cache this many times, or take this share of the available memory if that is less.
CACHES, MEMORY_SHARE = 2, 4


def in_turns(bench: Bench, arrays: Sequence[np.ndarray], work: Callable[[list[np.ndarray]], Work]) -> Work:
    """Return work that is done on `arrays` and on copies of them in turns.

    `work(arrays)` returns the work on some of them. There are no copies if the arrays exceed the last-level cache
    twice, and in a smoke run.
    """
    nbytes = sum(array.nbytes for array in arrays)
    most = max(1, available_memory() // MEMORY_SHARE // nbytes)
    count = 1 if bench.kind == "smoke" else min(most, -(-CACHES * last_level_cache() // nbytes))
    works = [work(list(arrays)), *(work([copy_of(array) for array in arrays]) for _ in range(1, count))]
    turns = cycle(works)

    def work_on_next() -> object:
        return next(turns)()

    return work_on_next


def copy_of(array: np.ndarray) -> np.ndarray:
    """Return a copy in huge pages whose axes have the order in memory of those of `array`."""
    axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    memory = huge_empty(tuple(array.shape[axis] for axis in axes), str(array.dtype))
    bits(memory)[...] = bits(array.transpose(axes))
    return memory.transpose(np.argsort(axes))
