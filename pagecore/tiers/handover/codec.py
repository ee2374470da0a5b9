"""MessagePack through msgspec, which is imported where it is used."""

from __future__ import annotations

from typing import Any, TypeVar

from pagecore.errors import ShapeError, UnsupportedOption

T = TypeVar("T")


def pack(value: object) -> bytes:
    """Return a dataclass of built-in types as MessagePack."""
    packed: bytes = _msgspec().msgpack.encode(value)
    return packed


def unpack(kind: type[T], packed: bytes, what: str) -> T:
    """Return the dataclass that `packed` holds; raise ShapeError if it holds anything else.

    Parameters
    ----------
    what : str
        Name of the value in messages, such as "manifest".
    """
    msgspec = _msgspec()
    try:
        value: T = msgspec.msgpack.decode(packed, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ShapeError(
            f"the {what} of {len(packed)} bytes cannot be read ({error}); pass the bytes that the exporter made, whole"
        ) from None
    return value


def _msgspec() -> Any:
    try:
        import msgspec
    except ImportError:
        raise UnsupportedOption("a hand-over needs msgspec; install it with: pip install 'pagecore[tiers]'") from None
    return msgspec
