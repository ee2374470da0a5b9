"""State machine of a guard, without threads and without a clock of its own."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers import payload
from pagecore.tiers.completions import Completions
from pagecore.tiers.guard.batch import Batch, Kind, Part, part_sizes
from pagecore.tiers.guard.breaker import Admission, Breaker
from pagecore.tiers.guard.counters import Counters
from pagecore.tiers.guard.deadline import Deadline
from pagecore.tiers.guard.limits import BatchLimits
from pagecore.tiers.guard.staging import Region, StagingMemory
from pagecore.tiers.guard.submission import remover_of, submitted
from pagecore.tiers.resources import descriptors
from pagecore.tiers.store import BlockStore, Done, EvictionReporter, Keys, Pieces


class Core(BatchLimits):
    """State machine of a guard. The caller serialises all calls, and runs the jobs that `take_job` returns.

    `store` is that of the first `adopt`, which the caller makes before it submits anything.

    A direct store verifies its payloads and ends each batch itself: the caller's pieces are handed to it, and a late
    batch is cancelled and ends when the store ends it. For any other store, payloads go through staging memory, and a
    late batch ends at once, while its memory is lost until the store ends the transfer.

    Invariants: each batch has a part, and each part of a batch is in `waiting`, `jobs`, `in_store` or `running`. An
    interrupt may break them for a batch, which then ends at its deadline.
    """

    def __init__(
        self, store: BlockStore, *, deadline: Deadline, budget_bytes: int, breaker: Breaker, read_only: bool = False
    ) -> None:
        self.read_only = read_only
        self.deadline = deadline
        self.budget_bytes = budget_bytes
        self.breaker = breaker
        is_framed = not getattr(store, "verifies", True)
        self.trailer = payload.FRAME_BYTES if is_framed else 0
        self.writes_late = bool(getattr(store, "writes_late", False))
        self.staging = StagingMemory(budget_bytes) if is_framed or self.writes_late else None
        try:
            with descriptors(store.name):
                self.completions = Completions()
        except BaseException:
            if self.staging is not None:
                self.staging.close()
            raise
        self.counters = Counters()
        self.batches: dict[int, Batch] = {}
        self.in_store: dict[int, Part] = {}
        self.waiting: deque[Part] = deque()
        self.jobs: deque[Part] = deque()
        self.running: Part | None = None
        self.store: BlockStore | None = None
        self.reporter: EvictionReporter | None = None

    def release(self) -> None:
        """Release descriptor and staging memory; no store has been adopted."""
        self.completions.close()
        if self.staging is not None:
            self.staging.close()

    # ---- submissions ----

    def submit(self, kind: Kind, keys: Keys, pieces: Pieces | None, now: float, before: Keys | None = None) -> int:
        """Hand a batch to the store, or end it at once; return its ticket."""
        sizes = np.zeros(0, np.uint64) if pieces is None else pieces[:, 1]
        regions = self._memory_of_store(sizes) if kind is Kind.STORE else None
        count = self._admissible(kind, sizes, regions, len(keys))
        error = None if count == len(keys) else self._dropped(kind, len(keys) - count)
        batch = Batch(0, kind, now, Admission.REFUSED, np.zeros(len(keys), bool), sizes[:count], error=error)
        limit = self.deadline.of(self._bytes_ahead(kind) + batch.nbytes)
        batch.ticket = self.completions.open()
        self.batches[batch.ticket] = batch  # late at once, if an interrupt comes before the next lines
        if count and self.store is not None:
            batch.admission = self.breaker.admit(now)
        if batch.admission is Admission.REFUSED:
            batch.error = self._refusal(now) if count else error
            batch.is_settled = True
            self._unlock(kind, keys)
            if regions:
                self._staging.give_all(regions)
            self._finish(batch, now)
            return batch.ticket
        self._unlock(kind, keys[count:])
        batch.deadline += limit
        self._hand_over(batch, keys[:count], None if pieces is None else pieces[:count], regions, now, before)
        return batch.ticket

    def cancel(self, ticket: int, now: float) -> None:
        """End a batch early; ended and unknown tickets are ignored."""
        batch = self.batches.get(ticket)
        if batch is not None and not batch.is_given_up:
            self._give_up(batch, "cancelled", now)
            self._place_waiting(now)

    def unlock(self, keys: Keys) -> None:
        """Release the holds of `keys`."""
        self._unlock(Kind.LOAD, keys)

    def _hand_over(
        self,
        batch: Batch,
        keys: Keys,
        pieces: Pieces | None,
        regions: list[Region] | None,
        now: float,
        before: Keys | None,
    ) -> None:
        indices = np.arange(len(keys))
        if pieces is None or self.staging is None:
            part = Part(batch, batch.kind, keys, indices, pieces, before=before)
            batch.parts.add(part)
            self._submit(part, now)
            return
        if batch.kind is Kind.STORE:
            part = Part(batch, batch.kind, keys, indices, pieces, regions, before=before)
            batch.parts.add(part)
            self.jobs.append(part)
            return
        bounds = self._bounds(part_sizes(pieces, self.trailer))
        for begin, end in pairwise(bounds):
            cut = slice(begin, end)
            part = Part(batch, batch.kind, keys[cut], indices[cut], pieces[cut])
            batch.parts.add(part)
            self.waiting.append(part)
        self._place_waiting(now)

    # ---- progress ----

    def advance(self, now: float) -> None:
        """Take what the store ended, abandon what is late, and submit what waits for memory."""
        if self.completions.num_pending > len(self.batches):  # after an interrupt of a submission
            self.completions.keep(self.batches.keys())
        for done in self._poll_store():
            part = self.in_store.pop(done.ticket, None)
            if part is not None:
                self._ended(part, done, now)
        for batch in [each for each in self.batches.values() if now >= each.deadline and each.can_be_late]:
            self.counters.late_batches += 1
            batch.is_failure = True
            self._give_up(batch, "late: the store did not end the batch within its deadline", now)
        self._place_waiting(now)

    def next_deadline(self) -> float | None:
        """Return the earliest time at which a batch is late."""
        return min((batch.deadline for batch in self.batches.values() if not batch.is_given_up), default=None)

    def take_job(self) -> Part | None:
        """Return a part whose payloads are to be copied, loads first; the caller runs it and calls `end_job`."""
        part = next((part for part in self.jobs if part.kind is Kind.LOAD), None) or next(iter(self.jobs), None)
        if part is not None:
            self.running = part
            self.jobs.remove(part)
        return part

    def end_job(self, part: Part, now: float) -> None:
        """Continue with a part whose payloads were copied."""
        self.running = None
        batch = part.batch
        assert batch is not None
        if part.kind is Kind.STORE and not batch.is_given_up and self.store is not None:
            self._submit(part, now)
            return
        if part.kind is Kind.LOAD:
            assert part.intact is not None
            batch.ok[part.indices] = part.intact
            if not part.intact.all():
                self.counters.failed_sums += int((~part.intact).sum())
                batch.fail(f"{int((~part.intact).sum())} payloads differ from their sums")
                self._delete(part.keys[~part.intact])
        self._free(part)
        self._leave(part, now)

    def _delete(self, keys: Keys) -> None:
        """Delete damaged entries, if the store can: they would be found and fail again, and never be replaced.

        A read-only guard leaves them to the processes that write.
        """
        if self.store is None or self.read_only:
            return
        with suppress(Exception):
            ticket = remover_of(self.store).submit_remove(keys)
            self.in_store[ticket] = Part(None, Kind.REMOVE, keys, np.arange(len(keys)), ticket=ticket)

    def fail_job(self, part: Part, error: Exception, now: float) -> None:
        """End a part whose copy raised."""
        self.running = None
        assert part.batch is not None
        part.batch.fail(f"{type(error).__name__}: {error}")
        self._free(part)
        self._leave(part, now)

    def _poll_store(self) -> list[Done]:
        with suppress(Exception):  # poll never raises by contract
            return [] if self.store is None else self.store.poll()
        return []

    def _place_waiting(self, now: float) -> None:
        while self.waiting:
            regions = self._staging.take(part_sizes(self.waiting[0].pieces, self.trailer))
            if regions is None:
                return
            part = self.waiting.popleft()
            part.regions = regions
            self._submit(part, now)

    def _submit(self, part: Part, now: float) -> None:
        assert self.store is not None
        pieces = part.pieces if part.regions is None else part.staged(self.trailer)
        try:
            part.ticket = submitted(self.store, part, pieces)
        except Exception as error:
            self._unlock(part.kind, part.keys)  # the holds of a load end with its batch
            failed = Done(0, np.zeros(len(part.keys), bool), f"{type(error).__name__}: {error}")
            self._ended(part, failed, now)
            return
        self.in_store[part.ticket] = part

    def _ended(self, part: Part, done: Done, now: float) -> None:
        """Take the end of a part in the store into account."""
        batch = part.batch
        ok = done.ok
        if part.regions is not None:
            self._free(part, ~ok, stuck=self.writes_late and done.error is not None and not done.is_full)
        if batch is None:  # the batch was abandoned
            if part.kind is Kind.LOOKUP:
                self._unlock(Kind.LOAD, part.keys[ok])
            else:
                self._free(part)
            return
        if done.error is not None:
            batch.fail(done.error, is_full=done.is_full)
        if part.kind is Kind.LOAD and part.regions:
            self.jobs.append(part)
            return
        if part.kind is Kind.STORE and part.regions is not None:
            batch.ok[part.indices] = True
            self._free(part)
        elif part.regions is None:
            batch.ok[part.indices] = ok
        self._leave(part, now)

    def _give_up(self, batch: Batch, error: str, now: float) -> None:
        """End a batch: at once, or when its running copies and direct transfers end."""
        batch.is_given_up = True
        batch.error = batch.error or error
        self._settle(batch, now)
        for part in list(batch.parts):
            if part in self.waiting:
                self.waiting.remove(part)
                self._unlock(part.kind, part.keys)
            elif part in self.jobs and part.kind is Kind.STORE:
                self.jobs.remove(part)
                self._free(part)
            elif part in self.jobs or part is self.running:
                continue
            else:
                is_known = part.ticket in self.in_store  # or an interrupt has come: the store may have it
                self._cancel(part)
                if is_known and part.pieces is not None and part.regions is None:
                    continue
                batch.parts.discard(part)  # first: an interrupt leaves no batch with a part that does not name it
                part.batch = None
                for region in part.regions or ():
                    self._staging.lose(region)
            batch.parts.discard(part)
        if not batch.parts:
            self._finish(batch, now)

    def _leave(self, part: Part, now: float) -> None:
        assert part.batch is not None
        part.batch.parts.discard(part)
        if not part.batch.parts:
            self._finish(part.batch, now)

    def _finish(self, batch: Batch, now: float) -> None:
        self._settle(batch, now)
        is_full = batch.is_full and not batch.is_failure
        if self.completions.end(batch.ticket, batch.ok, batch.error, is_full=is_full):
            self.counters.count(batch)
        self.batches.pop(batch.ticket, None)  # last: after an interrupt it ends again

    def _settle(self, batch: Batch, now: float) -> None:
        """Report the outcome of a batch to the breaker, once; a cancelled one has none."""
        if batch.is_settled:
            return
        if batch.admission is Admission.REFUSED:  # an interrupt came while it was admitted, perhaps as a probe
            if not any(each.admission is Admission.PROBE and not each.is_settled for each in self.batches.values()):
                self.breaker.withdraw(Admission.PROBE)
        elif batch.is_given_up and not batch.is_failure:
            self.breaker.withdraw(batch.admission)
        else:
            self.breaker.record(batch.admission, now, success=not batch.is_failure)
        batch.is_settled = True

    # ---- memory and the client ----

    def _free(self, part: Part, mask: NDArray[np.bool_] | None = None, *, stuck: bool = False) -> None:
        """Return the memory of a part, or of the keys in `mask`, which leave the part; a stuck transfer loses it."""
        chosen = np.ones(len(part.keys), bool) if mask is None else mask
        for region, is_chosen in zip(part.regions or (), chosen.tolist(), strict=False):
            if is_chosen and stuck:
                self._staging.lose(region)
            elif is_chosen:
                self._staging.give(region)
        if part.regions is not None:
            part.narrow(~chosen)

    def _unlock(self, kind: Kind, keys: Keys) -> None:
        if kind is Kind.LOAD and self.store is not None and len(keys):
            with suppress(Exception):
                self.store.unlock(keys)

    def _cancel(self, part: Part) -> None:
        with suppress(Exception):
            if self.store is not None and part.ticket is not None:
                self.store.cancel(part.ticket)

    def wants_reopen(self, now: float) -> bool:
        """Return True if memory is lost and the client is worth replacing, or it was closed and may be replaced."""
        if self.store is None:
            return self.breaker.state(now) != "open"
        if self.staging is None or not self.staging.lost_bytes:
            return False
        is_blocked = bool(self.waiting) and not self.staging.used_bytes
        is_large = 2 * self.staging.lost_bytes >= self.staging.nbytes
        return is_blocked or is_large or self.breaker.state(now) != "closed"

    def abandon(self, error: str, now: float) -> BlockStore | None:
        """Abandon all batches and forget the store, which the caller closes; return it."""
        for batch in list(self.batches.values()):
            if not batch.is_given_up:
                self._give_up(batch, error, now)
        store, self.store, self.reporter = self.store, None, None
        return store

    def destroyed(self, store: BlockStore, now: float) -> None:
        """Take back all memory: the store was closed, so that all its batches have ended."""
        with suppress(Exception):
            for done in store.poll():
                part = self.in_store.pop(done.ticket, None)
                if part is not None:
                    self._ended(part, done, now)
        parts, self.in_store = list(self.in_store.values()), {}
        for part in parts:
            self._ended(part, Done(0, np.zeros(len(part.keys), bool), "the store was closed"), now)
        if self.staging is not None:
            self.staging.recover()

    def adopt(self, store: BlockStore) -> None:
        """Use `store`, a new client, from now on."""
        register = getattr(store, "register_memory", None)
        if self.staging is not None and register is not None:
            register(self.staging.address, self.staging.nbytes)
        self.store = store
        self.reporter = store if isinstance(store, EvictionReporter) else None  # here, because it takes long

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself; no job may be running."""
        for batch in self.batches.values():
            assert batch.parts, f"batch {batch.ticket} has no part and has not ended"
            assert self.completions.is_pending(batch.ticket)
        assert self.completions.num_pending == len(self.batches)
        parts = [*self.waiting, *self.jobs, *self.in_store.values()]
        assert sum(part.batch is not None for part in parts) == sum(len(b.parts) for b in self.batches.values())
        if self.staging is not None:
            self.staging.check_invariants()
            held = sum(len(part.regions or ()) for part in parts)
            assert held <= self.staging.num_regions
