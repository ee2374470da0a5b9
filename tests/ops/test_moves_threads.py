"""Moves, copies and merges on several threads equal those on one thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import ops
from tests.ops.block_cases import batch_of, random_numbers
from tests.ops.cases import LAYOUTS, empty_cache
from tests.ops.instruction_sets import on_every_isa
from tests.together import together

SHAPE = (70, 16, 4, 64)


def caches(layout: str, seed: int) -> list[Any]:
    made = [empty_cache(layout, SHAPE, np.dtype(np.float32)) for _ in range(2)]
    for i, cache in enumerate(made):
        cache[...] = random_numbers(SHAPE, "float32", seed + i)
    return made


def on_each(work: Any) -> list[Any]:
    """Return the arrays of `work()` after it ran on one, two and five threads."""
    results = []
    for count in (1, 2, 5):
        pagecore.set_num_threads(count)
        try:
            results.append([np.ascontiguousarray(array).tobytes() for array in work()])
        finally:
            pagecore.set_num_threads(None)
    return results


def pairs(seed: int) -> Any:
    """Chains of blocks, and blocks that are written more than once."""
    return np.random.default_rng(seed).integers(1, SHAPE[0], (200, 2))


@together("layout", LAYOUTS)
def test_copies_follow_the_order_of_the_pairs(layout):
    def work() -> list[Any]:
        made = caches(layout, 0)
        ops.copy_blocks(made, pairs(0))
        return made

    one, *more = on_each(work)
    assert all(result == one for result in more)
    expected = caches(layout, 0)
    for cache in expected:
        for source, target in pairs(0):
            cache[target] = cache[source]
    assert one == [np.ascontiguousarray(cache).tobytes() for cache in expected]


@pytest.mark.slow
@together("layout", LAYOUTS)
@together("dims", [(64, 4, 64), (61, 3, 67)])
@on_every_isa
def test_copies_larger_than_the_caches_are_exact(layout, dims):
    """No block is both a source and a target, so that streaming stores copy them."""
    shape = (70, *dims)
    blocks = np.random.default_rng(2).permutation(70)
    chosen = np.stack([np.repeat(blocks[:20], 2), blocks[20:60]], axis=1)
    chosen[::7] = chosen[::7, :1]  # copies to themselves
    before = random_numbers(shape, "float32", 3)

    def work() -> list[Any]:
        made = [empty_cache(layout, shape, np.dtype(np.float32)) for _ in range(2)]
        for i, cache in enumerate(made):
            cache[...] = before + i
        ops.copy_blocks(made, chosen, independent=True)
        return made

    one, *more = on_each(work)
    assert all(result == one for result in more)
    expected = before.copy()
    expected[chosen[:, 1]] = before[chosen[:, 0]]
    assert one == [np.ascontiguousarray(expected + i).tobytes() for i in range(2)]


@together("layout", LAYOUTS)
def test_of_two_transfers_to_a_block_the_later_one_stays(layout):
    sources = caches(layout, 0)

    def work() -> list[Any]:
        targets = caches("HND", 5)
        ops.transfer_blocks(sources, targets, pairs(1))
        return targets

    one, *more = on_each(work)
    assert all(result == one for result in more)
    expected = caches("HND", 5)
    for source, target in zip(sources, expected, strict=True):
        for from_block, to_block in pairs(1):
            target[to_block] = source[from_block]
    assert one == [np.ascontiguousarray(cache).tobytes() for cache in expected]


@pytest.mark.slow
@together("ordered", [False, True])
@together("layout", LAYOUTS)
def test_sequences_come_out_and_go_in_again(layout, ordered):
    table, lens = batch_of([300, 1, 0, 517, 200], 16, SHAPE[0], holes=0.1, ordered=ordered)
    table = np.concatenate([table, table[::-1]])  # each block in two sequences: the later one stays
    lens = np.concatenate([lens, lens[::-1]])
    source = caches(layout, 3)[0]
    packed = random_numbers((int(lens.sum()), *SHAPE[2:]), "bfloat16", 7)

    def work() -> list[Any]:
        out, target = np.full_like(packed, 5), caches(layout, 9)[0]
        ops.gather_blocks(source, table, lens, out=out)
        ops.scatter_blocks(packed, target, table, lens)
        return [out, target]

    one, *more = on_each(work)
    assert all(result == one for result in more)
    gathered, scattered = np.zeros_like(packed), caches(layout, 9)[0]
    at = 0
    for row, length in zip(table, lens, strict=True):
        for i in range(length):
            block = row[i // 16]
            if block != 0:
                gathered[at] = source[block, i % 16].astype(packed.dtype)
                scattered[block, i % 16] = packed[at]
            at += 1
    assert one == [gathered.tobytes(), np.ascontiguousarray(scattered).tobytes()]


def test_merges_have_the_bits_of_one_thread():
    rng = np.random.default_rng(0)
    outs = [rng.standard_normal((3001, 4, 64)).astype(np.float32) for _ in range(2)]
    lses = [rng.standard_normal((3001, 4)).astype(np.float32) for _ in range(2)]
    one, *more = on_each(lambda: ops.merge_attention(outs[0], lses[0], outs[1], lses[1]))
    assert all(result == one for result in more)
