"""The plan of an import: which units it lacks, where they go, and what to ask of each exporter."""

from __future__ import annotations

import math
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.memory.sealer import sealed_groups
from pagecore.cache.parts import CacheParts
from pagecore.cache.sequences._sequences import Sequence
from pagecore.cache.step.batch import Batch
from pagecore.errors import UnsupportedOption
from pagecore.storage import CheckpointPool, KVPool, StatePool
from pagecore.storage.checks import ceil_div
from pagecore.storage.specs.attended import AttendedKeys
from pagecore.tiers.handover.images import RUNNING, HostImage, numbered
from pagecore.tiers.handover.manifest import Manifest
from pagecore.tiers.handover.matching import Share
from pagecore.tiers.handover.pieces import Units, buffer_units, is_head_outer, state_units, token_units
from pagecore.tiers.handover.pulls import PullRequest
from pagecore.tiers.handover.wire import WIRE_VERSION, Claim, Part, seeds_of


@dataclass(frozen=True)
class ArrivingCheckpoint:
    """Memory for the checkpoint of an exporter, and the tokens before it.

    Attributes
    ----------
    states : StatePool
        Pool of the importer's checkpoints.
    is_aligned : bool
        The caches have blocks of one size, so that the importer can keep the checkpoint.
    """

    length: int
    memory: NDArray[np.uint8]
    states: StatePool
    is_aligned: bool

    def fill(self, slot: int) -> None:
        """Write the checkpoint to a slot."""
        self._write(self.states, slot)

    def restore(self, states: StatePool, format: str, slot: int) -> None:
        """Write the state of which this is the quantised checkpoint to a slot of running states on the host."""
        staged = CheckpointPool(states, 2, format=format)
        self._write(staged.pool, 1)
        staged.load([1], [slot])

    def _write(self, pool: StatePool, slot: int) -> None:
        begin = 0
        for plane in pool.planes():
            target = plane.numpy()[slot].reshape(-1).view(np.uint8)
            target[:] = self.memory[begin : begin + target.nbytes]
            begin += target.nbytes


@dataclass(frozen=True)
class ImportPlan:
    """Requests to the exporters, and what arrives with them.

    Attributes
    ----------
    requests : list of PullRequest
    checkpoint : ArrivingCheckpoint or None
    image : HostImage or None
        Memory for the blocks and states of a cache on CUDA.
    state_slot : int
        Slot of the running state that arrives; 0 for none.
    rests : bool
        The running state is restored from the checkpoint.
    """

    requests: list[PullRequest]
    checkpoint: ArrivingCheckpoint | None
    image: HostImage | None
    state_slot: int
    rests: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all requests."""
        return sum(request.units.nbytes for request in self.requests)


@dataclass(frozen=True)
class _Lacking:
    """Units of a group that the importer lacks: their numbers, and the places of their tokens."""

    cut: int
    numbers: NDArray[np.int64]
    blocks: NDArray[np.int64]
    firsts: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class _Places:
    """Memory of the importer for what it lacks: the pools of its cache, or those of an image on the host."""

    lacks_tokens: bool
    lacking: list[_Lacking]
    pools: Listed[KVPool]
    states: StatePool | None
    state_slot: int
    image: HostImage | None
    num_sealed: int | None


def plan_import(
    parts: CacheParts,
    sequence: Sequence,
    batch: Batch | None,
    manifests: list[Manifest],
    shares: list[list[Share]],
    num_sealed: int | None,
    has_cross: bool,
    deadline: int,
) -> ImportPlan:
    """Return the requests of an import.

    Parameters
    ----------
    batch : Batch or None
        The arrival, whose slots are those of the lacking tokens; None if nothing is lacking.
    num_sealed : int or None
        Tokens of the exporters in sealed blocks; None without a batch, or for a cache without sealed blocks.
    has_cross : bool
        The exporters have the keys and values of the encoder tokens.
    deadline : int
        Nanoseconds of `time.monotonic_ns`.

    Raises
    ------
    UnsupportedOption
        The exporter has released blocks that the importer needs.
    """
    first = manifests[0]
    places = _places(parts, sequence, batch, first, num_sealed, has_cross)
    try:
        checkpoint = None
        is_aligned = first.geometry.block_size == parts.block_size
        kept = parts.store.checkpoints if places.image is None else places.image.checkpoints
        if batch is not None and kept is not None and first.checkpoint > 0 and (is_aligned or first.rests):
            memory = np.empty(kept.bytes_per_slot, np.uint8)
            checkpoint = ArrivingCheckpoint(first.checkpoint, memory, kept, is_aligned)
        requests = [
            _request(places, manifest, listed, i == 0, checkpoint, deadline)
            for i, (manifest, listed) in enumerate(zip(manifests, shares, strict=True))
        ]
    except BaseException:
        if places.image is not None:
            places.image.close()
        raise
    slot = _device_slot(batch) if first.has_state or first.rests else 0
    return ImportPlan(requests, checkpoint, places.image, slot, first.rests)


def _places(
    parts: CacheParts,
    sequence: Sequence,
    batch: Batch | None,
    manifest: Manifest,
    num_sealed: int | None,
    has_cross: bool,
) -> _Places:
    lacking = [] if batch is None else _lacking(parts, sequence, batch, manifest, num_sealed, has_cross)
    if parts.staging is None or batch is None:
        slot = _device_slot(batch)
        return _Places(batch is not None, lacking, parts.store.pools, parts.store.states, slot, None, num_sealed)
    found = [numbered(lack.blocks) for lack in lacking]
    image = HostImage(parts, [blocks for blocks, _ in found])
    moved = [replace(lack, blocks=own.astype(np.int64)) for lack, (_, own) in zip(lacking, found, strict=True)]
    return _Places(True, moved, image.pools, image.states, RUNNING, image, num_sealed)


def _device_slot(batch: Batch | None) -> int:
    """Return the slot to which a step writes the state of its sequence; 0 for none."""
    states = None if batch is None else batch.host.states
    return 0 if states is None else int(states.state_write.numpy()[0])


def _request(
    places: _Places,
    manifest: Manifest,
    shares: list[Share],
    is_first: bool,
    checkpoint: ArrivingCheckpoint | None,
    deadline: int,
) -> PullRequest:
    """Return the request to one exporter; the first one also delivers states."""
    asked, units, lanes, numbers = [], [], [], []
    for share in shares if places.lacks_tokens else []:
        lack = places.lacking[share.group]
        with_heads = len(share.their_heads) > 0
        if len(lack.numbers) == 0 or not (with_heads or share.whole):
            continue
        _check_held(manifest, share, lack, places.num_sealed)
        pool = places.pools[share.group]
        head_outer = is_head_outer(pool)
        asked.append(_part(lack, share, with_heads, head_outer))
        units.append(
            token_units(
                pool,
                lack.blocks,
                lack.firsts,
                lack.counts,
                share.layers,
                share.heads,
                with_heads=with_heads,
                without_heads=share.whole,
                head_outer=head_outer,
            )
        )
        lanes.append(np.full(len(lack.numbers), share.their_group, np.int64))
        numbers.append(lack.numbers)
    wants = [is_first and places.lacks_tokens and manifest.has_state, is_first and checkpoint is not None]
    if wants[0]:
        assert places.states is not None
        units.append(state_units(places.states, places.state_slot))
    if wants[1]:
        assert checkpoint is not None
        units.append(buffer_units(checkpoint.memory))
    lanes.append(np.full(sum(wants), len(manifest.geometry.groups), np.int64))
    numbers.append(np.flatnonzero(wants))
    seeds = seeds_of(manifest.export, np.concatenate(lanes), np.concatenate(numbers))
    claim = Claim(WIRE_VERSION, manifest.export, True, asked, wants[0], wants[1])
    return PullRequest(manifest, claim, Units.concatenate(units), seeds, deadline)


def _check_held(manifest: Manifest, share: Share, lack: _Lacking, num_sealed: int | None) -> None:
    """Raise UnsupportedOption if the exporter has released a block of the lacking units."""
    held = manifest.held_blocks(share.their_group)[lack.numbers * lack.cut // manifest.geometry.block_size]
    if held.all():
        return
    released = f"released the block of token {int(lack.numbers[~held][0]) * lack.cut} in group {share.their_group}"
    if num_sealed is None or manifest.geometry.is_sealed:
        raise UnsupportedOption(
            f"the exporter has {released}, which this cache needs: its layers have other windows; compute the sequence "
            "here"
        )
    layers = manifest.geometry.numbers
    raise UnsupportedOption(
        f"the exporter of layers {layers.start} to {layers.stop - 1} has no sealed blocks and has {released}; this "
        "cache has sealed blocks, and its windows need the keys that the first token after these sees "
        f"({num_sealed} tokens are sealed): use the same stages on both sides, or compute the sequence here"
    )


def _part(lack: _Lacking, share: Share, with_heads: bool, head_outer: bool) -> Part:
    numbers = lack.numbers.astype("<i4").tobytes()
    layers = (share.their_layers.start, len(share.their_layers))
    heads = (share.their_heads.start, len(share.their_heads)) if with_heads else (0, 0)
    return Part(share.their_group, lack.cut, numbers, *layers, *heads, with_heads, share.whole, head_outer)


def _released(attended: AttendedKeys, positions: NDArray[np.int64], length: int, size: int) -> NDArray[np.bool_]:
    """Return True for tokens between sinks and window, whose blocks the arrival has until its commit releases them."""
    if not attended.sink_tokens:
        return np.zeros(len(positions), np.bool_)
    sinks, kept = ceil_div(attended.sink_tokens, size) * size, attended.first_kept(length) // size * size
    return (positions >= sinks) & (positions < kept)


def _lacking(
    parts: CacheParts, sequence: Sequence, batch: Batch, manifest: Manifest, num_sealed: int | None, has_cross: bool
) -> list[_Lacking]:
    """Return the units of each group for which the arrival has slots."""
    size, start = parts.block_size, sequence.num_computed_tokens
    cut = math.gcd(size, manifest.geometry.block_size)
    sealed = set(sealed_groups(parts.layers).values())
    # Next to sealed blocks, windows keep what the first token after those sees.
    kept = manifest.num_computed if num_sealed is None else max(start, num_sealed)
    listed = []
    for group in range(len(parts.token_groups)):
        end = kept if group in sealed else manifest.num_computed
        numbers = np.arange(start // cut, ceil_div(end, cut), dtype=np.int64)
        numbers = numbers[~_released(parts.token_groups[group].attended, numbers * cut, kept, size)]
        slots = batch.host.slot_mappings[group].numpy()[numbers * cut - start].astype(np.int64)
        numbers, slots = numbers[slots >= 0], slots[slots >= 0]
        counts = np.minimum(cut, end - numbers * cut)
        listed.append(_Lacking(cut, numbers, slots // size, slots % size, counts))
    if parts.cross is None:
        return listed
    # The encoder tokens, unless the cache has them: its step then writes none.
    encoded = batch.cross.num_tokens if batch.cross is not None and has_cross else 0
    numbers = np.arange(ceil_div(encoded, cut), dtype=np.int64)
    tables = parts.cross.contents.tables
    for group in range(tables.num_groups):
        blocks = tables.blocks(sequence.cross_row, group) if encoded else np.empty(0, np.int32)
        places = blocks[numbers * cut // size].astype(np.int64)
        listed.append(_Lacking(cut, numbers, places, numbers * cut % size, np.minimum(cut, encoded - numbers * cut)))
    return listed
