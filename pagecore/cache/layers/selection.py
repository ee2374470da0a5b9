"""Selections of keys for the sequences of a batch, padded to the arrays of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import as_tensor

# Options of paged_attention with one entry for each sequence, and the number that pads them.
SELECTIONS = {"blocks": -1, "block_counts": 0, "indices": -1, "index_counts": 0}


def padded_selection(options: dict[str, Any], num_sequences: int, padded: int) -> dict[str, Any]:
    """Return the options of attention with `padded` lists instead of the `num_sequences` of the step; on the host."""
    given = {name: options[name] for name in SELECTIONS if options.get(name) is not None}
    if not given or num_sequences == padded:
        return options
    return {
        **options,
        **{name: _padded(array, num_sequences, padded, SELECTIONS[name]) for name, array in given.items()},
    }


def _padded(array: Any, count: int, padded: int, filler: int) -> Any:
    """Return a copy with empty lists for padding; an array that has another number of lists is left to its checks."""
    try:
        lists = np.asarray(array) if isinstance(array, list | tuple) else _host_lists(array)
    except ValueError:  # lists of unequal lengths
        return array
    if lists is None:
        return array
    if lists.ndim == 0 or lists.shape[0] != count or lists.dtype.kind not in "iu":
        return array
    filled = np.full((padded, *lists.shape[1:]), filler, np.int64)
    filled[:count] = lists
    return filled


def _host_lists(array: Any) -> NDArray[Any] | None:
    tensor = as_tensor(array)
    return tensor.numpy() if tensor.device == "cpu" else None


def num_listed(options: dict[str, Any], num_sequences: int, padded: int) -> int:
    """Return the number of sequences to attend with: those of the step if their lists are on a device, else `padded`.

    Lists on a device are not padded, because that would copy them.
    """
    for name in SELECTIONS:
        array = options.get(name)
        if array is None or isinstance(array, list | tuple):
            continue
        tensor = as_tensor(array)
        if tensor.device != "cpu" and tensor.ndim > 0 and tensor.shape[0] == num_sequences:
            return num_sequences
    return padded
