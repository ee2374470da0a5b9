"""The prompt of a call of ``model.generate``, read before the model runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagecore.interop.transformers.inputs.arguments import (
    Ids,
    Mask,
    check_tensor,
    embedded_columns,
    needs_more_than_ids,
    read_ids,
    read_mask,
)

# Modes of generation whose first pass gets the whole prompt, regardless of the columns in the cache.
_WHOLE_PROMPT = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")


@dataclass(frozen=True)
class Prompt:
    """The prompt of a call of `generate`.

    Attributes
    ----------
    ids : Ids or None
        ``[batch, columns]``; None if the call has embeddings, or no prompt.
    is_token : Mask or None
        ``[batch, columns]``: True for tokens, False for padding. None if `ids` is None.
    columns : int
        Number of columns of the ids or embeddings.
    num_rows : int
        Number of rows of the forward passes: each prompt is repeated for its beams or answers.
    is_reusable : bool
        The keys only depend on the ids, so a prefix may come from another prompt.
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
    """Read the arguments of ``model.generate``; None if `input_ids` only has the new tokens and the mask has more."""
    embeddings, given = options.get("inputs_embeds"), options.get("input_ids")
    if given is None:
        given = arguments[0] if arguments else options.get("inputs")
    whole = any(_option(model, options, name) is not None for name in _WHOLE_PROMPT)
    repeats = max(_option(model, options, name) or 1 for name in ("num_beams", "num_return_sequences"))
    if embeddings is not None or given is None:
        batch, columns = (1, 1) if embeddings is None else embedded_columns(embeddings)
        return Prompt(None, None, columns, batch * repeats, False, whole)
    ids, mask = read_ids(given), options.get("attention_mask")
    if mask is not None:
        check_tensor(mask, "attention_mask", "[batch, columns]")
        if mask.ndim == 2 and mask.shape[1] != ids.shape[1]:
            return None
    is_token = (
        _inferred_mask(model, ids, options)
        if mask is None
        else read_mask(mask, len(ids), ids.shape[1], "as input_ids is")
    )
    named = inspect.signature(model.forward).parameters
    others = {name: value for name, value in options.items() if name in named and name != "labels"}
    reusable = "position_ids" not in others and not needs_more_than_ids(others)
    return Prompt(ids, is_token, ids.shape[1], len(ids) * repeats, reusable, whole)


def as_attention_mask(prompt: Prompt, example: torch.Tensor) -> torch.Tensor:
    """Return the mask of a prompt as the argument of `generate`, on the device of `example`."""
    return torch.from_numpy(np.asarray(prompt.is_token, np.int64)).to(example.device)


def _inferred_mask(model: Any, ids: Ids, options: Mapping[str, Any]) -> Mask:
    """Return the mask that `generate` infers from the padding token if it gets no mask."""
    pad, ends = (_option(model, options, name) for name in ("pad_token_id", "eos_token_id"))
    ends = ends if isinstance(ends, (list, tuple)) else [] if ends is None else [ends]
    if pad is None or int(pad) in {int(end) for end in ends}:
        return np.ones(ids.shape, np.bool_)
    is_token: Mask = ids != int(pad)
    return is_token


def _option(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """Return an option of `generate`: from the call, else from the call's config, else from the model's config."""
    for source in (options, options.get("generation_config"), model.generation_config):
        value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
        if value is not None:
            return value
    return None
