"""Failed allocations in the scheduler, but not in its cache."""

from pagecore.cache import PagedKVCache
from tests.faults import PythonAllocations, undisturbed

CALLS = (
    "abandon",
    "all_sequences",
    "add_sequence",
    "append_tokens",
    "commit",
    "fork",
    "match_length",
    "prepare",
    "remove",
    "shortage",
    "shortages",
    "swap_in",
    "truncate",
    "try_prepare",
    "try_swap_out",
)


class Faults:
    """Fail the n-th allocation after a given number of cache calls, if it happens before the next cache call."""

    def __init__(self):
        self.allocations = PythonAllocations()
        self.calls = self.first = self.point = self.depth = 0

    def attempt(self, call, first, point):
        """Fail allocation number `point` after `first` cache calls; return True if the call returned."""
        self.calls, self.first, self.point = 0, first, point
        with undisturbed():
            try:
                if not first:
                    self.allocations.arm(point)
                call()
            except (MemoryError, SystemError):  # NumPy raises SystemError for some failed allocations
                return False
            finally:
                self.first = -1
                self.allocations.disarm()
        return True

    def enter(self):
        self.allocations.disarm()
        self.depth += 1

    def leave(self):
        self.depth -= 1
        self.calls += not self.depth
        if not self.depth and self.calls == self.first:
            self.allocations.arm(self.point)


class ShieldedCache(PagedKVCache):
    """A cache whose own allocations never fail, so that each of its calls is all-or-nothing."""

    faults = None

    @property
    def sequences(self):
        return self.all_sequences()

    def all_sequences(self):
        return super().sequences


def shielded(name):
    method = getattr(ShieldedCache, name)

    def call(self, *arguments, **options):
        if self.faults is None:
            return method(self, *arguments, **options)
        self.faults.enter()
        try:
            return method(self, *arguments, **options)
        finally:
            self.faults.leave()

    return call


for _name in CALLS:
    setattr(ShieldedCache, _name, shielded(_name))
