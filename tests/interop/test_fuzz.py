"""Foreign values for every argument of the torch operators give a typed error that names the argument, or a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pagecore
from tests.capabilities import require
from tests.ops.test_fuzz import attempt, foreign_values, names

torch = require("torch")


def operations() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return each function with new valid arguments."""
    from pagecore.interop import torch as operators

    ones, ids = torch.ones, torch.tensor
    cache = ones(6, 4, 2, 8)
    attention = {
        "query": ones(3, 4, 8),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "block_table": ids([[1, 2], [3, 4]]),
        "seq_lens": ids([5, 2]),
        "rows": ids([0, 1]),
        "cu_query_lens": ids([0, 2, 3]),
        "scale": 1.0,
        "causal": True,
        "window": 3,
        "softcap": 0.0,
        "sinks": ones(4),
        "alibi_slopes": ones(4),
        "mask": torch.ones(12, dtype=torch.bool),
        "key_scale": 1.0,
        "value_scale": ones(2),
        "out": None,
        "return_lse": False,
    }
    writing = {"key": ones(3, 2, 8), "value": ones(3, 2, 8), "key_cache": cache, "value_cache": cache.clone()}
    writing |= {"slot_mapping": ids([4, 5, -1]), "key_scale": 1.0, "value_scale": ones(2)}
    parts = {"out_a": ones(3, 4, 8), "lse_a": ones(3, 4), "out_b": ones(3, 4, 8), "lse_b": ones(3, 4)}
    return {
        "paged_attention": (operators.paged_attention, attention),
        "write_kv": (operators.write_kv, writing),
        "merge_attention": (operators.merge_attention, parts),
        "copy_blocks": (operators.copy_blocks, {"caches": [cache], "pairs": ids([[1, 2]])}),
        "as_torch": (operators.as_torch, {"tensor": pagecore.zeros(3), "read_only": False}),
    }


def foreign_tensors() -> Iterator[Any]:
    yield from foreign_values(np.random.default_rng(3))
    yield torch.tensor(1.0)
    yield torch.zeros(0)
    for dtype in (torch.float64, torch.complex64, torch.bool, torch.int64, torch.float8_e4m3fn):
        yield torch.ones(3, 4, 8).to(dtype)
    yield torch.ones(2, 2).to_sparse()
    yield torch.ones(2, 2).to_sparse_csr()
    yield torch.ones(3, 4, 8, requires_grad=True)
    yield torch.ones(3, 4, 8).transpose(0, 2)
    yield [torch.ones(3)]
    yield torch.nn.Parameter(torch.ones(2))


@pytest.mark.filterwarnings("ignore")  # torch warns about sparse tensors
@pytest.mark.parametrize("operation", ["paged_attention", "write_kv", "merge_attention", "copy_blocks", "as_torch"])
def test_foreign_arguments_of_an_operator_are_refused_by_name(operation):
    for name in operations()[operation][1]:
        for value in foreign_tensors():
            call, good = operations()[operation]
            error = attempt(operation, call, good | {name: value}, [name])
            assert error is None or names(error, name) or "pairs" in str(error), (name, str(error))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_operators_refuse_caches_that_share_memory(backend):
    from pagecore.interop import torch as operators

    def calls(kind: Any) -> Any:
        return kind if backend is None else torch.compile(kind, fullgraph=True, backend=backend)

    write, copy = calls(operators.write_kv), calls(operators.copy_blocks)
    new, slots, cache = torch.ones(2, 2, 8), torch.tensor([4, 5]), torch.zeros(3, 4, 2, 8)
    wide = torch.zeros(3, 4, 2, 12)
    for keys, values in ((cache, cache), (wide[..., :8], wide[..., 4:])):
        with pytest.raises(Exception, match="key_cache shares memory with value_cache"):
            write(new, new, keys, values, slots)
        assert not keys.any()
    with pytest.raises(Exception, match=r"caches\[0\] shares memory with caches\[1\]"):
        copy([cache, cache], torch.tensor([[1, 2]]))
    pool = torch.zeros(3, 2, 4, 2, 8)
    write(new, 2 * new, pool[:, 0], pool[:, 1], slots)
    assert (pool[:, 0].sum(), pool[:, 1].sum()) == (32, 64)
