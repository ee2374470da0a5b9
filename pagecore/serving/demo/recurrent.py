"""Recurrent layers of the hybrid model: a short convolution, then a linear recurrence.

    inputs [T, channels] -> causal convolution of `kernel` tokens, SiLU -> query, key, value of each head -> recurrence

The same code computes both kinds: "mamba2", whose B, C and x are the keys, queries and values, and "delta", the gated
delta rule, which normalises queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.storage import Plane
from pagecore.storage.state_shapes import delta_planes, mamba2_planes

__all__ = ["KINDS", "Recur", "RecurrentInputs", "RecurrentLayer", "RecurrentSizes", "silu"]

Array = NDArray[Any]
KINDS = ("mamba2", "delta")


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """Sizes of a recurrent layer; `groups` heads of queries and keys serve `heads` heads of values."""

    kind: str
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def width(self) -> int:
        """Numbers of the output of a token."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Numbers of the convolution's input of a token: queries, keys, then values."""
        return 2 * self.groups * self.key_dim + self.width

    def planes(self) -> tuple[Plane, ...]:
        """Return the planes of the state of a sequence, in float32."""
        conv = "float32"
        if self.kind == "mamba2":
            dims = (self.width, self.groups, self.heads, self.value_dim, self.key_dim)
            return mamba2_planes(*dims, self.kernel, dtype=conv)
        return delta_planes(self.groups, self.heads, self.key_dim, self.value_dim, self.kernel, dtype=conv)


@dataclass(frozen=True, slots=True)
class RecurrentInputs:
    """Inputs of a recurrent layer for T tokens, computed from each token alone.

    Attributes
    ----------
    channels : array [T, channels]
        Inputs of the convolution.
    log_decay, strength : array [T, heads]
    """

    channels: Array
    log_decay: Array
    strength: Array


# recur(layer, inputs) -> [T, heads * value_dim]
Recur = Callable[[int, RecurrentInputs], Array]


class RecurrentLayer:
    """Weights of a recurrent layer that are not matrices, and the arithmetic of its tokens.

    Parameters
    ----------
    sizes : RecurrentSizes
    random : numpy.random.Generator
        Source of the weights.
    dtype : numpy dtype
        Dtype of the computation. The weights are rounded to float32 in any dtype.
    """

    def __init__(self, sizes: RecurrentSizes, random: np.random.Generator, dtype: type[np.floating[Any]]) -> None:
        self.sizes = sizes
        self.is_delta = sizes.kind == "delta"

        def drawn(shape: tuple[int, ...], low: float, high: float) -> Array:
            return random.uniform(low, high, shape).astype(np.float32).astype(dtype)

        self.filter = drawn((sizes.channels, sizes.kernel), -1.0, 1.0)
        # Half-lives of a few tokens to a few hundred, so that a wrong state shows after a long text.
        self.rate = np.exp(drawn((sizes.heads,), -2.0, 1.0))
        self.bias = drawn((sizes.heads,), -4.0, -1.0)
        self.skip = drawn((sizes.heads,), 0.5, 1.5)

    def inputs(self, channels: Array, decay: Array, strength: Array) -> RecurrentInputs:
        """Return the inputs for projections ``[T, channels]``, ``[T, heads]`` and ``[T, heads]`` of the tokens."""
        step = np.logaddexp(decay + self.bias, 0)
        if self.is_delta:
            return RecurrentInputs(channels, -self.rate * step, 1 / (1 + np.exp(-strength)))
        return RecurrentInputs(channels, -self.rate * step, step)

    def convolved(self, inputs: Array) -> Array:
        """Return the convolution ``[n, T, channels]`` of ``[n, kernel - 1 + T, channels]``, oldest first."""
        length = inputs.shape[1] - self.sizes.kernel + 1
        total = np.zeros_like(inputs[:, :length])
        for tap in range(self.sizes.kernel):
            total += inputs[:, tap : tap + length] * self.filter[:, tap]
        return silu(total)

    def heads(self, convolved: Array) -> tuple[Array, Array, Array]:
        """Split ``[..., channels]`` into query, key ``[..., heads, key_dim]`` and value ``[..., heads, value_dim]``."""
        sizes = self.sizes
        keys = sizes.groups * sizes.key_dim
        parts = np.split(convolved, [keys, 2 * keys], axis=-1)
        query, key = (part.reshape(*part.shape[:-1], sizes.groups, sizes.key_dim) for part in parts[:2])
        if self.is_delta:
            query, key = _unit(query), _unit(key)
        spread = sizes.heads // sizes.groups
        value = parts[2].reshape(*convolved.shape[:-1], sizes.heads, sizes.value_dim)
        return np.repeat(query, spread, axis=-2), np.repeat(key, spread, axis=-2), value

    def skipped(self, output: Array, value: Array) -> Array:
        """Add the skip connection of Mamba-2 to outputs ``[..., heads, value_dim]``."""
        return output if self.is_delta else output + self.skip[:, None] * value


def silu(x: Array) -> Array:
    """Return x times its logistic function."""
    scaled: Array = x / (1 + np.exp(-x))
    return scaled


def _unit(vectors: Array) -> Array:
    """Scale vectors to length 1."""
    scaled: Array = vectors / np.sqrt((vectors * vectors).sum(axis=-1, keepdims=True) + vectors.dtype.type(1e-6))
    return scaled
