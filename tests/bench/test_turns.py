"""bench/harness/turns.py: work on copies of arrays in turns."""

import ml_dtypes
import numpy as np
import pytest

from bench.harness import turns
from bench.harness.runner import Bench


@pytest.mark.parametrize(("kind", "nbytes", "count"), [("quick", 2**20, 4), ("full", 2**22, 1), ("smoke", 2**20, 1)])
def test_copies_exceed_the_last_level_cache_twice(monkeypatch, kind, nbytes, count):
    monkeypatch.setattr(turns, "last_level_cache", lambda: 2 * 2**20 - 1)
    given = [np.arange(nbytes // 2, dtype=np.uint8), np.zeros(nbytes // 2, np.uint8)]
    worked = []
    work = turns.in_turns(Bench(kind=kind), given, lambda arrays: lambda: worked.append(arrays))
    for _ in range(2 * count):
        work()
    assert worked[:count] == worked[count:]
    assert len({id(arrays) for arrays in worked}) == count
    assert worked[0] == given
    for arrays in worked:
        assert all(np.array_equal(*pair) for pair in zip(arrays, given, strict=True))


@pytest.mark.parametrize(("available", "count"), [(3 * 1024 + 1, 3), (0, 1)])
def test_copies_leave_most_of_the_memory(monkeypatch, available, count):
    monkeypatch.setattr(turns, "last_level_cache", lambda: 2**40)
    monkeypatch.setattr(turns, "available_memory", lambda: turns.MEMORY_SHARE * available)
    made = []
    turns.in_turns(Bench(), [np.zeros(1024, np.uint8)], made.append)
    assert len(made) == count


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int32])
def test_a_copy_has_the_axes_of_its_array(dtype):
    array = np.arange(24, dtype=np.int32).astype(dtype).reshape(2, 3, 4).transpose(1, 2, 0)
    copy = turns.copy_of(array)
    assert copy.dtype == array.dtype
    assert copy.strides == array.strides
    assert np.array_equal(copy.astype(np.float32), array.astype(np.float32))
    assert not np.shares_memory(copy, array)
