"""Arguments of a model's forward pass, read on the host for a paged cache."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationMixin

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption

Mask = NDArray[np.bool_]
Ids = NDArray[np.int64]

# Names of the cache: "cache" since transformers 5.24; before, "cache_params" in Mamba's models and "past_key_values".
CACHES = ("cache", "past_key_values", "cache_params")
CACHE = next(
    name for name in CACHES if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
# Arguments that do not make the keys of a token depend on more than its id and position.
_NEUTRAL = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "cache_position",
    *CACHES,
    "logits_to_keep",
    "num_logits_to_keep",
}


def cache_in(given: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call; None without one."""
    return next((given[name] for name in CACHES if given.get(name) is not None), None)


@dataclass(frozen=True)
class Inputs:
    """The new columns of a forward pass.

    Attributes
    ----------
    is_token : Mask
        ``[batch, columns]``: True for tokens, False for padding.
    past : Mask or None
        ``[batch, past columns]``: the mask of the columns before them; None if the pass has no mask.
    ids : Ids or None
        ``[batch, columns]``; None if the keys depend on more than ids, such as embeddings or images.
    given_ids : Ids or None
        ``[batch, columns]``: the argument `input_ids`, even where `ids` is None.
    positions : Ids or None
        ``[batch or 1, columns]``; None if the model counts columns itself.
    """

    is_token: Mask
    past: Mask | None
    ids: Ids | None
    given_ids: Ids | None
    positions: Ids | None

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.is_token)

    @property
    def columns(self) -> int:
        """Number of new columns."""
        return int(self.is_token.shape[1])


def read_inputs(given: Mapping[str, Any], num_past: int) -> Inputs:
    """Read the arguments of a model's forward, by name; `num_past` columns are already computed."""
    tokens: Any = given.get("input_ids")
    embeddings: Any = given.get("inputs_embeds")
    if tokens is None and embeddings is None:
        raise UnsupportedOption("the forward pass has neither input_ids nor inputs_embeds; pass one of them")
    ids = None if tokens is None else read_ids(tokens)
    batch, columns = embedded_columns(embeddings) if ids is None else ids.shape
    if columns == 0:
        raise ShapeError(
            f"the forward pass has no new columns: the cache already holds all {num_past} columns of the prompt; call "
            "crop(), or end the generation with reset() or begin()"
        )
    past, is_token = _read_masks(given.get("attention_mask"), batch, columns, num_past)
    known = None if needs_more_than_ids(given) else ids
    return Inputs(is_token, past, known, ids, _read_positions(given.get("position_ids"), columns))


def needs_more_than_ids(given: Mapping[str, Any]) -> bool:
    """Return True if an argument of a model's forward may make keys depend on more than token ids."""
    return any(_affects_keys(name, value) for name, value in given.items())


def read_ids(ids: torch.Tensor) -> Ids:
    """Return token ids ``[batch, columns]`` as an array on the host."""
    if _num_axes(ids) != 2:
        raise ShapeError(f"input_ids is {_described(ids)}; it must be [batch, columns]")
    return read_integers(ids, "input_ids", "[batch, columns]")


def embedded_columns(embeddings: Any) -> tuple[int, int]:
    """Return the rows and columns of embeddings ``[batch, columns, dim]``."""
    check_tensor(embeddings, "inputs_embeds", "[batch, columns, dim]")
    if embeddings.ndim != 3:
        raise ShapeError(f"inputs_embeds is {_described(embeddings)}; it must be [batch, columns, dim]")
    return embeddings.shape[0], embeddings.shape[1]


def check_tensor(array: object, name: str, axes: str) -> None:
    """Raise UnsupportedDtype unless an array is a dense torch tensor."""
    if not isinstance(array, torch.Tensor):
        raise UnsupportedDtype(f"{name} is a {type(array).__name__}; it must be a torch tensor {axes}")
    if array.layout != torch.strided:
        raise UnsupportedDtype(f"{name} has the layout {array.layout}; pass {name}.to_dense()")


def read_integers(array: Any, name: str, axes: str) -> Ids:
    """Return a torch tensor of integers as an array on the host; raise UnsupportedDtype for other dtypes."""
    check_tensor(array, name, f"of integers {axes}")
    if array.is_floating_point() or array.is_complex() or array.dtype == torch.bool:
        raise UnsupportedDtype(f"{name} is {array.dtype}; it must be a torch tensor of integers {axes}")
    read: Ids = array.detach().cpu().numpy().astype(np.int64, copy=False)
    return read


def read_count(value: Any) -> int | None:
    """Return an integer, which may be an array without axes; None for anything else, truth values included."""
    try:
        number = operator.index(value)
        dtype = getattr(value, "dtype", None)
    except Exception:
        return None
    return None if isinstance(value, bool) or str(dtype).removeprefix("torch.") == "bool" else number


def read_mask(mask: torch.Tensor | None, batch: int, columns: int, why: str) -> Mask:
    """Return a padding mask ``[batch, columns]``, all True if `mask` is None; `why` explains the expected shape."""
    if mask is None:
        return np.ones((batch, columns), np.bool_)
    if _num_axes(mask) != 2:
        raise UnsupportedOption(
            f"attention_mask is {_described(mask)}; pass the padding mask [batch, columns]: a paged cache applies "
            "causality and windows itself"
        )
    if tuple(mask.shape) != (batch, columns):
        raise ShapeError(f"attention_mask has shape {tuple(mask.shape)}; it must be {(batch, columns)}: {why}")
    check_tensor(mask, "attention_mask", "[batch, columns], 0 where padding is")
    read: Mask = mask.detach().cpu().numpy() != 0
    return read


def _read_masks(mask: torch.Tensor | None, batch: int, columns: int, num_past: int) -> tuple[Mask | None, Mask]:
    if mask is None:
        return None, np.ones((batch, columns), np.bool_)
    why = (
        f"the cache holds {num_past} columns of this generation, and {columns} are new; to start another generation "
        "call reset() or begin()"
    )
    whole = read_mask(mask, batch, num_past + columns, why)
    return whole[:, :num_past], whole[:, num_past:]


def _read_positions(positions: torch.Tensor | None, columns: int) -> Ids | None:
    """Return positions; all -1, which equals no valid position, if a token has several positions."""
    if positions is None:
        return None
    read = read_integers(positions, "position_ids", "[batch, columns]")
    if read.shape[-1:] != (columns,):
        raise ShapeError(f"position_ids is {_described(positions)}; it must be [batch, columns] of {columns} columns")
    return read if read.ndim == 2 else np.full((1, columns), -1, np.int64)


def _affects_keys(name: str, value: Any) -> bool:
    """Return True for any argument but the neutral ones, None, numbers, and mappings of these."""
    if name in _NEUTRAL or value is None or isinstance(value, bool | int | float):
        return False
    return not isinstance(value, Mapping) or any(_affects_keys("", each) for each in value.values())


def _num_axes(array: object) -> Any:
    """Return the number of axes of an array; None for any other object, even one whose attributes raise."""
    try:
        return getattr(array, "ndim", None)
    except Exception:
        return None


def _described(value: object) -> str:
    return f"a {type(value).__name__}" if _num_axes(value) is None else f"of shape {tuple(getattr(value, 'shape', ()))}"
