"""Random selections of blocks or tokens for attention cases, and their oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ops.cases import Case
from tests.reference import attention as reference
from tests.reference import sparse

Array = NDArray[Any]


def query_lens_of(case: Case) -> list[int]:
    cu = case.options.get("cu_query_lens")
    return [1] * len(case.seq_lens) if cu is None else [int(n) for n in np.diff(cu)]


def random_selection(case: Case, unit: int, *, seed: int = 3, density: float = 0.5) -> tuple[Array, Array]:
    """Return ascending lists ``[B, Hkv, n]``, padded with -1, and their counts; some lists are empty, some whole."""
    rng = np.random.default_rng(seed)
    heads, limits = case.key_cache.shape[2], [-(-int(n) // unit) for n in case.seq_lens]
    lists = np.full((len(limits), heads, max([*limits, 1])), -1, np.int32)
    counts = np.zeros((len(limits), heads), np.int32)
    for i, limit in enumerate(limits):
        for head in range(heads):
            share = (density, density, 0.0, 1.0)[rng.integers(4)] if limit > 1 else 1.0
            chosen = np.flatnonzero(rng.random(limit) < share)
            lists[i, head, : chosen.size] = chosen
            counts[i, head] = chosen.size
    return lists, counts


def poison(case: Case, lists: Array, counts: Array, unit: int) -> None:
    """Write NaN to the keys and values that a head has not selected."""
    size = case.key_cache.shape[1]
    rows = case.options.get("rows", np.arange(len(case.seq_lens)))
    for i, length in enumerate(case.seq_lens):
        for head in range(case.key_cache.shape[2]):
            others = np.ones(int(length), bool)
            for entry in lists[i, head, : counts[i, head]]:
                others[entry * unit : (entry + 1) * unit] = False
            for j in np.flatnonzero(others):
                block = case.block_table[rows[i], j // size]
                if 0 < block < case.key_cache.shape[0]:
                    case.key_cache[block, j % size, head] = np.nan
                    case.value_cache[block, j % size, head] = np.nan


def expect(case: Case, lists: Array, counts: Array, unit: int) -> tuple[Array, Array]:
    """Return output and lse of the oracle: each key head by itself, with a mask of its selected keys."""
    heads, group = case.key_cache.shape[2], case.query.shape[1] // case.key_cache.shape[2]
    masks = sparse.selection_mask(lists, counts, unit, case.seq_lens, query_lens_of(case))
    outs, lses = [], []
    for head in range(heads):
        options = dict(case.options)
        own = np.concatenate([np.zeros(0, bool), *[mask.reshape(-1) for mask in masks[head]]])
        options["mask"] = own & options["mask"] if options.get("mask") is not None else own
        for name in ("sinks", "alibi_slopes"):
            if options.get(name) is not None:
                options[name] = options[name][head * group : (head + 1) * group]
        out, lse = reference.paged_attention(
            case.query[:, head * group : (head + 1) * group],
            case.key_cache[:, :, head : head + 1],
            case.value_cache[:, :, head : head + 1],
            case.block_table,
            case.seq_lens,
            **options,
        )
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs, axis=1), np.concatenate(lses, axis=1)
