"""Colours of the pictures, and colours and labels for the runs of a block map."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pagecore.serving.pictures.timeline import CACHED, FREE, Cells

__all__ = ["PALETTE", "colours_of", "labels_of", "readable_on"]

# The colour-blind safe palette of Okabe and Ito (2008), without black, which marks shared blocks.
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
INK, GREY, GRID = "#333333", "#767676", "#DDDDDD"
BLUE, RED, GREEN = "#0072B2", "#D55E00", "#009E73"
FREE_COLOUR, CACHED_COLOUR, SHARED_COLOUR = "#FFFFFF", "#CFCFCF", "#222222"


def colours_of(maps: Iterable[Cells]) -> dict[int, int]:
    """Choose a palette index for each run, the same in all maps.

    Adjacent runs get different colours while the palette suffices. The largest run chooses first; each run takes the
    colour that it touches least, and the least used one among equals (Welsh and Powell's order, 1967).

    Parameters
    ----------
    maps : iterable of numpy.ndarray
        int32 ``[rows, columns]``; cells that are not positive are free, cached or shared.

    Returns
    -------
    dict of int to int
        Palette index by run number.
    """
    sizes: Counter[int] = Counter()
    contacts: dict[int, Counter[int]] = defaultdict(Counter)
    for cells in maps:
        numbers, counts = np.unique(cells[cells > 0], return_counts=True)
        sizes.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
        for (first, second), count in _contacts(cells):
            contacts[first][second] += count
            contacts[second][first] += count
    colours: dict[int, int] = {}
    used = [0] * len(PALETTE)
    for number, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        touched = [0] * len(PALETTE)
        for other, count in contacts[number].items():
            if other in colours:
                touched[colours[other]] += count
        best = min(range(len(PALETTE)), key=lambda colour: (touched[colour], used[colour]))
        colours[number] = best
        used[best] += size
    return colours


def _contacts(cells: Cells) -> list[tuple[tuple[int, int], int]]:
    """Return the pairs of runs with adjacent cells, and the number of adjacent cells of each pair."""
    sides = [(cells[:-1], cells[1:]), (cells[:, :-1], cells[:, 1:])]
    first, second = (np.concatenate([side[i].ravel() for side in sides]).astype(np.int64) for i in (0, 1))
    differ = (first != second) & (first > 0) & (second > 0)
    low, high = np.minimum(first, second)[differ], np.maximum(first, second)[differ]
    pairs, counts = np.unique(low << 32 | high, return_counts=True)
    return [
        ((pair >> 32, pair & 0xFFFFFFFF), count) for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True)
    ]


def labels_of(cells: Cells, height: int, width: int) -> dict[int, tuple[int, int]]:
    """Return the first cell, ``(row, column)``, of a box for the label of each number.

    All `height` by `width` cells of the box have that number. If there are several boxes, one from the middle of the
    run's time is chosen. Numbers without a box, FREE and CACHED are left out.
    """
    if cells.shape[0] < height or cells.shape[1] < width:
        return {}
    least = sliding_window_view(sliding_window_view(cells, width, 1).min(-1), height, 0).min(-1)
    most = sliding_window_view(sliding_window_view(cells, width, 1).max(-1), height, 0).max(-1)
    # In column-major order, so that indices increase with time.
    boxes = np.where(least == most, least, FREE).T.ravel()
    order = np.argsort(boxes, kind="stable")
    numbers, firsts, counts = np.unique(boxes[order], return_index=True, return_counts=True)
    columns, rows = np.divmod(order[firsts + counts // 2], least.shape[0])
    found = zip(numbers.tolist(), rows.tolist(), columns.tolist(), strict=True)
    return {number: (row, column) for number, row, column in found if number not in (FREE, CACHED)}


def readable_on(colour: str) -> str:
    """Return black or white, the one with the higher WCAG 2 contrast on a colour (``#RRGGBB``)."""
    parts = (part / 255 for part in bytes.fromhex(colour[1:]))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#FFFFFF"
