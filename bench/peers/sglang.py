"""SGLang 0.5.23's allocators of tokens and pages, against BlockPool and SlotAllocator.

The package has the dependencies of a whole engine. Empty modules replace those that its allocators do not need (the
front-end language, patches of transformers). The timed code is SGLang's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.harness.runner import Bench, Job, Work
from bench.harness.targets import DECODE_US_MAX, EXTEND_US_MAX
from bench.index.slots import SlotCalls, uneven
from bench.peers import add_to_path, unimportable
from bench.peers.hollow import hollowed
from pagecore.index import BlockPool, SlotAllocator

VERSION, FOLDER = "0.5.23", "sglang-0.5.23"
NAME = f"SGLang {VERSION}"
RECIPE = f"""  mkdir -p $PAGECORE_PEERS && cd $PAGECORE_PEERS
  for v in {VERSION} 0.5.9; do
      pip download --no-deps -d . sglang==$v && python -m zipfile -e sglang-$v-*.whl sglang-$v
  done
  pip install torch triton tqdm orjson psutil pybase64 requests pyzmq packaging pillow starlette prometheus-client \\
      msgspec pydantic fastapi uvloop IPython aiohttp apache-tvm-ffi
(into the environment that runs the bench, CPython 3.11 on Linux; 0.5.9 is optional, for prefix only)"""
UNNEEDED = ("sglang.lang", "sglang.srt.utils.hf_transformers_patches")
PAGE = 16


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run tokens one by one and pages in batches."""
    torch, token_allocator, paged_allocator = load()
    _tokens(bench, torch, token_allocator)
    _pages(bench, torch, paged_allocator)


@cache
def load() -> tuple[Any, Any, Any]:
    """Return torch and the two allocators."""
    add_to_path(NAME, FOLDER, RECIPE)
    try:
        with hollowed(*UNNEEDED):
            import torch
            from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
            from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    except ImportError as error:
        raise unimportable(NAME, FOLDER, error, RECIPE) from error
    torch.set_num_threads(1)
    return torch, TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator


def _tokens(bench: Bench, torch: Any, allocator: Any) -> None:
    """Allocate and free tokens; SGLang's free costs time in proportion to the pool."""
    num_slots = bench.pick(1_000_000, 10_000)
    for count in bench.pick((1, 256, 2048), (16,)):
        ours = BlockPool(num_slots + 1, order="fifo")
        theirs = allocator(num_slots, torch.bfloat16, "cpu", None, False)

        def check(ours: BlockPool = ours, theirs: Any = theirs, count: int = count) -> None:
            taken = ours.allocate(count), theirs.alloc(count)
            np.testing.assert_array_equal(taken[0], taken[1].numpy())
            ours.free(taken[0])
            theirs.free(taken[1])

        bench.compare(
            f"tokens: allocate + free {count:>4} of {num_slots}",
            _pair(ours.allocate, ours.free, count),
            {NAME: _pair(theirs.alloc, theirs.free, count)},
            check=check,
            sizes={"slots": num_slots, "count": count},
        )


def _pair(allocate: Callable[[int], Any], free: Callable[[Any], object], count: int) -> Work:
    return lambda: free(allocate(count))


class _Paged:
    """SGLang's allocator under SlotAllocator's names; it also takes host copies of lengths and the token count."""

    def __init__(self, allocator: Any, new_tokens: int) -> None:
        self.allocator = allocator
        self.new_tokens = new_tokens
        self.free = allocator.free

    def extend(self, prefix_lens: Any, seq_lens: Any, last_slots: Any) -> Any:
        return self.allocator.alloc_extend(prefix_lens, prefix_lens, seq_lens, seq_lens, last_slots, self.new_tokens)

    def decode(self, seq_lens: Any, last_slots: Any) -> Any:
        return self.allocator.alloc_decode(seq_lens, seq_lens, last_slots)


def _pages(bench: Bench, torch: Any, allocator: Any) -> None:
    """Time pages of 16 tokens: prompts, their end, and decode steps."""
    num_slots = bench.pick(4_000_000, 65_536)

    def sides(counts: NDArray[np.int64]) -> tuple[SlotCalls, SlotCalls]:
        pool = BlockPool(num_slots // PAGE + 1, order="fifo")
        theirs = allocator(num_slots, PAGE, torch.bfloat16, "cpu", None, False)
        return (
            SlotCalls(SlotAllocator(pool, PAGE), counts),
            SlotCalls(_Paged(theirs, int(counts.sum())), counts, torch.from_numpy),
        )

    rows, count = bench.pick((32, 1024), (2, 64))
    sizes = {"rows": rows, "tokens_a_row": count, "page": PAGE, "slots": num_slots}
    _prompts(bench, sides(np.full(rows, count)), sizes)
    rows = bench.pick(256, 8)
    _decodes(bench, sides(uneven(rows, count, PAGE)), sizes | {"rows": rows})


def _prompts(bench: Bench, sides: tuple[SlotCalls, SlotCalls], sizes: dict[str, int]) -> None:
    ours, theirs = sides
    shown = f"{sizes['rows']} x {sizes['tokens_a_row']}"

    def check_extend() -> None:
        for side in sides:
            side.extend()
        np.testing.assert_array_equal(ours.slots, theirs.slots.numpy())
        for side in sides:
            side.free()

    def check_free() -> None:
        for side in sides:
            side.extend()
            side.free()
        assert ours.allocator.pool.num_free * PAGE == theirs.allocator.allocator.available_size()

    bench.compare(
        f"pages: extend {shown}",
        Job(ours.extend, after=ours.free),
        {NAME: Job(theirs.extend, after=theirs.free)},
        check=check_extend,
        at_most=EXTEND_US_MAX,
        sizes=sizes,
    )
    bench.compare(
        f"pages: free {shown} tokens",
        Job(ours.free, before=ours.extend),
        {NAME: Job(theirs.free, before=theirs.extend)},
        check=check_free,
        sizes=sizes,
    )


def _decodes(bench: Bench, sides: tuple[SlotCalls, SlotCalls], sizes: dict[str, int]) -> None:
    ours, theirs = sides
    for side in sides:
        side.begin_decode()

    def check() -> None:
        for _ in range(PAGE + 1):
            for side in sides:
                side.decode()
                side.grow()
            np.testing.assert_array_equal(ours.slots, theirs.slots.numpy())

    bench.compare(
        f"pages: decode {sizes['rows']}",
        Job(ours.decode, after=ours.grow),
        {NAME: Job(theirs.decode, after=theirs.grow)},
        check=check,
        at_most=DECODE_US_MAX,
        sizes=sizes,
    )
