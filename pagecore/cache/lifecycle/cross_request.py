"""Checks of the arguments that request an encoder output, and the keys by which sequences share it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import SupportsIndex

from pagecore.cache.parts import CacheParts
from pagecore.cache.sequences._sequences import content_key
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage.checks import require_int

Digest = bytes | int
NO_INPUT = ()  # in the place of a digest, and equal to none


def cross_request(
    parts: CacheParts, num_tokens: SupportsIndex | None, digest: Digest | None, namespace: Hashable
) -> tuple[int, Hashable] | None:
    """Return the checked number of encoder tokens, and the key under which other sequences find the output.

    Return None for a sequence without an encoder output. The key has the namespace: adapters change encoders, too.

    Raises
    ------
    UnsupportedOption
        As `name_output`, or a digest is given without `num_tokens`.
    ShapeError, UnsupportedDtype
        As `name_output`.
    """
    if num_tokens is None:
        if digest is not None:
            require_cross(parts)
            raise UnsupportedOption("cross_digest is given without cross_tokens; pass both")
        return None
    count, name = name_output(parts, num_tokens, digest)
    return count, None if name is None else content_key(namespace, name)


def name_output(parts: CacheParts, num_tokens: SupportsIndex, digest: Digest | None) -> tuple[int, Hashable]:
    """Return the checked number of encoder tokens, and the name of the output in a namespace; None for no name.

    Raises
    ------
    UnsupportedOption
        The cache has no cross-attention layers, or a digest is given for 0 tokens.
    ShapeError
        More tokens than the cross-attention layers serve, or fewer than 0.
    UnsupportedDtype
        A digest that is neither bytes nor an int.
    """
    if digest is not None:
        require_cross(parts)
    if parts.cross is None:
        raise UnsupportedOption(
            "cross_tokens is given, but the cache has no cross-attention layers; leave it out, or list a CrossSpec"
        )
    count = require_int("cross_tokens", num_tokens, 0, max=None)
    most = parts.cross.contents.max_tokens
    if count > most:
        raise ShapeError(
            f"cross_tokens is {count}; the cross-attention layers serve {most} encoder tokens: raise max_tokens of "
            "their CrossSpec, or the number of blocks"
        )
    if not count:
        if digest is not None:
            raise UnsupportedOption("cross_digest is given with cross_tokens=0; leave out the digest of an empty input")
        return 0, NO_INPUT
    if digest is not None:
        _require_digest(digest)
    return count, digest


def cross_namespace(namespace: Hashable, digest: Digest | None) -> Hashable:
    """Return the namespace of a sequence's prefix: keys of a decoder depend on the output that it attends to."""
    if digest is None:
        return namespace
    _require_digest(digest)
    return (namespace, digest)


def require_cross(parts: CacheParts) -> None:
    """Raise UnsupportedOption for the digest of an encoder's input in a cache without cross attention."""
    if parts.cross is None:
        raise UnsupportedOption(
            "cross_digest is given, but the cache has no cross-attention layers: leave it out; in a pipeline stage of "
            "a model that has such layers, make it a part of the namespace: namespace=(namespace, cross_digest)"
        )


def _require_digest(digest: object) -> None:
    if isinstance(digest, bool) or not isinstance(digest, bytes | int):
        raise UnsupportedDtype(f"cross_digest is a {type(digest).__name__}; expected bytes or an int")
