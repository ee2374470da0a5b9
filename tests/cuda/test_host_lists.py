"""Index arrays on the host of calls on CUDA arrays: the call raises the errors of the host, and writes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors
from tests.cuda.kit import Kit
from tests.ops.block_cases import random_numbers
from tests.together import together

TABLE = np.array([[1, 2, 3], [4, 5, -1]], np.int32)
BATCH: dict[str, Any] = {"block_table": TABLE, "seq_lens": [10, 7], "cu_query_lens": [0, 2, 3]}
# The arrays on the device; all other arguments are on the host.
PLANES: dict[str, dict[str, Any]] = {
    "paged_attention": {
        "query": random_numbers((3, 4, 64), "float16"),
        "key_cache": random_numbers((6, 4, 2, 64), "float16"),
        "value_cache": random_numbers((6, 4, 2, 64), "float16", 1),
        "out": np.full((3, 4, 64), -7, np.float16),
    },
    "latent_attention": {
        "query_latent": random_numbers((3, 4, 16), "float32"),
        "query_rope": random_numbers((3, 4, 8), "float32"),
        "latent_cache": random_numbers((6, 4, 24), "float32"),
        "out": np.full((3, 4, 16), -7, np.float32),
    },
    "score_blocks": {
        "query": random_numbers((3, 4, 16), "float32"),
        "key_min": random_numbers((6, 2, 16), "float32"),
        "key_max": random_numbers((6, 2, 16), "float32", 1),
    },
    "score_tokens": {
        "query": random_numbers((3, 4, 16), "float32"),
        "label": random_numbers((6, 4, 2, 3), "float32"),
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "latent_attention": {"rope_cache": None, "scale": 0.2},
    "score_blocks": {"block_size": 4},
    "score_tokens": {"channels": [[0, 1, 2]] * 2},
}
WRONG: dict[str, dict[str, Any]] = {
    "block past the cache": {"block_table": np.where(TABLE == 2, 6, TABLE)},
    "negative block": {"block_table": np.where(TABLE == 5, -2, TABLE)},
    "row past the table": {"rows": [0, 2]},
    "negative row": {"rows": [-1, 0]},
    "negative length": {"seq_lens": [10, -1]},
    "length past the table": {"seq_lens": [13, 7]},
    "falling offsets": {"cu_query_lens": [0, 4, 3]},
    "offsets past the query": {"cu_query_lens": [0, 2, 4]},
}
LISTS = {"blocks": [[[0, 1], [0, 2]], [[0, 1], [1, -1]]]}
MASK = np.ones(27, bool)
ONLY_ATTENTION: dict[str, dict[str, Any]] = {
    "selected block": LISTS | {"block_table": np.where(TABLE == 2, 6, TABLE)},
    "attended block": {"mask": MASK, "block_table": np.where(TABLE == 5, -2, TABLE)},
    "parent after its child": {"tree_mask": np.array([1, 1, 3], np.uint64), "cu_query_lens": [0, 2, 3]},
}


def both(cuda: Kit, op: str, change: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return the results of the host and of CUDA, an error for a refusal, and the arrays of the device."""
    device = {name: cuda.put(array) for name, array in PLANES[op].items()}
    results: list[Any] = []
    for planes in ({name: array.copy() for name, array in PLANES[op].items()}, device):
        try:
            results.append(getattr(pagecore, op)(**planes, **{**BATCH, **OPTIONS.get(op, {}), **change}))
        except errors.PagecoreError as error:
            results.append(error)
    return results[0], results[1], device


@together(
    ("op", "change"),
    [(op, change) for op in PLANES for change in WRONG.values()]
    + [("paged_attention", change) for change in ONLY_ATTENTION.values()],
)
def test_wrong_lists_raise_the_errors_of_the_host(cuda, op, change):
    expected, got, device = both(cuda, op, change)
    assert isinstance(expected, errors.PagecoreError)
    assert (type(got), str(got)) == (type(expected), str(expected))
    for name, tensor in device.items():
        assert cuda.get(tensor).tobytes() == PLANES[op][name].tobytes()


HIDDEN = MASK.copy()
HIDDEN[20:24] = False  # the first block of the second sequence
UNREAD: dict[str, dict[str, Any]] = {
    "past the length": {"block_table": TABLE},
    "outside of the window": {"window": 3, "block_table": np.array([[-9, 2, 3], [2**31 - 1, 5, 7]])},
    "hidden by the mask": {"mask": HIDDEN, "block_table": np.array([[1, 2, 3], [-4, 5, 0]])},
    "not selected": {"blocks": [[[0, 1]] * 2, [[0, 1], [1, -1]]], "block_table": np.array([[1, 2, 6], [4, 5, -1]])},
}


@together("name", UNREAD)
def test_blocks_that_no_query_reads_may_hold_anything(cuda, name):
    expected, got, _ = both(cuda, "paged_attention", UNREAD[name])
    np.testing.assert_allclose(cuda.get(got), np.asarray(expected), rtol=5e-3, atol=5e-3)


@together("op", ["gather_blocks", "scatter_blocks", "gather_latent"])
def test_shapes_are_checked_before_lists(cuda, op):
    """Both the length of the packed array and a block are wrong."""
    table, lens, packed = [[1, 9]], [5], np.zeros((4, 8), np.float32)
    cache = random_numbers((3, 4, 8), "float32")

    def call(put: Any) -> str:
        given = {"block_table": table, "seq_lens": lens, "values" if op == "scatter_blocks" else "out": put(packed)}
        given |= {"latent_cache": put(cache), "rope_cache": None} if op == "gather_latent" else {"cache": put(cache)}
        with pytest.raises(errors.ShapeError) as refused:
            getattr(pagecore, op)(**given)
        return str(refused.value)

    assert call(cuda.put) == call(np.copy)
