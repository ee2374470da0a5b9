"""Latent attention of DeepSeek models: marks that follow the latents, and the projections that are absorbed.

transformers passes latents to the cache, expands what the cache returns to keys and values of all heads, and passes
these to the attention function. With a paged cache the function only needs to know where the latents are stored, so the
tensors that the cache returns carry a mark through the expansion.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pagecore.errors import UnsupportedOption

STORED = "_pagecore_stored_keys"


class StoredLatents(torch.Tensor):  # type: ignore[misc]
    """Latents of a forward pass that are stored in a paged cache; every tensor computed from them has their mark."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as usual, and mark the results."""
        result = super().__torch_function__(func, types, args, kwargs or {})
        stored = next((found for each in args if (found := _mark(each)) is not None), None)
        if stored is not None:
            for each in result if isinstance(result, tuple | list) else (result,):
                if isinstance(each, torch.Tensor):
                    setattr(each, STORED, stored)
        return result


def _mark(argument: Any) -> Any:
    if isinstance(argument, tuple | list):
        return next((found for each in argument if (found := _mark(each)) is not None), None)
    return getattr(argument, "__dict__", {}).get(STORED) if isinstance(argument, StoredLatents) else None


def stored_latents(tensors: Iterable[torch.Tensor], stored: object) -> tuple[torch.Tensor, ...]:
    """Return views of the tensors that carry the mark `stored`."""
    views = tuple(tensor.as_subclass(StoredLatents) for tensor in tensors)
    for view in views:
        setattr(view, STORED, stored)
    return views


def projections(
    module: torch.nn.Module, heads: int, latent_dim: int, nope_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the up-projections of keys ``[heads, nope_dim, latent_dim]`` and values ``[heads, v_dim, latent_dim]``.

    Raises
    ------
    UnsupportedOption
        The module has no plain linear layer ``kv_b_proj`` without bias, for example because an adapter or a
        quantisation has replaced it.
    """
    linear: Any = getattr(module, "kv_b_proj", None)
    if type(linear) is not torch.nn.Linear or linear.bias is not None:
        raise UnsupportedOption(
            f"kv_b_proj of the {type(module).__name__} is a {type(linear).__name__}; a PagedCache absorbs a "
            "torch.nn.Linear without bias: merge adapters, or use another cache"
        )
    weight = linear.weight.view(heads, -1, latent_dim)
    return weight[:, :nope_dim], weight[:, nope_dim:]
