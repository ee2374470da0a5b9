"""Random calls that copy or write, on arrays of random layouts: CUDA leaves the bytes that the host leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pagecore
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.cuda.memory import assert_same_memory
from tests.ops.cases import DTYPES

Array = np.ndarray[Any, Any]
Rng = np.random.Generator
SEEDS = cases(range(3), range(60))


def array(rng: Rng, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return random numbers with gaps between rows, an odd first element, a reversed axis, or none of these."""
    layout = rng.choice(["plain", "gaps", "odd", "reversed", "strided"])
    if layout == "gaps":
        memory = np.zeros((*shape[:-1], shape[-1] + 3), dtype)[..., : shape[-1]]
    elif layout == "odd":
        memory = np.zeros((*shape[:-1], shape[-1] + 1), dtype)[..., 1:]
    elif layout == "strided":
        memory = np.zeros((shape[0], 3, *shape[1:]), dtype)[:, 1]
    else:
        memory = np.zeros(shape, dtype)[:: -1 if layout == "reversed" else 1]
    memory[...] = (4 * rng.standard_normal(shape)).astype(np.float32)
    return memory


def any_dtype(rng: Rng) -> np.dtype[Any]:
    return DTYPES[str(rng.choice(list(DTYPES)))]


def sequences(rng: Rng) -> tuple[dict[str, Any], int, int, int]:
    """Return a table, lengths and rows, and the numbers of blocks, of tokens in a block, and of all tokens."""
    size, lens = int(rng.choice([1, 3, 8, 16])), rng.integers(0, 40, rng.integers(0, 5))
    rows = rng.permutation(len(lens) + 2)[: len(lens)]
    width = -(-40 // size)
    table = (
        rng.permutation(np.arange(1, (len(lens) + 2) * width + 1)).reshape(-1, width).astype(rng.choice(["i4", "i8"]))
    )
    table[rng.random(table.shape) < 0.1] = 0
    return {"block_table": table, "seq_lens": lens, "rows": rows}, table.size + 1, size, int(lens.sum())


def some_slots(rng: Rng, num_slots: int, count: int) -> Array:
    slots = rng.permutation(num_slots)[:count]
    return np.where(rng.random(len(slots)) < 0.2, -1, slots)


def gather_blocks(rng: Rng) -> dict[str, Any]:
    batch, blocks, size, tokens = sequences(rng)
    tail = tuple(rng.choice([1, 3, 8, 16], rng.integers(1, 3)).tolist())
    return batch | {"cache": array(rng, (blocks, size, *tail), any_dtype(rng)),
                    "out": array(rng, (tokens, *tail), any_dtype(rng))}  # fmt: skip


def scatter_blocks(rng: Rng) -> dict[str, Any]:
    given = gather_blocks(rng)
    return given | {"values": given.pop("out")}


def copy_blocks(rng: Rng) -> dict[str, Any]:
    caches = [array(rng, (9, 4, int(rng.choice([1, 3, 8]))), any_dtype(rng)) for _ in range(rng.integers(1, 3))]
    return {"caches": caches, "pairs": rng.integers(0, 9, (rng.integers(0, 30), 2))}


def transfer_blocks(rng: Rng) -> dict[str, Any]:
    tail = (4, *rng.choice([1, 3, 8, 16], rng.integers(1, 3)).tolist())
    pairs = np.stack([rng.integers(1, 9, 12), rng.integers(1, 7, 12)], -1)
    return {"source_caches": array(rng, (9, *tail), any_dtype(rng)),
            "target_caches": array(rng, (7, *tail), any_dtype(rng)), "pairs": pairs}  # fmt: skip


def move_slots(rng: Rng) -> dict[str, Any]:
    given = copy_blocks(rng)
    count = len(given.pop("pairs"))
    return given | {"source": rng.integers(0, 36, count).tolist(), "target": rng.integers(0, 36, count).tolist()}


def write_kv(rng: Rng) -> dict[str, Any]:
    heads, dims, dtype = int(rng.integers(1, 4)), rng.choice([1, 7, 8, 24, 64], 2).tolist(), any_dtype(rng)
    new = {name: array(rng, (9, heads, dim), dtype) for name, dim in zip(("key", "value"), dims, strict=True)}
    caches = {f"{name}_cache": array(rng, (4, 5, heads, x.shape[2]), any_dtype(rng)) for name, x in new.items()}
    factors = {"key_scale": rng.uniform(0.5, 2, heads).astype(np.float32), "value_scale": 0.7}
    return new | caches | factors | {"slot_mapping": some_slots(rng, 20, 9)}


def latent_cache(rng: Rng, blocks: int, size: int) -> tuple[dict[str, Any], int, int]:
    latent, rope, dtype = int(rng.choice([2, 8, 24])), int(rng.choice([0, 1, 8])), any_dtype(rng)
    if rope and rng.random() < 0.5:
        planes = [array(rng, (blocks, size, dim), dtype) for dim in (latent, rope)]
        return {"latent_cache": planes[0], "rope_cache": planes[1]}, latent, rope
    return {"latent_cache": array(rng, (blocks, size, latent + rope), dtype), "rope_cache": None}, latent, rope


def write_latent(rng: Rng) -> dict[str, Any]:
    planes, latent, rope = latent_cache(rng, 4, 5)
    dtype = any_dtype(rng)
    turned = array(rng, (9, rope), dtype) if rope else None
    return planes | {"latent": array(rng, (9, latent), dtype), "rope": turned, "slot_mapping": some_slots(rng, 20, 9)}


def gather_latent(rng: Rng) -> dict[str, Any]:
    batch, blocks, size, tokens = sequences(rng)
    planes, latent, rope = latent_cache(rng, blocks, size)
    if planes["rope_cache"] is None and rope:  # without queries the width of a row is that of the cache
        latent, rope = latent + rope, 0
    return batch | planes | {"out": array(rng, (tokens, latent + rope), any_dtype(rng))}


OPS: list[Callable[[Rng], dict[str, Any]]] = [
    copy_blocks, gather_blocks, gather_latent, move_slots, scatter_blocks, transfer_blocks, write_kv, write_latent,
]  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", OPS, ids=lambda make: make.__name__)
def test_cuda_leaves_the_bytes_of_the_host(cuda, make, seed):
    rng = np.random.default_rng([seed, OPS.index(make)])
    for _ in range(8):
        compare(cuda, make.__name__, make(rng))


def compare(cuda: Kit, op: str, given: dict[str, Any]) -> None:
    def put(x: Any) -> Any:
        if isinstance(x, list) and isinstance(x[0] if x else None, np.ndarray):
            return [put(each) for each in x]
        return cuda.put(x) if isinstance(x, np.ndarray) else x

    there = {name: put(value) for name, value in given.items()}
    getattr(pagecore, op)(**given)
    getattr(pagecore, op)(**there)
    for name, value in given.items():
        for tensor, expected in zip(
            *([x] if not isinstance(x, list) else x for x in (there[name], value)), strict=True
        ):
            if isinstance(expected, np.ndarray):
                assert_same_memory(cuda.get(tensor), expected)
