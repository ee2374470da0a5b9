"""Checks of stores of blocks, and of the arguments that every store takes."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage.checks import shown
from pagecore.tiers.store import KEY_BYTES, BlockStore, Keys, Medium, Pieces

ALIGNMENT = 4096


def checked_store(name: str, store: Any) -> BlockStore:
    """Return a store.

    Raises
    ------
    UnsupportedOption
        Another object, a class of stores, a medium that no store has, or a store that is closed.
    """
    if isinstance(store, type) or not isinstance(store, BlockStore):
        raise UnsupportedOption(
            f"{name} is {shown(store)}; expected an object with the methods of BlockStore, such as a DiskStore"
        )
    if store.medium not in get_args(Medium):
        raise UnsupportedOption(
            f"{name} has medium {shown(store.medium)}; expected one of {', '.join(get_args(Medium))}"
        )
    if store.fileno() < 0:
        raise UnsupportedOption(f"{name}, {store.name}, is closed; open another one")
    return store


def checked_keys(keys: Any) -> Keys:
    """Return `keys` as a contiguous copy that later writes of the caller do not change.

    Raises
    ------
    ShapeError
        `keys` is not uint8 ``[n, 17]``.
    """
    if not (isinstance(keys, np.ndarray) and keys.dtype == np.uint8 and keys.ndim == 2 and keys.shape[1] == KEY_BYTES):
        raise ShapeError(
            f"expected keys as uint8 [n, {KEY_BYTES}], got {_described(keys)}; use the keys of pagecore.tiers.keys"
        )
    return np.array(keys, order="C", copy=True)


def checked_pieces(pieces: Any, num_keys: int) -> Pieces:
    """Return `pieces` as a contiguous copy.

    Raises
    ------
    ShapeError
        `pieces` is not uint64 ``[num_keys, 2]``, an address is zero or not a multiple of 4,096, or a piece is empty.
    """
    if not (isinstance(pieces, np.ndarray) and pieces.dtype == np.uint64 and pieces.shape == (num_keys, 2)):
        raise ShapeError(
            f"expected pieces as uint64 [{num_keys}, 2], one for each key, got {_described(pieces)}; "
            "use the pieces of HostPool"
        )
    copied = np.array(pieces, order="C", copy=True)
    wrong = (copied[:, 0] % ALIGNMENT != 0) | (copied == 0).any(axis=1)
    if wrong.any():
        index = int(wrong.argmax())
        raise ShapeError(
            f"pieces[{index}] is {int(copied[index, 1])} bytes at address {int(copied[index, 0]):#x}; expected "
            f"one byte or more at a multiple of {ALIGNMENT}; use the pieces of HostPool"
        )
    return copied


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
