"""Independent pairs of copy_blocks and transfer_blocks: copied concurrently; a false claim is detected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore.errors import UnsupportedOption
from tests.cuda.kit import Kit
from tests.cuda.memory import assert_same_memory, calls_of
from tests.cuda.move_cases import PLACES, check_all, indices, put_all
from tests.ops.block_cases import is_independent, random_cache, random_numbers, random_pairs
from tests.ops.cases import LAYOUTS


def copied(caches: Any, pairs: Any) -> Any:
    """Return the caches after copying the pairs one by one."""
    for cache in caches:
        for source, target in pairs:
            cache[target] = cache[source]
    return caches


@pytest.fixture
def debugging() -> Iterator[None]:
    pagecore.debug(True)
    yield
    pagecore.debug(None)


@pytest.fixture
def grids(cuda: Kit, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the grids of the launches of a test."""
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it records launches")
    seen: list[Any] = []
    launch = cuda.runtime.launch

    def record(kernel: Any, grid: Any, *rest: Any) -> None:
        seen.append(grid)
        launch(kernel, grid, *rest)

    monkeypatch.setattr(cuda.runtime, "launch", record)
    return seen


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_independent_pairs_are_copied_as_a_loop_copies_them(cuda, layout, place):
    rng = np.random.default_rng(len(layout))
    made = [random_cache(layout, (40, 5, 3, dim), "float16", dim) for dim in (8, 3)]
    pairs = random_pairs(rng, 40)
    device = put_all(cuda, made)
    pagecore.copy_blocks(device, indices(cuda, pairs, place), independent=True)
    check_all(cuda, device, copied(made, pairs))


@pytest.mark.parametrize("seed", range(6))
def test_random_independent_pairs_are_copied(cuda, seed):
    rng = np.random.default_rng(seed)
    num_blocks = int(rng.choice([3, 20, 300, 1500]))
    cache = np.arange(num_blocks * 3, dtype=np.int64).reshape(num_blocks, 3)
    pairs = random_pairs(rng, num_blocks)
    device = [cuda.put(cache), cuda.put(cache)]
    pagecore.copy_blocks(device[0], pairs, independent=True)
    pagecore.copy_blocks(device[1], cuda.put(pairs), independent=True)
    check_all(cuda, device, copied([cache, cache], pairs))


@pytest.mark.parametrize("place", PLACES)
def test_a_source_may_repeat_and_a_block_may_be_paired_with_itself_anywhere(cuda, place):
    """A graph of fixed size pads its pairs with those of a block and itself."""
    cache = random_numbers((9, 40), "float32")
    pairs = [(0, 0), (1, 5), (5, 5), (1, 6), (1, 1), (0, 0), (2, 7)]
    device = cuda.put(cache)
    pagecore.copy_blocks(device, indices(cuda, pairs, place), independent=True)
    check_all(cuda, [device], copied([cache], pairs))


@pytest.mark.parametrize("place", PLACES)
def test_transfers_may_read_and_write_blocks_with_the_same_number(cuda, place):
    """Sources and targets belong to different caches."""
    source, target = random_numbers((40, 4, 30), "float32"), random_numbers((40, 4, 30), "float16")
    pairs = [(i, 1 + i % 39) for i in range(1, 40)]
    device = cuda.put(target)
    pagecore.transfer_blocks(cuda.put(source), device, indices(cuda, pairs, place), independent=True)
    for a, b in pairs:
        target[b] = source[a].astype(np.float16)
    assert_same_memory(cuda.get(device), target)


def test_independent_pairs_divide_the_grid_and_dependent_pairs_use_one_row_of_it(cuda, grids):
    cache = cuda.put(random_numbers((513, 64), "float32"))
    pairs = cuda.put(np.stack([np.arange(1, 257), np.arange(257, 513)], axis=1))
    pagecore.copy_blocks(cache, pairs)
    pagecore.copy_blocks(cache, pairs, independent=True)
    pagecore.transfer_blocks(cache, cuda.empty((513, 64)), pairs)
    pagecore.transfer_blocks(cache, cuda.empty((513, 64)), pairs, independent=True)
    assert [grid[1] for grid in grids] == [1, 256, 1, 256]


@pytest.mark.slow
def test_more_pairs_than_the_grid_has_rows_are_copied_in_rounds(cuda, grids):
    """With many arrays the grid has few rows."""
    made = [np.random.default_rng(i).integers(0, 256, (700, 4), np.uint8) for i in range(112)]
    device, pairs = put_all(cuda, made), np.stack([np.arange(350), np.arange(350, 700)], axis=1)
    pagecore.copy_blocks(device, cuda.put(pairs), independent=True)
    check_all(cuda, device, copied(made, pairs))
    assert grids == [(1, 2**15 // 112, 112)]
    assert grids[0][1] < len(pairs)


FALSE = {
    "a chain read first": [(2, 3), (1, 2)],
    "a chain": [(1, 2), (2, 3)],
    "a target twice": [(1, 5), (2, 5)],
    "a swap": [(1, 2), (2, 1)],
    "far apart": [*((i, i + 40) for i in range(1, 20)), (45, 70)],
}


@pytest.mark.parametrize("claim", FALSE)
def test_a_false_claim_of_the_device_is_a_race(cuda, claim):
    """Seeds vary the order of thread blocks: the emulator does not report a read that precedes the racing write."""
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it finds races")
    pairs, found = cuda.put(np.asarray(FALSE[claim])), []
    for cuda.runtime.seed in range(8):
        cache = cuda.put(random_numbers((80, 40), "float32"))
        try:
            pagecore.copy_blocks(cache, pairs, independent=True)
            cuda.runtime.synchronize(0)
        except AssertionError as error:
            found.append(str(error))
    assert found
    assert all("move_pairs" in text and "races: it" in text for text in found)


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize("seed", range(12))
def test_debug_finds_false_claims_of_the_device_and_no_others(cuda, seed):
    rng = np.random.default_rng(seed)
    pairs = rng.integers(1, 30, (int(rng.integers(1, 7)), 2))
    cache = random_numbers((30, 4), "float32")
    device, other = cuda.put(cache), cuda.put(cache)
    for call, one_cache in (
        (lambda: pagecore.copy_blocks(device, cuda.put(pairs), independent=True), True),
        (lambda: pagecore.transfer_blocks(device, other, cuda.put(pairs), independent=True), False),
    ):
        if is_independent(pairs, one_cache=one_cache):
            call()
        else:
            with pytest.raises(UnsupportedOption, match=r"independent is True, and pair.*leave independent out"):
                call()
    assert_same_memory(cuda.get(device), copied([cache], pairs if is_independent(pairs) else [])[0])


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize(
    ("pairs", "message"),
    [([(1, 2), (7, 8), (2, 3)], "pair 2 reads block 2, which pair 0 writes"), ([(1, 5), (2, 5)], "pairs 0 and 1 both")],
)
@pytest.mark.parametrize("place", PLACES)
def test_a_false_claim_names_the_pairs_and_copies_nothing(cuda, pairs, message, place):
    caches = [random_numbers((10, 4), "float32", i) for i in range(2)]
    device = put_all(cuda, caches)
    with pytest.raises(UnsupportedOption, match=message):
        pagecore.copy_blocks(device, indices(cuda, pairs, place), independent=True)
    check_all(cuda, device, caches)


def test_independent_pairs_of_the_device_are_one_launch_and_nothing_else(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    caches = put_all(cuda, [random_numbers((400, 4, 8), "float32", i) for i in range(2)])
    pairs = cuda.put(np.stack([np.arange(1, 200), np.arange(200, 399)], axis=1))
    assert calls_of(cuda, lambda: pagecore.copy_blocks(caches, pairs, independent=True)) == {"launches": 1}
