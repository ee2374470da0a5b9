"""Selections of keys for the sequences of a batch, padded to the arrays of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagecore.arrays import as_tensor

# Options of paged_attention with one entry for each sequence, and the number that pads them.
SELECTIONS = {"blocks": -1, "block_counts": 0, "indices": -1, "index_counts": 0}


def padded_selection(options: dict[str, Any], num_sequences: int, padded: int) -> dict[str, Any]:
    """Return the options of attention with `padded` lists instead of the `num_sequences` of the step."""
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
        lists = np.asarray(array) if isinstance(array, list | tuple) else as_tensor(array).numpy()
    except ValueError:  # lists of unequal lengths
        return array
    if lists.ndim == 0 or lists.shape[0] != count or lists.dtype.kind not in "iu":
        return array
    filled = np.full((padded, *lists.shape[1:]), filler, np.int64)
    filled[:count] = lists
    return filled
