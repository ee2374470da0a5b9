"""The tokens of a forward pass that the cache stores: those of rows that differ, without padding."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagecore.arrays import Tensor
from pagecore.errors import ShapeError
from pagecore.interop.transformers.inputs.arguments import Ids, Mask


class EqualRows:
    """The rows of a batch that are stored, where several are equal.

    Attributes
    ----------
    stored : ndarray of int
        The first row of each set of equal rows.
    index : ndarray of int
        For each row, the index in `stored` of the row that it equals.
    """

    def __init__(self, stored: list[int], index: list[int]) -> None:
        self.stored = np.asarray(stored, np.intp)
        self.index = np.asarray(index, np.intp)


def equal_rows(ids: Ids, is_token: Mask, digests: Listed[bytes] = ()) -> EqualRows | None:
    """Return the sets of equal rows; None if all differ. Rows whose encoder outputs have other digests differ."""
    known: dict[bytes, int] = {}
    stored: list[int] = []
    index: list[int] = []
    for row, tokens in enumerate(np.where(is_token, ids, -1)):
        output = digests[row] if digests else b""
        at = known.setdefault(output + tokens.tobytes(), len(stored))
        if at == len(stored):
            stored.append(row)
        index.append(at)
    return None if len(stored) == len(index) else EqualRows(stored, index)


class StoredTokens:
    """Conversion between the arrays of a model, which have all rows and columns, and the stored tokens.

    Parameters
    ----------
    is_token : Mask
        ``[rows, columns]``: True for tokens, False for padding.
    equal : EqualRows or None
        None if all rows are stored.
    device : torch.device
        Device of the model.
    """

    def __init__(self, is_token: Mask, equal: EqualRows | None, device: torch.device) -> None:
        self._shape = is_token.shape
        self._equal = equal
        self.is_token = self.rows_of(is_token)
        self._pick = None if equal is None else _on_device(equal.stored, device)
        self._repeat = None if equal is None else _on_device(equal.index, device)
        # Flat indices of tokens among the stored columns; None if all columns are tokens.
        self._indices = None if self.is_token.all() else _on_device(np.flatnonzero(self.is_token), device)

    @property
    def rows(self) -> NDArray[np.intp]:
        """The stored rows."""
        return np.arange(self._shape[0]) if self._equal is None else self._equal.stored

    @property
    def copies(self) -> list[int] | None:
        """For each row the index of its equal among the stored ones; None if all rows are stored."""
        return None if self._equal is None else self._equal.index.tolist()

    def rows_of(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the stored rows of an array that has all rows."""
        return array if self._equal is None else array[self._equal.stored]

    def spread(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return an array with all rows, of one with the stored rows."""
        return array if self._equal is None else array[self._equal.index]

    def at_rows(self, of_sequences: Tensor) -> NDArray[np.int64]:
        """Return numbers of sequences as numbers of the stored rows; 0 for the other rows."""
        numbers = np.zeros(self._shape[0], np.int64)
        numbers[self.rows] = np.from_dlpack(of_sequences)[: len(self.rows)]
        return numbers

    def check(self, array: torch.Tensor) -> None:
        """Raise ShapeError unless an array ``[rows, heads, columns, dim]`` has the rows and columns of the pass."""
        if array.ndim != 4 or (array.shape[0], array.shape[2]) != self._shape:
            raise ShapeError(
                f"a layer passed an array of shape {tuple(array.shape)}; expected [rows, heads, columns, dim] with "
                f"{self._shape[0]} rows of {self._shape[1]} columns"
            )

    def pick(self, array: torch.Tensor) -> torch.Tensor:
        """Return the stored rows of ``[rows, ...]``."""
        return array if self._pick is None else array[self._pick]

    def repeat(self, array: torch.Tensor) -> torch.Tensor:
        """Return all rows of ``[stored rows, ...]``; the inverse of `pick`."""
        return array if self._repeat is None else array[self._repeat]

    def pack(self, array: torch.Tensor) -> torch.Tensor:
        """Return the stored tokens ``[tokens, heads, dim]`` of ``[rows, heads, columns, dim]``."""
        packed = self.pick(array.transpose(1, 2))
        packed = packed.reshape(-1, *packed.shape[2:])
        return packed if self._indices is None else packed[self._indices]

    def unpack(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, columns, heads, dim]`` of stored tokens ``[tokens, heads, dim]``; 0 for padding."""
        rows, columns = self.is_token.shape
        if self._indices is not None:
            spread = tokens.new_zeros((rows * columns, *tokens.shape[1:]))
            spread[self._indices] = tokens
            tokens = spread
        return self.repeat(tokens.view(rows, columns, *tokens.shape[1:]))


def _on_device(array: NDArray[np.intp], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
