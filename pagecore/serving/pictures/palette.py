"""Colours and names for the runs of a block map: stable for each run, different for neighbours."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pagecore.serving.pictures.timeline import CACHED, FREE, Cells

__all__ = ["PALETTE", "colours_of", "labels_of", "readable_on"]

# Okabe and Ito's colours for all kinds of sight (2008), without black, which is for shared blocks.
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")


def colours_of(maps: Iterable[Cells]) -> dict[int, int]:
    """A place in the palette for each run of some block maps, the same in all of them.

    Runs that touch get different colours as far as those suffice: the largest run chooses first, and each takes the
    colour that it touches least, of equals the one that is used least (Welsh and Powell's order, 1967).

    Parameters
    ----------
    maps : iterable of numpy.ndarray
        int32 ``[rows, columns]``; what is not positive is free, cached or shared.
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
    """Pairs of runs whose cells lie side by side or one upon the other, and how many such cells there are."""
    sides = [(cells[:-1], cells[1:]), (cells[:, :-1], cells[:, 1:])]
    first, second = (np.concatenate([side[i].ravel() for side in sides]).astype(np.int64) for i in (0, 1))
    differ = (first != second) & (first > 0) & (second > 0)
    low, high = np.minimum(first, second)[differ], np.maximum(first, second)[differ]
    pairs, counts = np.unique(low << 32 | high, return_counts=True)
    return [
        ((pair >> 32, pair & 0xFFFFFFFF), count) for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True)
    ]


def labels_of(cells: Cells, height: int, width: int) -> dict[int, tuple[int, int]]:
    """Where to write what each number of a map stands for: the first cell of a box, `height` by `width`, all its own.

    Of several such boxes it is one in the middle of its time. Numbers without one, FREE and CACHED are left out.
    """
    if cells.shape[0] < height or cells.shape[1] < width:
        return {}
    least = sliding_window_view(sliding_window_view(cells, width, 1).min(-1), height, 0).min(-1)
    most = sliding_window_view(sliding_window_view(cells, width, 1).max(-1), height, 0).max(-1)
    # Column by column, so that places are in order of time.
    boxes = np.where(least == most, least, FREE).T.ravel()
    order = np.argsort(boxes, kind="stable")
    numbers, firsts, counts = np.unique(boxes[order], return_index=True, return_counts=True)
    columns, rows = np.divmod(order[firsts + counts // 2], least.shape[0])
    found = zip(numbers.tolist(), rows.tolist(), columns.tolist(), strict=True)
    return {number: (row, column) for number, row, column in found if number not in (FREE, CACHED)}


def readable_on(colour: str) -> str:
    """Black or white, whichever stands out more on a colour (``#RRGGBB``), by the contrast of WCAG 2."""
    parts = (part / 255 for part in bytes.fromhex(colour[1:]))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#FFFFFF"
