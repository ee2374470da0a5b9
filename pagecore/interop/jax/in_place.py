"""jax.jit for functions that update caches: donates the caches and checks that XLA updated them in place."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax

from pagecore.errors import UnsupportedOption


def jit(function: Callable[..., Any] | None = None, *, caches: str | Iterable[str], **options: Any) -> Any:
    """`jax.jit` that donates caches and raises if they were not updated in place.

    `jax.jit(donate_argnames=...)` allows XLA to update an argument in place. If XLA cannot, it silently copies the
    argument, which would be a whole cache in every step.

    Parameters
    ----------
    function : callable
        Takes the caches, arrays or pytrees of them, and returns them among its results.
    caches : str or iterable of str
        Names of the arguments that are caches.
    **options
        Passed to `jax.jit`.

    Returns
    -------
    callable
        The compiled function; its attribute `jitted` is the result of `jax.jit`. Without `function`, a decorator.

    Raises
    ------
    UnsupportedOption
        A call copied a cache, because JAX does not own its memory (it came through DLPack or from NumPy), because
        another object views it, or because the function does not return it. The results of the call are dropped; memory
        that JAX does not own is unchanged.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from pagecore.interop import jax as pagecore_jax
    >>> @pagecore_jax.jit(caches=("keys", "values"))
    ... def write(keys, values, new, slots):
    ...     return pagecore_jax.write_kv(new, new, keys, values, slots)
    >>> keys, values = jnp.zeros((2, 4, 4, 16, 8))  # 4 blocks of 4 tokens, 16 heads of 8
    >>> keys, values = write(keys, values, jnp.ones((3, 16, 8)), jnp.array([6, 7, -1]))
    >>> keys[1, :, 0, 0]
    Array([0., 0., 1., 1.], dtype=float32)
    """
    names = (caches,) if isinstance(caches, str) else tuple(caches)
    if function is None:
        return functools.partial(jit, caches=names, **options)
    if taken := {"donate_argnums", "donate_argnames"} & options.keys():
        raise UnsupportedOption(f"{taken.pop()} is not supported; list donated arguments in caches=")
    positions = [(name, _position(function, name)) for name in names]
    jitted = jax.jit(function, donate_argnames=names, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [
            (name, array, _addresses(array))
            for name, position in positions
            for array in jax.tree.leaves(args[position] if position < len(args) else kwargs.get(name))
        ]
        results = jitted(*args, **kwargs)
        returned = {address for array in jax.tree.leaves(results) for address in _addresses(array)}
        for name, array, addresses in given:
            if not returned.issuperset(addresses) and not jax.config.jax_disable_jit:
                raise _copied(name, array)
        return results

    call.jitted = jitted  # type: ignore[attr-defined]
    return call


def _position(function: Callable[..., Any], name: str) -> int:
    """Return the position of an argument; sys.maxsize for a keyword-only argument."""
    parameters = inspect.signature(function).parameters
    if name not in parameters:
        raise UnsupportedOption(
            f"caches lists {name!r}, which is not an argument of the function; its arguments are {list(parameters)}"
        )
    by_name = parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    return sys.maxsize if by_name else list(parameters).index(name)


def _addresses(array: Any) -> tuple[int, ...]:
    """Return the address of an array on each device.

    () for a traced array; (-1,), which equals no address, for an array that JAX does not own.
    """
    try:
        return (array.unsafe_buffer_pointer(),)
    except AttributeError:
        return (-1,)
    except TypeError:
        return ()
    except RuntimeError:  # on several devices, or deleted, for which the call itself raises
        shards = () if array.is_deleted() else array.addressable_shards
        return tuple(shard.data.unsafe_buffer_pointer() for shard in shards)


def _copied(name: str, array: Any) -> UnsupportedOption:
    what = f"{name} ({getattr(array, 'dtype', type(array).__name__)}{list(getattr(array, 'shape', ()))})"
    if isinstance(array, jax.Array) and not array.is_deleted():
        return UnsupportedOption(
            f"{what} was copied, because the function does not return it, or because another object views its memory "
            "(numpy.asarray of it, a pagecore.Tensor, another framework's array); delete such views before the call"
        )
    return UnsupportedOption(
        f"{what} was copied, because JAX does not own its memory; make caches with jax.numpy.zeros, or copy the array "
        "once with jax.numpy.array(x, copy=True)"
    )
