"""hadamard as operations of JAX, which run on any of its devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.interop.jax.arguments import FLOATS
from pagecore.ops.codecs._codecs import rotation_block


def hadamard(x: jax.Array) -> jax.Array:
    """Return rows times orthonormal Hadamard matrices: `pagecore.hadamard` for `jax.jit`, with the same bits.

    It consists of operations of JAX: unlike the others of this module it serves every device, `vmap` and gradients.
    Denormal numbers may count as 0.

    Parameters
    ----------
    x : jax.Array, [..., D]
        float32, float16 or bfloat16; D is a multiple of 8.

    Returns
    -------
    jax.Array, [..., D]

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption
        An array with another last axis or dtype, or no array of JAX.
    """
    if not isinstance(x, jax.Array):
        raise UnsupportedOption(f"x is a {type(x).__name__}; expected a jax.Array")
    if str(x.dtype) not in FLOATS:
        raise UnsupportedDtype(f"x is {x.dtype}; float32, float16 and bfloat16 are served: convert it")
    block = rotation_block(x.shape[-1]) if x.ndim else 0
    if not block:
        raise ShapeError(f"x has shape {x.shape}; the last axis must be a multiple of 8: pad the rows with zeros")
    numbers, step = x.astype(jnp.float32), 1
    while step < block:
        pairs = numbers.reshape(-1, 2, step)
        numbers = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        step *= 2
    scaled: jax.Array = (numbers * jnp.float32(block**-0.5)).reshape(x.shape).astype(x.dtype)
    return scaled
