"""Export: offer a computed sequence to other processes."""

from __future__ import annotations

import os
import time

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.lifecycle._lifecycle import content_identity, num_publishable_tokens
from pagecore.cache.memory.sealer import sealed_groups
from pagecore.cache.paged import PagedKVCache
from pagecore.cache.parts import CacheParts, parts_of
from pagecore.cache.sequences._sequences import Sequence
from pagecore.cache.state._state import Held
from pagecore.errors import UnsupportedOption
from pagecore.storage import StatePool
from pagecore.storage.checks import ceil_div, require_int, shown
from pagecore.tiers.handover.acceptance import check_transport, lease_seconds
from pagecore.tiers.handover.geometry import check_served, describe
from pagecore.tiers.handover.images import CHECKPOINT, RUNNING, HostImage, numbered
from pagecore.tiers.handover.manifest import ID_BYTES, Geometry, Manifest
from pagecore.tiers.handover.offers import Offer
from pagecore.tiers.handover.transport import Transport


def export_sequence(
    cache: PagedKVCache,
    sequence: Sequence,
    *,
    transport: Transport,
    lease: float = 30.0,
    readers: int = 1,
    model: str = "",
    first_layer: int | None = None,
) -> Manifest:
    """Offer the computed tokens of a sequence to other processes, and return the manifest that finds them.

    The rows are held by a fork of the sequence, which the cache counts; `sequence` itself may grow, or be removed at
    once. They are given back when `readers` imports are complete, or when the lease has ended and no read can follow:
    sockets cut their readers then, one-sided transports wait for the end of theirs. The rows of a cache on CUDA are
    copied to host memory before the call returns, after what its stream was given before; no fork is held.

    Parameters
    ----------
    cache : PagedKVCache
        A cache with bytes.
    sequence : Sequence
        Idle, not swapped out and not compacted.
    transport : Transport
        With an address.
    lease : float
        Seconds for which the rows are kept for readers; `extend_lease` adds to them, and `release_export` ends them.
    readers : int
        Number of imports: one for each rank and pipeline stage of the importing side that is passed the manifest.
    model : str
        Name and revision of the model; an importer that names another one refuses the manifest.
    first_layer : int, optional
        For a cache that has the layers of a pipeline stage: the number of its first layer among the cache layers of the
        whole model.

    Returns
    -------
    Manifest
        Send ``manifest.encode()`` to the importer.

    Raises
    ------
    UnsupportedOption, DeviceError
        A cache or sequence that cannot be handed over, or a transport without an address.
    InvalidSequence
        A sequence that is not of this cache, in flight or swapped out.
    OutOfRows
        The fork needs a row; raise `max_sequences`.
    ShapeError
        A lease, number of readers or `first_layer` out of range. After every error nothing is held.
    """
    parts = parts_of(cache)
    check_served(parts)
    seconds = lease_seconds(lease)
    number = require_int("readers", readers, max=1024)
    geometry = describe(parts, first_layer)
    check_transport(transport)
    if not isinstance(model, str):
        raise UnsupportedOption(f"model is {shown(model)}; give a str")
    if not transport.address:
        raise UnsupportedOption(
            f"transport {transport!r} has no address, so that importers cannot reach it; make it with one"
        )
    if isinstance(sequence, Sequence) and sequence.num_dropped_tokens:
        raise UnsupportedOption(
            f"sequence {sequence.id!r} was compacted, so that its positions run ahead of its tokens; hand it over "
            "before compact"
        )
    export = os.urandom(ID_BYTES)
    held = cache.fork(sequence, ("export", export.hex()))
    offer = None
    try:
        offer = _offer(cache, held, export, seconds, number)
        manifest = _manifest(cache, held, offer, transport, model, geometry, seconds)
    except BaseException:
        if offer is not None and offer.image is not None:
            offer.image.close()
        cache.remove(held)
        raise
    if offer.image is None:
        parts.exports[export] = transport.address
    else:
        cache.remove(held)
    try:
        transport.offer(offer)
    except BaseException:
        offer.give_back()
        raise
    return manifest


def _offer(cache: PagedKVCache, held: Sequence, export: bytes, lease: float, readers: int) -> Offer:
    parts = parts_of(cache)
    size, computed = parts.block_size, held.num_computed_tokens
    lengths = [computed] * len(parts.token_groups)
    for group in sealed_groups(parts.layers).values():
        lengths[group] = held.num_sealed_tokens
    rows = [parts.tables.blocks(held.row, group)[: ceil_div(n, size)].copy() for group, n in enumerate(lengths)]
    if parts.cross is not None:
        encoded = held.num_cross_tokens or 0 if held.is_cross_written and computed else 0
        tables = parts.cross.contents.tables
        for group in range(tables.num_groups):
            blocks = tables.blocks(held.cross_row, group) if encoded else np.empty(0, np.int32)
            rows.append(blocks[: ceil_div(encoded, size)].copy())
            lengths.append(encoded)
    slot = cache.state_slot(held) if parts.state.states is not None else 0
    image = None
    if parts.staging is None:
        checkpoint = _copied_checkpoint(parts, held)
    else:
        image, rows, slot, checkpoint = _copied_rows(parts, held, rows, slot)
    expires = time.monotonic_ns() + int(lease * 1e9)
    owner = held if image is None else None
    return Offer(export, cache, owner, image, lengths, rows, slot, *checkpoint, expires, readers)


def _copied_rows(
    parts: CacheParts, held: Sequence, rows: list[NDArray[np.int32]], slot: int
) -> tuple[HostImage, list[NDArray[np.int32]], int, tuple[NDArray[np.uint8] | None, int]]:
    """Copy rows and states from the device; return their image, and rows, slot and checkpoint in it."""
    listed = [numbered(row) for row in rows]
    image = HostImage(parts, [blocks for blocks, _ in listed])
    try:
        with Held(parts.state.lock):  # eviction may take the slot of an idle row's checkpoint
            found = _checkpoint_of(parts, held)
            states = [(slot, RUNNING)] if slot else []
            states += [] if found is None else [(found[0], CHECKPOINT)]
            event = image.copy(states, to_device=False)
        event.synchronize()
        checkpoint = (None, 0) if found is None else (_bytes_of(image.checkpoints, CHECKPOINT), found[1])
    except BaseException:
        image.close()
        raise
    return image, [row for _, row in listed], RUNNING if slot else 0, checkpoint


def _checkpoint_of(parts: CacheParts, held: Sequence) -> tuple[int, int] | None:
    """Return the slot of the checkpoint in which a sequence rests, or of its newest one, and its tokens, or None.

    Eviction can take the checkpoint of an idle row, but not the one in which the row rests.
    """
    states = parts.state.states
    if states is None:
        return None
    resting = states.resting(held.row)
    return (resting, held.num_computed_tokens) if resting else states.checkpoint(held.row)


def _copied_checkpoint(parts: CacheParts, held: Sequence) -> tuple[NDArray[np.uint8] | None, int]:
    """Return the bytes of a sequence's checkpoint, and the number of its tokens; None and 0 without one."""
    with Held(parts.state.lock):  # eviction may take the slot of an idle row's checkpoint
        found = _checkpoint_of(parts, held)
        if found is None:
            return None, 0
        return _bytes_of(parts.store.checkpoints, found[0]), found[1]


def _bytes_of(states: StatePool | None, slot: int) -> NDArray[np.uint8]:
    """Return a copy of one state on the host."""
    assert states is not None
    return np.concatenate([plane.numpy()[slot].reshape(-1).view(np.uint8) for plane in states.planes()])


def _manifest(
    cache: PagedKVCache,
    held: Sequence,
    offer: Offer,
    transport: Transport,
    model: str,
    geometry: Geometry,
    lease: float,
) -> Manifest:
    parts = parts_of(cache)
    namespace, spans = content_identity(parts.state, held)
    return Manifest(
        offer.export,
        transport.name,
        transport.address,
        model,
        geometry,
        held.tokens.astype("<i4").tobytes(),
        held.num_computed_tokens,
        [np.packbits(row != 0).tobytes() for row in offer.rows],
        offer.state_slot > 0,
        offer.checkpoint_length,
        held.num_cross_tokens,
        any(length for length, group in zip(offer.lengths, parts.groups, strict=True) if group.is_cross),
        namespace,
        spans,
        lease,
        held.num_sealed_tokens,
        num_publishable_tokens(parts.state, held),
    )
