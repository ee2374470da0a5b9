"""The prompt of `model.generate`: its ids, mask and rows, as far as a paged cache must know them before it runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagecore.interop.transformers.inputs import Ids, Mask, read_ids, read_mask, says_more_than_ids

# Ways to generate that give the model the whole prompt in their first pass, whatever the cache holds.
_WHOLE_PROMPT = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")


@dataclass(frozen=True)
class Prompt:
    """What a call of `generate` begins with.

    Attributes
    ----------
    ids : Ids or None
        ``[batch, columns]``; None where the call gives embeddings, or nothing.
    is_token : Mask or None
        ``[batch, columns]``: which ids are tokens, and not padding. None where `ids` is.
    columns : int
        Columns of ids or embeddings.
    num_rows : int
        Rows of the forward passes: each prompt is repeated for its beams or answers.
    is_reusable : bool
        Keys follow from the ids alone, so that a prefix may come from other prompts.
    is_whole : bool
        The first forward pass gets all columns.
    """

    ids: Ids | None
    is_token: Mask | None
    columns: int
    num_rows: int
    is_reusable: bool
    is_whole: bool


def read_prompt(model: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Prompt | None:
    """Read the arguments of ``model.generate``; None where they give new tokens alone, behind a mask of all columns."""
    embeddings, given = options.get("inputs_embeds"), options.get("input_ids")
    if given is None:
        given = arguments[0] if arguments else options.get("inputs")
    whole = any(_option(model, options, name) is not None for name in _WHOLE_PROMPT)
    repeats = max(_option(model, options, name) or 1 for name in ("num_beams", "num_return_sequences"))
    if embeddings is not None or given is None:
        batch, columns = (1, 1) if embeddings is None else embeddings.shape[:2]
        return Prompt(None, None, columns, batch * repeats, False, whole)
    ids, mask = read_ids(given), options.get("attention_mask")
    if mask is not None and getattr(mask, "ndim", None) == 2 and mask.shape[1] != ids.shape[1]:
        return None
    is_token = (
        _inferred_mask(model, ids, options)
        if mask is None
        else read_mask(mask, len(ids), ids.shape[1], "as input_ids is")
    )
    named = inspect.signature(model.forward).parameters
    others = {name: value for name, value in options.items() if name in named and name != "labels"}
    reusable = "position_ids" not in others and not says_more_than_ids(others)
    return Prompt(ids, is_token, ids.shape[1], len(ids) * repeats, reusable, whole)


def as_attention_mask(prompt: Prompt, example: torch.Tensor) -> torch.Tensor:
    """Return the mask of a prompt as `generate` takes it, on the device of `example`."""
    return torch.from_numpy(np.asarray(prompt.is_token, np.int64)).to(example.device)


def _inferred_mask(model: Any, ids: Ids, options: Mapping[str, Any]) -> Mask:
    """Which ids `generate` takes for padding where it is given no mask."""
    pad, ends = (_option(model, options, name) for name in ("pad_token_id", "eos_token_id"))
    ends = ends if isinstance(ends, (list, tuple)) else [] if ends is None else [ends]
    if pad is None or int(pad) in {int(end) for end in ends}:
        return np.ones(ids.shape, np.bool_)
    is_token: Mask = ids != int(pad)
    return is_token


def _option(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """An option of `generate`: of the call, of the config in the call, or of the model's own config."""
    for place in (options, options.get("generation_config"), model.generation_config):
        value = place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)
        if value is not None:
            return value
    return None
