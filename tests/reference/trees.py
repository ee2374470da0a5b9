"""Trees of new tokens in plain Python: rows of bits, depths, paths, and what each token of a tree attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def ancestors(parents: Sequence[int], token: int) -> list[int]:
    """Return the tokens of the path that ends with `token`, from one without a parent on."""
    path = [token]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def bits_of(parents: Sequence[int]) -> list[int]:
    """Return the row of bits of each token, as an integer of any size."""
    return [sum(1 << at for at in ancestors(parents, token)) for token in range(len(parents))]


def depths_of(parents: Sequence[int]) -> list[int]:
    return [len(ancestors(parents, token)) - 1 for token in range(len(parents))]


def words_of(bits: Sequence[int], words: int) -> NDArray[np.uint64]:
    """Return rows of bits as uint64 ``[n, words]``."""
    rows = [[row >> 64 * word & (1 << 64) - 1 for word in range(words)] for row in bits]
    return np.array(rows, np.uint64).reshape(len(bits), words)


def random_parents(rng: np.random.Generator, count: int, *, branching: float = 0.5) -> list[int]:
    """Return the parents of a random tree: each token continues the last one, or starts a branch anywhere."""
    starts = [int(rng.integers(-1, token)) if token else -1 for token in range(count)]
    return [token - 1 if token and rng.random() > branching else start for token, start in enumerate(starts)]


def random_path(rng: np.random.Generator, parents: Sequence[int]) -> list[int]:
    """Return a path from a token without a parent to one of its descendants; may be empty."""
    if not parents or rng.random() < 0.1:
        return []
    return ancestors(parents, int(rng.integers(len(parents))))


def tree_view(
    bits: ArrayLike,
    /,
    seq_len: int,
    *,
    positions: ArrayLike | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    **_: Any,
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
    """Return what the new tokens of one sequence attend to, the position of each key for each, and their positions.

    Parameters
    ----------
    bits : uint64, [n, words]
    """
    words = np.asarray(bits, np.uint64)
    count, base = len(words), seq_len - len(words)
    attended = np.zeros((count, seq_len), bool)
    keys = np.tile(np.arange(seq_len), (count, 1))
    own = np.zeros(count, np.int64)
    left = window[0] if isinstance(window, tuple) else None if window is None else window - 1
    for token in range(count):
        row = sum(int(word) << 64 * i for i, word in enumerate(words[token]))
        path = [i for i in range(count) if row >> i & 1]
        own[token] = base + len(path) - 1 if positions is None else np.asarray(positions)[token]
        attended[token, :base] = True
        for distance, at in enumerate(reversed(path)):
            attended[token, base + at] = True
            keys[token, base + at] = own[token] - distance
        if left is not None and left != -1:
            attended[token] &= keys[token] >= own[token] - left
        if chunk is not None:
            attended[token] &= keys[token] // chunk == own[token] // chunk
    return attended, keys, own
