"""Self-attention with a bias for the relative position (T5), over keys that are gathered from the cache.

The kernels of `paged_attention` add no bias. Blocks, sharing and reordering are those of every other layer.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pagecore.cache import Batch, PagedKVCache
from pagecore.interop.transformers.inputs.arguments import Mask


def biased_attention(
    cache: PagedKVCache,
    layer: int,
    batch: Batch,
    query: torch.Tensor,
    bias: torch.Tensor,
    is_token: Mask,
    scale: float | None,
) -> torch.Tensor:
    """Return outputs [rows, columns, heads, dim] of the last columns of a batch's rows.

    Parameters
    ----------
    query : Tensor
        ``[rows, heads, columns, dim]``
    bias : Tensor
        ``[1, heads, columns, all columns]``, added to the scores.
    is_token : Mask
        ``[rows, all columns]``: True for tokens, False for padding.
    """
    columns, new = is_token.shape[1], query.shape[2]
    keys, values = (_by_column(cache, layer, name, batch, is_token, query.device) for name in ("key", "value"))
    first = columns - new
    position = np.arange(columns)
    seen = is_token[:, None, :] & (position[None, None, :] <= position[None, first:, None])
    allowed = torch.from_numpy(seen[:, None]).to(query.device)
    mask = torch.where(allowed, bias, torch.finfo(query.dtype).min).to(query.dtype)
    attended = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    padding = torch.from_numpy(~is_token[:, first:]).to(query.device)
    return attended.transpose(1, 2).masked_fill(padding[:, :, None, None], 0.0)


def _by_column(
    cache: PagedKVCache, layer: int, name: str, batch: Batch, is_token: Mask, device: torch.device
) -> torch.Tensor:
    """Return a plane's rows [rows, heads, all columns, dim]; columns of padding hold any token's."""
    plane = torch.from_dlpack(cache.plane(name, layer))
    tables = cache._parts.tables.table(cache.group_of(layer))
    rows = batch.host.rows.numpy()[: len(is_token)]
    tokens: NDArray[np.int64] = np.maximum(is_token.cumsum(axis=1) - 1, 0)
    size = cache.block_size
    slots = tables[rows[:, None], tokens // size].astype(np.int64) * size + tokens % size
    found = plane.reshape(-1, *plane.shape[2:])[torch.from_numpy(slots).to(device)]
    return found.transpose(1, 2)
