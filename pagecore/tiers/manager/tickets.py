"""Open batches of one store, and the code that waits for their ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import StoreError, UnsupportedOption
from pagecore.tiers.arguments import checked_keys
from pagecore.tiers.guard import Guard
from pagecore.tiers.manager.ledger import Ledger
from pagecore.tiers.manager.port import Flags, Positions, Spans
from pagecore.tiers.store import (
    BlockStore,
    Done,
    EntryLister,
    EntryRemover,
    EntryTaker,
    EntryToucher,
    EvictionReporter,
    Keys,
    Pieces,
    PrefixKeeper,
    StoreStats,
)

__all__ = ["Ended", "StorePort"]

Ended = Callable[[Flags, str | None], None]
T = TypeVar("T")
_CLOSED = "the store was closed"


@dataclass(slots=True, eq=False)
class _Removal:
    """Entries to delete, which the batches `awaited` may still write."""

    keys: Keys
    ended: Ended
    awaited: set[int]


class StorePort:
    """A store and its open tickets; every submission calls `ended` once, in `poll` or in `close`.

    After an interrupt of `ended`, the next `poll` calls it again.

    A submission that the store refuses by an exception ends with a failure of all keys, as an error of the store does:
    a store may cost hits, never a request.

    Parameters
    ----------
    store : BlockStore
    index : int
        Place of the store in the order of nearness.
    ledger : Ledger

    Attributes
    ----------
    num_refused : int
        Submissions that ended with an exception.
    last_error : str or None
        Reason of the last failure.
    """

    def __init__(self, store: BlockStore, index: int, ledger: Ledger) -> None:
        self.store = store
        self.index = index
        self.ledger = ledger
        self.num_refused = 0
        self.last_error: str | None = None
        self._open: dict[int, tuple[Ended, int]] = {}
        self._refused: deque[tuple[Ended, int, str]] = deque()
        # Batches that the store has ended, until the code that waits for them was called, which may raise.
        self._done: deque[Done] = deque()
        self._saves: set[int] = set()
        self._removals: list[_Removal] = []

    @property
    def medium(self) -> str:
        """Medium of the store."""
        return self.store.medium

    @property
    def num_pending(self) -> int:
        """Number of submissions that have not ended."""
        return len(self._open) + len(self._refused) + len(self._removals)

    @property
    def can_remove(self) -> bool:
        """True if the store deletes entries on request."""
        store: object = self.store
        return isinstance(store, EntryRemover) and store.can_remove

    @property
    def can_list(self) -> bool:
        """True if the store lists its entries."""
        store: object = self.store
        return isinstance(store, EntryLister) and store.can_list

    @property
    def can_clear(self) -> bool:
        """False if `require_clear` raises UnsupportedOption."""
        return self._has_no_client() or self._why_not_cleared() is None

    def require_clear(self) -> None:
        """Raise UnsupportedOption if the store cannot be cleared, and StoreError if it has no client now."""
        other = f"or leave {self.medium} out of media"
        if self._has_no_client():
            raise StoreError(f"{self._no_client}; clear again later, {other}")
        if (reason := self._why_not_cleared()) is not None:
            raise UnsupportedOption(f"the store {self.store.name} cannot be cleared: {reason}, {other}")

    def keys(self) -> Keys:
        """Return the keys of all entries of a store that can be cleared; raise StoreError if it does not list them."""
        store: object = self.store
        assert isinstance(store, EntryLister)
        try:
            return checked_keys(store.keys())
        except Exception as error:  # as in _submit
            if self._has_no_client():
                raise StoreError(self._no_client) from error
            raise StoreError(
                f"the store {self.store.name} cannot list its entries: {type(error).__name__}: {error}"
            ) from error

    def lookup(self, keys: Keys, ended: Ended) -> int | None:
        """Submit a look-up; return its ticket, or None if the store refused it."""
        return self._submit(lambda: self.store.submit_lookup(keys), len(keys), ended)

    def load(self, keys: Keys, pieces: Pieces, ended: Ended) -> int | None:
        """Submit a load; return its ticket, or None if the store refused it."""
        return self._submit(lambda: self.store.submit_load(keys, pieces), len(keys), ended)

    def save(self, keys: Keys, pieces: Pieces, ended: Ended, before: Keys | None = None) -> int | None:
        """Submit entries to be stored; return their ticket, or None if the store refused them.

        `before` makes them a part of a prefix, for a store that keeps prefixes; see `PrefixKeeper`.
        """
        ticket = self._submit(partial(_save, self.store, keys, pieces, before), len(keys), ended)
        if ticket is not None:
            self._saves.add(ticket)
        return ticket

    def remove(self, keys: Keys, ended: Ended) -> None:
        """Delete entries of a store that `can_remove`, once what is being saved now has been saved."""
        self._removals.append(_Removal(keys, ended, set(self._saves)))
        self._submit_removals()

    @property
    def takes_entries(self) -> bool:
        """True if the store takes entries."""
        store: object = self.store
        return not isinstance(store, EntryTaker) or store.takes_entries

    @property
    def can_touch(self) -> bool:
        """True if the store's order of eviction counts what was used in nearer tiers."""
        store: object = self.store
        return isinstance(store, EntryToucher) and store.can_touch

    def touch(self, keys: Keys) -> None:
        """Report entries as used, from the last key to the first, to a store that `can_touch`."""
        if self.can_touch and len(keys):
            self._try(partial(_touch, self.store, keys))

    def unlock(self, keys: Keys) -> None:
        """Release the holds of a look-up."""
        if len(keys):
            self._try(lambda: self.store.unlock(keys))

    def cancel(self, ticket: int | None) -> None:
        """Ask for an early end of a batch."""
        if ticket is not None and ticket in self._open:
            self._try(lambda: self.store.cancel(ticket))

    def poll(self) -> int:
        """Call the code that waits for each batch that ended; return the number of batches.

        If that raises, the next call goes on with the other batches; after an interrupt, with the same one.
        """
        # Before the ends: an entry that comes back later is noted at the end of its batch.
        self._try(self._note_evicted)
        num_ended = len(self._refused)
        for _ in range(num_ended):  # not those that the calls add
            _take_first(self._refused, _fail)
        self._done.extend(self.store.poll())
        num_ended += len(self._done)
        while self._done:
            _take_first(self._done, self._end)
        self._submit_removals()
        return num_ended

    def _end(self, done: Done) -> None:
        """Call the code that waits for a batch."""
        self._saves.discard(done.ticket)
        if done.ticket not in self._open:
            return
        ended, count = self._open[done.ticket]
        ok = np.asarray(done.ok, np.bool_)
        if done.error is not None:
            self.last_error = done.error
        try:
            ended(ok if ok.shape == (count,) else np.zeros(count, np.bool_), done.error)
        except Exception:
            del self._open[done.ticket]
            raise
        del self._open[done.ticket]

    def note(
        self,
        tokens: NDArray[np.int32],
        namespace: Hashable,
        spans: Spans | None,
        found: Sequence[tuple[Positions, Flags]],
        keys: Callable[[int, Positions], Keys],
        *,
        forgets: bool,
    ) -> None:
        """Note in the ledger which entries of each lane of a prefix the store has; see `Ledger.note`.

        `keys` returns the content keys of entries of a lane, by which a store names what it has or has evicted.
        """
        if not self.ledger.is_recording:
            return
        listed, names = list(found), None
        if (reporter := self._reporter()) is not None or self.can_list:
            names = [keys(lane, positions) for lane, (positions, _) in enumerate(found)]
        if names is not None and reporter is not None:
            for lane, name in enumerate(names):
                # An entry that was evicted after its batch had ended: its eviction may have been taken already.
                self._try(partial(_drop_evicted, listed, lane, reporter, name))
        self.ledger.note(tokens, namespace, spans, listed, store=self.index, forgets=forgets, keys=names)

    def note_listed(self, keys: Keys) -> None:
        """Note in the ledger that the store has no entries but those that it has just listed."""
        if self.ledger.is_recording:
            self.ledger.note_listed(keys, store=self.index)

    def note_removed(self, keys: Keys) -> None:
        """Note in the ledger that a store that lists its entries has deleted some."""
        if self.ledger.is_recording:
            self.ledger.note_evicted(keys, store=self.index)

    def close(self) -> None:
        """Close the store, which ends all of its batches; those without an end count as failures.

        An error, of the store or of the code that waits for a batch, is raised after everything has ended.
        """
        with ExitStack() as steps:  # calls the last one first, also after one that raises
            steps.callback(self._fail_open)
            steps.callback(self.poll)
            steps.callback(self.store.close)
            steps.callback(self._fail_removals)
            self.poll()

    def _fail_removals(self) -> None:
        left, self._removals = self._removals, []
        _fail_all((removal.ended, len(removal.keys), _CLOSED) for removal in left)

    def _fail_open(self) -> None:
        left = [*self._refused, *((ended, count, _CLOSED) for ended, count in self._open.values())]
        self._refused.clear()
        self._open.clear()
        _fail_all(left)

    def stats(self) -> StoreStats:
        """Return the counters of the store; refused submissions are included in its failures."""
        stats = self.store.stats()
        return replace(stats, num_load_failures=stats.num_load_failures + self.num_refused)

    def _has_no_client(self) -> bool:
        store: object = self.store
        return isinstance(store, Guard) and store.store is None

    @property
    def _no_client(self) -> str:
        return f"the store {self.store.name} is being reopened or was closed"

    def _why_not_cleared(self) -> str | None:
        """Return why a store with a client cannot be cleared, and what to do; None if it can."""
        store: object = self.store
        if isinstance(store, Guard) and store.read_only:
            return "its guard is read-only; clear it in a process that writes it"
        if not self.can_list:
            return "it does not list its entries; clear it by its own tools"
        if not self.can_remove:
            return "it does not delete entries on request; clear it by its own tools"
        return None

    def _submit_removals(self) -> None:
        """Submit the removals that need not wait for anything that is being saved."""
        ready = [each for each in self._removals if not each.awaited & self._saves]
        for removal in ready:
            self._removals.remove(removal)
            self._submit(partial(_remove, self.store, removal.keys), len(removal.keys), removal.ended)

    @cached_property
    def _as_reporter(self) -> EvictionReporter | None:
        """The store, if it has the methods; `isinstance` takes longer than the rest of a poll."""
        store = self.store
        return store if isinstance(store, EvictionReporter) else None

    def _reporter(self) -> EvictionReporter | None:
        store = self._as_reporter
        return store if store is not None and store.reports_evictions else None

    def _note_evicted(self) -> None:
        if self.ledger.is_recording and (reporter := self._reporter()) is not None:
            self.ledger.note_evicted(reporter.take_evicted(), store=self.index)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # as in _submit
            self.num_refused += 1
            self.last_error = f"{type(error).__name__}: {error}"

    def _submit(self, submit: Callable[[], int], count: int, ended: Ended) -> int | None:
        try:
            ticket = submit()
        except Exception as error:  # a store of the caller may raise anything
            reason = f"{type(error).__name__}: {error}"
            self.num_refused += 1
            self.last_error = reason
            self._refused.append((ended, count, reason))
            return None
        self._open[ticket] = (ended, count)
        return ticket


def _take_first(waiting: deque[T], end: Callable[[T], None]) -> None:
    """Call `end` with the first one and remove it; after an interrupt it is there still."""
    try:
        end(waiting[0])
    except Exception:
        waiting.popleft()
        raise
    waiting.popleft()


def _fail(waiting: tuple[Ended, int, str]) -> None:
    ended, count, reason = waiting
    ended(np.zeros(count, np.bool_), reason)


def _fail_all(waiting: Iterable[tuple[Ended, int, str]]) -> None:
    """Call the code that waits for batches, each with a failure of all keys, also after a call that raises."""
    with ExitStack() as calls:
        for ended, count, reason in waiting:
            calls.callback(_fail, (ended, count, reason))


def _save(store: BlockStore, keys: Keys, pieces: Pieces, before: Keys | None) -> int:
    keeper: object = store
    if isinstance(keeper, PrefixKeeper) and keeper.keeps_prefixes:
        return keeper.submit_store(keys, pieces, before=before)
    return store.submit_store(keys, pieces)


def _touch(store: BlockStore, keys: Keys) -> None:
    assert isinstance(store, EntryToucher)
    store.touch(keys)


def _remove(store: BlockStore, keys: Keys) -> int:
    assert isinstance(store, EntryRemover)
    return store.submit_remove(keys)


def _drop_evicted(found: list[tuple[Positions, Flags]], lane: int, reporter: EvictionReporter, keys: Keys) -> None:
    """Clear the flags of entries of a lane that the store does not have any more."""
    positions, ok = found[lane]
    found[lane] = positions, ok & reporter.has(keys)
