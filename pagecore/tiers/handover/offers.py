"""Offers: exported sequences whose rows are kept until every read has ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.paged import PagedKVCache
from pagecore.cache.parts import parts_of
from pagecore.cache.sequences._sequences import Sequence
from pagecore.errors import InvalidSequence
from pagecore.storage import KVPool, StatePool
from pagecore.storage.checks import ceil_div
from pagecore.tiers.handover.errors import CorruptTransfer, LeaseExpired
from pagecore.tiers.handover.images import HostImage
from pagecore.tiers.handover.pieces import Units, buffer_units, state_units, token_units
from pagecore.tiers.handover.wire import Claim, Part, seeds_of

LEASE_SECONDS_MAX = 7 * 24 * 3600.0


@dataclass
class Offer:
    """One exported sequence, and the readers that it waits for.

    The rows belong to a fork of the exported sequence, so that the cache counts and keeps them like those of any other
    sequence, and the exported sequence itself may grow or go. Those of a cache on CUDA are in an image on the host.

    Attributes
    ----------
    export : bytes
    cache : PagedKVCache
    held : Sequence or None
        The fork; None if an image has the rows.
    image : HostImage or None
    lengths : list of int
        Tokens of each group; those of a cross-attention group are encoder tokens.
    rows : list of ndarray
        Block of each block index of each group, in the pools of the cache or of the image; 0 for a hole.
    state_slot : int
        Slot of the running state; 0 for none.
    checkpoint : ndarray or None
        Copy of the checkpoint, whose slot the cache may take back at any time.
    checkpoint_length : int
        Tokens before the checkpoint; 0 without one.
    expires : int
        End of the lease, in nanoseconds of `time.monotonic_ns`.
    readers : int
        Complete reads after which the rows are given back.
    on_release : callable, optional
        Called before the rows are given back.
    """

    export: bytes
    cache: PagedKVCache
    held: Sequence | None
    image: HostImage | None
    lengths: list[int]
    rows: list[NDArray[np.int32]]
    state_slot: int
    checkpoint: NDArray[np.uint8] | None
    checkpoint_length: int
    expires: int
    readers: int
    on_release: Callable[[], None] | None = None
    num_active: int = 0
    num_complete: int = 0
    is_closed: bool = False
    _is_releasing: bool = False
    _is_released: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def seconds_left(self) -> float:
        """Seconds until the lease ends; negative after it."""
        return (self.expires - time.monotonic_ns()) / 1e9

    @property
    def is_open(self) -> bool:
        """True while new readers are accepted."""
        return not self.is_closed and self.num_complete < self.readers and self.seconds_left > 0

    def extend(self, seconds: float) -> None:
        """Let the lease end no earlier than in some seconds; one that is out of range changes nothing."""
        if 0 < seconds <= LEASE_SECONDS_MAX:
            with self._lock:
                self.expires = max(self.expires, time.monotonic_ns() + int(seconds * 1e9))

    def begin(self) -> bool:
        """Count a reader; return False if the offer is no longer open."""
        with self._lock:
            if not self.is_open:
                return False
            self.num_active += 1
            return True

    def end(self, is_complete: bool) -> None:
        """Count a reader as gone; give the rows back if it was the last."""
        with self._lock:
            self.num_active -= 1
            self.num_complete += is_complete
        self.settle()

    def withdraw(self) -> None:
        """Accept no more readers; give the rows back as soon as none is active."""
        with self._lock:
            self.is_closed = True
        self.settle()

    def settle(self) -> bool:
        """Give the rows back if the offer is not open and nothing reads it; return True if they are given back."""
        with self._lock:
            if self._is_releasing or self.num_active or self.is_open:
                return self._is_released  # False while another thread gives them back
            self._is_releasing = True
        with contextlib.ExitStack() as steps:  # each runs, whatever one before it raises
            steps.callback(setattr, self, "_is_released", True)
            steps.callback(self.give_back)
            if self.on_release is not None:
                self.on_release()
        return True

    def give_back(self) -> None:
        """Return rows and memory; nothing reads them any more."""
        if self.image is not None:
            self.image.close()
        if self.held is not None:
            with contextlib.suppress(InvalidSequence):  # its owner may have removed every sequence of the cache
                self.cache.remove(self.held)
        parts_of(self.cache).exports.pop(self.export, None)

    @property
    def pools(self) -> Listed[KVPool]:
        """Pools of the rows, on the host."""
        return parts_of(self.cache).store.pools if self.image is None else self.image.pools

    @property
    def states(self) -> StatePool | None:
        """Pool of the running state, on the host."""
        return parts_of(self.cache).store.states if self.image is None else self.image.states

    def require_rows(self) -> None:
        """Raise LeaseExpired if the owner of the cache has removed the fork: its blocks may have other tokens."""
        if self.held is not None and self.held.row < 0:
            raise LeaseExpired("the sequence that holds the rows of the export was removed; export again")

    def units(self, claim: Claim) -> tuple[Units, NDArray[np.uint64]]:
        """Return the units that a claim asks for, and the seeds of their sums.

        Raises
        ------
        CorruptTransfer
            A claim for blocks, heads or states that the export does not have.
        """
        parts, lanes, numbers = [], [], []
        for part in claim.parts:
            self._check(part)
            parts.append(self._part(part))
            lanes.append(np.full(len(part.numbers), part.group, np.int64))
            numbers.append(part.numbers)
        groups = len(self.rows)
        states = self.states
        if claim.wants_state:
            if states is None or self.state_slot == 0:
                raise CorruptTransfer("the claim asks for a state that the export does not have; import it again")
            parts.append(state_units(states, self.state_slot))
        if claim.wants_checkpoint:
            if self.checkpoint is None:
                raise CorruptTransfer("the claim asks for a checkpoint that the export does not have; import it again")
            parts.append(buffer_units(self.checkpoint))
        extra = np.flatnonzero([claim.wants_state, claim.wants_checkpoint])
        lanes.append(np.full(len(extra), groups, np.int64))
        numbers.append(extra)
        return Units.concatenate(parts), seeds_of(self.export, np.concatenate(lanes), np.concatenate(numbers))

    def _check(self, part: Part) -> None:
        if len(part.units) % 4:
            raise CorruptTransfer(f"the claim lists units in {len(part.units)} bytes; expected 4 for each number")
        numbers = part.numbers
        if not 0 <= part.group < len(self.rows) or part.cut < 1 or self.cache.block_size % part.cut:
            raise CorruptTransfer(f"the claim names group {part.group} cut at {part.cut} tokens, which do not exist")
        length = self.lengths[part.group]
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < ceil_div(length, part.cut)):
            raise CorruptTransfer(f"the claim asks for tokens past the {length} computed ones")
        if not self.rows[part.group][numbers * part.cut // self.cache.block_size].all():
            raise CorruptTransfer(f"the claim asks for blocks of group {part.group} that its window has released")
        layers = self.pools[part.group].num_layers
        if not 0 <= part.first_layer <= part.first_layer + part.num_layers <= layers:
            raise CorruptTransfer(f"the claim asks for layers of group {part.group} that the export does not have")
        heads = [plane.shape[0] for plane in self.pools[part.group].spec.planes if len(plane.shape) == 2]
        if part.with_heads and not 0 <= part.first_head <= part.first_head + part.num_heads <= min(heads, default=0):
            raise CorruptTransfer(f"the claim asks for heads of group {part.group} that the export does not have")

    def _part(self, part: Part) -> Units:
        size = self.cache.block_size
        begins = part.numbers * part.cut
        return token_units(
            self.pools[part.group],
            self.rows[part.group][begins // size],
            begins % size,
            np.minimum(part.cut, self.lengths[part.group] - begins),
            range(part.first_layer, part.first_layer + part.num_layers),
            range(part.first_head, part.first_head + part.num_heads),
            with_heads=part.with_heads,
            without_heads=part.without_heads,
            head_outer=part.head_outer,
        )
