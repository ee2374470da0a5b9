"""Twin of the planning kernel in plain Python, tile by tile and border by border.

Workers get equal shares of the cost of all tiles. A border between two shares cuts the tile in which it lies, or moves
to one of its ends; a batch-invariant plan cuts tiles at folds, and borders move to those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DECODE_ROWS, PROMPT_ROWS = 16, 128
FLOORS = (128, 256)
FOLD, ITEM_COST = 1024, 64
BEFORE, BEHIND = -1, 2**31 - 1


@dataclass
class Tile:
    """Queries of a sequence, and the keys that any of them attends to."""

    sequence: int
    query_begin: int
    query_count: int
    key_begin: int
    key_end: int
    is_alone: bool

    @property
    def cost(self) -> int:
        return self.key_end - self.key_begin + ITEM_COST


def attended(position: int, length: int, causal: bool, window: Any, chunk: int | None = None) -> range:
    """Return the keys that a query attends to, but for sinks."""
    left, right = (None, None) if window is None else window if isinstance(window, tuple) else (window - 1, None)
    left, right = (-1 if side is None else side for side in (left, right))
    right = 0 if causal else right
    begin = 0 if left < 0 else min(max(position - left, 0), length)
    end = length if right < 0 else position + right + 1
    if chunk is not None:
        begin = min(max(position, 0) // chunk * chunk, length)
        end = min(end, begin + chunk if position >= 0 else 0)
    return range(begin, min(max(end, begin), length))


def tiles_of(
    cu: list[int], lens: list[int], section: int, group: int, invariant: bool, keys: Any, sinks: int
) -> list[Tile]:
    size = max(1, (DECODE_ROWS, PROMPT_ROWS)[section] // group)
    tiles = []
    for i, length in enumerate(lens):
        first, end = cu[i], cu[i + 1]
        is_decode = not invariant and (end - first) * group <= DECODE_ROWS
        for begin in range(first, end, size) if is_decode == (section == 0) else ():
            count, position = min(size, end - begin), length - (end - begin)
            key_begin = max(keys(position, length).start, min(sinks, length))
            key_end = max(keys(position + count - 1, length).stop, key_begin)
            tiles.append(Tile(i, begin, count, key_begin, key_end, count == end - first))
    return tiles


def cut(tile: Tile, into: int, unit: int, least: int) -> int:
    """Return the key that a border inside a tile cuts at."""
    low = -(-(tile.key_begin + least) // unit) * unit
    high = max(tile.key_end - least, 0) // unit * unit
    if low > high:
        return BEFORE if 2 * into < tile.cost else BEHIND
    key = tile.key_begin + into - ITEM_COST
    if 2 * key < tile.key_begin + low:
        return BEFORE
    if 2 * key >= high + tile.key_end:
        return BEHIND
    return min(max((key + unit // 2) // unit * unit, low), high)


def folds_of(tile: Tile, always: bool) -> list[int]:
    """Return the keys at which a batch-invariant plan cuts a tile."""
    if not (tile.is_alone or always):
        return []
    return list(range((tile.key_begin // FOLD + 1) * FOLD, tile.key_end, FOLD))


def plan_section(
    tiles: list[Tile], num_workers: int, floor: int, invariant: bool, num_rows: int, sinks: int
) -> tuple[Any, Any]:
    """Return the items of a section, as in PcWorkItem, and the first item of each worker.

    With sinks, the first item of each tile has them, and every tile has partial rows.
    """
    extra = int(sinks > 0)
    total = sum(tile.cost for tile in tiles)
    items: list[list[int]] = []
    first_item: list[int] = []
    cost = rows = 0
    for tile in tiles:
        # Borders whose cost lies in the tile.
        borders = [w * total // num_workers - cost for w in range(num_workers)]
        borders = [into for into in borders if 0 <= into < tile.cost]
        cost += tile.cost
        if invariant:
            cuts = folds_of(tile, sinks > 0)
            own = (len(cuts) + 1) * tile.query_count if cuts else 0
            fits = sinks > 0 or rows + own <= num_rows
            cuts = cuts if fits else []
            keys = [cut(tile, into, FOLD, 1 if cuts else BEHIND) for into in borders]
        else:
            keys = [cut(tile, into, floor, floor // 2) for into in borders]
            cuts = sorted({key for key in keys if key not in (BEFORE, BEHIND)})
            own = (len(cuts) + 1) * tile.query_count if cuts else 0
        ends = [*cuts, tile.key_end]
        for key in keys:
            passed = len(ends) if key == BEHIND else sum(end <= key for end in cuts)
            first_item.append(len(items) + passed + extra * (key > tile.key_begin))
        ranges = list(zip([tile.key_begin, *cuts], ends, strict=True))
        if extra:
            ranges = [(0, min(sinks, tile.key_end)), *ranges]
            own = len(ranges) * tile.query_count
        for split, (begin, end) in enumerate(ranges):
            partial = rows + split * tile.query_count if len(ranges) > 1 else -1
            place = [tile.sequence, tile.query_begin, tile.query_count, begin, end]
            items.append([*place, partial, split, len(ranges)])
        rows += own
    first_item += [len(items)] * (num_workers + 1 - len(first_item))
    return items, first_item


def plan(
    cu: Any,
    lens: Any,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    causal: bool = True,
    window: Any = None,
    chunk: int | None = None,
    sink_tokens: int = 0,
    batch_invariant: bool = False,
    num_workers: tuple[int, int],
) -> list[tuple[Any, Any]]:
    """Return items and first items of decode and of prompts, for the given numbers of workers."""
    group = num_query_heads // num_kv_heads
    cu = list(range(len(lens) + 1)) if cu is None else list(cu)
    sizes = [max(1, rows // group) for rows in (DECODE_ROWS, PROMPT_ROWS)]
    num_rows = max(3 * workers * size for workers, size in zip(num_workers, sizes, strict=True))
    sections = []
    for section in range(2):
        keys = lambda at, length: attended(at, length, causal, window, chunk)  # noqa: E731
        tiles = tiles_of(cu, list(lens), section, group, batch_invariant, keys, sink_tokens)
        workers, floor = num_workers[section], FLOORS[section]
        sections.append(plan_section(tiles, workers, floor, batch_invariant, num_rows, sink_tokens))
    return sections
