"""Where the first new token stands: an int, or a number that a framework holds on the host."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any

import numpy as np

from pagecore.arrays import as_tensor
from pagecore.arrays.frameworks import is_instance
from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype, UnsupportedOption


def position_number(position: Any) -> int:
    """`position` as an int: Python's, NumPy's, or the only element of an array of integers on the host."""
    if type(position) is int:
        return position
    if is_instance(position, "jax.core", "Tracer"):
        raise UnsupportedOption(
            "position is traced by JAX (under jax.jit) and has no value yet; mark it static (static_argnames), and "
            "call the cache outside of the traced function"
        )
    array = _on_host(position)
    if array is not None and array.size == 1 and array.dtype.kind in "iuO":
        number = array.item()
        with suppress(Exception):  # an object may answer with an error of its own; it is no position either way
            if not isinstance(number, bool):
                return operator.index(number)
    raise ShapeError(
        f"position is {_shown(position)}; give an int, or an array of one integer, the place of the first new token"
    )


def _on_host(position: Any) -> np.ndarray[Any, np.dtype[Any]] | None:
    """The array that `position` is; nothing is fetched from a device, which would wait for it."""
    try:
        tensor = as_tensor(position)
    except UnsupportedDtype:  # Python's and NumPy's own numbers, lists, and integers of 16 bits or without a sign
        try:
            return np.asarray(position)
        except Exception:  # what an object answers to NumPy is its own affair; it is no position either way
            return None
    except DeviceError:
        raise
    except (TypeError, ValueError, RuntimeError, BufferError):
        return None
    if tensor.device != "cpu":
        raise DeviceError(
            f"position is on {tensor.device}; give it as an int or on the host: reading it would wait for the device"
        )
    return tensor.numpy()


def _shown(position: object) -> str:
    try:
        return repr(position)[:80]
    except Exception:
        return f"a {type(position).__name__}"
