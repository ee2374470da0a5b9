"""StaticKVCache: contiguous arrays of a fixed length for a fixed batch."""

from __future__ import annotations

from typing import Any, NoReturn, SupportsIndex

import numpy as np

from pagecore.arrays import Tensor
from pagecore.arrays.cuda.devices import device_name
from pagecore.cache.layers.groups import Layers, arrange, layer_number
from pagecore.cache.static.position import position_number
from pagecore.cache.static.static_arrays import StaticArrays, alike_planes, encoder_capacity
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.ops.arguments._arguments import float_array
from pagecore.storage import Spec, TensorParallel
from pagecore.storage.checks import require_int, shown
from pagecore.storage.specs.cross_spec import is_cross
from pagecore.storage.specs.parallel import as_parallel
from pagecore.storage.specs.rotation import is_rotated


class StaticKVCache:
    """The keys and values of a fixed batch, each in one contiguous array ``[layers, batch, heads, length, dim]``.

    One thread at a time; the cache has no lock.

    Parameters
    ----------
    spec : spec or list of specs
        One spec for all layers (with `num_layers`), or a list with one spec or `Alias` per model layer. Pass the specs
        of the whole model, also for one rank of several. All must store key and value of one shape and dtype. Window,
        scale, softcap and sinks may differ: the cache keeps every token, and the attention of the caller applies them.
        `CrossSpec` layers keep the output of an encoder in arrays of their own, which may have another shape, dtype or
        format; each needs the same `max_tokens`.
    num_layers : int, optional
        Number of layers for a single spec; 1 by default.
    max_batch_size, max_length : int
        Maximum number of sequences, and of tokens of each. Encoder tokens are not counted.
    device : str
        "cpu", "cuda" (short for "cuda:0") or another CUDA device.
    parallel : TensorParallel, optional
        The rank that this cache serves: it holds the rank's heads, and `update` takes them.

    Attributes
    ----------
    key_array, value_array : Tensor
        The memory, ``[layers that store, max_batch_size, heads, max_length, head_dim or v_head_dim]``; zero where
        nothing was written. On the host the operating system allocates pages when they are first touched.
    cross_key_array, cross_value_array : Tensor or None
        The memory of the `CrossSpec` layers, with `max_cross_tokens` as length; None without such layers.
    parallel : TensorParallel
    max_batch_size, max_length : int
    max_cross_tokens : int
        Maximum number of encoder tokens of a sequence, the `max_tokens` of the `CrossSpec` layers; 0 without such
        layers.
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
        for layer, placed in enumerate(self._layers):
            if placed.sealed_group is not None:
                name = getattr(placed.spec, "format", None)
                raise UnsupportedOption(
                    f"layer {layer} has the format {name!r}, which seals older tokens, but a StaticKVCache can "
                    "write each token again; use a PagedKVCache, or another format, such as 'int4_token'"
                )
            if is_rotated(placed.spec):
                raise UnsupportedOption(
                    f"layer {layer} has a rotation, but the attention over a StaticKVCache is the caller's, whose "
                    "queries it cannot rotate; leave key_rotation and value_rotation out and pass `hadamard(key)` to "
                    "update, or use a PagedKVCache"
                )
        own, cross = ([group for group in groups if group.is_cross is kind] for kind in (False, True))
        planes = alike_planes(own)
        cross_planes = alike_planes(cross) if cross else ()
        self.max_cross_tokens = encoder_capacity(cross) if cross else 0

        stored = {(layer.group, layer.index): layer.spec for layer in self._layers}
        specs = [spec for spec in stored.values() if not is_cross(spec)]
        cross_specs = [spec for spec in stored.values() if is_cross(spec)]
        self._own = StaticArrays(planes, specs, self.max_batch_size, self.max_length, self.device)
        self.key_array, self.value_array = self._own.named["key"], self._own.named["value"]
        self._cross: StaticArrays | None = None
        self.cross_key_array: Tensor | None = None
        self.cross_value_array: Tensor | None = None
        if cross:
            shape = self.max_batch_size, self.max_cross_tokens
            self._cross = StaticArrays(cross_planes, cross_specs, *shape, self.device)
            self.cross_key_array, self.cross_value_array = (self._cross.named[name] for name in ("key", "value"))
        self._places = self._placed()

    def _placed(self) -> list[tuple[StaticArrays, int]]:
        """Return the arrays of each model layer, and its index in them; an alias has those of its target."""
        places: dict[tuple[int, int], tuple[StaticArrays, int]] = {}
        counts = {False: 0, True: 0}
        for layer in self._layers:
            kind = is_cross(layer.spec)
            arrays = self._cross if kind else self._own
            assert arrays is not None
            if (layer.group, layer.index) not in places:
                places[layer.group, layer.index] = arrays, counts[kind]
                counts[kind] += 1
        return [places[layer.group, layer.index] for layer in self._layers]

    @property
    def num_layers(self) -> int:
        """Number of model layers, including aliases."""
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of this rank, of an encoder's output too, and of their scales."""
        return self._own.nbytes + (0 if self._cross is None else self._cross.nbytes)

    def spec(self, layer: int) -> Spec:
        """Return the spec of this rank's part of a model layer; for an alias, that of the layer that it shares."""
        return self._layers[layer_number(layer, self.num_layers)].spec

    def plane(self, name: str, layer: int) -> Tensor:
        """Return the plane "key" or "value" of a model layer, or its "key_scale" or "value_scale".

        Returns
        -------
        Tensor
            ``[max_batch_size, num_kv_heads, max_length, head_dim or v_head_dim]``; it aliases the cache. With a format
            the last axis counts stored codes, or scales. A `CrossSpec` layer has `max_cross_tokens` instead of
            `max_length`.

        Raises
        ------
        UnsupportedOption
            Any name that the layer does not store.
        ShapeError
            The cache does not have that layer.
        """
        arrays, index = self._place(layer)
        if not isinstance(name, str) or name not in arrays.named:
            raise UnsupportedOption(f"plane {shown(name)} is not stored; the layer has {', '.join(arrays.named)}")
        return arrays.named[name][index]

    def key(self, layer: int) -> Tensor:
        """Return ``plane("key", layer)``."""
        return self.plane("key", layer)

    def value(self, layer: int) -> Tensor:
        """Return ``plane("value", layer)``."""
        return self.plane("value", layer)

    def length(self, layer: int = 0) -> int:
        """Return the number of tokens of a model layer: the end of its last `update`.

        For a `CrossSpec` layer the number of encoder tokens; 0 until an encoder's output is written.
        """
        arrays, index = self._place(layer)
        return arrays.room.lengths[index]

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
            this cache. A batch smaller than `max_batch_size` updates the first sequences. For a `CrossSpec` layer, all
            tokens of an encoder's output, 1 to `max_cross_tokens`, padded to the longest of the batch.
        position : int, or an array of one integer on the host
            Position of the first new token, the same in each sequence. It is read during the call: a CUDA graph that
            captures the call writes at that position in every replay. An array is refused in a capture. It is 0 for a
            `CrossSpec` layer.
        stream : int or a stream, optional
            Stream of a cache on CUDA, where a call neither allocates nor waits; by default the current stream of the
            framework of `key`.

        Returns
        -------
        key, value : Tensor, [batch, num_kv_heads, position + tokens, head_dim or v_head_dim]
            Views of the cache, which keep its memory alive and show later writes. Tokens before `position` have the
            values of earlier calls, or zeros. With a format they hold codes, whose scales are in the planes
            "key_scale" and "value_scale"; `dequantize` reads both.

        Notes
        -----
        A `CrossSpec` layer is written once for an encoder's output, not in every step. Later steps read
        ``key(layer)[:, :, : length(layer)]``. A second write replaces the output of the sequences that it passes; those
        that it leaves out keep theirs. `length` is that of the last write, so pass all sequences if the lengths differ.
        Tokens of a replaced output past the new length remain in the plane, outside of the views.

        Raises
        ------
        ShapeError
            An invalid layer, batch, number of heads, head_dim or position; tokens past `max_length`; for a `CrossSpec`
            layer a position other than 0, or an output of 0 sequences, 0 tokens or more than `max_cross_tokens`.
        UnsupportedDtype, UnsupportedOption, DeviceError
            Unsupported arrays or positions, such as a position in an array during a capture. In every case nothing was
            written.
        MemoryError
            The host has no memory for the arguments of the writes, or, as NotEnoughMemory, for a copy of arrays that
            cannot be read in place. On the host nothing was written.
        """
        arrays, index = self._place(layer)
        begin = position_number(position)
        is_fixed = isinstance(position, int | np.integer)
        if arrays is self._cross:
            self._check_output(layer, key, begin)
            is_fixed = True  # an output begins at 0 in every replay
        return arrays.room.update(index, key, value, begin, stream, is_fixed)

    def reset(self, *, stream: object = None) -> None:
        """Forget every token: set the lengths to 0 and zero everything that `update` wrote, in place.

        An encoder's output is forgotten too. To decode again from the same output, write the decoder's tokens from
        position 0 on instead.

        On CUDA the work is submitted to `stream`, by default CuPy's current one.
        """
        self._own.room.reset(stream)
        if self._cross is not None:
            self._cross.room.reset(stream)

    def _place(self, layer: SupportsIndex) -> tuple[StaticArrays, int]:
        """Return the arrays of a model layer, and its index in them."""
        return self._places[layer_number(layer, self.num_layers)]

    def _check_output(self, layer: SupportsIndex, key: Any, begin: int) -> None:
        """Raise ShapeError unless `key` is a whole encoder output at position 0; its other axes are not checked."""
        if begin != 0:
            raise ShapeError(
                f"position is {shown(begin)}, but layer {layer} is a CrossSpec, whose encoder output is written whole: "
                "pass 0"
            )
        shape = float_array(key, "key").shape
        if len(shape) == 4 and shape[0] == 0:
            raise ShapeError(
                f"key has shape {shape}, an encoder output of 0 sequences; pass 1 to {self.max_batch_size}"
            )
        if len(shape) == 4 and not 1 <= shape[2] <= self.max_cross_tokens:
            raise ShapeError(
                f"key has {shape[2]} encoder tokens; layer {layer} holds 1 to {self.max_cross_tokens}, the max_tokens "
                "of its CrossSpec: pass all tokens of the encoder's output, or raise max_tokens"
            )

    def __repr__(self) -> str:
        cross = f"{self.max_cross_tokens} encoder tokens, " if self.max_cross_tokens else ""
        return (
            f"StaticKVCache({self.num_layers} layers, batch {self.max_batch_size}, {self.key_array.shape[2]} heads, "
            f"length {self.max_length}, {cross}{self.nbytes / 2**20:.1f} MiB on {self.device})"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise UnsupportedOption: a cache cannot be copied or pickled."""
        raise UnsupportedOption(
            "a StaticKVCache cannot be copied or pickled; make one from the same arguments, and copy key_array and "
            "value_array"
        )
