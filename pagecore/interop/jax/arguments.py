"""Checks of arguments by shape and dtype, while `jax.jit` traces a function.

The checks and errors equal those of `pagecore.ops`. The handlers check the numbers inside arrays when they run.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedDtype, UnsupportedOption, shown
from pagecore.interop.jax import _xla
from pagecore.ops.arguments._arguments import listed_bits

INT32 = np.iinfo(np.int32)
FLOATS = ("float32", "float16", "bfloat16")
_WORDS = (np.uint64, np.int64)  # dtypes of a tree's 64-bit words


def floats(array: Any, name: str, axes: str, first_full: int) -> jax.Array:
    """Return a query, key or value as an array of JAX with three axes; axes from `first_full` on must not be empty."""
    array = _as_jax(array, name)
    _check_float(array, name)
    check_rank(array, name, 3, axes)
    without_empty(array, name, first_full, axes)
    return array


def _check_float(array: Any, name: str) -> None:
    if array.dtype not in FLOATS:
        raise UnsupportedDtype(f"{name} is {array.dtype}; float32, float16 and bfloat16 are served: convert it")


def without_empty(array: Any, name: str, first_full: int, axes: str) -> tuple[int, ...]:
    """Return the shape of an array; raise ShapeError if an axis from `first_full` on is empty."""
    shape: tuple[int, ...] = array.shape
    for axis in range(first_full, len(shape)):
        if shape[axis] == 0:
            raise ShapeError(f"{name} has shape {shape}, {axes}; axis {axis} must have at least 1 element")
    return shape


def check_rank(array: Any, name: str, ndim: int, axes: str) -> None:
    """Raise ShapeError unless the array has `ndim` axes."""
    if array.ndim != ndim:
        raise ShapeError(f"{name} has shape {array.shape}; it must have {ndim} axes: {axes}")


def check_length(array: Any, name: str, axis: int, expected: int, reason: str) -> None:
    """Raise ShapeError unless an axis has the expected length."""
    if array.shape[axis] != expected:
        raise ShapeError(f"{name} has shape {array.shape}; axis {axis} must have length {expected}: {reason}")


def indices(array: Any, name: str, ndim: int, axes: str) -> jax.Array:
    """Return indices as int32, or as int64 under x64; raise for numbers that JAX would truncate."""
    if not isinstance(array, jax.Array):
        array = _narrowest(array, name)
    if array.dtype.kind not in "iu":
        raise UnsupportedDtype(f"{name} holds {array.dtype}; it must hold integers: int32, or int64 under x64")
    if array.dtype not in ("int32", "int64"):
        if array.dtype.itemsize >= 4:
            raise UnsupportedDtype(f"{name} holds {array.dtype}; it must hold int32, or int64 under x64: convert it")
        array = array.astype(np.int32)
    check_rank(array, name, ndim, axes)
    return array


def _narrowest(array: Any, name: str) -> Any:
    """Convert integers from outside of JAX to the narrowest dtype of JAX that holds them."""
    try:
        values = np.asarray(array)
    except MemoryError:
        raise
    except Exception as error:
        raise ShapeError(f"{name} is not an array of integers: {shown(error)}") from error
    if values.size == 0:
        return jnp.asarray(values.astype(np.int32))
    if values.dtype.kind not in "iu":
        raise UnsupportedDtype(f"{name} holds {values.dtype}; it must hold integers: int32, or int64 under x64")
    if INT32.min <= values.min() and values.max() <= INT32.max:
        return jnp.asarray(values.astype(np.int32))
    if not jax.config.jax_enable_x64 or values.dtype == np.uint64:
        raise ShapeError(f"{name} holds {values.max()}, which JAX would truncate to int32; set jax_enable_x64")
    return jnp.asarray(values.astype(np.int64))


def head_numbers(array: Any, name: str, num_heads: int) -> jax.Array:
    """Return an array [num_heads] in a dtype that the kernels read."""
    array = _as_jax(array, name)
    if array.dtype.kind not in "iuf" and array.dtype not in FLOATS:
        raise UnsupportedDtype(f"{name} holds {array.dtype}; it must hold numbers that float32 can hold")
    if array.shape != (num_heads,):
        raise ShapeError(f"{name} has shape {array.shape}; it must be [{num_heads}], one number for each head")
    return array if array.dtype in FLOATS else array.astype(np.float32)


def scales(scale: Any, name: str, num_kv_heads: int, divides: bool) -> jax.Array | None:
    """Return float32 scales [num_kv_heads] of a number or an array; None if the scale is None or 1.

    With `divides` the scale is a divisor, so 0 raises.
    """
    if scale is None:
        return None
    if isinstance(scale, float | int | np.number):
        value = np.float32(_xla.number(scale, name))
        if value == 0 and divides:
            raise UnsupportedOption(f"{name} is {scale}; it must be finite and not 0 as a float32, because it divides")
        return None if value == 1 else jnp.full(num_kv_heads, value)
    array = _as_jax(scale, name)
    if array.shape in ((), (1,)):
        array = jnp.broadcast_to(array, (num_kv_heads,))
    return head_numbers(array, name, num_kv_heads).astype(np.float32)


def flat_mask(array: Any) -> jax.Array:
    """Return a mask as a bool array with one axis."""
    mask = jnp.zeros(0, bool) if isinstance(array, list | tuple) and not array else _as_jax(array, "mask")
    if mask.dtype != bool:
        raise UnsupportedDtype(f"mask is {mask.dtype}; it must be bool, True where a query attends: pass mask != 0")
    check_rank(mask, "mask", 1, "flat, [query_len, seq_len] of every sequence in order")
    return mask


def tree_words(array: Any, num_tokens: int) -> jax.Array:
    """Return the bits of a tree as int32 ``[num_tokens, 2 * words]``, low halves of 64-bit words first."""
    if not isinstance(array, jax.Array):
        given = _host_words(array)
        if given.dtype in _WORDS:
            given = np.ascontiguousarray(_by_token(given)).view(np.int32)
        array = _as_jax(given, "tree_mask")
    if array.dtype in _WORDS:
        words = _by_token(array)
        array = jax.lax.bitcast_convert_type(words, np.int32).reshape(words.shape[0], 2 * words.shape[1])
    if array.dtype not in (np.uint32, np.int32):
        raise UnsupportedDtype(f"tree_mask is {array.dtype}; it must hold words of 64 bits, or their halves as uint32")
    check_rank(array, "tree_mask", 2, "[num_tokens, 2 * words]")
    check_length(array, "tree_mask", 0, num_tokens, "a row of bits for each row of query")
    if array.shape[1] == 0 or array.shape[1] % 2:
        raise ShapeError(f"tree_mask has shape {array.shape}; give an even number of halves of words for each token")
    return jax.lax.bitcast_convert_type(array, np.int32)


def _host_words(array: Any) -> Any:
    """Return an array of NumPy, of 64-bit words for a list; raise ShapeError if it cannot be converted."""
    if isinstance(array, list | tuple):
        return listed_bits(array)
    try:
        return np.asarray(array)
    except MemoryError:
        raise
    except Exception as error:
        raise ShapeError(f"tree_mask is not an array of integers: {shown(error)}") from error


def _by_token(words: Any) -> Any:
    """Return words of 64 bits as ``[num_tokens, words]``."""
    if words.ndim not in (1, 2):
        raise ShapeError(f"tree_mask has shape {words.shape}; it must be [num_tokens] or [num_tokens, words]")
    return words[:, None] if words.ndim == 1 else words


def number(value: Any, name: str) -> float:
    """Return a number that must be known when the function is traced."""
    _refuse_tracer(value, name, "a Python number")
    return _xla.number(value, name)


def switch(value: Any, name: str) -> bool:
    """Return a bool that must be known when the function is traced."""
    _refuse_tracer(value, name, "True or False")
    if not isinstance(value, bool | np.bool_):
        raise UnsupportedOption(f"{name} is {shown(value)}; it must be True or False")
    return bool(value)


def _refuse_tracer(value: Any, name: str, what: str) -> None:
    if isinstance(value, jax.core.Tracer):
        raise UnsupportedOption(f"{name} is traced; it must be known when the function is compiled: {what}")


def _as_jax(array: Any, name: str) -> Any:
    if isinstance(array, jax.Array):
        return array
    try:
        return jnp.asarray(array)
    except MemoryError:
        raise
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise NotEnoughMemory(
                f"{name}: JAX has not enough memory to copy it: {shown(error)}; free memory, or pass a jax.Array"
            ) from error
        raise UnsupportedDtype(f"{name} cannot be converted to a jax.Array: {shown(error)}") from error
