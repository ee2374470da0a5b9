"""Slot-mapped writes of new tokens, against NumPy fancy indexing, a copy of the same bytes, and torch.

Up to 512 tokens are decode steps, with each token in a different block; 2,048 tokens fill whole scattered blocks.
Calls cycle through pools larger than the caches, so that no call finds its slots warm; the copy cycles through an
equally large pool. NumPy uses one thread in all figures.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from itertools import cycle, product
from typing import Any

import numpy as np

from bench.harness.arrays import DTYPES, paged_cache
from bench.harness.runner import Bench, Work
from bench.harness.targets import WRITE_RATIO_MIN
from bench.harness.torch_control import load_torch, torch_view
from bench.host.attention_controls import on_threads, thread_counts
from pagecore import write_kv

HEADS, BLOCK = 8, 16
NUMPY, COPY, TORCH = "NumPy indexing", "numpy.copyto of the same bytes", "torch index_put_"
CASTS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"))
Mapping = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Case:
    """One write: tokens, shapes and dtypes."""

    tokens: int
    head_dim: int
    source: str
    dtype: str
    heads: str
    slots: str = "int64"

    @property
    def title(self) -> str:
        dtypes = self.dtype if self.source == self.dtype else f"{self.source} -> {self.dtype}"
        slots = "" if self.slots == "int64" else f", {self.slots} slots"
        return f"write {self.tokens:>4}, {HEADS} x {self.head_dim}, {dtypes}, {self.heads}{slots}"

    @property
    def target(self) -> float | None:
        """Target ratio to NumPy; None for casts and other head dims."""
        return WRITE_RATIO_MIN.get(self.tokens) if self.source == self.dtype and self.head_dim == 128 else None


class Pools:
    """Caches of one dtype and head order, a pair for each subject and control."""

    def __init__(self, num_blocks: int, head_dim: int, dtype: str, heads: str, names: tuple[str, ...]) -> None:
        self.num_blocks = num_blocks
        self.caches = {
            name: [paged_cache(num_blocks, BLOCK, HEADS, head_dim, dtype, heads) for _ in range(2)] for name in names
        }


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run all dtypes and head orders at dim 128, and int32 slots; a full run adds dims 64 and 256."""
    torch = load_torch(bench)
    threads = thread_counts(bench)
    num_blocks = bench.pick(2048, 160)
    names = ("ours", NUMPY, COPY) + ((TORCH,) if torch else ())
    for dim, (source, dtype), heads in product(bench.pick((128, 64, 256), (128,), (128,)), CASTS, ("HND", "NHD")):
        pools = Pools(num_blocks * 128 // dim, dim, dtype, heads, names)
        for tokens in bench.pick((8, 64, 512, 2048), (8, 2048), (8, 64, 2048)):
            _write(bench, torch, Case(tokens, dim, source, dtype, heads), pools, threads)
        if dim == 128 and source == dtype:
            for tokens in WRITE_RATIO_MIN:
                _write(bench, torch, Case(tokens, dim, source, dtype, heads, "int32"), pools, threads[:1])


def _write(bench: Bench, torch: Any, case: Case, pools: Pools, threads: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    new = random.standard_normal((2, case.tokens, HEADS, case.head_dim), dtype=np.float32).astype(DTYPES[case.source])
    mappings = _mappings(random, pools.num_blocks, case.tokens)
    nbytes = new.size * DTYPES[case.dtype].itemsize
    works: dict[str, Work] = {
        "ours": _ours(new, pools.caches["ours"], mappings, case.slots),
        NUMPY: _numpy(new, pools.caches[NUMPY], mappings),
        COPY: _copy(new, pools.caches[COPY]),
    }
    if torch:
        works[TORCH] = _torch(torch, new, pools.caches[TORCH], mappings)
    subject = works.pop("ours")

    def check() -> None:
        expected = [rows.astype(DTYPES[case.dtype]).view(np.uint8) for rows in new]
        for slots, blocks, offsets in mappings:
            subject()
            for cache, rows in zip(pools.caches["ours"], expected, strict=True):
                if not np.array_equal(cache[blocks, offsets].view(np.uint8), rows):
                    raise AssertionError(f"the rows at slots {slots} are not those that were written")

    for count in threads:
        with on_threads(count, torch):
            bench.compare(
                f"{case.title}, {count} thread{'s' if count > 1 else ''}",
                subject,
                works,
                check=check,
                nbytes=nbytes,
                at_least={NUMPY: case.target} if case.target else None,
                sizes=asdict(case)
                | {"kv_heads": HEADS, "block_size": BLOCK, "num_blocks": pools.num_blocks, "threads": count},
            )


def _ours(new: np.ndarray, caches: list[np.ndarray], mappings: list[Mapping], slots: str) -> Work:
    each = cycle([mapping[0].astype(slots) for mapping in mappings])
    key, value = new
    key_cache, value_cache = caches
    return lambda: write_kv(key, value, key_cache, value_cache, next(each))


def _numpy(new: np.ndarray, caches: list[np.ndarray], mappings: list[Mapping]) -> Work:
    each = cycle(mappings)

    def work() -> None:
        _slots, blocks, offsets = next(each)
        for cache, rows in zip(caches, new, strict=True):
            cache[blocks, offsets] = rows

    return work


def _copy(new: np.ndarray, caches: list[np.ndarray]) -> Work:
    """Copy key and value unchanged to the next piece of their pools."""
    rows = [array.reshape(-1).astype(cache.dtype).view(np.uint8) for array, cache in zip(new, caches, strict=True)]
    pieces = cycle(list(zip(*[_pieces(cache, rows[0].nbytes) for cache in caches], strict=True)))

    def work() -> None:
        for piece, array in zip(next(pieces), rows, strict=True):
            np.copyto(piece, array)

    return work


def _pieces(cache: np.ndarray, nbytes: int) -> list[np.ndarray]:
    """Return the memory of a cache in pieces of `nbytes` bytes, in either head order."""
    memory = (cache if cache.flags.c_contiguous else cache.swapaxes(1, 2)).reshape(-1).view(np.uint8)
    return [memory[start : start + nbytes] for start in range(0, len(memory) - nbytes + 1, nbytes)]


def _torch(torch: Any, new: np.ndarray, caches: list[np.ndarray], mappings: list[Mapping]) -> Work:
    tensors = [torch_view(torch, cache) for cache in caches]
    rows = [torch_view(torch, array) for array in new]
    places = cycle([[torch.from_numpy(part) for part in mapping[1:]] for mapping in mappings])

    def work() -> None:
        index = next(places)
        for tensor, values in zip(tensors, rows, strict=True):
            tensor.index_put_(index, values.to(tensor.dtype))  # no copy if the dtypes agree

    return work


def _mappings(random: np.random.Generator, num_blocks: int, count: int) -> list[Mapping]:
    """Return the slots, blocks and offsets of the calls that cover the whole pool once."""
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
