"""What a cache is to be, as values: to be kept in a file, compared, and made into a cache for any model."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

import numpy as np

from pagecore.arrays import DType, as_dtype
from pagecore.arrays.devices import device_name
from pagecore.cache.layers import Layers
from pagecore.cache.limits import cache_device, refuse_unserved, scrub_option, slot_dtype
from pagecore.cache.paged import PagedKVCache
from pagecore.cache.static import StaticKVCache
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage import KVLayout, Spec, TensorParallel, parse_memory
from pagecore.storage.checks import require_int, shown
from pagecore.storage.layout import as_layout
from pagecore.storage.memory import Memory

# Of what is free, where a config says neither blocks nor memory.
DEFAULT_MEMORY = 0.5


@dataclass(frozen=True)
class PagedCacheConfig:
    """Everything about a `PagedKVCache` but the model, the clock and memory of the caller.

    Parameters
    ----------
    block_size : int
        Tokens a block.
    num_blocks : int or list of int, optional
        Blocks of each group, the null block counted. Exclusive with `memory`.
    memory : int, str or float, optional
        Bytes, "8GiB", or the fraction of what is free. Half of what is free where `num_blocks` is not given either.
    max_sequences : int
        Rows of the block tables.
    max_tokens_per_sequence : int, optional
        Room of a row. None or 0 is the model's longest, or what the smallest pool holds where that is not known.
    device : str
        "cpu", "cuda" (which is "cuda:0"), another CUDA device, or "none" for a cache without bytes.
    layout : str or KVLayout, optional
        How the pools lie in memory; "layerwise" by default.
    prefix_cache : bool
        Keep what sequences have computed, and let others that begin alike reuse it.
    eviction_policy : str
        Which cached blocks go first when blocks are short: "lru" and others, see `PagedKVCache`.
    index_dtype : {"int64", "int32"}
        Dtype of slot mappings.
    dtype : str or anything that names a dtype
        What key and value are stored as; "auto" takes the model's, any other replaces it in every layer.
    scrub : bool
        Zero blocks that change hands between namespaces, see `PagedKVCache`.

    A value: checked when it is made, equal to another with the same fields, and hashable.
    """

    block_size: int = 16
    num_blocks: int | Listed[int] | None = None
    memory: Memory | None = None
    max_sequences: int = 256
    max_tokens_per_sequence: int | None = None
    device: str = "cpu"
    layout: str | KVLayout | None = None
    prefix_cache: bool = True
    eviction_policy: str = "lru"
    index_dtype: str = "int64"
    dtype: DType | str = "auto"
    scrub: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("index_dtype", slot_dtype(self.index_dtype))
        refuse_unserved(self.prefix_cache, self.eviction_policy)
        put("device", cache_device(self.device))
        put("scrub", scrub_option(self.scrub, self.device))
        put("block_size", require_int("block_size", self.block_size))
        put("max_sequences", require_int("max_sequences", self.max_sequences, max=None))
        put("max_tokens_per_sequence", _optional_length("max_tokens_per_sequence", self.max_tokens_per_sequence))
        if self.num_blocks is not None and self.memory is not None:
            raise ShapeError(
                f"num_blocks is {shown(self.num_blocks)} and memory is {shown(self.memory)}; give one of them or none"
            )
        if self.num_blocks is not None:
            put("num_blocks", _block_counts(self.num_blocks))
        if self.memory is not None:
            parse_memory(self.memory)
        if self.layout is not None:
            as_layout(self.layout)
        put("dtype", _dtype_or_auto(self.dtype))


@dataclass(frozen=True)
class StaticCacheConfig:
    """Everything about a `StaticKVCache` but the model.

    Parameters
    ----------
    max_batch_size : int
        Sequences that there is room for.
    max_length : int, optional
        Tokens of each; the model's longest where it is None or 0, or where it is more than that.
    device : str
        "cpu", "cuda" (which is "cuda:0") or another CUDA device.
    dtype : str or anything that names a dtype
        What key and value are stored as; "auto" takes the model's, any other replaces it in every layer.

    A value: checked when it is made, equal to another with the same fields, and hashable.
    """

    max_batch_size: int = 1
    max_length: int | None = None
    device: str = "cpu"
    dtype: DType | str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", device_name(self.device))
        object.__setattr__(self, "max_batch_size", require_int("max_batch_size", self.max_batch_size, max=None))
        object.__setattr__(self, "max_length", _optional_length("max_length", self.max_length))
        object.__setattr__(self, "dtype", _dtype_or_auto(self.dtype))


def effective_length(configured: SupportsIndex | None, model_maximum: SupportsIndex | None) -> int:
    """How many tokens of a sequence a cache is to hold: what is configured, at most what the model can use.

    Parameters
    ----------
    configured : int or None
        None or 0 is the model's longest.
    model_maximum : int or None
        The model's longest; None where it is not known, and `configured` alone decides.

    Raises
    ------
    ShapeError
        A negative number, a model of no length, or neither of the two.

    Examples
    --------
    >>> from pagecore import effective_length
    >>> effective_length(None, 1024), effective_length(2048, 1024), effective_length(512, 1024)
    (1024, 1024, 512)
    """
    wanted = _optional_length("configured length", configured)
    if model_maximum is None:
        if wanted is None:
            raise ShapeError(f"the configured length is {configured} and the model's is not known; give one of the two")
        return wanted
    longest = require_int("model maximum", model_maximum, max=None)
    return longest if wanted is None else min(wanted, longest)


@overload
def make_cache(
    config: PagedCacheConfig,
    layers: Layers,
    *,
    num_layers: int | None = None,
    parallel: TensorParallel | None = None,
    model_max_length: int | None = None,
) -> PagedKVCache: ...
@overload
def make_cache(
    config: StaticCacheConfig,
    layers: Layers,
    *,
    num_layers: int | None = None,
    parallel: TensorParallel | None = None,
    model_max_length: int | None = None,
) -> StaticKVCache: ...
def make_cache(
    config: PagedCacheConfig | StaticCacheConfig,
    layers: Layers,
    *,
    num_layers: int | None = None,
    parallel: TensorParallel | None = None,
    model_max_length: int | None = None,
) -> PagedKVCache | StaticKVCache:
    """The cache that a config describes, for one model.

    Parameters
    ----------
    config : PagedCacheConfig or StaticCacheConfig
    layers : spec or list of specs
        The whole model's: one spec for all layers (with `num_layers`), or one spec or `Alias` for each.
    num_layers : int, optional
        How often a single spec is repeated; 1 by default.
    parallel : TensorParallel, optional
        Which rank of how many the cache serves.
    model_max_length : int, optional
        The longest sequence that the model serves; bounds what the config says, see `effective_length`.

    Returns
    -------
    PagedKVCache or StaticKVCache
        Both are a `KVCache`.

    Raises
    ------
    UnsupportedOption
        A config of another kind, or a spec that cannot be stored as another dtype.
    PagecoreError
        Whatever the cache refuses.

    Examples
    --------
    >>> from pagecore import AttentionSpec, StaticCacheConfig, make_cache
    >>> cache = make_cache(StaticCacheConfig(dtype="float32"), AttentionSpec(8, 64), num_layers=2, model_max_length=256)
    >>> cache.key(0).shape, cache.key(0).dtype
    ((1, 8, 256, 64), DType('float32'))
    """
    if isinstance(config, StaticCacheConfig):
        length = effective_length(config.max_length, model_max_length)
        stored = _stored_as(layers, config.dtype)
        return StaticKVCache(stored, num_layers, config.max_batch_size, length, config.device, parallel)
    given: object = config
    if not isinstance(given, PagedCacheConfig):
        raise UnsupportedOption(f"config is {shown(given)}; give a PagedCacheConfig or a StaticCacheConfig")
    room = config.max_tokens_per_sequence
    if model_max_length is not None:
        room = effective_length(room, model_max_length)
    return PagedKVCache(
        _stored_as(layers, config.dtype),
        num_layers=num_layers,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        memory=DEFAULT_MEMORY if config.num_blocks is None and config.memory is None else config.memory,
        max_sequences=config.max_sequences,
        max_tokens_per_sequence=room,
        device=config.device,
        layout=config.layout,
        parallel=parallel,
        prefix_cache=config.prefix_cache,
        eviction_policy=config.eviction_policy,
        index_dtype=config.index_dtype,
        scrub=config.scrub,
    )


def _stored_as(layers: Layers, dtype: DType | str) -> Layers:
    """`layers` with every spec's dtype replaced; what is no spec stays, for the cache to refuse by its place."""
    if dtype == "auto":
        return layers
    if isinstance(layers, Spec):
        return _with_dtype(layers, dtype)
    given: object = layers
    if not isinstance(given, Iterable):
        return layers
    return [_with_dtype(entry, dtype) if isinstance(entry, Spec) else entry for entry in given]


def _with_dtype(spec: Spec, dtype: DType | str) -> Spec:
    change: Any = getattr(spec, "with_dtype", None)
    if not callable(change):
        raise UnsupportedOption(
            f"dtype is {str(dtype)!r}, but a {type(spec).__name__} has no method with_dtype(dtype); use dtype='auto'"
        )
    changed: object = change(dtype)
    if not isinstance(changed, Spec):
        raise UnsupportedOption(f"with_dtype of {type(spec).__name__} gave {changed!r}; it must give a spec")
    return changed


def _dtype_or_auto(dtype: object) -> DType | str:
    if isinstance(dtype, str) and dtype == "auto":
        return "auto"
    try:
        return as_dtype(dtype)
    except UnsupportedDtype as error:
        raise UnsupportedDtype(f"{error}; or 'auto', which takes the model's") from None


def _optional_length(name: str, length: SupportsIndex | None) -> int | None:
    return None if length is None else require_int(name, length, min=0, max=None) or None


def _block_counts(num_blocks: int | Listed[int]) -> int | tuple[int, ...]:
    given: Any = num_blocks
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, list | tuple):
        return tuple(require_int("num_blocks", count, min=2, max=None) for count in given)
    return require_int("num_blocks", given, min=2, max=None)
