"""move_slots: tokens of caches move to other slots, one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore import InvalidBlock, ShapeError
from pagecore.ops import move_slots

Array = np.ndarray[Any, Any]


def twin_moves(plane: Array, source: Any, target: Any) -> Array:
    moved = plane.copy().reshape(-1, *plane.shape[2:])
    for here, there in zip(source, target, strict=True):
        moved[there] = moved[here]
    return moved.reshape(plane.shape)


def random_moves(rng: np.random.Generator, num_slots: int, count: int) -> tuple[Array, Array]:
    """Return sources and targets, of which many are both."""
    return rng.integers(0, num_slots, count), rng.integers(0, num_slots, count)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_moves_are_made_in_order(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    blocks, size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    planes = [
        rng.integers(0, 255, (blocks, size, *shape)).astype(dtype)
        for shape, dtype in (((2, 3), np.float32), ((), np.uint8), ((7,), np.float16))
    ]
    source, target = random_moves(rng, blocks * size, data.draw(st.integers(0, 20)))
    expected = [twin_moves(plane, source, target) for plane in planes]
    move_slots(planes, source, target)
    for plane, want in zip(planes, expected, strict=True):
        np.testing.assert_array_equal(plane, want)


def test_any_layout():
    plane = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).transpose(0, 2, 1, 3)  # heads before tokens
    expected = twin_moves(plane, [7, 1], [0, 7])
    move_slots(plane, [7, 1], [0, 7])
    np.testing.assert_array_equal(plane, expected)


def test_worked_example_f2_moves_two_slots():
    plane = np.arange(24).reshape(6, 4)
    move_slots([plane], [15, 22], [14, 15])
    assert plane.ravel()[13:16].tolist() == [13, 15, 22]


@pytest.mark.parametrize(
    ("source", "target", "error", "message"),
    [
        ([0, 8], [1, 2], InvalidBlock, r"source\[1\] is 8; the caches have slots 0 to 7"),
        ([0], [-1], InvalidBlock, r"target\[0\] is -1"),
        ([0, 1], [2], ShapeError, "source has 2 slots and target 1; give one for each"),
        (0, [2], ShapeError, "source"),
    ],
)
def test_what_is_refused(source, target, error, message):
    plane = np.arange(8).reshape(2, 4)
    with pytest.raises(error, match=message):
        move_slots(plane, source, target)
    assert plane.ravel().tolist() == list(range(8))


def test_caches_of_unequal_blocks_are_refused():
    with pytest.raises(ShapeError, match=r"caches\[1\] has shape .2, 3.; expected 2 blocks of 4 tokens"):
        move_slots([np.zeros((2, 4), np.int8), np.zeros((2, 3), np.int8)], [0], [1])
    with pytest.raises(ShapeError, match=r"has shape \(8,\)"):
        move_slots(np.zeros(8, np.int8), [0], [1])
