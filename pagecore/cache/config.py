"""Configurations of caches: values that can be stored, compared, and made into a cache for any model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

import numpy as np

from pagecore.arrays import DType, as_dtype
from pagecore.arrays.cuda.devices import device_name
from pagecore.cache.layers.groups import Layers
from pagecore.cache.memory.limits import cache_device, refuse_unserved, scrub_option, slot_dtype
from pagecore.cache.paged import PagedKVCache
from pagecore.cache.static.static import StaticKVCache
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage import KVLayout, Spec, StateSpec, TensorParallel, parse_memory
from pagecore.storage.checks import flag, require_int, require_pool, shown
from pagecore.storage.memory.budgets import Memory
from pagecore.storage.pools.allocation import Allocator
from pagecore.storage.pools.layout import as_layout
from pagecore.storage.pools.state_pool import checked_ratio
from pagecore.storage.specs.spec import is_spec

# Fraction of the free memory for a config without num_blocks and memory.
DEFAULT_MEMORY = 0.5


@dataclass(frozen=True)
class PagedCacheConfig:
    """All options of a `PagedKVCache` except the model, the clock and memory of the caller.

    Configs are values: validated when made, compared by their fields, and hashable.

    Parameters
    ----------
    block_size : int, optional
        Tokens per block; by default those that the specs require, or 16, see `PagedKVCache`.
    num_blocks : int or list of int, optional
        Blocks of each group, including the null block. Exclusive with `memory`.
    memory : int, str or float, optional
        Bytes, "8GiB", or a fraction of the free memory. By default without `num_blocks`: half of the free memory.
    max_sequences : int
        Number of rows of the block tables.
    max_tokens_per_sequence : int, optional
        Capacity of a row. None or 0 means the model's maximum length, or the longest sequence that the pools hold if
        that length is unknown.
    device : str
        "cpu", "cuda" (short for "cuda:0"), another CUDA device, or "none" for a cache without bytes.
    layout : str or KVLayout, optional
        Memory layout of the pools; "layerwise" by default.
    prefix_cache : bool
        Keep computed blocks, and reuse them for sequences with the same prefix.
    eviction_policy : str
        Order in which cached blocks are evicted: "lru" and others, see `PagedKVCache`.
    index_dtype : {"int64", "int32"}
        Dtype of slot mappings.
    dtype : str or anything that names a dtype
        Dtype of keys and values; "auto" keeps that of the specs, any other replaces it in every layer.
    scrub : bool
        Zero a block when it passes from one namespace to another, see `PagedKVCache`.
    recompute_last_block : bool
        A prefix hit drops its last block, see `PagedKVCache`.
    num_states : int, optional
        Slots for states, for models with layers that keep them, see `PagedKVCache`.
    state_ratio : float, optional
        Bytes of states over bytes of blocks, if `memory` is divided among them.
    num_checkpoints : int, optional
        Slots for quantised checkpoints, see `PagedKVCache`.
    memory_saver : bool
        Let the cache give its memory back to the system for a time, see `PagedKVCache.release_memory`.

    Raises
    ------
    ShapeError, UnsupportedOption, UnsupportedDtype, DeviceError
        Invalid options.
    """

    block_size: int | None = None
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
    recompute_last_block: bool = False
    num_states: int | None = None
    state_ratio: float | None = None
    num_checkpoints: int | None = None
    memory_saver: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("index_dtype", slot_dtype(self.index_dtype))
        refuse_unserved(self.prefix_cache, self.eviction_policy)
        put("device", cache_device(self.device))
        put("scrub", scrub_option(self.scrub, self.device))
        put("recompute_last_block", flag("recompute_last_block", self.recompute_last_block))
        if self.num_states is not None:
            put("num_states", require_pool("num_states", self.num_states, "slot", max=None))
        if self.num_checkpoints is not None:
            put("num_checkpoints", require_pool("num_checkpoints", self.num_checkpoints, "slot", max=None))
        if self.state_ratio is not None:
            put("state_ratio", checked_ratio(self.state_ratio))
        put("memory_saver", flag("memory_saver", self.memory_saver))
        if self.block_size is not None:
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
    """All options of a `StaticKVCache` except the model.

    Configs are values: validated when made, compared by their fields, and hashable.

    Parameters
    ----------
    max_batch_size : int
        Maximum number of sequences.
    max_length : int, optional
        Maximum number of tokens of each. None or 0 means the model's maximum length, which also limits other values.
        Encoder tokens are not counted: `max_tokens` of a `CrossSpec` is their maximum.
    device : str
        "cpu", "cuda" (short for "cuda:0") or another CUDA device.
    dtype : str or anything that names a dtype
        Dtype of keys and values; "auto" keeps that of the specs, any other replaces it in every layer.

    Raises
    ------
    ShapeError, UnsupportedDtype, DeviceError
        Invalid options.
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
    """Return the smaller of a configured length and the model's maximum length, in tokens.

    Parameters
    ----------
    configured : int or None
        None or 0 means the model's maximum length.
    model_maximum : int or None
        The model's maximum length; None if it is unknown, so that `configured` alone decides.

    Raises
    ------
    ShapeError
        A negative length, a maximum of 0, or neither length given.

    Examples
    --------
    >>> from pagecore import effective_length
    >>> effective_length(None, 1024), effective_length(2048, 1024), effective_length(512, 1024)
    (1024, 1024, 512)
    """
    wanted = _optional_length("configured length", configured)
    if model_maximum is None:
        if wanted is None:
            raise ShapeError(
                f"the configured length is {configured} and the model's maximum length is unknown; give one of them"
            )
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
    buffers: object = None,
    clock: Callable[[], float] | None = None,
    allocator: Allocator | None = None,
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
    buffers: object = None,
    clock: Callable[[], float] | None = None,
    allocator: Allocator | None = None,
) -> PagedKVCache | StaticKVCache:
    """Make the cache that a config describes, for one model.

    Parameters
    ----------
    config : PagedCacheConfig or StaticCacheConfig
    layers : spec or list of specs
        Specs of the whole model: one spec for all layers (with `num_layers`), or one spec or `Alias` per layer.
    num_layers : int, optional
        Number of layers for a single spec; 1 by default.
    parallel : TensorParallel, optional
        The rank that the cache serves.
    model_max_length : int, optional
        The longest sequence that the model supports; limits the length of the config, see `effective_length`.
    buffers : optional
        Memory of the caller for a paged cache, see `PagedKVCache`. If the config has neither `num_blocks` nor `memory`,
        each group has the number of blocks that its buffers hold.
    clock : callable, optional
        Clock of a paged cache, see `PagedKVCache`.
    allocator : callable, optional
        Source of the memory of a paged cache, see `PagedKVCache`.

    Returns
    -------
    PagedKVCache or StaticKVCache
        Both implement `KVCache`.

    Raises
    ------
    UnsupportedOption
        A config of another type; a spec that cannot be stored as another dtype; buffers or a clock for a static cache.
    PagecoreError
        The errors of the cache.

    Examples
    --------
    >>> from pagecore import AttentionSpec, StaticCacheConfig, make_cache
    >>> cache = make_cache(StaticCacheConfig(dtype="float32"), AttentionSpec(8, 64), num_layers=2, model_max_length=256)
    >>> cache.key(0).shape, cache.key(0).dtype
    ((1, 8, 256, 64), DType('float32'))
    """
    if isinstance(config, StaticCacheConfig):
        for name, given in (("buffers", buffers), ("clock", clock), ("allocator", allocator)):
            if given is not None:
                raise UnsupportedOption(f"{name} is given for a static cache; leave it out, or use a PagedCacheConfig")
        length = effective_length(config.max_length, model_max_length)
        stored = _stored_as(layers, config.dtype)
        return StaticKVCache(stored, num_layers, config.max_batch_size, length, config.device, parallel)
    paged: object = config
    if not isinstance(paged, PagedCacheConfig):
        raise UnsupportedOption(f"config is {shown(paged)}; give a PagedCacheConfig or a StaticCacheConfig")
    max_tokens = config.max_tokens_per_sequence
    if model_max_length is not None:
        max_tokens = effective_length(max_tokens, model_max_length)
    has_size = config.num_blocks is not None or config.memory is not None or buffers is not None
    return PagedKVCache(
        _stored_as(layers, config.dtype),
        num_layers=num_layers,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        memory=config.memory if has_size else DEFAULT_MEMORY,
        max_sequences=config.max_sequences,
        max_tokens_per_sequence=max_tokens,
        device=config.device,
        layout=config.layout,
        parallel=parallel,
        prefix_cache=config.prefix_cache,
        eviction_policy=config.eviction_policy,
        index_dtype=config.index_dtype,
        scrub=config.scrub,
        recompute_last_block=config.recompute_last_block,
        num_states=config.num_states,
        state_ratio=config.state_ratio,
        num_checkpoints=config.num_checkpoints,
        memory_saver=config.memory_saver,
        buffers=buffers,
        clock=time.monotonic if clock is None else clock,
        allocator=allocator,
    )


def _stored_as(layers: Layers, dtype: DType | str) -> Layers:
    """Return `layers` with the dtype of every spec replaced; the cache refuses other entries by their position."""
    if dtype == "auto":
        return layers
    if is_spec(layers):
        return _with_dtype(layers, dtype)
    given: object = layers
    if not isinstance(given, Iterable):
        return layers
    return [_with_dtype(entry, dtype) if is_spec(entry) else entry for entry in given]


def _with_dtype(spec: Spec, dtype: DType | str) -> Spec:
    if isinstance(spec, StateSpec):  # the planes of a state have dtypes of their own
        return spec
    change: Any = getattr(spec, "with_dtype", None)
    if not callable(change):
        raise UnsupportedOption(
            f"dtype is {str(dtype)!r}, but a {type(spec).__name__} has no method with_dtype(dtype); add one, or use "
            "dtype='auto'"
        )
    changed: object = change(dtype)
    if not is_spec(changed):
        raise UnsupportedOption(f"with_dtype of {type(spec).__name__} returned {shown(changed)}; it must return a spec")
    return changed


def _dtype_or_auto(dtype: object) -> DType | str:
    if isinstance(dtype, str) and dtype == "auto":
        return "auto"
    try:
        return as_dtype(dtype)
    except UnsupportedDtype as error:
        raise UnsupportedDtype(f"{error}; or 'auto', which keeps that of the specs") from None


def _optional_length(name: str, length: SupportsIndex | None) -> int | None:
    return None if length is None else require_int(name, length, min=0, max=None) or None


def _block_counts(num_blocks: int | Listed[int]) -> int | tuple[int, ...]:
    given: Any = num_blocks
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, list | tuple):
        return tuple(require_pool("num_blocks", count, max=None) for count in given)
    return require_pool("num_blocks", given, max=None)
