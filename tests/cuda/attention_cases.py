"""Attention cases of tests/ops on a device: run into a poisoned output and compared with the float64 oracle."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from pagecore.ops import AttentionPlan, paged_attention, plan_attention
from tests.cuda.kit import Kit
from tests.ops.cases import Case, Shape, assert_lse_close, assert_output_close, random_mask

LIMITS = ("causal", "window", "chunk", "sink_tokens")
INDICES = ("block_table", "seq_lens", "rows", "cu_query_lens")
BF16 = {"query_dtype": "bfloat16", "cache_dtype": "bfloat16"}
F16 = {"query_dtype": "float16", "cache_dtype": "float16"}
MIXED = Shape(seq_lens=(200, 77, 5, 0, 130, 33), query_lens=(33, 77, 1, 0, 2, 33), heads=(8, 2), dims=(64, 64), **BF16)
DECODED = Shape(seq_lens=(2500, 900), heads=(8, 2), dims=(64, 64), **BF16)

SINKS = np.linspace(-2, 3, 8, dtype=np.float32)
SLOPES = (2.0 ** -np.arange(1, 9)).astype(np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "not causal": {"causal": False},
    "window": {"window": 33},
    "chunk": {"chunk": 48},
    "chunk, not causal": {"chunk": 100, "causal": False},
    "sink tokens": {"window": 33, "sink_tokens": 4},
    "many sink tokens": {"causal": False, "window": (40, 9), "sink_tokens": 70},
    "both sides": {"causal": False, "window": (40, 9)},
    "sinks": {"sinks": SINKS},
    "scales": {"key_scale": np.array([0.5, -2.0], np.float32), "value_scale": 0.7, "scale": 0.2},
    "negative scale": {"scale": -0.1},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": SLOPES},
    "mask": {"mask": random_mask(MIXED)},
    "everything": {
        "window": 50,
        "sinks": SINKS,
        "softcap": 20.0,
        "alibi_slopes": SLOPES,
        "mask": random_mask(MIXED),
        "key_scale": np.array([0.5, 2.0], np.float32),
        "value_scale": np.array([0.7, 1.3], np.float32),
    },
    "everything with sink tokens": {
        "window": 50,
        "sink_tokens": 9,
        "sinks": SINKS,
        "softcap": 20.0,
        "alibi_slopes": SLOPES,
        "mask": random_mask(MIXED),
        "key_scale": np.array([0.5, 2.0], np.float32),
        "value_scale": np.array([0.7, 1.3], np.float32),
    },
}


class DeviceCase:
    """The arrays of a case in device memory, except those that `on_host` names.

    Attributes
    ----------
    arrays : dict
        Arguments of paged_attention by name, including options.
    out, lse : Tensor
        Filled with 0xFF bytes before a call.
    """

    def __init__(self, cuda: Kit, case: Case, on_host: Collection[str] = ()) -> None:
        self.cuda, self.case = cuda, case
        names = ("query", "key_cache", "value_cache", "block_table", "seq_lens")
        self.arrays: dict[str, Any] = dict(zip(names, case.arrays, strict=True)) | case.options
        for name, value in self.arrays.items():
            if isinstance(value, np.ndarray) and name not in on_host:
                is_bits = value.dtype == np.uint64  # of a tree
                self.arrays[name] = cuda.put(value.view(np.int64) if is_bits else value)
        self.shape = (*case.query.shape[:2], case.value_cache.shape[3])
        self.out = cuda.empty(self.shape, str(case.query.dtype))

    def run(self, **more: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Call paged_attention; return output and lse on the host."""
        out, lse = paged_attention(**{**self.arrays, "out": self.out, **more}, return_lse=True)
        return self.cuda.get(out), self.cuda.get(lse)

    def plan(self, **more: Any) -> AttentionPlan:
        """Return a plan of the case's lengths and options on the device."""
        kinds = {name: self.case.options[name] for name in LIMITS if name in self.case.options}
        heads = {"num_query_heads": self.shape[1], "num_kv_heads": self.case.key_cache.shape[2]}
        cu = self.case.options.get("cu_query_lens")
        return plan_attention(cu, self.case.seq_lens, **{**heads, **kinds, "device": self.cuda.device, **more})


def check(cuda: Kit, case: Case, *, on_host: Collection[str] = (), plan: bool = False, **more: Any) -> None:
    """Run a case and compare it with the oracle; with `plan`, use a plan made with the options `more`."""
    there = DeviceCase(cuda, case, on_host)
    compare(case, there.run(plan=there.plan(**more)) if plan else there.run(**more))


def compare(case: Case, got: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> None:
    """Assert that the errors of output and lse are within the bounds of their dtype."""
    expected = case.expect()
    assert_output_close(got[0], expected[0], case.magnitude())
    assert_lse_close(got[1], expected[1], str(case.query.dtype))


def between_nan(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a view that equals `array` and has eight NaN before and after every row."""
    dim = array.shape[-1]
    wide = np.full((*array.shape[:-1], dim + 16), np.nan, array.dtype)
    wide[..., 8 : 8 + dim] = array
    return wide[..., 8 : 8 + dim]


def poisoned(case: Case) -> Case:
    """Return a case whose rows of queries, keys and values are surrounded by NaN."""
    caches = {"key_cache": between_nan(case.key_cache), "value_cache": between_nan(case.value_cache)}
    return replace(case, query=between_nan(case.query), **caches)


def in_last_slot(case: Case, sequence: int) -> Case:
    """Exchange blocks so that the first block of a sequence, which must be full, is the last block of the caches."""
    last, used = len(case.key_cache) - 1, int(case.block_table[sequence, 0])
    for cache in (case.key_cache, case.value_cache):
        cache[[used, last]] = cache[[last, used]]
    table = case.block_table.copy()
    table[case.block_table == used], table[case.block_table == last] = last, used
    return replace(case, block_table=table)
