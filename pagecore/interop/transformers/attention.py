"""The attention implementation "pagecore" of transformers: paged where a `PagedCache` runs, SDPA elsewhere.

A forward pass with a paged cache is known by what the cache hands out, so that other passes, on this thread or others,
are not touched: `Columns` in place of the length of its keys, and `StoredKeys` on the keys and values that it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from pagecore.errors import UnsupportedOption
from pagecore.interop.transformers.forward import Forward
from pagecore.interop.transformers.implementation import NAME

_STORED_KEYS = "_pagecore_stored_keys"
_REFUSAL = "_pagecore_refusal"
# Options of attention, beside those of `_attention`, by which models change what it gives.
_CHANGING = (
    *("position_bias", "head_mask", "sinks", "indices", "block_indices"),
    *("cu_seq_lens_q", "cu_seq_lens_k"),  # several texts in a row, each of which sees itself alone
)


def register() -> None:
    """Make "pagecore" known to transformers, for attention and for masks."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


class Columns(int):
    """How many columns a layer's mask would have, told by a paged cache, which masks by itself."""

    windows: frozenset[int | None]

    def __new__(cls, count: int, windows: Iterable[int | None]) -> Columns:
        """`windows` are those of the cache's layers, None for a layer without one."""
        columns = super().__new__(cls, count)
        columns.windows = frozenset(windows)
        return columns


@dataclass(frozen=True)
class StoredKeys:
    """Where the keys of a layer went."""

    forward: Forward
    layer: int


def mark_stored(key: torch.Tensor, value: torch.Tensor, stored: StoredKeys) -> None:
    """Let both say where they went: by an attribute, since models hand them on to their attention as they are."""
    setattr(key, _STORED_KEYS, stored)
    setattr(value, _STORED_KEYS, stored)


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
    """Outputs [batch, tokens, heads, dim] of queries [batch, heads, tokens, dim]; `PagedCache.update` has the keys."""
    stored: StoredKeys | None = getattr(key, _STORED_KEYS, None)
    if stored is None:
        served = {"softcap": softcap, "sinks (s_aux)": s_aux}
        for name, given in (served | {each: options.get(each) for each in ("sinks", "block_indices")}).items():
            if given is not None:
                remedy = "pass a PagedCache, or call" if name in served else "call"
                raise UnsupportedOption(
                    f"the model attends with {name}, and not to a PagedCache: attention {NAME!r} leaves that to SDPA, "
                    f'which has none; {remedy} model.set_attn_implementation("eager")'
                )
        attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return attended
    of_value: object = getattr(value, _STORED_KEYS, None)
    if of_value is not stored:
        _refuse("the model attends to values that it made of those in the cache", "use another cache")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        _refuse("is_causal is False", "choose another implementation for this model")
    if dropout:
        _refuse(f"dropout is {dropout}", "call model.eval()")
    if attention_mask is not None:
        if hasattr(attention_mask, _REFUSAL):
            raise UnsupportedOption(getattr(attention_mask, _REFUSAL))
        _refuse("attention_mask has a mask for every layer", "pass the padding mask [batch, columns] alone")
    for name in _CHANGING:
        if options.get(name) is not None:
            _refuse(f"{name} is given", "choose another implementation for this model")
    if options.get("output_attentions"):
        _refuse("output_attentions is set", 'call model.set_attn_implementation("eager") and use another cache')
    return stored.forward.attend(stored.layer, query, scaling, softcap or 0.0, sliding_window, s_aux), None


def _mask(*arguments: Any, **options: Any) -> torch.Tensor | None:
    """No mask where a paged cache knows which tokens are there; else what SDPA takes.

    Models lay masks of every window that their config speaks of, whether a layer has it or not: one that the cache does
    not know is refused where a layer attends with it.
    """
    columns = options.get("kv_length")
    if not isinstance(columns, Columns):
        mask: torch.Tensor | None = sdpa_mask(*arguments, **options)
        return mask
    window, rule = options.get("local_size"), options.get("mask_function", causal_mask_function)
    is_known = rule is causal_mask_function or window is not None
    if not is_known or options.get("use_vmap") or not options.get("allow_is_causal_skip", True):
        whose = "tokens that see later ones, as those of an image, or see their own chunk only"
        raise UnsupportedOption(_why_masks_are_refused(whose, columns))
    if window is None or window in columns.windows:
        return None
    refused = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    setattr(refused, _REFUSAL, _why_masks_are_refused(f"a window or a chunk of {window} keys", columns))
    return refused


def _why_masks_are_refused(whose: str, columns: Columns) -> str:
    return (
        f"the model lays a mask of its own over causality ({whose}); with a PagedCache attention {NAME!r} serves "
        "causal attention and the windows of the cache's layers, "
        f"{sorted(filter(None, columns.windows)) or 'which has none'}: make the cache with specs that have the model's "
        "windows, or use another"
    )


def _refuse(what: str, remedy: str) -> NoReturn:
    raise UnsupportedOption(f"{what}; with a PagedCache attention {NAME!r} does not serve it: {remedy}")
