"""An import under way: a thread pulls its bytes, and the caller's thread commits them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Hashable

from pagecore.arrays.cuda.protocol import Event
from pagecore.cache.lifecycle._lifecycle import adopt_checkpoint
from pagecore.cache.paged import PagedKVCache
from pagecore.cache.parts import parts_of
from pagecore.cache.prefix.retention import Spans
from pagecore.cache.sequences._sequences import Sequence
from pagecore.cache.state._state import Held
from pagecore.cache.step.batch import Batch, own_step
from pagecore.errors import InvalidSequence, PagecoreError
from pagecore.storage import StatePool
from pagecore.tiers.handover.acceptance import deadline_at
from pagecore.tiers.handover.errors import HandoverError, ImportCancelled
from pagecore.tiers.handover.images import CHECKPOINT, RUNNING
from pagecore.tiers.handover.leases import ANSWER_SECONDS
from pagecore.tiers.handover.plans import ArrivingCheckpoint, ImportPlan
from pagecore.tiers.handover.pulls import Pull
from pagecore.tiers.handover.transport import Transport


class SequenceImport:
    """An import under way; `start_import` makes it.

    A thread of its own pulls the bytes into blocks that no other sequence uses. The sequence becomes usable within
    `poll` or `result`, in the thread of the caller. An import that is dropped is cancelled.

    Attributes
    ----------
    namespace, spans, cross_digest
        The arguments of `start_import`.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        sequence: Sequence,
        batch: Batch | None,
        plan: ImportPlan,
        transport: Transport,
        content: tuple[Hashable, Spans | None, bytes | int | None],
    ) -> None:
        self.namespace, self.spans, self.cross_digest = content
        self._cache, self._sequence, self._batch, self._plan = cache, sequence, batch, plan
        self._transport, self._is_given_up = transport, False
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._descriptor: int | None = None
        self._error: BaseException | None = None
        self._has_arrived = self._is_ended = False
        self._copied: Event | None = None
        self._pulls: list[Pull] = []
        try:
            for request in plan.requests:
                self._pulls.append(transport.pull(request))
            self._thread = threading.Thread(target=_pull_all, args=(self,), name="pagecore-import", daemon=True)
            _start(self._thread)
        except BaseException:
            self._is_ended = True
            for pull in self._pulls:
                pull.cancel()
                with contextlib.suppress(HandoverError):
                    pull.run()
            if plan.image is not None:
                plan.image.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes to pull; what the prefix cache had is not counted."""
        return self._plan.nbytes

    def fileno(self) -> int:
        """Return an eventfd that is readable once `poll` has an end to return; it is closed then."""
        with self._lock:
            if self._is_ended:
                raise InvalidSequence("the import has ended; call result()")
            if self._descriptor is None:
                self._descriptor = os.eventfd(int(self._known.is_set()), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return self._descriptor

    def poll(self) -> bool:
        """Return True if the import has ended; then `result` returns or raises at once. Never waits, never raises."""
        if not self._known.is_set():
            return False
        with self._lock:
            if not self._is_ended:
                self._is_ended = True
                if self._descriptor is not None:
                    os.close(self._descriptor)
                    self._descriptor = None
                if self._error is None:
                    self._land()
        return True

    @property
    def has_ended(self) -> bool:
        """True once `poll` has returned True. With `cancel` and `release`, a load for `Scheduler.wait_for`."""
        return self._is_ended

    def release(self) -> None:
        """Do nothing: the sequence holds what has arrived."""

    def result(self) -> Sequence:
        """Wait for the end; return the sequence or raise the error of the import."""
        self._known.wait()
        self.poll()
        if self._error is not None:
            raise self._error
        return self._sequence

    def cancel(self) -> None:
        """Give the import up; `result` then raises ImportCancelled. An import that has ended is left as it is.

        The exporter is notified, and counts this reader as served: with one reader it gives its rows back at once.
        """
        with self._lock:
            if self._is_ended:
                return
            if self._has_arrived:
                self._error = ImportCancelled("the import was cancelled")
                self._give_back()
                return
            self._is_given_up = True
        for pull in self._pulls:
            pull.cancel()

    def _fail(self, error: BaseException) -> None:
        """Make an error known."""
        with self._lock:
            self._error = self._error or error
            self._tell()

    def _tell(self) -> None:
        self._known.set()
        if self._descriptor is not None:
            os.eventfd_write(self._descriptor, 1)

    def _land(self) -> None:
        """Commit what has arrived."""
        plan, parts = self._plan, parts_of(self._cache)
        try:
            if plan.image is not None:
                self._restore(plan.image.states, RUNNING)
                states = [(plan.state_slot, RUNNING)] if plan.state_slot else []
                self._copied = plan.image.copy(states, to_device=True)
            with Held(parts.state.lock):
                if self._batch is not None:
                    if plan.image is None:
                        self._restore(parts.store.states, plan.state_slot)
                    self._cache.commit(self._batch)
                if plan.checkpoint is not None and plan.checkpoint.is_aligned:
                    self._keep_checkpoint(plan.checkpoint)
        except PagecoreError as error:
            self._error = error
            self._give_back()

    def _restore(self, states: StatePool | None, slot: int) -> None:
        """Restore the running state from the checkpoint if the exporter had no other."""
        plan, quantiser = self._plan, parts_of(self._cache).store.quantiser
        if plan.rests and plan.checkpoint is not None and quantiser is not None:
            assert states is not None
            plan.checkpoint.restore(states, quantiser.format, slot)

    def _keep_checkpoint(self, arrived: ArrivingCheckpoint) -> None:
        """Let the sequence keep the checkpoint of the exporter, bit for bit, if a slot is free."""
        kept = self._cache.checkpoint(self._sequence)
        if kept is None:
            state = parts_of(self._cache).state
            adopt_checkpoint(state, self._sequence, arrived.length, self._fill_checkpoint)
        elif self._plan.rests and kept[1] == arrived.length:
            self._fill_checkpoint(kept[0])  # the commit has quantised the restored state again

    def _fill_checkpoint(self, slot: int) -> None:
        plan = self._plan
        assert plan.checkpoint is not None
        plan.checkpoint.fill(slot if plan.image is None else CHECKPOINT)
        if plan.image is not None:
            self._copied = plan.image.copy_states([(slot, CHECKPOINT)])

    def _give_back(self) -> None:
        """Return rows and blocks to the cache; nothing writes to them any more."""
        with contextlib.suppress(InvalidSequence):  # removed by the caller meanwhile
            if self._batch is not None and self._batch.in_flight:
                self._cache.abandon(self._batch)
        with contextlib.suppress(InvalidSequence):
            self._cache.remove(self._sequence)
        self._release_image()

    def _release_image(self) -> None:
        """Wait for copies to the device and release their source."""
        if self._plan.image is not None:
            if self._copied is not None:
                self._copied.synchronize()
            self._plan.image.close()

    def _pull(self) -> None:
        for i, pull in enumerate(self._pulls):
            try:
                pull.run()
            except BaseException:
                for other in self._pulls[i + 1 :]:
                    other.cancel()
                    with contextlib.suppress(HandoverError):
                        other.run()
                raise

    def _work(self) -> None:
        """Pull everything; runs in the thread of the import."""
        error: BaseException | None = None
        try:
            if self._batch is None:
                self._pull()
            else:  # until it returns, the step cannot end or lose its blocks
                own_step(parts_of(self._cache).state, self._batch).run(self._pull)
        except BaseException as raised:
            error = raised
        with self._lock:
            if error is None and self._error is None and not self._is_given_up:
                self._has_arrived = True
                self._tell()
                return
        self._give_back()
        self._fail(error or ImportCancelled("the import was cancelled"))
        if self._is_given_up:
            self._release_exports()

    def _release_exports(self) -> None:
        """Give up what was not read to the end; the lease ends an export whose exporter does not answer."""
        for request, pull in zip(self._plan.requests, self._pulls, strict=True):
            if not pull.is_complete:
                with contextlib.suppress(PagecoreError):
                    self._transport.change_lease(request.manifest, 0.0, deadline_at(ANSWER_SECONDS)).run()

    def __del__(self) -> None:
        if not getattr(self, "_is_ended", True):
            self.cancel()
            self.poll()
        if getattr(self, "_copied", None) is not None:
            self._release_image()

    def __repr__(self) -> str:
        state = "running" if not self._known.is_set() else "failed" if self._error else "arrived"
        return f"SequenceImport({self._sequence.id!r}, {self.nbytes} bytes, {state})"


def _start(thread: threading.Thread) -> None:
    """Start a thread; raise HandoverError if there is none left."""
    try:
        thread.start()
    except RuntimeError as error:
        raise HandoverError(
            f"no thread can be started for the import: {error}; import again, or raise the limit of processes"
        ) from None


def _pull_all(running: SequenceImport) -> None:
    running._work()
