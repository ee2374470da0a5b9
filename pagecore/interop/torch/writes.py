"""Operators that write to caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagecore.errors import UnsupportedOption, shown
from pagecore.interop.torch import registration
from pagecore.interop.torch.arguments import (
    SEALED_PLANES,
    WRITE_ARRAYS,
    Scale,
    check_arguments,
    is_plane,
    per_head_scale,
    refuse_stream,
)
from pagecore.ops import SealedBlocks


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: Scale = None,
    value_scale: Scale = None,
    **options: Any,
) -> None:
    """Write new keys and values into paged caches: `pagecore.write_kv` as a torch operator.

    Parameters
    ----------
    key : Tensor, [T, Hkv, D]
    value : Tensor, [T, Hkv, Dv]
    key_cache : Tensor, [num_blocks, block_size, Hkv, D]
    value_cache : Tensor, [num_blocks, block_size, Hkv, Dv]
        Mutated. Numbers, or the codes of a format. All tensors are on one device.
    slot_mapping : Tensor, integers [at most T]
        ``block * block_size + offset`` of each token; a negative slot writes nothing.
    key_scale, value_scale : float, Tensor [Hkv] or Tensor [num_blocks, block_size, Hkv, groups], optional
        A given factor, by which keys or values are divided; or the plane of the scales of a format, which is mutated.
        The operator itself takes such a plane as `key_scale_cache` or `value_scale_cache`.
    **options
        The other options of `pagecore.write_kv`, except `stream`: `key_global_scale`, `value_global_scale`, `format`,
        and `key_min`, `key_max` and `label`, which are mutated.

    Raises
    ------
    UnsupportedDtype
        An array is not a torch tensor.
    PagecoreError
        As `pagecore.write_kv`. Tracing a graph already raises for shapes, dtypes and devices.
    """
    refuse_stream(options)
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None:
            options[f"{name}_cache" if is_plane(scale) else name] = per_head_scale(name, scale, key_cache)
    check_arguments(key, value, key_cache, value_cache, slot_mapping, options=options, names=WRITE_ARRAYS)
    registration.write_kv(key, value, key_cache, value_cache, slot_mapping, **options)


def seal_kv(key_cache: torch.Tensor, value_cache: torch.Tensor, sealed: SealedBlocks, pairs: torch.Tensor) -> None:
    """Quantise whole blocks of keys and values to sealed blocks: `pagecore.seal_kv` as a torch operator.

    Parameters
    ----------
    key_cache, value_cache : Tensor, [num_blocks, block_size, Hkv, D] and [num_blocks, block_size, Hkv, Dv]
        Plain caches of the newest tokens. All tensors are on one device, except that `pairs` may be on the host.
    sealed : SealedBlocks
        Of tensors, the first four of which are mutated.
    pairs : Tensor, integers [n, 2]
        (block of the plain caches, sealed block).

    Raises
    ------
    UnsupportedDtype
        An array is not a torch tensor.
    PagecoreError
        As `pagecore.seal_kv`. Block 0 is the null block.
    """
    arrays = (key_cache, value_cache, *_planes_of(sealed), pairs)
    check_arguments(*arrays, names=" ".join(("key_cache value_cache", *SEALED_PLANES, "pairs")))
    registration.seal_kv(*arrays)


def unseal_kv(sealed: SealedBlocks, key_cache: torch.Tensor, value_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """Write the numbers of sealed blocks to blocks of plain caches: `pagecore.unseal_kv` as a torch operator.

    Parameters
    ----------
    sealed : SealedBlocks
        Of tensors. All tensors are on one device, except that `pairs` may be on the host.
    key_cache, value_cache : Tensor, [num_blocks, block_size, Hkv, D] and [num_blocks, block_size, Hkv, Dv]
        Plain caches: float32, float16 or bfloat16. Mutated.
    pairs : Tensor, integers [n, 2]
        (sealed block, block of the plain caches).

    Raises
    ------
    UnsupportedDtype
        An array is not a torch tensor.
    PagecoreError
        As `pagecore.unseal_kv`. Block 0 is the null block.
    """
    arrays = (*_planes_of(sealed), key_cache, value_cache, pairs)
    check_arguments(*arrays, names=" ".join((*SEALED_PLANES, "key_cache value_cache pairs")))
    registration.unseal_kv(*arrays)


def _planes_of(sealed: object) -> tuple[Any, ...]:
    """Return codes and scales; raise UnsupportedOption unless `sealed` is a SealedBlocks."""
    if not isinstance(sealed, SealedBlocks):
        raise UnsupportedOption(f"sealed is {shown(sealed)}; pass a SealedBlocks")
    return sealed[: len(SEALED_PLANES)]


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
