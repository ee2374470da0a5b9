"""jax.jit for functions that update caches: they are donated, and it is seen to that they stay where they are."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax

from pagecore.errors import UnsupportedOption


def jit(function: Callable[..., Any] | None = None, *, caches: str | Iterable[str], **options: Any) -> Any:
    """`jax.jit` with donated caches, which must come back in place.

    `jax.jit(donate_argnames=...)` allows XLA to update an argument in place, and where that cannot be copies it without
    a word: a whole cache for every step. This one raises instead.

    Parameters
    ----------
    function : callable
        Takes the caches, arrays or pytrees of them, and returns them among its results.
    caches : str or iterable of str
        Names of the arguments that are caches.
    **options
        Of `jax.jit`.

    Returns
    -------
    callable
        With the attribute `jitted`, what `jax.jit` made of `function`. Without `function`, a decorator.

    Raises
    ------
    UnsupportedOption
        A call has copied a cache: its memory is not JAX's own (it came by DLPack or from NumPy), something else views
        it, or the function does not return it. The results of that call are dropped; memory that is not JAX's own is
        as it was.

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
        raise UnsupportedOption(f"{taken.pop()} is given; name what is donated in caches=")
    places = [(name, _place(function, name)) for name in names]
    jitted = jax.jit(function, donate_argnames=names, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [
            (name, array, _addresses(array))
            for name, place in places
            for array in jax.tree.leaves(args[place] if place < len(args) else kwargs.get(name))
        ]
        results = jitted(*args, **kwargs)
        returned = {address for array in jax.tree.leaves(results) for address in _addresses(array)}
        for name, array, addresses in given:
            if not returned.issuperset(addresses) and not jax.config.jax_disable_jit:
                raise _copied(name, array)
        return results

    call.jitted = jitted  # type: ignore[attr-defined]
    return call


def _place(function: Callable[..., Any], name: str) -> int:
    """Where an argument stands among the positional ones; past all of them where it is given by name alone."""
    parameters = inspect.signature(function).parameters
    if name not in parameters:
        raise UnsupportedOption(f"caches names {name!r}, no argument of the function; it has {list(parameters)}")
    by_name = parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    return sys.maxsize if by_name else list(parameters).index(name)


def _addresses(array: Any) -> tuple[int, ...]:
    """Where an array lies, on each device. None where it is traced; one that never comes back where it is not JAX's."""
    try:
        return (array.unsafe_buffer_pointer(),)
    except AttributeError:
        return (-1,)
    except TypeError:
        return ()
    except RuntimeError:  # on several devices, or deleted, which the call itself refuses
        shards = () if array.is_deleted() else array.addressable_shards
        return tuple(shard.data.unsafe_buffer_pointer() for shard in shards)


def _copied(name: str, array: Any) -> UnsupportedOption:
    what = f"{name} ({getattr(array, 'dtype', type(array).__name__)}{list(getattr(array, 'shape', ()))})"
    if isinstance(array, jax.Array) and not array.is_deleted():
        return UnsupportedOption(
            f"{what} was copied, because the function does not return it, or because something else views its memory "
            "(numpy.asarray of it, a pagecore.Tensor, another framework's array); drop such views before the call"
        )
    return UnsupportedOption(
        f"{what} was copied, because its memory is not JAX's own; make caches with jax.numpy.zeros, or take over what "
        "is in the memory of others once, with jax.numpy.array(x, copy=True)"
    )
