"""Host memory in 4,096-aligned pieces, and random keys, for tests of stores."""

from __future__ import annotations

import numpy as np

from pagecore.tiers.store import KEY_BYTES

POISON = 0xA5


class Blocks:
    """Blocks of `nbytes` each in one allocation, every block at a multiple of 4,096; poisoned at first."""

    def __init__(self, count, nbytes):
        self.nbytes = nbytes
        self.stride = -(-nbytes // 4096) * 4096
        memory = np.full((count + 1) * self.stride + 4096, POISON, np.uint8)
        begin = -memory.ctypes.data % 4096
        self.bytes = memory[begin : begin + count * self.stride].reshape(count, self.stride)
        self.payloads = self.bytes[:, :nbytes]
        self._memory = memory

    def pieces(self, ids=None):
        """Return pieces of the blocks `ids`, all by default."""
        ids = np.arange(len(self.bytes)) if ids is None else np.asarray(ids)
        pieces = np.empty((len(ids), 2), np.uint64)
        pieces[:, 0] = self.bytes.ctypes.data + ids * self.stride
        pieces[:, 1] = self.nbytes
        return pieces

    def fill(self, seed):
        """Fill the payloads with random bytes; return a copy of them."""
        self.payloads[:] = np.random.default_rng(seed).integers(0, 256, self.payloads.shape, np.uint8)
        return self.payloads.copy()

    def poison(self):
        self.bytes[:] = POISON

    @property
    def is_poisoned(self):
        """Mask of the blocks of which no byte was written."""
        return (self.bytes == POISON).all(axis=1)


def random_keys(count, seed=0, lane=0):
    keys = np.random.default_rng(seed).integers(0, 256, (count, KEY_BYTES), np.uint8)
    keys[:, -1] = lane
    return keys


def wait(store, ticket, timeout=20.0):
    """Return the `Done` of a ticket; other batches that end meanwhile are lost."""
    return wait_all(store, [ticket], timeout)[ticket]


def wait_all(store, tickets, timeout=20.0):
    """Return a dict of ticket to `Done`, once all of `tickets` have ended."""
    import select
    import time

    ended = {}
    limit = time.monotonic() + timeout
    poller = select.poll()
    poller.register(store.fileno(), select.POLLIN)
    while not ended.keys() >= set(tickets):
        for done in store.poll():
            assert done.ticket not in ended, f"two ends of ticket {done.ticket}"
            ended[done.ticket] = done
        left = limit - time.monotonic()
        assert left > 0, f"tickets {set(tickets) - ended.keys()} have not ended in {timeout} s"
        if not ended.keys() >= set(tickets):
            poller.poll(left * 1000)
    return ended
