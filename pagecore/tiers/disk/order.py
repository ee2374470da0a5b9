"""The order in which a lane evicts its entries: by last use, and a prefix from its end."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Set
from itertools import islice


class EvictionOrder:
    """Entries that may be evicted, and links between entries of one prefix.

    An entry that others follow in their prefixes is not evicted before them, because they cannot be served without it,
    and counts as used when they are. If such an entry is the least recently used, `first` passes it over; it comes
    first again when its last follower goes, which was then the least recently used.

    Invariants: an entry is in `_uses` or in `_passed`, not in both; each entry of `_passed` has followers;
    `_num_followers` counts the values of `_before`; links have no circles. Each method takes constant time, amortised
    over the uses, unless an entry comes back whose followers are still there. A method without memory changes nothing,
    except that `first` may have passed over entries.

    Parameters
    ----------
    keys : iterable of bytes
        Entries, the least recently used first.
    before : mapping of bytes to bytes
        The entry before an entry in its prefix, which need not exist.
    """

    def __init__(self, keys: Iterable[bytes], before: Mapping[bytes, bytes]) -> None:
        self._uses: OrderedDict[bytes, None] = OrderedDict.fromkeys(keys)
        self._passed: dict[bytes, None] = {}
        self._before: dict[bytes, bytes] = {}
        self._num_followers: dict[bytes, int] = {}
        for key, other in before.items():
            self.link(key, other)

    def use(self, key: bytes) -> None:
        """Add an entry as the most recently used, or make it so."""
        if key in self._uses:
            self._uses.move_to_end(key)
        else:
            self._uses[key] = None
        self._passed.pop(key, None)

    def discard(self, key: bytes) -> None:
        """Leave an entry out until its next use; its link stays."""
        self._passed.pop(key, None)
        self._uses.pop(key, None)

    def __contains__(self, key: bytes) -> bool:
        return key in self._uses or key in self._passed

    def keys(self) -> list[bytes]:
        """Return the entries that may be evicted, the least recently used first."""
        return [*self._passed, *self._uses]

    def first(self, kept: bytes | None = None) -> bytes | None:
        """Return the entry to evict, which is not `kept`; None if others follow every other entry or there is none."""
        while True:
            for key in islice(self._uses, 2):
                if key in self._num_followers:
                    self._pass_over(key)
                    break
                if key != kept:
                    return key
            else:
                return None

    def pop(self) -> bytes | None:
        """Remove and return the entry to evict; None if there is none."""
        key = self.first()
        if key is not None:
            self.unlink(key)
            del self._uses[key]
        return key

    def link(self, key: bytes, before: bytes) -> None:
        """Note the entry before a new one; a link that would close a circle is left out."""
        if key in self._num_followers:  # it was lost while others followed it
            one: bytes | None = before
            while one is not None and one != key:
                one = self._before.get(one)
            if one == key:
                return
        self._before[key] = before
        try:
            self._num_followers[before] = self._num_followers.get(before, 0) + 1
        except BaseException:
            del self._before[key]
            raise

    def unlink(self, key: bytes) -> None:
        """Forget the entry before one that goes."""
        before = self._before.get(key)
        if before is None:
            return
        left = self._num_followers[before] - 1
        if left:
            self._num_followers[before] = left
        else:
            if before in self._passed:
                try:
                    self._uses[before] = None
                    self._uses.move_to_end(before, last=False)
                except BaseException:
                    self._uses.pop(before, None)
                    raise
                del self._passed[before]
            del self._num_followers[before]
        del self._before[key]

    def recover(self, listed: Mapping[bytes, object], known: Set[bytes]) -> None:
        """Make the order consistent after an interrupt: `listed` may be evicted, and only `known` keys have links.

        Those of `listed` that the order has lost become the most recently used, from the first to the last.
        """
        self._before = {key: before for key, before in self._before.items() if key in known}
        self._num_followers = dict(Counter(self._before.values()))
        self._uses = OrderedDict.fromkeys(key for key in self._uses if key in listed)
        passed = [key for key in self._passed if key in listed and key not in self._uses]
        self._passed = {key: None for key in passed if key in self._num_followers}
        for key in reversed(passed):
            if key not in self._passed:  # its last follower has gone
                self._uses[key] = None
                self._uses.move_to_end(key, last=False)
        for key in listed:
            if key not in self:
                self._uses[key] = None

    def _pass_over(self, key: bytes) -> None:
        self._passed[key] = None
        try:
            del self._uses[key]
        except BaseException:
            del self._passed[key]
            raise

    def faults(self) -> dict[str, bool]:
        """Return the rules of the order, and whether each holds."""
        return {
            "an entry to evict is listed twice": not self._passed.keys() & self._uses.keys(),
            "an entry was passed over that others do not follow": self._passed.keys() <= self._num_followers.keys(),
            "followers are counted wrongly": self._num_followers == Counter(self._before.values()),
        }
