"""The attention implementation "pagecore_flash": attention of `generate_batch` over the paged cache of transformers.

transformers builds a mask of all queries times all keys, and gathers the keys of every layer, unless the name of the
implementation contains "flash". Each forward pass carries a `BatchPass`, which a hook on the model adds to its
keywords; passes without one are those of other calls of the model, and are left to the implementation "pagecore".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from packaging.version import parse
from transformers import AttentionInterface, __version__
from transformers.masking_utils import AttentionMaskInterface

import pagecore
from pagecore.errors import PagecoreError, ShapeError, UnsupportedOption
from pagecore.interop.transformers.generate_batch.caches import NewKeys, group_of, groups_of, num_layers
from pagecore.interop.transformers.generate_batch.layout import (
    GATHER_BLOCK,
    Gathered,
    GroupBatch,
    Part,
    Requests,
    lay_out,
)
from pagecore.interop.transformers.implementation import NAME
from pagecore.interop.transformers.tracing import untraced

# Continuous batching before 5.19 asks for a prefix.
BATCH_NAME = f"paged|{NAME}_flash" if parse(__version__) < parse("5.19") else f"{NAME}_flash"
REMEDY = "call model.generate with a PagedCache"
_PASS = "pagecore_batch"


def register_batched() -> None:
    """Register "pagecore_flash" with transformers, for attention and for masks."""
    AttentionInterface.register(BATCH_NAME, _attention)
    AttentionMaskInterface.register(BATCH_NAME, AttentionMaskInterface()[NAME])


@dataclass
class BatchPass:
    """A forward pass of `generate_batch`: its cache, and its requests in each group of layers."""

    cache: Any
    groups: dict[int, GroupBatch]
    num_tokens: int
    errors: list[PagecoreError] = field(default_factory=list)


def batch_keywords(given: dict[str, Any], dtype: torch.dtype, errors: list[PagecoreError]) -> dict[str, Any]:
    """Return the keywords of a pass of `generate_batch` with a `BatchPass`, and with masks that hide nothing.

    Models build masks of their own unless they get one of four axes.
    """
    cache = given["cache"]
    starts = _numbers(given["cu_seq_lens_q"])
    counts = np.diff(starts)
    past = np.zeros(len(counts), np.int64)
    past[counts > 0] = _numbers(given["position_ids"])[0][starts[:-1][counts > 0]]
    requests, groups = Requests(starts, past), {}
    keys = given["cu_seq_lens_k"]
    kinds: list[str] = []
    for group in groups_of(cache):
        groups[group.index] = lay_out(
            group.layout,
            requests,
            _numbers(given["read_index"][group.index]),
            _numbers(keys[group.kind] if isinstance(keys, dict) else keys),
            _numbers(given["write_index"][group.index]),
        )
        kinds.append(group.kind)
    mask = torch.zeros(1, 1, 1, 1, dtype=dtype)
    masks = {"attention_mask": mask if len(set(kinds)) == 1 else dict.fromkeys(kinds, mask)}
    batch = BatchPass(cache, groups, given["input_ids"].shape[1], errors)
    return given | masks | {"cache": NewKeys(cache), _PASS: batch}


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return outputs [1, tokens, heads, dim] of the queries [1, heads, tokens, dim] of a batch of requests."""
    batch: BatchPass | None = options.pop(_PASS, None)
    if batch is None:
        if options.get("read_index") is not None:
            raise UnsupportedOption(
                "the model runs for generate_batch without the hook of use_in_generate_batch; call "
                "use_in_generate_batch(model) with the model whose generate_batch is called"
            )
        attended: tuple[torch.Tensor, None] = AttentionInterface()[NAME](
            module, query, key, value, attention_mask, **options
        )
        return attended
    try:
        return _attend(batch, module, query, key, value, attention_mask, options), None
    except PagecoreError as error:
        batch.errors.append(error)
        raise


@untraced
def _attend(
    batch: BatchPass,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    layer: int = module.layer_idx
    try:
        index, window, *arrays = group_of(batch.cache, layer)
    except KeyError:
        _refuse(layer, f"is beyond the {num_layers(batch.cache)} layers of the cache of generate_batch")
    caches = arrays[0], arrays[1]
    _check(batch, layer, window, caches, (key, value), attention_mask, options)
    group = batch.groups[index]
    new = key[0].transpose(0, 1), value[0].transpose(0, 1)
    scaling, sinks = options.get("scaling"), options.get("s_aux")
    arguments: dict[str, Any] = {"softcap": options.get("softcap") or 0.0}
    arguments |= {"scale": scaling} if scaling is not None else {}
    arguments |= {"sinks": sinks.detach()} if sinks is not None else {}
    # Copies keys that the new ones overwrite, so it comes before the write.
    late = None if group.gathered is None else _gathered_keys(group.gathered, caches, new)
    pagecore.write_kv(new[0], new[1], caches[0], caches[1], group.slots)
    rows = query[0].transpose(0, 1)
    if group.in_place is not None and group.in_place.tokens is None:
        return _attend_part(group.in_place, rows, caches, arguments)[None]
    out = rows.new_zeros(rows.shape)
    if group.in_place is not None:
        _attend_into(out, group.in_place, rows, caches, arguments)
    if late is not None and group.gathered is not None:
        _attend_into(out, group.gathered.part, rows, late, arguments)
    return out[None]


def _attend_into(
    out: torch.Tensor, part: Part, rows: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], options: Any
) -> None:
    if part.tokens is None:
        out[:] = _attend_part(part, rows, caches, options)
        return
    chosen = torch.from_numpy(part.tokens)
    out[chosen] = _attend_part(part, rows[chosen], caches, options)


def _attend_part(
    part: Part, rows: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], options: dict[str, Any]
) -> torch.Tensor:
    attended: torch.Tensor = pagecore.paged_attention(
        rows,
        *caches,
        part.block_table,
        part.seq_lens,
        cu_query_lens=part.cu_query_lens,
        window=part.window,
        **options,
    )
    return attended


def _gathered_keys(
    gathered: Gathered, caches: tuple[torch.Tensor, torch.Tensor], new: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in blocks of their own: cached ones, and the new ones after them."""
    block_size = caches[0].shape[1]
    blocks, offsets = (torch.from_numpy(part) for part in np.divmod(gathered.old_slots, block_size))
    old_targets, new_targets = torch.from_numpy(gathered.old_targets), torch.from_numpy(gathered.new_targets)
    tokens = slice(None, len(new_targets)) if gathered.part.tokens is None else torch.from_numpy(gathered.part.tokens)
    copies = []
    for cache, added in zip(caches, new, strict=True):
        copied = cache.new_empty(gathered.num_blocks * GATHER_BLOCK, *cache.shape[2:])
        copied[old_targets] = cache[blocks, offsets]
        copied[new_targets] = added[tokens]
        copies.append(copied.view(gathered.num_blocks, GATHER_BLOCK, *cache.shape[2:]))
    return copies[0], copies[1]


def _check(
    batch: BatchPass,
    layer: int,
    own: int | None,
    caches: tuple[torch.Tensor, torch.Tensor],
    arrays: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> None:
    """Raise for a layer that this attention does not serve; nothing has been written."""
    heads, dim = caches[0].shape[-2:]
    for name, array in zip(("keys", "values"), arrays, strict=True):
        if tuple(array.shape) != (1, heads, batch.num_tokens, dim):
            raise ShapeError(
                f"layer {layer} computes {name} of shape {tuple(array.shape)}; the cache of generate_batch expects "
                f"{(1, heads, batch.num_tokens, dim)}, the same heads and dim in all layers: {REMEDY}"
            )
    window = options.get("sliding_window")
    if window is not None and window != own:
        _refuse(layer, f"attends with a window of {window}, but generate_batch stores one of {own}")
    if attention_mask is not None and attention_mask.numel() != 1:
        _refuse(layer, "adds a bias or a mask of its own to the scores")
    for name in ("position_bias", "head_mask", "indices", "block_indices", "sinks"):
        if options.get(name) is not None:
            _refuse(layer, f"attends with {name}")
    if options.get("dropout"):
        raise UnsupportedOption(f"layer {layer} attends with dropout {options['dropout']}; call model.eval()")


def _refuse(layer: int, reason: str) -> NoReturn:
    raise UnsupportedOption(f"layer {layer} {reason}, which use_in_generate_batch does not support; {REMEDY}")


def _numbers(indices: torch.Tensor) -> Any:
    return indices.detach().numpy().astype(np.int64, copy=False)
