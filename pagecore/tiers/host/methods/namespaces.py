"""Namespaces from the keys under which a prefix tree keeps them; see `pagecore.index.radix._radix`."""

from __future__ import annotations

import struct
from collections.abc import Hashable

from pagecore.errors import UnsupportedDtype


def namespace_of(key: object) -> Hashable:
    """Return the namespace of a key.

    Raises
    ------
    UnsupportedDtype
        The namespace has parts other than str, bytes, int, float, bool, None and tuples of them.
    """
    if key is None or isinstance(key, str):
        return key
    assert isinstance(key, tuple)
    value, _ = _unpack(key[0], 0)
    return value


def _unpack(packed: bytes, at: int) -> tuple[Hashable, int]:
    """Return the value that begins at an index, and the index after it."""
    tag, at = packed[at : at + 1], at + 1
    if tag in (b"N", b"T", b"F"):
        return {b"N": None, b"T": True, b"F": False}[tag], at
    if tag == b"f":
        return struct.unpack_from("<d", packed, at)[0], at + 8
    if tag not in (b"s", b"b", b"i", b"("):
        raise UnsupportedDtype("the namespace contains an object that has no value outside this process")
    colon = packed.index(b":", at)
    count, at = int(packed[at:colon]), colon + 1
    if tag == b"(":
        parts = []
        for _ in range(count):
            part, at = _unpack(packed, at)
            parts.append(part)
        return tuple(parts), at
    content, at = packed[at : at + count], at + count
    if tag == b"b":
        return content, at
    if tag == b"i":
        return int.from_bytes(content, "little", signed=True), at
    return content.decode("utf-8", "surrogatepass"), at
