"""The attention implementation "pagecore" of transformers: paged where a `PagedCache` runs, SDPA elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from pagecore.errors import UnsupportedOption

if TYPE_CHECKING:
    from pagecore.interop.transformers.forward import Forward

NAME = "pagecore"
# How a key that `PagedCache.update` has stored says where it went: an attribute, since models hand it on as it is.
TICKET = "_pagecore_ticket"

# The forward passes under way with a paged cache, innermost last: an assistant's may run within another's.
_running: list[Forward] = []


def register() -> None:
    """Make "pagecore" known to transformers, for attention and for masks."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def enter(forward: Forward) -> None:
    """From now on masks are the business of a paged cache."""
    _running.append(forward)


def leave(forward: Forward) -> None:
    """Forget a forward pass, and those within it that failed."""
    if forward in _running:
        del _running[_running.index(forward) :]


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """[batch, heads, tokens, dim] queries to [batch, tokens, heads, dim]; keys are where `update` put them."""
    ticket = getattr(key, TICKET, None)
    if ticket is None:
        if softcap is not None:
            options["softcap"] = softcap
        if s_aux is not None:
            options["s_aux"] = s_aux
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    _refuse("dropout", dropout, dropout != 0.0, "call model.eval()")
    _refuse("attention_mask", "given", attention_mask is not None, "pass the padding mask [batch, tokens] alone")
    _refuse("position_bias", "given", options.get("position_bias") is not None, "use another implementation")
    forward, layer = ticket
    return forward.attend(layer, query, scaling, softcap or 0.0, sliding_window, s_aux), None


def _mask(*arguments: Any, **options: Any) -> torch.Tensor | None:
    """No mask where a paged cache knows which tokens are there; else what SDPA takes."""
    if not _running:
        mask: torch.Tensor | None = sdpa_mask(*arguments, **options)
        return mask
    if options.get("use_vmap"):
        raise UnsupportedOption(
            "the model lays a mask of its own over causality (tokens that see later ones, such as those of an image); "
            f"attention {NAME!r} serves causal and windowed attention: choose another attn_implementation for it"
        )
    return None


def _refuse(name: str, value: object, is_given: bool, remedy: str) -> None:
    if is_given:
        raise UnsupportedOption(f"{name} is {value}; attention {NAME!r} does not serve it: {remedy}")
