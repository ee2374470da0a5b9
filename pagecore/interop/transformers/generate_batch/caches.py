"""The paged caches of `generate_batch`: their groups of layers, and the arrays of a layer.

transformers 5.18 and later store the keys and values of several layers in the pages of one tensor. Versions 5.16
and 5.17 have a tensor of keys and one of values for each layer of a group, in which the groups share the blocks. In
5.15 layers with windows read other tokens than those of the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import parse
from transformers import __version__

from pagecore.errors import UnsupportedOption
from pagecore.interop.transformers.generate_batch.layout import GroupLayout

__all__ = ["CacheGroup", "NewKeys", "cache_class", "group_of", "groups_of", "holders", "num_layers"]


@dataclass(frozen=True)
class CacheGroup:
    """Layers of a cache that share blocks.

    Attributes
    ----------
    index : int
    kind : str
        "full_attention" or "sliding_attention".
    layout : GroupLayout
    """

    index: int
    kind: str
    layout: GroupLayout


class NewKeys:
    """A paged cache whose `update` returns the new keys and values alone: attention stores them and reads the others.

    Layers of transformers 5.24 call `update` before they attend; earlier ones leave that to the attention.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the arguments."""
        return key_states, value_states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def cache_class() -> type:
    """Return the class of the paged cache of transformers; raise UnsupportedOption for versions with another one."""
    try:
        from transformers.generation.continuous_batching.cache import PagedAttentionCache

        if parse(__version__) < parse("5.16"):
            raise ImportError("the cache of an earlier version")
        try:
            import transformers.generation.continuous_batching.cache_allocators  # noqa: F401
        except ImportError:
            from transformers.generation.continuous_batching.cache_manager import CacheAllocator  # noqa: F401
    except ImportError as error:
        raise UnsupportedOption(
            f"transformers {__version__} has another paged cache than use_in_generate_batch serves; install "
            "transformers 5.16 to 5.24"
        ) from error
    found: type = PagedAttentionCache
    return found


def groups_of(cache: Any) -> Iterator[CacheGroup]:
    """Yield the groups of layers of a cache."""
    if hasattr(cache, "cache_allocators"):
        for kind, each in cache.cache_allocators.items():
            layout = GroupLayout(each.tokens_per_page, each.block_physical_stride, _window(each))
            yield CacheGroup(each.index, kind, layout)
        return
    for index, each in enumerate(cache.group_cache_managers):
        kind = "full_attention" if _window(each) is None else "sliding_attention"
        yield CacheGroup(index, kind, GroupLayout(cache.block_size, cache.block_size, _window(each)))


def group_of(cache: Any, layer: int) -> tuple[int, int | None, torch.Tensor, torch.Tensor]:
    """Return the group of a layer, its window, and its keys and values ``[blocks, tokens, heads, dim]``, as views.

    Raises
    ------
    KeyError
        The cache does not have the layer.
    """
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer]
        heads, dim = allocator.cache_tensor.shape[-2:]
        # A block has the keys and then the values of one layer after the other.
        pages = allocator.cache_tensor.view(-1, 2 * allocator.pages_per_block, allocator.tokens_per_page, heads, dim)
        first = 2 * allocator.layer_indices.index(layer)
        return allocator.index, _window(allocator), pages[:, first], pages[:, first + 1]
    index, number = cache.layer_index_to_group_indices[layer]
    arrays = (cache.key_cache[number], cache.value_cache[number])
    keys, values = (each.view(-1, cache.block_size, *each.shape[-2:]) for each in arrays)
    return index, _window(cache.group_cache_managers[index]), keys, values


def num_layers(cache: Any) -> int:
    """Return the number of layers of a cache."""
    found = getattr(cache, "layer_to_allocator", None)
    return len(cache.layer_index_to_group_indices if found is None else found)


def holders(cache: Any) -> set[str]:
    """Return the requests that hold blocks of a cache."""
    has_allocators = hasattr(cache, "cache_allocators")
    groups = cache.cache_allocators.values() if has_allocators else cache.group_cache_managers
    return {name for each in groups for name in each.block_table}


def _window(allocator: Any) -> int | None:
    window: int | None = getattr(allocator, "sliding_window", None)
    return window
