"""The view of one layer that transformers expects in ``cache.layers``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Listed
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from pagecore.errors import UnsupportedOption
from pagecore.interop.transformers.attention import Columns


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of a `PagedCache`, for those who ask the layer and not the cache."""

    is_compileable = False
    is_croppable = True

    def __init__(self, cache: Cache, index: int, windows: Listed[int | None]) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self._index = index
        self._windows = windows
        self.is_sliding = windows[index] is not None
        self.is_initialized = True

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing: the blocks are there from the start."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """As `PagedCache.update`."""
        return self._whole.update(key_states, value_states, self._index)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Columns with those of the forward pass, and 0."""
        columns = query_length if isinstance(query_length, int) else query_length.shape[0]
        return Columns(self.get_seq_length() + columns, self._windows), 0

    def get_seq_length(self, *_: Any) -> int:
        """As `PagedCache.get_seq_length`."""
        length: int = self._whole.get_seq_length()
        return length

    def get_max_length(self) -> int:
        """-1: a row grows until blocks are short."""
        return -1

    get_max_cache_shape = get_max_length

    @property
    def _whole(self) -> Cache:
        cache = self._cache()
        if cache is None:
            raise UnsupportedOption(
                "the PagedCache that this layer belongs to is gone; keep it for as long as its layers"
            )
        return cache
