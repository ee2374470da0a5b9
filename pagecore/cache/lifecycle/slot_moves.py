"""Moves of tokens between the slots of a cache: the planes that are moved, and the bounds that are renewed."""

from __future__ import annotations

from collections.abc import Iterable

from pagecore.arrays import Tensor
from pagecore.cache.parts import CacheParts
from pagecore.errors import UnsupportedOption
from pagecore.ops.moves._moves import SlotMoves
from pagecore.storage import AttentionSpec, KVPool
from pagecore.storage.specs.attention_spec import sealing_of

BOUNDS = ("key_min", "key_max")


def slot_moves(parts: CacheParts, groups: Iterable[int] | None = None) -> list[SlotMoves]:
    """Return the moves of some groups, or of all; an empty list for a cache without bytes.

    Raises
    ------
    UnsupportedOption
        Planes per block that cannot be computed from the keys.
    DeviceError
        The stream of the cache is being captured.
    """
    pools = parts.store.pools[: parts.tables.num_groups]
    if groups is not None and pools:
        pools = [pools[group] for group in groups]
    if parts.staging is None:
        return [moves_of(pool) for pool in pools]
    parts.staging.refuse_captured(parts.staging.stream)
    parts.store.await_arrivals()
    return [moves_of(pool, parts.staging.stream) for pool in pools]


def moves_of(pool: KVPool, stream: int = 0) -> SlotMoves:
    """Return the moves of one pool, on the stream of this handle if it is on a device."""
    layers = range(pool.num_layers)
    planes = [pool.plane(plane.name, layer) for plane in pool.spec.planes if plane.per == "token" for layer in layers]
    return SlotMoves(planes, [_bounds_of(pool, layer) for layer in layers] if _has_bounds(pool) else [], stream)


def _has_bounds(pool: KVPool) -> bool:
    """Return True if the layers store bounds of their keys; raise UnsupportedOption for other planes per block."""
    spec = pool.spec
    if sealing_of(spec) is not None:  # moved tokens are in the tail, and not sealed yet
        return False
    named = [plane.name for plane in spec.planes if plane.per == "block"]
    if not named:
        return False
    if not isinstance(spec, AttentionSpec) or spec.format is not None:
        what = "stores them in a format" if isinstance(spec, AttentionSpec) else "is not an AttentionSpec"
        raise UnsupportedOption(
            f"tokens cannot move, because the planes {', '.join(named)} per block cannot be renewed: the spec {what}; "
            "use a spec without them"
        )
    return True


def _bounds_of(pool: KVPool, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    low, high = (pool.plane(name, layer) for name in BOUNDS)
    return pool.plane("key", layer), low, high
