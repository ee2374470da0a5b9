"""Operators that write to caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagecore.interop.torch import registration
from pagecore.interop.torch.arguments import WRITTEN, Scale, check_arguments, each_head


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: Scale = None,
    value_scale: Scale = None,
) -> None:
    """`pagecore.write_kv` as a torch operator; all arrays are torch tensors of one device, the caches are mutated.

    Raises
    ------
    UnsupportedDtype
        What is no torch tensor.
    As `pagecore.write_kv`; while a graph is traced, what does not fit is refused then.
    """
    if key_scale is None and value_scale is None:
        check_arguments(key, value, key_cache, value_cache, slot_mapping, names=WRITTEN)
        registration.write_kv(key, value, key_cache, value_cache, slot_mapping)
        return
    scales = {"key_scale": each_head(key_scale, key_cache), "value_scale": each_head(value_scale, key_cache)}
    check_arguments(key, value, key_cache, value_cache, slot_mapping, options=scales, names=WRITTEN)
    registration.write_kv(key, value, key_cache, value_cache, slot_mapping, **scales)


def copy_blocks(
    caches: torch.Tensor | Sequence[torch.Tensor], pairs: torch.Tensor, *, independent: bool = False
) -> None:
    """`pagecore.copy_blocks` as a torch operator; the caches are mutated."""
    listed = list(caches) if isinstance(caches, Sequence) else [caches]
    check_arguments(pairs, *listed, names="pairs caches")
    registration.copy_blocks(listed, pairs, independent=bool(independent))
