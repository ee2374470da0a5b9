"""Key and value of new tokens into their slots, beside NumPy fancy indexing and torch.

8 and 64 tokens are decode steps, each token in a block of its own; 2,048 tokens fill whole blocks that lie scattered.
Calls go through the whole of pools that are larger than the caches, so that no call finds its slots warm.
"""

from __future__ import annotations

import argparse
from itertools import cycle
from typing import Any

import numpy as np

from bench.arrays import DTYPES, paged_cache
from bench.runner import Bench
from bench.torch_control import load_torch, torch_view
from pagecore import write_kv

HEADS, DIM, BLOCK = 8, 128, 16
TARGETS = {8: 1.0, 64: 1.0, 2048: 1.7}


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Both head orders, in float32 and bfloat16."""
    torch = load_torch(bench)
    for dtype in ("float32", "bfloat16"):
        for heads in ("HND", "NHD"):
            for count in TARGETS:
                _write(bench, torch, dtype, heads, count)


def _write(bench: Bench, torch: Any, dtype: str, heads: str, count: int) -> None:
    num_blocks = bench.pick(2048, 160)
    random = np.random.default_rng(0)
    key, value = random.standard_normal((2, count, HEADS, DIM), dtype=np.float32).astype(DTYPES[dtype])
    mappings = _mappings(random, num_blocks, count)
    names = ("ours", "NumPy indexing") + (("torch index_put_",) if torch else ())
    caches = {name: [paged_cache(num_blocks, BLOCK, HEADS, DIM, dtype, heads) for _ in range(2)] for name in names}
    each = {name: cycle(mappings) for name in names}

    def ours() -> None:
        write_kv(key, value, *caches["ours"], next(each["ours"])[0])

    def with_numpy() -> None:
        _slots, blocks, offsets = next(each["NumPy indexing"])
        for cache, new in zip(caches["NumPy indexing"], (key, value), strict=True):
            cache[blocks, offsets] = new

    controls = {"NumPy indexing": with_numpy}
    if torch:
        new_tensors = [torch_view(torch, array) for array in (key, value)]
        tensors = [torch_view(torch, cache) for cache in caches["torch index_put_"]]
        places = cycle([[torch.from_numpy(part) for part in mapping[1:]] for mapping in mappings])

        def with_torch() -> None:
            index = next(places)
            for cache, new in zip(tensors, new_tensors, strict=True):
                cache.index_put_(index, new)

        controls["torch index_put_"] = with_torch

    def check() -> None:
        for _ in mappings:
            for work in (ours, *controls.values()):
                work()
        for name in names[1:]:
            for got, expected in zip(caches["ours"], caches[name], strict=True):
                np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))

    bench.compare(
        f"write {count} tokens, {HEADS} x {DIM}, {dtype}, {heads}",
        ours,
        controls,
        check=check,
        nbytes=key.nbytes + value.nbytes,
        at_least={"NumPy indexing": TARGETS[count]},
        sizes={"tokens": count, "kv_heads": HEADS, "head_dim": DIM, "block_size": BLOCK, "num_blocks": num_blocks}
        | {"dtype": dtype, "heads": heads},
    )


def _mappings(random: np.random.Generator, num_blocks: int, count: int) -> list[tuple[np.ndarray, ...]]:
    """Slots, blocks and offsets of as many calls as it takes to go through the whole pool once."""
    whole = count >= 2048
    each = count // BLOCK if whole else count
    made = []
    for offset in (0,) if whole else random.permutation(BLOCK):
        ids = 1 + random.permutation(num_blocks - 1)
        for start in range(0, len(ids) - each + 1, each):
            blocks = ids[start : start + each].repeat(BLOCK if whole else 1)
            offsets = np.arange(count) % BLOCK if whole else np.full(count, offset)
            made.append((blocks * BLOCK + offsets, blocks, offsets))
    return made
