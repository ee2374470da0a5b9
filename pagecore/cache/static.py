"""StaticKVCache: contiguous arrays of a fixed length for a fixed batch."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np

from pagecore.arrays import Tensor, zeros
from pagecore.arrays.devices import device_name
from pagecore.cache._static import StaticRoom
from pagecore.cache.layer_ops import given_factors
from pagecore.cache.layers import Layer, Layers, arrange, layer_number
from pagecore.cache.position import position_number
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage import Plane, Spec, TensorParallel
from pagecore.storage.checks import require_int, shown
from pagecore.storage.parallel import as_parallel
from pagecore.storage.spec import format_of


class StaticKVCache:
    """The keys and values of a fixed batch, each in one contiguous array ``[layers, batch, heads, length, dim]``.

    One thread at a time; the cache has no lock.

    Parameters
    ----------
    spec : spec or list of specs
        One spec for all layers (with `num_layers`), or a list with one spec or `Alias` per model layer. Pass the specs
        of the whole model, also for one rank of several. All must store key and value of one shape and dtype. Window,
        scale, softcap and sinks may differ: the cache keeps every token, and the attention of the caller applies them.
    num_layers : int, optional
        Number of layers for a single spec; 1 by default.
    max_batch_size, max_length : int
        Maximum number of sequences, and of tokens of each.
    device : str
        "cpu", "cuda" (short for "cuda:0") or another CUDA device.
    parallel : TensorParallel, optional
        The rank that this cache serves: it holds the rank's heads, and `update` takes them.

    Attributes
    ----------
    key_array, value_array : Tensor
        The memory, ``[layers that store, max_batch_size, heads, max_length, head_dim or v_head_dim]``; zero where
        nothing was written. On the host the operating system allocates pages when they are first touched.
    parallel : TensorParallel
    max_batch_size, max_length : int
    device : str

    Raises
    ------
    ShapeError, UnsupportedOption, UnsupportedDtype, DeviceError
        Invalid sizes, specs, device or number of ranks.
    NotEnoughMemory
        The allocation failed.

    Examples
    --------
    >>> import numpy as np
    >>> from pagecore import AttentionSpec, StaticKVCache
    >>> cache = StaticKVCache(AttentionSpec(2, 64, dtype="float32"), num_layers=4, max_batch_size=1, max_length=128)
    >>> prompt = np.ones((1, 2, 7, 64), np.float32)  # [batch, heads, tokens, dim]
    >>> keys, values = cache.update(0, prompt, prompt, position=0)
    >>> keys, values = cache.update(0, prompt[:, :, :1], prompt[:, :, :1], position=7)
    >>> keys.shape
    (1, 2, 8, 64)
    """

    def __init__(
        self,
        spec: Layers,
        num_layers: int | None = None,
        max_batch_size: int = 1,
        max_length: int | None = None,
        device: str = "cpu",
        parallel: TensorParallel | None = None,
    ) -> None:
        self.device = device_name(device)
        self.parallel = as_parallel(parallel)
        self.max_batch_size = require_int("max_batch_size", max_batch_size, max=None)
        if max_length is None:
            raise ShapeError("max_length is None; pass the maximum number of tokens of a sequence")
        self.max_length = require_int("max_length", max_length, max=None)
        self._layers, groups = arrange(spec, num_layers, self.parallel, attends=True, keeps_states=False)
        if any(group.is_cross for group in groups):
            raise UnsupportedOption(
                "a StaticKVCache has no cross attention, and a CrossSpec is listed; use a PagedKVCache, or a second "
                "StaticKVCache with AttentionSpec layers for the encoder's tokens"
            )
        planes = [_planes_of(group.spec) for group in groups]
        for other in planes[1:]:
            _check_alike(planes[0], other)
        self._indices = _array_indices(self._layers)
        room = len(set(self._indices)), self.max_batch_size, planes[0][0].shape[0], self.max_length
        self._arrays = {plane.name: zeros((*room, plane.shape[1]), plane.dtype, self.device) for plane in planes[0]}
        self.key_array, self.value_array = self._arrays["key"], self._arrays["value"]
        self._room = self._make_room()

    def _make_room(self) -> StaticRoom:
        stored = format_of(self._layers[0].spec)
        if stored is None:
            return StaticRoom(self.key_array, self.value_array)
        specs = dict(zip(self._indices, (layer.spec for layer in self._layers), strict=True))
        factors = [given_factors(specs[index], self.device) for index in range(len(specs))]
        scales = self._arrays.get("key_scale"), self._arrays.get("value_scale")
        return StaticRoom(self.key_array, self.value_array, *scales, factors, stored.codes_per_byte)

    @property
    def num_layers(self) -> int:
        """Number of model layers, including aliases."""
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of this rank, and of their scales."""
        return sum(array.nbytes for array in self._arrays.values())

    def spec(self, layer: int) -> Spec:
        """Return the spec of this rank's part of a model layer; for an alias, that of the layer that it shares."""
        return self._layers[layer_number(layer, self.num_layers)].spec

    def plane(self, name: str, layer: int) -> Tensor:
        """Return the plane "key" or "value" of a model layer, or its "key_scale" or "value_scale".

        Returns
        -------
        Tensor
            ``[max_batch_size, num_kv_heads, max_length, head_dim or v_head_dim]``; it aliases the cache. With a format
            the last axis counts stored codes, or scales.

        Raises
        ------
        UnsupportedOption
            Any other name.
        ShapeError
            The cache does not have that layer.
        """
        if not isinstance(name, str) or name not in self._arrays:
            raise UnsupportedOption(f"plane {shown(name)} is not stored; this cache has {', '.join(self._arrays)}")
        return self._arrays[name][self._array_index(layer)]

    def key(self, layer: int) -> Tensor:
        """Return ``plane("key", layer)``."""
        return self.plane("key", layer)

    def value(self, layer: int) -> Tensor:
        """Return ``plane("value", layer)``."""
        return self.plane("value", layer)

    def length(self, layer: int = 0) -> int:
        """Return the number of tokens of a model layer: the end of its last `update`."""
        return self._room.lengths[self._array_index(layer)]

    def update(
        self, layer: SupportsIndex, key: Any, value: Any, position: Any, *, stream: object = None
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens; return views of all keys and values up to and including them.

        Parameters
        ----------
        layer : int
            A model layer; an alias writes to the layer that it shares.
        key, value : array, [batch, num_kv_heads, tokens, head_dim] and [batch, num_kv_heads, tokens, v_head_dim]
            float32, float16 or bfloat16 arrays of any framework on the cache's device; cast to the cache's dtype,
            rounding to nearest even. On the host they may have any strides and may be views of this cache: the values
            from before the call are written. On CUDA the last axis must be contiguous, and they must not be views of
            this cache. A batch smaller than `max_batch_size` updates the first sequences.
        position : int, or an array of one integer on the host
            Position of the first new token, the same in each sequence. It is read during the call: a CUDA graph that
            captures the call writes at that position in every replay. An array is refused in a capture.
        stream : int or a stream, optional
            Stream of a cache on CUDA, where a call neither allocates nor waits; by default the current stream of the
            framework of `key`.

        Returns
        -------
        key, value : Tensor, [batch, num_kv_heads, position + tokens, head_dim or v_head_dim]
            Views of the cache, which keep its memory alive and show later writes. Tokens before `position` have the
            values of earlier calls, or zeros. With a format they hold codes, whose scales are in the planes
            "key_scale" and "value_scale"; `dequantize` reads both.

        Raises
        ------
        ShapeError
            An invalid layer, batch, number of heads, head_dim or position; tokens past `max_length`.
        UnsupportedDtype, UnsupportedOption, DeviceError
            Unsupported arrays or positions, such as a position in an array during a capture. In every case nothing was
            written.
        """
        is_fixed = isinstance(position, int | np.integer)
        return self._room.update(self._array_index(layer), key, value, position_number(position), stream, is_fixed)

    def reset(self, *, stream: object = None) -> None:
        """Forget every token: set the lengths to 0 and zero everything that `update` wrote, in place.

        On CUDA the work is submitted to `stream`, by default CuPy's current one.
        """
        self._room.reset(stream)

    def _array_index(self, layer: SupportsIndex) -> int:
        """Return the index of a model layer in the arrays."""
        return self._indices[layer_number(layer, self.num_layers)]

    def __repr__(self) -> str:
        return (
            f"StaticKVCache({self.num_layers} layers, batch {self.max_batch_size}, {self.key_array.shape[2]} heads, "
            f"length {self.max_length}, {self.nbytes / 2**20:.1f} MiB on {self.device})"
        )


def _planes_of(spec: Spec) -> tuple[Plane, ...]:
    """Return the planes that a static cache holds; raise UnsupportedOption for a spec with any others."""
    planes = {plane.name: plane for plane in spec.planes}
    stored = format_of(spec) if {"key", "value"} <= planes.keys() else None
    scales = {"key_scale", "value_scale"} if stored is not None and stored.scale_dtype is not None else set()
    if planes.keys() != {"key", "value"} | scales:
        raise UnsupportedOption(
            f"a {type(spec).__name__} stores {', '.join(planes)}; a static cache holds key and value only, and the "
            "scales of their format: use a PagedKVCache"
        )
    return tuple(planes[name] for name in ("key", "value", *sorted(scales)))


def _check_alike(first: tuple[Plane, ...], other: tuple[Plane, ...]) -> None:
    for a, b in zip(first, other, strict=False):
        if a != b:
            raise UnsupportedOption(
                f"{a.name} is {a.shape} of {a.dtype} in some layers and {b.shape} of {b.dtype} in others; a static "
                "cache keeps all layers in one array: make one cache for each kind, or a PagedKVCache"
            )
    if len(first) != len(other):
        raise UnsupportedOption(
            "some layers store scales in addition to codes and others do not; a static cache keeps all layers in one "
            "array: make one cache for each format, or a PagedKVCache"
        )


def _array_indices(layers: list[Layer]) -> list[int]:
    """Return the index of each model layer in the arrays; an alias has that of its target."""
    indices: dict[tuple[int, int], int] = {}
    return [indices.setdefault((layer.group, layer.index), len(indices)) for layer in layers]
