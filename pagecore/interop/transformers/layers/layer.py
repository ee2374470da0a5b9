"""The view of one layer that transformers expects in ``cache.layers``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from pagecore.errors import UnsupportedOption
from pagecore.interop.transformers.layers.attention import Columns
from pagecore.interop.transformers.states.layers import StateTensors


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `PagedCache`, for code of transformers that calls the layer instead of the cache."""

    is_compileable = False
    is_croppable = True

    def __init__(self, cache: Cache, index: int, limit: int | None, limits: Iterable[int | None]) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self._index = index
        self._limits = limits  # of all layers
        self.is_sliding = limit is not None
        self.is_initialized = True

    @property
    def keys(self) -> Any:
        """Raise UnsupportedOption: the keys are in blocks. A Whisper copies them for some options of `generate`."""
        self._refuse_to_read("keys")

    @keys.setter
    def keys(self, given: object) -> None:
        self._refuse_to_set("keys", given)

    @property
    def values(self) -> Any:
        """Raise UnsupportedOption, as `keys`."""
        self._refuse_to_read("values")

    @values.setter
    def values(self, given: object) -> None:
        self._refuse_to_set("values", given)

    def _refuse_to_read(self, name: str) -> NoReturn:
        raise UnsupportedOption(
            f"layer {self._index} of a paged cache was asked for a tensor of its {name}, which are in blocks; use "
            "transformers' own cache where they are needed, and leave out return_dict_in_generate, logprob_threshold "
            "and token timestamps of a Whisper, which copies them for short inputs"
        )

    def _refuse_to_set(self, name: str, given: object) -> None:
        if given is not None:  # the base class sets None
            raise UnsupportedOption(
                f"layer {self._index} of a paged cache was given a tensor of {name}, but its {name} are in blocks; "
                "write them with update(), or use transformers' own cache"
            )

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing: blocks are allocated when the cache is made."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Store keys and values; see `PagedCache.update`."""
        return self._paged_cache.update(key_states, value_states, self._index)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the number of columns, those of the forward pass included, and the offset 0."""
        columns = query_length if isinstance(query_length, int) else query_length.shape[0]
        return Columns(self.get_seq_length() + columns, self._limits, self._paged_cache.mask_limits), 0

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of computed columns, padding included."""
        length: int = self._paged_cache.get_seq_length()
        return length

    def get_max_length(self) -> int:
        """Return -1: the length of a row is only limited by the free blocks."""
        return -1

    get_max_cache_shape = get_max_length

    @property
    def _paged_cache(self) -> Cache:
        cache = self._cache()
        if cache is None:
            raise UnsupportedOption(
                "the PagedCache of this layer was deleted; keep a reference to the cache while its layers are used"
            )
        return cache


class PagedHybridLayer(PagedLayer, StateTensors):
    """A layer with attention and a state, such as one of Falcon-H1."""

    is_croppable = False

    def __init__(self, cache: Cache, index: int, limit: int | None, limits: Iterable[int | None]) -> None:
        StateTensors.__init__(self)
        PagedLayer.__init__(self, cache, index, limit, limits)

    def lazy_initialization(self, *_: Any, **states: Any) -> None:
        """Initialise states; blocks are allocated when the cache is made."""
        if states:
            StateTensors.lazy_initialization(self, **states)
