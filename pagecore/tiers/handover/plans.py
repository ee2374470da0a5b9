"""The plan of an import: which units it lacks, where they go, and what to ask of each exporter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecore.cache._sequence import Sequence
from pagecore.cache.parts import CacheParts
from pagecore.cache.step.batch import Batch
from pagecore.errors import UnsupportedOption
from pagecore.storage import StatePool
from pagecore.storage.checks import ceil_div
from pagecore.tiers.handover.geometry import Share
from pagecore.tiers.handover.manifest import Manifest
from pagecore.tiers.handover.pieces import Units, buffer_units, is_head_outer, state_units, token_units
from pagecore.tiers.handover.pulls import PullRequest
from pagecore.tiers.handover.wire import WIRE_VERSION, Claim, Part, seeds_of


@dataclass(frozen=True)
class ArrivingCheckpoint:
    """Memory for the checkpoint of an exporter, and the tokens before it."""

    length: int
    memory: NDArray[np.uint8]
    states: StatePool

    def fill(self, slot: int) -> None:
        """Write the checkpoint to a slot."""
        begin = 0
        for plane in self.states.planes():
            target = plane.numpy()[slot].reshape(-1).view(np.uint8)
            target[:] = self.memory[begin : begin + target.nbytes]
            begin += target.nbytes


@dataclass(frozen=True)
class ImportPlan:
    """Requests to the exporters, and the checkpoint that arrives with them."""

    requests: list[PullRequest]
    checkpoint: ArrivingCheckpoint | None

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


def plan_import(
    parts: CacheParts,
    sequence: Sequence,
    batch: Batch | None,
    manifests: list[Manifest],
    shares: list[list[Share]],
    deadline: int,
) -> ImportPlan:
    """Return the requests of an import.

    Parameters
    ----------
    batch : Batch or None
        The arrival, whose slots are those of the lacking tokens; None if nothing is lacking.
    deadline : int
        Nanoseconds of `time.monotonic_ns`.

    Raises
    ------
    UnsupportedOption
        The exporter has released blocks that the importer needs.
    """
    first = manifests[0]
    lacking = [] if batch is None else _lacking(parts, sequence, batch, first)
    checkpoint = None
    states = parts.store.states
    is_aligned = first.geometry.block_size == parts.block_size
    if batch is not None and states is not None and first.checkpoint > 0 and is_aligned:
        checkpoint = ArrivingCheckpoint(first.checkpoint, np.empty(states.bytes_per_slot, np.uint8), states)
    requests = []
    for i, manifest in enumerate(manifests):
        asked, units, lanes, numbers = [], [], [], []
        for group, (lack, share) in enumerate(zip(lacking, shares[i], strict=False)):
            with_heads = len(share.theirs) > 0
            if len(lack.numbers) == 0 or not (with_heads or share.whole):
                continue
            pool = parts.store.pools[group]
            head_outer = is_head_outer(pool)
            asked.append(_part(group, lack, share, with_heads, head_outer))
            units.append(
                token_units(
                    pool,
                    lack.blocks,
                    lack.firsts,
                    lack.counts,
                    share.mine,
                    with_heads=with_heads,
                    without_heads=share.whole,
                    head_outer=head_outer,
                )
            )
            lanes.append(np.full(len(lack.numbers), group, np.int64))
            numbers.append(lack.numbers)
        wants = [i == 0 and batch is not None and manifest.has_state, i == 0 and checkpoint is not None]
        if wants[0]:
            assert batch is not None
            assert states is not None
            units.append(state_units(states, int(batch.state_write.numpy()[0])))
        if wants[1]:
            assert checkpoint is not None
            units.append(buffer_units(checkpoint.memory))
        lanes.append(np.full(sum(wants), len(parts.token_groups), np.int64))
        numbers.append(np.flatnonzero(wants))
        seeds = seeds_of(manifest.export, np.concatenate(lanes), np.concatenate(numbers))
        claim = Claim(WIRE_VERSION, manifest.export, True, asked, wants[0], wants[1])
        requests.append(PullRequest(manifest, claim, Units.concatenate(units), seeds, deadline))
    return ImportPlan(requests, checkpoint)


def _part(group: int, lack: _Lacking, share: Share, with_heads: bool, head_outer: bool) -> Part:
    numbers = lack.numbers.astype("<i4").tobytes()
    heads = (share.theirs.start, len(share.theirs)) if with_heads else (0, 0)
    return Part(group, lack.cut, numbers, *heads, with_heads, share.whole, head_outer)


def _lacking(parts: CacheParts, sequence: Sequence, batch: Batch, manifest: Manifest) -> list[_Lacking]:
    """Return the units of each group for which the arrival has slots."""
    size, start, end = parts.block_size, sequence.num_computed_tokens, manifest.num_computed
    cut = math.gcd(size, manifest.geometry.block_size)
    listed = []
    for group in range(len(parts.token_groups)):
        numbers = np.arange(start // cut, ceil_div(end, cut), dtype=np.int64)
        slots = batch.host.slot_mappings[group].numpy()[numbers * cut - start].astype(np.int64)
        numbers, slots = numbers[slots >= 0], slots[slots >= 0]
        held = manifest.held_blocks(group)[numbers * cut // manifest.geometry.block_size]
        if not held.all():
            token = int(numbers[~held][0]) * cut
            raise UnsupportedOption(
                f"the exporter has released the block of token {token} in group {group}, which this cache needs: its "
                "layers have sink tokens, or other windows; compute the sequence here"
            )
        counts = np.minimum(cut, end - numbers * cut)
        listed.append(_Lacking(cut, numbers, slots // size, slots % size, counts))
    return listed
