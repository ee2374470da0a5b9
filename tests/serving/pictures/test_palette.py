"""Colours and labels of runs: different for neighbours, readable, and the same in every map."""

from itertools import combinations

import numpy as np
import pytest

from pagecore.serving.pictures.palette import CACHED_COLOUR, PALETTE, colours_of, labels_of, readable_on
from pagecore.serving.pictures.timeline import CACHED
from tests.together import together

# Simulation of colour vision deficiency on linear RGB, severity 1 (Machado, Oliveira and Fernandes, 2009).
SIGHT = {
    "all": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    parts = np.frombuffer(bytes.fromhex(colour[1:]), np.uint8) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(colour, sight):
    seen = np.clip(np.array(SIGHT[sight]) @ linear(colour), 0, 1)
    x, y, z = np.cbrt(TO_XYZ @ seen / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_differ_for_every_kind_of_colour_vision(sight):
    for one, other in combinations([*PALETTE, "#FFFFFF", CACHED_COLOUR, "#222222"], 2):
        assert np.linalg.norm(lab(one, sight) - lab(other, sight)) > 10, (one, other)


@together("colour", [*PALETTE, "#FFFFFF", "#222222"])
def test_names_are_readable_on_every_colour(colour):
    light, dark = sorted(float(np.dot([0.2126, 0.7152, 0.0722], linear(c))) for c in (colour, readable_on(colour)))[
        ::-1
    ]
    assert (light + 0.05) / (dark + 0.05) > 4.5


def striped(random, rows=40, columns=60, runs=30):
    """Return cells with overlapping rectangles of runs, as in a block map."""
    cells = np.zeros((rows, columns), np.int32)
    for number in range(1, runs + 1):
        row, column = random.integers(0, rows), random.integers(0, columns)
        height, width = random.integers(1, 12), random.integers(1, 25)
        cells[row : row + height, column : column + width] = number
    return cells


def touching(cells):
    """Return the pairs of adjacent runs and the number of adjacent cells, by plain loops."""
    found = {}
    rows, columns = cells.shape
    for row in range(rows):
        for column in range(columns):
            for other in ((row + 1, column), (row, column + 1)):
                if other[0] < rows and other[1] < columns:
                    pair = frozenset((int(cells[row, column]), int(cells[other])))
                    if len(pair) == 2 and min(pair) > 0:
                        found[pair] = found.get(pair, 0) + 1
    return found


@pytest.mark.parametrize("seed", range(20))
def test_runs_that_touch_have_different_colours(seed):
    cells = striped(np.random.default_rng(seed))
    cells[::7] *= -1
    cells[3:9, 10:40] = CACHED
    colours = colours_of([cells])
    assert colours.keys() == set(cells[cells > 0].tolist())
    assert all(len({colours[number] for number in pair}) == 2 for pair in touching(cells))


def test_a_run_has_one_colour_in_all_maps_and_differs_from_its_neighbours_in_each():
    first = np.repeat(np.arange(1, 8, dtype=np.int32)[:, None], 3, axis=1)
    second = np.repeat(np.array([[1], [7], [2], [6], [3], [5], [4]], np.int32), 3, axis=1)
    colours = colours_of([first, second])
    for cells in (first, second):
        assert all(len({colours[number] for number in pair}) == 2 for pair in touching(cells))


def test_runs_that_touch_least_share_a_colour_when_colours_run_out():
    # Eight runs that all touch each other in many cells, except the last two, which touch once.
    rows = [np.repeat([one, other], 9) for one, other in combinations(range(1, 9), 2) if (one, other) != (7, 8)]
    cells = np.zeros((2 * len(rows) + 1, 18), np.int32)
    cells[:-1:2] = rows
    cells[1:-1:2] = [row[::-1] for row in rows]
    cells[-1, :2] = 7, 8
    colours = colours_of([cells])
    assert colours[7] == colours[8]
    assert len(set(colours.values())) == 7


def test_all_colours_are_used_equally_often():
    cells = np.repeat(np.arange(1, 71, dtype=np.int32)[:, None], 4, axis=1)
    cells[1::2] = 0
    counts = np.bincount(list(colours_of([cells]).values()))
    assert counts.tolist() == [5] * 7


def test_a_map_without_runs_has_no_colours_and_no_labels():
    assert colours_of([]) == colours_of([np.zeros((3, 3), np.int32)]) == {}
    assert labels_of(np.zeros((3, 3), np.int32), 1, 1) == {}
    assert labels_of(np.ones((3, 3), np.int32), 4, 1) == labels_of(np.ones((3, 3), np.int32), 1, 4) == {}


@together("seed", range(20))
@together(("height", "width"), [(1, 1), (2, 5), (4, 3)])
def test_a_label_is_placed_in_a_box_of_its_own_run_if_there_is_one(seed, height, width):
    cells = striped(np.random.default_rng(seed))
    cells[:, ::9] *= -1
    cells[10:20, 5:30] = CACHED
    labels = labels_of(cells, height, width)
    for number, (row, column) in labels.items():
        assert (cells[row : row + height, column : column + width] == number).all()
        assert row + height <= cells.shape[0]
        assert column + width <= cells.shape[1]
    boxes = np.lib.stride_tricks.sliding_window_view(cells, (height, width))
    room = {int(box[0, 0]) for box in boxes.reshape(-1, height, width) if box[0, 0] and (box == box[0, 0]).all()}
    assert labels.keys() == room - {CACHED}
