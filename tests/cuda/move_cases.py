"""Shared parts of the tests of block copies: index arrays on host or device, and lists of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.cuda.kit import Kit
from tests.cuda.memory import assert_same_memory
from tests.ops.cases import DTYPES

PLACES = ["host", "int32", "int64"]
CASTS = [(a, b) for a in DTYPES for b in DTYPES if a != b]


def indices(cuda: Kit, values: Any, place: str) -> Any:
    """Return index values as a list on the host, or as a device array with gaps between rows."""
    if place == "host":
        return np.asarray(values).tolist() if len(values) else np.asarray(values)
    array = np.asarray(values, place)
    spaced = np.full((array.shape[0], 2, *array.shape[1:]), -7, place)
    spaced[:, 1] = array
    return cuda.put(spaced[:, 1])


def put_all(cuda: Kit, arrays: Any) -> list[Any]:
    return [cuda.put(array) for array in arrays]


def check_all(cuda: Kit, got: Any, expected: Any) -> None:
    for tensor, array in zip(got, expected, strict=True):
        assert_same_memory(cuda.get(tensor), array)
