"""The static cache: a fixed room for a fixed batch, every sequence in one piece."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np

from pagecore.arrays import Tensor, zeros
from pagecore.arrays.devices import device_name
from pagecore.cache._static import StaticRoom
from pagecore.cache.layers import Layer, Layers, arrange, layer_number
from pagecore.cache.position import position_number
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage import Plane, Spec, TensorParallel
from pagecore.storage.checks import require_int
from pagecore.storage.parallel import as_parallel


class StaticKVCache:
    """Key and value of a fixed batch in one contiguous array each, ``[layers, batch, heads, length, dim]``.

    Parameters
    ----------
    spec : spec or list of specs
        The whole model's: one for all layers (with `num_layers`), or a list with one spec or `Alias` for each model
        layer. All must store planes of one shape and dtype; window, scale, softcap and sinks may differ. They are for
        whoever attends: the cache keeps every token.
    num_layers : int, optional
        How often a single spec is repeated; 1 by default.
    max_batch_size, max_length : int
        Sequences, and tokens of each, that there is room for.
    device : str
        "cpu", "cuda" (which is "cuda:0") or another CUDA device.
    parallel : TensorParallel, optional
        Which rank of how many this cache serves: it holds the rank's heads, and `update` takes them.

    Attributes
    ----------
    key_array, value_array : Tensor
        The memory, ``[layers that store, max_batch_size, heads, max_length, head_dim or v_head_dim]``, zero where
        nothing was written. On the host it takes pages of the machine only where it is touched.
    parallel : TensorParallel
    max_batch_size, max_length : int
    device : str

    Raises
    ------
    ShapeError, UnsupportedOption, UnsupportedDtype, DeviceError
        Sizes, specs, a device or a number of ranks that do not fit.
    NotEnoughMemory
        The system has not that much.

    One writer at a time; the cache has no lock.

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
            raise ShapeError("max_length is None; say for how many tokens of each sequence there is to be room")
        self.max_length = require_int("max_length", max_length, max=None)
        self._layers, groups = arrange(spec, num_layers, self.parallel, attends=True)
        planes = [_key_and_value(group.spec) for group in groups]
        for other in planes[1:]:
            _check_alike(planes[0], other)
        key, value = planes[0]
        self._places = _places(self._layers)
        room = len(set(self._places)), self.max_batch_size, key.shape[0], self.max_length
        self.key_array = zeros((*room, key.shape[1]), key.dtype, self.device)
        self.value_array = zeros((*room, value.shape[1]), value.dtype, self.device)
        self._room = StaticRoom(self.key_array, self.value_array)

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Model layers, aliases among them."""
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of key and value, of this rank."""
        return self.key_array.nbytes + self.value_array.nbytes

    def spec(self, layer: int) -> Spec:
        """What this rank stores and attends of a model layer; an alias has the spec of the layer that it shares."""
        return self._layers[layer_number(layer, self.num_layers)].spec

    def key(self, layer: int) -> Tensor:
        """Keys of a model layer, ``[max_batch_size, num_kv_heads, max_length, head_dim]``; aliases the cache."""
        return self.key_array[self._place(layer)]

    def value(self, layer: int) -> Tensor:
        """Values of a model layer, ``[max_batch_size, num_kv_heads, max_length, v_head_dim]``; aliases the cache."""
        return self.value_array[self._place(layer)]

    def length(self, layer: int = 0) -> int:
        """Tokens of a model layer up to now: where its last `update` ended."""
        return self._room.lengths[self._place(layer)]

    # -- writing -------------------------------------------------------------------------------------------------

    def update(
        self, layer: SupportsIndex, key: Any, value: Any, position: Any, *, stream: object = None
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens, and show everything up to them.

        Parameters
        ----------
        layer : int
            A model layer; an alias writes to the layer that it shares.
        key, value : array, [batch, num_kv_heads, tokens, head_dim] and [batch, num_kv_heads, tokens, v_head_dim]
            float32, float16 or bfloat16 where the cache is, of any framework; cast to the cache's dtype and rounded to
            nearest even. On the host they have any strides, and may be views of this cache: what they held before the
            call is written. On CUDA the last axis is contiguous, and they are no views of this cache. Fewer sequences
            than `max_batch_size` are its first ones.
        position : int, or an array of one integer on the host
            Position of the first new token, the same in each sequence. It is read now: a CUDA graph that captures this
            call writes at that position in every replay. An array is refused in a capture.
        stream : int or a stream, optional
            Of a cache on CUDA, where a call allocates nothing and waits for nothing; by default the current one of the
            framework of `key`.

        Returns
        -------
        key, value : Tensor, [batch, num_kv_heads, position + tokens, head_dim or v_head_dim]
            Views of the cache: they copy nothing, keep its memory alive, and see what is written later. What stands
            before `position` is what earlier calls wrote, or zero.

        Raises
        ------
        ShapeError
            A layer, batch, number of heads, head_dim or position that does not fit, tokens past `max_length`.
        UnsupportedDtype, UnsupportedOption, DeviceError
            Arrays or a position that are not served, such as a position in an array while a graph is captured. In every
            case nothing has been written.
        """
        is_fixed = isinstance(position, int | np.integer)
        return self._room.update(self._place(layer), key, value, position_number(position), stream, is_fixed)

    def reset(self, *, stream: object = None) -> None:
        """Forget every token: lengths are 0, and what `update` wrote is zero again. The arrays stay where they are.

        On CUDA that is done in the order of `stream`, which is CuPy's current one by default.
        """
        self._room.reset(stream)

    def _place(self, layer: SupportsIndex) -> int:
        """Where in the arrays a model layer is."""
        return self._places[layer_number(layer, self.num_layers)]

    def __repr__(self) -> str:
        return (
            f"StaticKVCache({self.num_layers} layers, batch {self.max_batch_size}, {self.key_array.shape[2]} heads, "
            f"length {self.max_length}, {self.nbytes / 2**20:.1f} MiB on {self.device})"
        )


def _key_and_value(spec: Spec) -> tuple[Plane, Plane]:
    """The two planes that a static cache holds; UnsupportedOption for a spec that stores more than these."""
    planes = {plane.name: plane for plane in spec.planes}
    if len(planes) > 2:
        raise UnsupportedOption(
            f"a {type(spec).__name__} stores {', '.join(planes)}; a static cache holds key and value only: use a "
            "PagedKVCache"
        )
    return planes["key"], planes["value"]


def _check_alike(first: tuple[Plane, Plane], other: tuple[Plane, Plane]) -> None:
    for a, b in zip(first, other, strict=True):
        if a != b:
            raise UnsupportedOption(
                f"{a.name} is {a.shape} of {a.dtype} in some layers and {b.shape} of {b.dtype} in others; a static "
                "cache keeps all layers in one array: make one for each kind, or a PagedKVCache"
            )


def _places(layers: list[Layer]) -> list[int]:
    """Where in the arrays each model layer is; aliases share the place of their target."""
    places: dict[tuple[int, int], int] = {}
    return [places.setdefault((layer.group, layer.index), len(places)) for layer in layers]
