"""Operators that write to caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagecore.interop.torch import registration
from pagecore.interop.torch.arguments import WRITE_ARRAYS, Scale, check_arguments, per_head_scale


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
    """Write new keys and values into paged caches: `pagecore.write_kv` as a torch operator.

    Parameters
    ----------
    key : Tensor, [T, Hkv, D]
    value : Tensor, [T, Hkv, Dv]
    key_cache : Tensor, [num_blocks, block_size, Hkv, D]
    value_cache : Tensor, [num_blocks, block_size, Hkv, Dv]
        Mutated. All tensors are on one device.
    slot_mapping : Tensor, integers [at most T]
        ``block * block_size + offset`` of each token; a negative slot writes nothing.
    key_scale, value_scale : float or Tensor [Hkv], optional
        Keys and values are divided by their scale before they are stored.

    Raises
    ------
    UnsupportedDtype
        An array is not a torch tensor.
    PagecoreError
        As `pagecore.write_kv`. Tracing a graph already raises for shapes, dtypes and devices.
    """
    if key_scale is None and value_scale is None:
        check_arguments(key, value, key_cache, value_cache, slot_mapping, names=WRITE_ARRAYS)
        registration.write_kv(key, value, key_cache, value_cache, slot_mapping)
        return
    scales = {"key_scale": per_head_scale(key_scale, key_cache), "value_scale": per_head_scale(value_scale, key_cache)}
    check_arguments(key, value, key_cache, value_cache, slot_mapping, options=scales, names=WRITE_ARRAYS)
    registration.write_kv(key, value, key_cache, value_cache, slot_mapping, **scales)


def copy_blocks(
    caches: torch.Tensor | Sequence[torch.Tensor], pairs: torch.Tensor, *, independent: bool = False
) -> None:
    """Copy blocks within caches: `pagecore.copy_blocks` as a torch operator.

    Parameters
    ----------
    caches : Tensor or sequence of Tensor, [num_blocks, ...]
        Mutated.
    pairs : Tensor, integers [n, 2]
        (source, target) block ids.
    independent : bool
        Promise that no block is a target twice, or both a source and a target.

    Raises
    ------
    UnsupportedDtype
        An array is not a torch tensor.
    PagecoreError
        As `pagecore.copy_blocks`.
    """
    listed = list(caches) if isinstance(caches, Sequence) else [caches]
    check_arguments(pairs, *listed, names="pairs caches")
    registration.copy_blocks(listed, pairs, independent=bool(independent))
