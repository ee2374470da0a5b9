"""A small Llama-shaped decoder in plain NumPy: RoPE, RMSNorm, grouped queries, SwiGLU; some layers may be recurrent.

Attention and recurrence are parameters of the forward pass, so that the same model runs with a paged cache and from
scratch. In the dense model every second layer has a sliding window; `HybridSizes` describes a model with states.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import ShapeError
from pagecore.serving.demo.recurrent import Recur, RecurrentLayer, RecurrentSizes, silu
from pagecore.storage import AttentionSpec, Spec
from pagecore.storage.checks import as_float, require_int

__all__ = ["Attend", "Model", "ModelSizes", "dense_attention"]

Array = NDArray[Any]
# Number of multiplications of a matrix product below which OpenBLAS uses one thread. The products of the model are so
# small that, on a busy machine, several threads would wait for each other longer than they compute.
SINGLE_THREADED = 1 << 18
QUERIES_AT_ONCE = 16
# attend(layer, query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D]) -> [T, Hq, D]
Attend = Callable[[int, Array, Array, Array], Array]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model; odd layers have a sliding window of `window` keys.

    Raises
    ------
    ShapeError
        A size is not a positive integer, or `rope_base` or `epsilon` is not a positive finite number.
    """

    vocab_size: int = 512
    width: int = 128
    num_layers: int = 4
    num_query_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    hidden_width: int = 256
    window: int = 48
    rope_base: float = 10_000.0
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.default.__class__ is int:
                require_int(each.name, getattr(self, each.name))
            elif each.default.__class__ is float and not 0 < as_float(each.name, getattr(self, each.name)) < math.inf:
                raise ShapeError(f"{each.name} is {getattr(self, each.name)}; expected a positive finite number")

    def layer_window(self, layer: int) -> int | None:
        """Return the number of keys that a query of this layer attends to; None for all."""
        return self.window if layer % 2 else None

    @property
    def recurrent(self) -> dict[int, RecurrentSizes]:
        """Sizes of each recurrent layer, by its number; the other layers have attention."""
        return {}

    def spec(self, layer: int) -> Spec:
        """Return the spec of one layer, for a cache of float32."""
        return AttentionSpec(
            self.num_kv_heads,
            self.head_dim,
            dtype="float32",
            window=self.layer_window(layer),
            num_query_heads=self.num_query_heads,
        )

    def specs(self) -> list[Spec]:
        """Return the spec of each layer."""
        return [self.spec(layer) for layer in range(self.num_layers)]

    @property
    def num_groups(self) -> int:
        """Number of groups of layers with attention, whose blocks a cache counts separately."""
        return len({self.layer_window(layer) for layer in range(self.num_layers) if layer not in self.recurrent})


class Model:
    """A model with random weights.

    Parameters
    ----------
    sizes : ModelSizes
    seed : int
        Seed of the weights.
    dtype : numpy dtype
        Dtype of the computation. The weights are rounded to float32 in any dtype, so that models of the same seed have
        the same weights.
    """

    def __init__(self, sizes: ModelSizes, seed: int = 0, dtype: type[np.floating[Any]] = np.float32) -> None:
        self.sizes = sizes
        self.dtype = dtype
        random = np.random.default_rng(seed)

        def matrix(rows: int, columns: int, gain: float = 1.0) -> Array:
            weights = random.standard_normal((rows, columns), np.float32) * np.float32(gain / np.sqrt(rows))
            return weights.astype(dtype)

        query, keys = sizes.num_query_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim

        def mixer(layer: int) -> dict[str, Array]:
            recurrent = sizes.recurrent.get(layer)
            if recurrent is None:
                # Larger gains spread the scores: attention selects among tokens, and the logits depend on the choice.
                return {
                    "query": matrix(sizes.width, query, gain=1.5),
                    "key": matrix(sizes.width, keys, gain=1.5),
                    "value": matrix(sizes.width, keys),
                    "output": matrix(query, sizes.width, gain=2.0),
                }
            self.recurrent[layer] = RecurrentLayer(recurrent, random, dtype)
            return {
                "channels": matrix(sizes.width, recurrent.channels),
                "decay": matrix(sizes.width, recurrent.heads),
                "strength": matrix(sizes.width, recurrent.heads),
                "output gate": matrix(sizes.width, recurrent.width),
                "output": matrix(recurrent.width, sizes.width, gain=2.0),
            }

        self.embedding = matrix(sizes.vocab_size, sizes.width, gain=np.sqrt(sizes.vocab_size))
        self.recurrent: dict[int, RecurrentLayer] = {}
        self.layers = [
            {
                **mixer(layer),
                "gate": matrix(sizes.width, sizes.hidden_width),
                "up": matrix(sizes.width, sizes.hidden_width),
                "down": matrix(sizes.hidden_width, sizes.width),
            }
            for layer in range(sizes.num_layers)
        ]
        self.head = matrix(sizes.width, sizes.vocab_size, gain=2.0)

    def forward(self, tokens: Array, positions: Array, attend: Attend, recur: Recur | None = None) -> Array:
        """Return hidden states `[T, width]` of tokens `[T]` at `positions` `[T]`, of one or several sequences.

        `recur` is needed for a model with recurrent layers.
        """
        rotations = self._rotations(positions)
        hidden: Array = self.embedding[tokens]
        for layer, weights in enumerate(self.layers):
            normed = self._normalize(hidden)
            if layer in self.recurrent:
                assert recur is not None
                hidden = hidden + self._recurrent(layer, normed, recur)
            else:
                hidden = hidden + self._attention(layer, normed, rotations, attend)
            normed = self._normalize(hidden)
            gate = silu(product(normed, weights["gate"]))
            hidden = hidden + product(gate * product(normed, weights["up"]), weights["down"])
        return hidden

    def _attention(self, layer: int, normed: Array, rotations: tuple[Array, Array], attend: Attend) -> Array:
        weights = self.layers[layer]
        query = self._rotate(self._heads(product(normed, weights["query"])), rotations)
        key = self._rotate(self._heads(product(normed, weights["key"])), rotations)
        attended = attend(layer, query, key, self._heads(product(normed, weights["value"])))
        return product(attended.reshape(len(normed), -1), weights["output"])

    def _recurrent(self, layer: int, normed: Array, recur: Recur) -> Array:
        """Gate and normalise the output of the recurrence, as Mamba-2 does."""
        weights = self.layers[layer]
        projected = (product(normed, weights[name]) for name in ("channels", "decay", "strength"))
        output = recur(layer, self.recurrent[layer].inputs(*projected))
        return product(self._normalize(output * silu(product(normed, weights["output gate"]))), weights["output"])

    def logits(self, hidden: Array) -> Array:
        """Return the logits `[n, vocab_size]` of hidden states `[n, width]`."""
        return product(self._normalize(hidden), self.head)

    def _normalize(self, hidden: Array) -> Array:
        """RMSNorm with all gains 1."""
        square = np.mean(hidden * hidden, axis=-1, keepdims=True)
        scaled: Array = hidden / np.sqrt(square + self.dtype(self.sizes.epsilon))
        return scaled

    def _heads(self, flat: Array) -> Array:
        return flat.reshape(len(flat), -1, self.sizes.head_dim)

    def _rotations(self, positions: Array) -> tuple[Array, Array]:
        """Return cosine and sine of the rotary embedding, each `[T, 1, head_dim / 2]`."""
        half = self.sizes.head_dim // 2
        rates = self.sizes.rope_base ** (-np.arange(half) / half)
        angles = np.asarray(positions, np.float64)[:, None, None] * rates
        return np.cos(angles).astype(self.dtype), np.sin(angles).astype(self.dtype)

    def _rotate(self, heads: Array, rotations: tuple[Array, Array]) -> Array:
        cosine, sine = rotations
        first, second = np.split(heads, 2, axis=-1)
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def dense_attention(query: Array, key: Array, value: Array, window: int | None = None) -> Array:
    """Compute causal attention over one whole sequence without a cache, in the dtype of the arguments.

    Parameters
    ----------
    query : array [T, Hq, D]
    key, value : array [T, Hkv, D]
        Hq is a multiple of Hkv.
    window : int, optional
        Number of keys that a query attends to, its own included.

    Returns
    -------
    array [T, Hq, D]
    """
    length, heads, dim = query.shape
    group = heads // key.shape[1]
    spread_key, spread_value = (np.repeat(part, group, axis=1).transpose(1, 0, 2) for part in (key, value))
    scaled = query.transpose(1, 0, 2) / query.dtype.type(np.sqrt(dim))
    attended = np.empty((length, heads, value.shape[-1]), query.dtype)
    for start in range(0, length, QUERIES_AT_ONCE):
        stop = min(start + QUERIES_AT_ONCE, length)
        scores = scaled[:, start:stop] @ spread_key[:, :stop].transpose(0, 2, 1)
        distance = np.arange(start, stop)[:, None] - np.arange(stop)
        scores = np.where((distance >= 0) & (distance < (window or length)), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended[start:stop] = (weights @ spread_value[:, :stop]).transpose(1, 0, 2)
    return attended


def product(rows: Array, weights: Array) -> Array:
    """Return `rows @ weights`, computed a few rows at a time so that the BLAS does not use several threads."""
    # One row would be a product of a matrix and a vector, for which OpenBLAS has a lower limit.
    at_once = max(1, min(SINGLE_THREADED // weights.size, max(2, len(rows))))
    padded = np.zeros((-(-len(rows) // at_once) * at_once, rows.shape[1]), rows.dtype)
    padded[: len(rows)] = rows
    pieces = padded.reshape(-1, at_once, rows.shape[1]) @ weights
    return pieces.reshape(-1, weights.shape[1])[: len(rows)]
