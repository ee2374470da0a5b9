"""Absorption of the key-value projection of latent attention: queries and outputs of the latent space."""

from __future__ import annotations

from typing import Any

import torch

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.interop.transformers.implementation import FLOATS
from pagecore.storage import LatentSpec


def check_latents(spec: LatentSpec, layer: int, latent: torch.Tensor, rope: torch.Tensor) -> None:
    """Raise ShapeError unless a layer stores latents of one head with the dims of its spec."""
    given = [(array.shape[1], array.shape[3]) for array in (latent, rope)]
    if given != [(1, spec.latent_dim), (1, spec.rope_dim)]:
        heads, dim, value_dim = given[0][0], given[0][1], given[1][1]
        raise ShapeError(
            f"layer {layer} stores {heads} heads of {dim} and {value_dim} numbers; its LatentSpec expects one of "
            f"{spec.latent_dim} and one of {spec.rope_dim}: for a model that stores expanded keys and values, make the "
            f"cache with layers=[AttentionSpec({heads}, {dim}, {value_dim}, scale=...), ...]"
        )


class Absorbed:
    """The projections of a layer's ``kv_b_proj``, for the queries and outputs of one call.

    Raises
    ------
    UnsupportedOption
        The projection is not a plain linear layer with float weights.
    ShapeError
        Its sizes do not match the spec, or those of the queries.
    """

    def __init__(self, module: torch.nn.Module, spec: LatentSpec, layer: int, query: torch.Tensor) -> None:
        weight = _weight(module, layer)
        heads, nope = query.shape[1], query.shape[3] - spec.rope_dim
        rows, columns = weight.shape
        if nope < 1 or columns != spec.latent_dim or rows % heads or rows <= heads * nope:
            raise ShapeError(
                f"layer {layer} has a kv_b_proj of {rows} x {columns} and queries of {heads} heads of {query.shape[3]} "
                f"numbers, but its spec has latent_dim {spec.latent_dim} and rope_dim {spec.rope_dim}; make the cache "
                "with specs that have the model's dims"
            )
        self._nope = nope
        # [heads, nope + v_head_dim, latent_dim]
        projections = weight.detach().view(heads, -1, spec.latent_dim)
        self._key, self._value = projections[:, :nope], projections[:, nope:]

    def query(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [tokens, heads, latent_dim] and [tokens, heads, rope_dim] of a query [tokens, heads, dim]."""
        nope, rope = query[..., : self._nope], query[..., self._nope :]
        return torch.einsum("thd,hdl->thl", nope, self._key), rope

    def value(self, attended: torch.Tensor) -> torch.Tensor:
        """Return values [tokens, heads, v_head_dim] of an output in the latent space [tokens, heads, latent_dim]."""
        return torch.einsum("thl,hvl->thv", attended, self._value)


def _weight(module: torch.nn.Module, layer: int) -> torch.Tensor:
    """Return the weight [heads * (nope + v_head_dim), latent_dim] of the layer's projection."""
    linear = getattr(module, "kv_b_proj", None)
    weight = getattr(linear, "weight", None)
    if weight is None or not _is_plain(linear) or weight.dtype not in FLOATS or weight.is_meta:
        kind = type(linear).__name__ if weight is None else f"{type(linear).__name__} of {weight.dtype}"
        raise UnsupportedOption(
            f"kv_b_proj of layer {layer} is a {kind}; latents are read through a plain linear layer without bias or "
            "hooks, in float32, float16 or bfloat16: merge adapters and dequantise the layer, or use another cache"
        )
    found: torch.Tensor = weight
    return found


def _is_plain(linear: Any) -> bool:
    """Return True for a linear layer whose output is its weight times the input, and nothing else."""
    if not isinstance(linear, torch.nn.Linear) or type(linear).forward is not torch.nn.Linear.forward:
        return False
    is_hooked = "forward" in vars(linear) or linear._forward_hooks or linear._forward_pre_hooks
    return linear.bias is None and not is_hooked
