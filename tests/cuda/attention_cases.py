"""Cases of tests/ops on a device: put there, run into a poisoned output, compared with the float64 oracle."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from pagecore.ops import AttentionPlan, paged_attention, plan_attention
from tests.cuda.kit import Kit
from tests.ops.cases import Case, assert_lse_close, assert_output_close

INDICES = ("block_table", "seq_lens", "rows", "cu_query_lens")


class DeviceCase:
    """The arrays of a case in device memory; what `on_host` names stays on the host.

    Attributes
    ----------
    arrays : dict
        By the names of paged_attention's arguments, options too.
    out, lse : Tensor
        All bytes 0xFF before a call.
    """

    def __init__(self, cuda: Kit, case: Case, on_host: Collection[str] = ()) -> None:
        self.cuda, self.case = cuda, case
        names = ("query", "key_cache", "value_cache", "block_table", "seq_lens")
        self.arrays: dict[str, Any] = dict(zip(names, case.arrays, strict=True)) | case.options
        for name, value in self.arrays.items():
            if isinstance(value, np.ndarray) and name not in on_host:
                self.arrays[name] = cuda.put(value)
        self.shape = (*case.query.shape[:2], case.value_cache.shape[3])
        self.out = cuda.empty(self.shape, str(case.query.dtype))

    def run(self, **more: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Call paged_attention, and return output and lse on the host."""
        out, lse = paged_attention(**{**self.arrays, "out": self.out, **more}, return_lse=True)
        return self.cuda.get(out), self.cuda.get(lse)

    def plan(self, **more: Any) -> AttentionPlan:
        """Return a plan of the case's lengths and options on the device."""
        kinds = {name: self.case.options[name] for name in ("causal", "window") if name in self.case.options}
        heads = {"num_query_heads": self.shape[1], "num_kv_heads": self.case.key_cache.shape[2]}
        cu = self.case.options.get("cu_query_lens")
        return plan_attention(cu, self.case.seq_lens, **{**heads, **kinds, "device": self.cuda.device, **more})


def check(cuda: Kit, case: Case, *, on_host: Collection[str] = (), plan: bool = False, **more: Any) -> None:
    """Run a case and compare it with the oracle; `plan` makes one with the options `more`."""
    there = DeviceCase(cuda, case, on_host)
    compare(case, there.run(plan=there.plan(**more)) if plan else there.run(**more))


def compare(case: Case, got: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> None:
    """Assert that output and lse keep the bounds of their dtype."""
    expected = case.expect()
    assert_output_close(got[0], expected[0], case.magnitude())
    assert_lse_close(got[1], expected[1], str(case.query.dtype))


def among(case: Case, sequences: np.ndarray[Any, Any]) -> tuple[Case, np.ndarray[Any, Any]]:
    """Return these sequences as a batch of their own, and their rows of the query."""
    cu = case.options.get("cu_query_lens", np.arange(len(case.seq_lens) + 1))
    rows = np.concatenate([np.arange(cu[i], cu[i + 1]) for i in sequences])
    options = dict(case.options)
    if "cu_query_lens" in options:
        options["cu_query_lens"] = np.concatenate([[0], np.cumsum(np.diff(cu)[sequences])])
    table, lens = case.block_table[sequences], case.seq_lens[sequences]
    return Case(case.query[rows], case.key_cache, case.value_cache, table, lens, options), rows


__all__ = ["INDICES", "DeviceCase", "among", "check", "compare"]
