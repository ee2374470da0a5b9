"""Checks of the arguments of `Tiers`, which are made before anything begins."""

from __future__ import annotations

from collections.abc import Collection, Sized
from typing import Any, Literal, get_args

from pagecore.cache.parts import CacheParts, parts_of
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage.checks import as_float, require_int, shown
from pagecore.tiers.arguments import checked_store
from pagecore.tiers.guard import Guard
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.store import BlockStore, Medium

STREAM_BYTES = 64 << 20
AnyMedium = Literal["GPU", "CPU", "DISK", "EXTERNAL"]
Write = Literal["through", "second_hit", "on_release", "on_evict", "explicit"]


def checked_parts(cache: Any, host: Any, write: Any) -> CacheParts:
    """Return the parts of a cache; refuse a host tier of another cache, and an unknown `write`."""
    parts = parts_of(cache)
    if not isinstance(host, HostTier) or host.cache is not cache:
        raise UnsupportedOption(f"host is {shown(host)}; expected a HostTier of this cache")
    if host.is_closed:
        raise UnsupportedOption("the host tier is closed; make another one")
    if not isinstance(write, str) or write not in get_args(Write):
        raise UnsupportedOption(f"write is {shown(write)}; use one of {', '.join(get_args(Write))}")
    return parts


def checked_stores(stores: Any, parts: CacheParts, fingerprint: Any) -> tuple[BlockStore, ...]:
    """Return the stores as a tuple; refuse other objects, and stores that cannot serve the cache."""
    try:
        given = tuple(stores)
    except TypeError:
        raise UnsupportedOption(
            f"stores are {shown(stores)}; expected a list of BlockStore, the nearest first; pass one as [store]"
        ) from None
    checked = tuple(checked_store(f"store {number}", store) for number, store in enumerate(given))
    inner = [(store.store or store) if isinstance(store, Guard) else store for store in checked]
    if len({id(store) for store in inner}) < len(inner):
        raise UnsupportedOption("a store is listed twice; list each once, the nearest first")
    for number, store in enumerate(inner):
        own = getattr(store, "fingerprint", fingerprint)
        if isinstance(own, Fingerprint) and isinstance(fingerprint, Fingerprint) and own.digest != fingerprint.digest:
            raise UnsupportedOption(
                f"store {number} was opened with another fingerprint, {own.name}, than the tiers have, "
                f"{fingerprint.name}; open it with the same"
            )
    if checked and parts.cross is not None:
        raise UnsupportedOption(
            "the cache has cross-attention layers, whose prefixes depend on encoder outputs; stores do not keep "
            "these: use Tiers without stores"
        )
    return checked


def require_fingerprint(stores: Sized, fingerprint: object) -> None:
    """Refuse stores without a fingerprint."""
    if len(stores) and fingerprint is None:
        raise UnsupportedOption(
            f"{len(stores)} stores are given without a fingerprint, which keeps the entries of models apart; "
            "pass fingerprint=Fingerprint.of(cache, model=...)"
        )


def check_fingerprint(fingerprint: Any, stores: Sized, host: HostTier) -> None:
    """Refuse an object that is not a Fingerprint, one of other entries than the host has, and stores without one."""
    require_fingerprint(stores, fingerprint)
    if fingerprint is None:
        return
    if not isinstance(fingerprint, Fingerprint):
        raise UnsupportedOption(
            f"fingerprint is {shown(fingerprint)}; expected a Fingerprint: pass Fingerprint.of(cache, model=...)"
        )
    if fingerprint.payload_bytes != host.payload_bytes:
        raise ShapeError(
            f"the fingerprint describes entries of {list(fingerprint.payload_bytes)} bytes, the host has entries "
            f"of {list(host.payload_bytes)} bytes; use Fingerprint.of of this cache"
        )


def stream_slots(host: HostTier, given: Any) -> int:
    """Return the blocks through which long prefixes pass; refuse more than the host has."""
    if not host.can_stream:
        return 0
    most = min(host.num_blocks) - 1  # block 0 is unused
    if given is not None:
        return require_int("stream_blocks", given, min=0, max=most)
    return max(1, min(STREAM_BYTES // max(sum(host.payload_bytes), 1), most // 4))


def checked_seconds(name: str, value: Any) -> float:
    """Return a duration; refuse what is not a number of seconds, 0 or more."""
    seconds = as_float(name, value)
    if not seconds >= 0:
        raise ShapeError(f"{name} is {shown(value)}; expected seconds, 0 or more")
    return seconds


def checked_timeout(timeout: Any) -> float | None:
    """Return a timeout in seconds, None for none; refuse what is not a number."""
    return None if timeout is None else as_float("timeout", timeout)


def checked_spans(spans: Any) -> tuple[tuple[int, int, bytes | int], ...] | None:
    """Return spans as a tuple; refuse what cannot be listed. Their entries are checked when keys are made."""
    if spans is None:
        return None
    try:
        return tuple(spans)
    except TypeError:
        raise ShapeError(f"expected spans as a list of (start, end, digest), got {shown(spans)}") from None


def checked_media(media: Any, known: tuple[str, ...] = get_args(Medium)) -> frozenset[Any]:
    """Return media; refuse what is not a collection of those that are known."""
    if isinstance(media, str | bytes) or not isinstance(media, Collection):
        raise UnsupportedOption(
            f"media is {shown(media)}; expected a collection of {', '.join(known)}, such as [{known[-1]!r}]"
        )
    for medium in media:
        if not isinstance(medium, str) or medium not in known:
            raise UnsupportedOption(f"media has {shown(medium)}; expected {', '.join(known)}")
    return frozenset(media)


def check_agree(agree: Any) -> None:
    """Refuse an `agree` that cannot be called."""
    if not (agree is None or callable(agree)):
        raise UnsupportedOption(
            f"agree is {shown(agree)}; expected a callable that returns the elementwise minimum over ranks, or None"
        )
