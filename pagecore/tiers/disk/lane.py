"""The index of a lane: which key each slot holds, and which slots may be given to another key."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterable, Mapping

from pagecore.errors import PagecoreError
from pagecore.tiers.disk.order import EvictionOrder

# Most keys of a record of evictions, each of 17 bytes.
MAX_EVICTED = 1 << 16


class Lane:
    """Keys and slots of one lane.

    Every slot is in one place: free, being written (`writing`), published (`entries`), or dropped while a load reads it
    or its entry is erased (`orphans`). A published key that is not pinned may be evicted, in the order of
    `EvictionOrder`. A pin belongs to a lookup (`held`), or to a load, store or removal that runs.
    A method without memory changes nothing, except that a link or an order of uses may be lost. After a method that an
    interrupt has ended, call `recover`.

    Parameters
    ----------
    num_slots : int
    entries : dict of bytes to int
        Keys that the table has, the least recently used first, and their slots.
    before : mapping of bytes to bytes, optional
        The key before each one in its prefix, of keys that have one.
    """

    def __init__(self, num_slots: int, entries: dict[bytes, int], before: Mapping[bytes, bytes] | None = None) -> None:
        self.num_slots = num_slots
        self.entries = entries
        self.writing: dict[bytes, int] = {}
        self.orphans: dict[bytes, int] = {}
        self.held: Counter[bytes] = Counter()
        self._pins: Counter[bytes] = Counter()
        self._order = EvictionOrder(entries, before or {})
        used = set(entries.values())
        self._free = deque(slot for slot in range(num_slots) if slot not in used)
        self._evicted: OrderedDict[bytes, None] | None = None

    def hold(self, key: bytes) -> bool:
        """Pin a published key for a lookup; return False if it is not published."""
        if key not in self.entries:
            return False
        self.held[key] += 1
        try:
            self._pin(key)
        except BaseException:
            self._take_hold(key)
            raise
        return True

    def unhold(self, key: bytes) -> None:
        """End the hold of a lookup; a key without one is ignored."""
        if self.held.get(key):
            self.unpin(key)
            self._take_hold(key)

    def pin_for_load(self, key: bytes) -> int | None:
        """Return the slot of a key and pin it; None if it is not published. A hold of the key becomes the pin."""
        slot = self.entries.get(key)
        if slot is None:
            self.unhold(key)
            return None
        if not self._take_hold(key):
            self._pin(key)
        return slot

    def unpin(self, key: bytes) -> None:
        """End a pin; the last one makes the key the most recently used. A key that has none is ignored."""
        left = self._pins[key] - 1
        if left < 0:  # an interrupt came after the end of the pin, which `recover` has found, and before its note
            return
        if left:
            self._pins[key] = left
            return
        if key in self.orphans:
            self._free.append(self.orphans[key])
            del self.orphans[key]
        else:
            self._order.use(key)
        self._pins.pop(key)

    def pin(self, key: bytes) -> bool:
        """Pin a published key; return False if it is not published."""
        if key not in self.entries:
            return False
        self._pin(key)
        return True

    def touch(self, key: bytes) -> None:
        """Make a published key the most recently used; a pinned one becomes so at its last `unpin`."""
        if key in self._order:
            self._order.use(key)

    def take(self, key: bytes, before: bytes | None = None) -> int | None:
        """Return a slot for a key that is neither published nor being written, evicting another; None without one.

        `before` is the key before it in its prefix, which must be published or being written, and is not evicted.
        """
        if key in self.orphans or (before is not None and not self._has(before)):
            return None
        victim = None if self._free else self._order.first(kept=before)
        if victim is None and not self._free:
            return None
        slot = self._free[0] if victim is None else self.entries[victim]
        try:
            self.writing[key] = slot
            if before is not None:
                self._order.link(key, before)
            if victim is None:
                self._free.popleft()
            else:
                self._evict(victim)
        except BaseException:
            if victim in self.entries or (self._free and self._free[0] == slot):
                self.writing.pop(key, None)
                self._order.unlink(key)
            raise
        return slot

    def publish(self, key: bytes) -> None:
        """Make a written key available; one that is not being written is ignored."""
        if key not in self.writing:
            return
        self._order.use(key)
        try:
            self.entries[key] = self.writing[key]
        except BaseException:
            self._order.discard(key)
            raise
        del self.writing[key]
        if self._evicted is not None:
            self._evicted.pop(key, None)

    def abandon(self, key: bytes) -> None:
        """Free the slot of a key that was not written; one that is not being written is ignored.

        The slot is reused last, because its sectors may be bad.
        """
        slot = self.writing.get(key)
        if slot is not None:
            self._order.unlink(key)
            self._free.append(slot)
            del self.writing[key]

    def drop(self, key: bytes) -> int | None:
        """Forget a published key, as if it had been evicted; return its slot, None if it is gone already."""
        slot = self.entries.get(key)
        if slot is None:
            return None
        self._order.unlink(key)
        self._note_evicted(key)
        try:
            if key in self._pins:
                self.orphans[key] = slot
            else:
                self._free.append(slot)
        except BaseException:
            self._unnote_evicted(key)
            raise
        self._order.discard(key)
        del self.entries[key]
        return slot

    def remove(self, key: bytes) -> int | None:
        """Forget a published key and keep its slot from others until `unpin`; None if it is not published."""
        if key not in self.entries:
            return None
        self._pin(key)
        try:
            return self.drop(key)
        except BaseException:
            self.unpin(key)
            raise

    def take_evicted(self) -> list[bytes]:
        """Return the keys that were evicted or dropped since the last call and are not published again.

        The first call begins the record, which keeps the newest `MAX_EVICTED` keys.
        """
        evicted, self._evicted = self._evicted, OrderedDict()
        return list(evicted or ())

    def recover(self, pins: Counter[bytes], written: Container[bytes]) -> None:
        """Make the index consistent after an interrupt.

        Parameters
        ----------
        pins : Counter of bytes
            Pins of batches, of which each has called `pin_for_load`, `pin` or `remove`, and not yet `unpin`.
        written : container of bytes
            Keys of batches that have called `take`, and neither `publish` nor `abandon`.
        """
        slotted = self.entries.keys() | self.orphans.keys()
        self.held = Counter({key: number for key, number in self.held.items() if number > 0 and key in self.entries})
        self._pins = self.held + Counter({key: number for key, number in pins.items() if key in slotted})
        self.writing = {k: slot for k, slot in self.writing.items() if k in written and k not in self.entries}
        self.orphans = {k: slot for k, slot in self.orphans.items() if k in self._pins and k not in self.entries}
        used = {*self.entries.values(), *self.writing.values(), *self.orphans.values()}
        known = dict.fromkeys(slot for slot in self._free if slot not in used)
        taken = used | known.keys()
        self._free = deque([*known, *(slot for slot in range(self.num_slots) if slot not in taken)])
        if self._evicted is not None:
            self._evicted = OrderedDict.fromkeys(key for key in self._evicted if key not in self.entries)
        unpinned = {key: None for key in self.entries if key not in self._pins}
        self._order.recover(unpinned, self.entries.keys() | self.writing.keys())

    def slots_by_use(self) -> Iterable[int]:
        """Return the slots of the entries that may be evicted, the least recently used first."""
        return map(self.entries.__getitem__, self._order.keys())

    def check_invariants(self) -> None:
        """Raise PagecoreError if a slot or a pin is not in exactly one place."""
        places: list[Iterable[int]] = [self._free, self.writing.values(), self.orphans.values(), self.entries.values()]
        slots = sorted(slot for place in places for slot in place)
        slotted = self.entries.keys() | self.orphans.keys()
        unpinned = self.entries.keys() - self._pins.keys()
        rules = {
            "a slot is in no place or in two": slots == list(range(self.num_slots)),
            "the keys to evict are not the unpinned ones": set(self._order.keys()) == unpinned,
            "a hold has no pin": all(0 < self.held[key] <= self._pins[key] for key in self.held),
            "a pinned key has no slot": self._pins.keys() <= slotted and all(n > 0 for n in self._pins.values()),
            "a published key is being written": not self.writing.keys() & self.entries.keys(),
            **self._order.faults(),
        }
        for rule, holds in rules.items():
            if not holds:
                raise PagecoreError(f"the index of a disk lane is inconsistent: {rule}")

    def _has(self, key: bytes) -> bool:
        return key in self.entries or key in self.writing

    def _evict(self, victim: bytes) -> None:
        """Forget an entry that `EvictionOrder.first` returned."""
        self._note_evicted(victim)
        try:
            self._order.unlink(victim)
        except BaseException:
            self._unnote_evicted(victim)
            raise
        self._order.discard(victim)
        del self.entries[victim]

    def _note_evicted(self, key: bytes) -> None:
        if self._evicted is not None:
            self._evicted[key] = None
            try:
                if len(self._evicted) > MAX_EVICTED:
                    del self._evicted[next(iter(self._evicted))]
            except BaseException:
                self._unnote_evicted(key)
                raise

    def _unnote_evicted(self, key: bytes) -> None:
        if self._evicted is not None:
            self._evicted.pop(key, None)

    def _pin(self, key: bytes) -> None:
        self._pins[key] += 1
        self._order.discard(key)

    def _take_hold(self, key: bytes) -> bool:
        left = self.held.get(key, 0) - 1
        if left > 0:
            self.held[key] = left
        elif left == 0:
            self.held.pop(key)
        return left >= 0
