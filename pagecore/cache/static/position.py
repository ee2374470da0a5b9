"""Conversion of a position: an int, or an integer in a framework's array on the host."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any

import numpy as np

from pagecore.arrays import as_tensor
from pagecore.arrays.exchange.frameworks import is_instance
from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage.checks import shown


def position_number(position: Any) -> int:
    """Return a position as an int; it may be an int, a NumPy integer, or a host array with one integer.

    Raises
    ------
    UnsupportedOption
        A value that JAX traces.
    DeviceError
        An array on a device: reading it would wait for the device.
    ShapeError
        Any other value.
    """
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
        with suppress(Exception):  # the conversion may raise anything; the value is not a position then
            if not isinstance(number, bool):
                return operator.index(number)
    raise ShapeError(
        f"position is {shown(position)}; give an int or an array of one integer, the position of the first new token"
    )


def _on_host(position: Any) -> np.ndarray[Any, np.dtype[Any]] | None:
    """Return `position` as a host array, or None if it is not an array; raise DeviceError for one on a device."""
    try:
        tensor = as_tensor(position)
    except UnsupportedDtype:  # Python and NumPy numbers, lists, and 16-bit or unsigned integers
        try:
            return np.asarray(position)
        except Exception:  # __array__ may raise anything; the value is not a position then
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
