"""Random batches with trees of new tokens, for the tests of the host and of CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ops.cases import Case, Shape, make_case
from tests.reference.trees import bits_of, random_parents, tree_view, words_of


def tree_case(shape: Shape, *, seed: int = 0, words: int | None = None, branching: float = 0.5, **options: Any) -> Case:
    """Return a batch whose new tokens are random trees, with NaN in slots that no token attends to."""
    assert shape.query_lens is not None
    rng = np.random.default_rng(seed)
    rows = max(1, -(-max(shape.query_lens, default=1) // 64)) if words is None else words
    trees = [random_parents(rng, count, branching=branching) for count in shape.query_lens]
    bits = np.concatenate([words_of(bits_of(tree), rows) for tree in trees])
    bits = np.concatenate([bits, np.zeros((shape.padding, rows), np.uint64)])
    case = make_case(shape, seed=seed)
    case.options |= {"tree_mask": bits[:, 0].copy() if rows == 1 else bits, **options}
    poison(case, bits, shape)
    return case


def poison(case: Case, bits: np.ndarray[Any, Any], shape: Shape) -> None:
    """Write NaN to every slot of a sequence that none of its new tokens attends to."""
    first = 0
    rows = case.options.get("rows", range(len(shape.seq_lens)))
    assert shape.query_lens is not None
    for row, seq_len, count in zip(rows, shape.seq_lens, shape.query_lens, strict=True):
        attended, _, _ = tree_view(bits[first : first + count], seq_len, **case.options)
        for token in np.flatnonzero(~attended.any(axis=0)) if count else ():
            block, offset = case.block_table[row, token // shape.block_size], token % shape.block_size
            for cache in (case.key_cache, case.value_cache):
                cache[block, offset] = np.nan
        first += count
