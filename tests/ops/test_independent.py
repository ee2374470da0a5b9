"""Independent pairs on the host are copied like other pairs, and a false claim is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagecore import ops
from pagecore.errors import UnsupportedOption
from tests.ops.block_cases import is_independent, random_numbers, random_pairs
from tests.ops.cases import snapshot

PAIRS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6)
CALLS = ["copy", "transfer"]


def check(call: str, pairs: Any) -> None:
    """A true claim does not change the result; a false one is refused before anything is written."""
    source, target = (random_numbers((10, 3), "float32", seed) for seed in range(2))
    expected, unchanged = [target.copy(), source.copy()], snapshot(source, target)
    given = (target, pairs) if call == "copy" else (source, target, pairs)
    run = ops.copy_blocks if call == "copy" else ops.transfer_blocks
    if not is_independent(pairs, one_cache=call == "copy"):
        with pytest.raises(UnsupportedOption, match=r"independent is True, and pair.*leave independent out to copy"):
            run(*given, independent=True)
        assert unchanged()
        return
    for a, b in pairs:
        expected[0][b] = expected[call == "transfer"][a]
    run(*given, independent=True)
    np.testing.assert_array_equal(target, expected[0])


@settings(deadline=None)
@given(pairs=PAIRS, call=st.sampled_from(CALLS))
@example(pairs=[(1, 1), (1, 2), (1, 1)], call="copy")
@example(pairs=[(1, 1), (1, 2), (1, 1)], call="transfer")
@example(pairs=[(1, 2), (2, 2)], call="copy")
@example(pairs=[(1, 2), (2, 1)], call="transfer")
def test_a_claim_holds_or_is_refused(pairs, call):
    check(call, pairs)


@pytest.mark.parametrize("claim", [None, "yes", np.array([True, False])], ids=str)
@pytest.mark.parametrize("run", [ops.copy_blocks, ops.transfer_blocks])
def test_a_claim_is_true_or_false(run, claim):
    cache, other = np.zeros((4, 2), np.float32), np.ones((4, 2), np.float32)
    caches = (cache,) if run is ops.copy_blocks else (other, cache)
    with pytest.raises(UnsupportedOption, match=r"independent is .*; it must be True or False"):
        run(*caches, [(1, 2)], independent=claim)
    assert not cache.any()


@pytest.mark.parametrize("seed", range(4))
def test_many_independent_pairs_are_copied(seed):
    cache = random_numbers((500, 7), "float32", seed)
    pairs, expected = random_pairs(np.random.default_rng(seed), 500), cache.copy()
    for source, target in pairs:
        expected[target] = expected[source]
    ops.copy_blocks(cache, pairs, independent=True)
    np.testing.assert_array_equal(cache, expected)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(3, 9), (1, 2), (4, 5), (2, 8)], "pair 3 reads block 2, which pair 1 writes"),
        ([(2, 8), (1, 2)], "pair 0 reads block 2, which pair 1 writes"),
        ([(1, 9), (2, 8), (3, 9)], "pairs 0 and 2 both write block 9"),
    ],
)
def test_a_false_claim_names_the_pairs(pairs, message):
    with pytest.raises(UnsupportedOption, match=message):
        ops.copy_blocks(np.zeros((10, 2), np.float32), pairs, independent=True)


def test_the_claim_is_checked_before_anything_else_of_the_pairs():
    """Debug, which checks the claim for pairs on a device, raises the errors of the host."""
    with pytest.raises(UnsupportedOption, match="both write block 70"):
        ops.copy_blocks(np.zeros((10, 2), np.float32), [(1, 70), (2, 70)], independent=True)
    ops.copy_blocks(np.zeros((10, 2), np.float32), [], independent=True)
