"""The attention implementation "pagecore" of transformers: paged attention with a `PagedCache`, SDPA otherwise.

A forward pass with a paged cache is recognised by objects of the cache, not by global state: `Columns` as the number of
keys, and `StoredKeys` attached to keys and values. Other passes, on this thread or another, are not affected.
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
from pagecore.interop.transformers.implementation import NAME
from pagecore.interop.transformers.passes.forward import Forward

_STORED_KEYS = "_pagecore_stored_keys"
_REFUSAL = "_pagecore_refusal"
# Further options that change the result of attention in some models; paged attention does not implement them.
_UNSUPPORTED = (
    *("head_mask", "sinks", "indices", "block_indices"),
    *("cu_seq_lens_q", "cu_seq_lens_k"),  # several texts packed into one row, each attending only to itself
)


def register() -> None:
    """Register "pagecore" with transformers, for attention and for masks."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


class Columns(int):
    """The number of columns of a layer's mask, marked as that of a paged cache, which applies masks itself."""

    limits: frozenset[int | None]
    made: set[int | None]

    def __new__(cls, count: int, limits: Iterable[int | None], made: set[int | None]) -> Columns:
        """Make a number that knows the windows and chunks of the cache's layers; None for a layer without.

        The limit of each mask that the model makes is added to `made`.
        """
        columns = super().__new__(cls, count)
        columns.limits, columns.made = frozenset(limits), made
        return columns


@dataclass(frozen=True)
class StoredKeys:
    """The forward pass and the layer that keys and values were stored for.

    `is_cross` is True for keys of an encoder, and `takes_bias` if the layer can add a bias to its scores.
    """

    forward: Forward
    layer: int
    is_cross: bool = False
    takes_bias: bool = False


def mark_stored(key: torch.Tensor, value: torch.Tensor, stored: StoredKeys) -> None:
    """Attach `stored` to both tensors; models pass them on to their attention unchanged."""
    setattr(key, _STORED_KEYS, stored)
    setattr(value, _STORED_KEYS, stored)


def stored_keys(key: torch.Tensor) -> StoredKeys | None:
    """Return what `mark_stored` attached to a tensor, or None."""
    stored: StoredKeys | None = getattr(key, _STORED_KEYS, None)
    return stored


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return outputs [batch, tokens, heads, dim] of queries [batch, heads, tokens, dim] over keys in the cache."""
    # A model that does not pass sliding_window leaves the window of a layer to its masks.
    window_of_module = None if "sliding_window" in options else getattr(module, "sliding_window", None)
    window: int | None = options.pop("sliding_window", None)
    stored = stored_keys(key)
    if stored is None:
        served = {"softcap": softcap, "sinks (s_aux)": s_aux}
        for name, given in (served | {each: options.get(each) for each in ("sinks", "block_indices")}).items():
            if given is not None:
                remedy = "pass a PagedCache, or call" if name in served else "call"
                raise UnsupportedOption(
                    f"the model attends with {name} and without a PagedCache; attention {NAME!r} uses SDPA then, which "
                    f'does not support {name}: {remedy} model.set_attn_implementation("eager")'
                )
        attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return attended
    of_value: object = getattr(value, _STORED_KEYS, None)
    if of_value is not stored:
        _refuse("the model attends to values that it computed from the cached values", "use another cache")
    bias = options.pop("position_bias", None)
    if bias is not None and not (stored.is_cross or stored.takes_bias):
        _refuse("position_bias is given", "choose another implementation for this model")
    if stored.is_cross:
        if getattr(module, "has_relative_attention_bias", False):
            _refuse("cross attention has a position_bias", "choose another implementation for this model")
        # Encoder padding is not in the cache, so the mask has nothing to hide; a bias of zeros changes nothing.
        attention_mask = None
    causal = True if stored.is_cross else options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        _refuse("is_causal is False", "choose another implementation for this model")
    if dropout:
        _refuse(f"dropout is {dropout}", "call model.eval()")
    if attention_mask is not None:
        if hasattr(attention_mask, _REFUSAL):
            raise UnsupportedOption(getattr(attention_mask, _REFUSAL))
        _refuse("attention_mask has a mask for every layer", "pass only the padding mask [batch, columns]")
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            _refuse(f"{name} is given", "choose another implementation for this model")
    if options.get("output_attentions"):
        _refuse("output_attentions is set", 'call model.set_attn_implementation("eager") and use another cache')
    if bias is not None and not stored.is_cross:
        if softcap or s_aux is not None or window is not None:
            _refuse("position_bias is given with a window, sinks or a softcap", "choose another implementation")
        return stored.forward.attend_biased(stored.layer, query, scaling, bias), None
    return (
        stored.forward.attend(
            stored.layer, module, query, scaling, softcap or 0.0, window, s_aux, window_of_module=window_of_module
        ),
        None,
    )


def _mask(*arguments: Any, **options: Any) -> torch.Tensor | None:
    """Return None with a paged cache, which applies masks itself; otherwise the mask for SDPA.

    Models make masks for every window in their config, even for a window that no layer has. A mask with a window that
    the cache does not have raises only when a layer attends with it.
    """
    columns = options.get("kv_length")
    if not isinstance(columns, Columns):
        mask: torch.Tensor | None = sdpa_mask(*arguments, **options)
        return mask
    window, rule = options.get("local_size"), options.get("mask_function", causal_mask_function)
    # Forward.attend compares the kind, window or chunk, with the spec of the layer.
    is_known = rule is causal_mask_function or window is not None
    if not is_known or options.get("use_vmap") or not options.get("allow_is_causal_skip", True):
        kind = "tokens that attend to later ones, such as those of an image"
        raise UnsupportedOption(_mask_refusal(kind, columns))
    columns.made.add(window)
    if window is None or window in columns.limits:
        return None
    refused = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    setattr(refused, _REFUSAL, _mask_refusal(f"a window or a chunk of {window} keys", columns))
    return refused


def _mask_refusal(rule: str, columns: Columns) -> str:
    limits = sorted(filter(None, columns.limits)) or "none"
    return (
        f"the model uses a mask of its own on top of causality ({rule}); with a PagedCache attention {NAME!r} serves "
        f"causal attention and the windows and chunks of the cache's layers ({limits}): make the cache with specs that "
        "have the model's windows and chunks, or use another cache"
    )


def _refuse(what: str, remedy: str) -> NoReturn:
    raise UnsupportedOption(f"{what}; with a PagedCache attention {NAME!r} does not support it: {remedy}")
