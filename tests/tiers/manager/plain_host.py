"""A host tier in plain Python: a dict of entries by the tokens before them. The rules of reuse are written out."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np

from pagecore.index import RadixTree

ALIGNMENT = 4096


def payload(namespace, tokens, lane, nbytes):
    """Return the bytes that the entry after `tokens` must have."""
    seed = hashlib.sha256(repr((namespace, [int(token) for token in tokens], lane)).encode()).digest()
    return np.frombuffer((seed * (nbytes // len(seed) + 1))[:nbytes], np.uint8)


class PlainHost:
    """Lanes: `num_full` groups that attend to everything, then one a window, then states."""

    def __init__(self, *, block_size=4, num_full=1, windows=(), states=False, slots=16, nbytes=256):
        self.block_size = block_size
        self.windows = windows
        self.num_full = num_full
        self.states = states
        self.tree = RadixTree(block_size, full=num_full, windows=windows, states=states)
        self.lanes = tuple(range(num_full + len(windows)))
        self.num_lanes = num_full + len(windows) + states
        self.payload_bytes = (nbytes,) * self.num_lanes
        raw = np.zeros((self.num_lanes * slots + 1) * ALIGNMENT, np.uint8)
        begin = -raw.ctypes.data % ALIGNMENT
        self.memory = raw[begin : begin + self.num_lanes * slots * ALIGNMENT].reshape(self.num_lanes, slots, ALIGNMENT)
        self.free = [list(range(slots)) for _ in range(self.num_lanes)]
        self.entries = [{} for _ in range(self.num_lanes)]  # (namespace, tokens before the end) -> [slot, time]
        self.pins = []
        self.leases = []
        self.now = 0

    def fill(self, tokens, *, namespace=None, stop=None):
        """Put every entry of a prefix into the host, with the right bytes; return the tokens for which it had room."""
        size = self.block_size
        for index in range((len(tokens) if stop is None else stop) // size):
            keys = [(namespace, tuple(tokens[: (index + 1) * size]))] * self.num_lanes
            lanes = [lane for lane, key in enumerate(keys) if key not in self.entries[lane]]
            for lane in lanes:
                if not self.free[lane] and not self.evict(lane, 1):
                    return index * size
            for lane in lanes:
                slot = self.free[lane].pop()
                self.now += 1
                self.entries[lane][keys[lane]] = [slot, self.now]
                self.memory[lane, slot, : self.payload_bytes[lane]] = payload(
                    namespace, keys[lane][1], lane, self.payload_bytes[lane]
                )
        return len(tokens) // size * size

    def evict(self, lane, count):
        """Evict the oldest entries that are not pinned; return True if `count` could go."""
        pinned = {key for pin in self.pins for key in pin.keys[lane]}
        for key in sorted(self.entries[lane], key=lambda key: self.entries[lane][key][1]):
            if len(self.free[lane]) >= count:
                break
            if key not in pinned:
                slot, _ = self.entries[lane].pop(key)
                self.memory[lane, slot] = 0xEE
                self.free[lane].append(slot)
        return len(self.free[lane]) >= count

    def needed(self, tokens, namespace, length):
        """Return the keys of the entries that a prefix of `length` tokens needs, lane by lane."""
        size = self.block_size
        keys = [(namespace, tuple(tokens[: end + size])) for end in range(0, length, size)]
        lanes = [keys] * self.num_full
        lanes += [keys[max(length - window, 0) // size :] for window in self.windows]
        return lanes + [keys[-1:]] * self.states

    def lengths(self, tokens, max_tokens):
        """Return whole blocks of tokens without the last one, longest first."""
        most = len(tokens) - 1 if max_tokens is None else min(max_tokens, len(tokens) - 1)
        return [count * self.block_size for count in range(max(most, 0) // self.block_size, -1, -1)]

    def has(self, lane, keys):
        return all(key in self.entries[lane] for key in keys)

    def match(self, tokens, *, namespace=None, spans=None, max_tokens=None):
        assert spans is None
        tokens = [int(token) for token in tokens]
        for length in self.lengths(tokens, max_tokens):
            needed = self.needed(tokens, namespace, length)
            if not length or all(self.has(lane, keys) for lane, keys in enumerate(needed)):
                return length
        raise AssertionError("unreachable")

    def hold(self, tokens, *, namespace=None, spans=None, max_tokens=None):
        """Pin what there is of the longest prefix that the groups without a window have."""
        tokens = [int(token) for token in tokens]
        for length in self.lengths(tokens, max_tokens):
            keys = [(namespace, tuple(tokens[: end + self.block_size])) for end in range(0, length, self.block_size)]
            if all(self.has(lane, keys) for lane in range(self.num_full)):
                there = [[key for key in keys if key in self.entries[lane]] for lane in range(self.num_lanes)]
                if self.states:
                    there[-1] = there[-1][-1:]
                pin = _Pin(self, there)
                self.pins.append(pin)
                return pin
        raise AssertionError("unreachable")

    def reserve(self, positions):
        counts = [len(lane) for lane in positions]
        if not all(self.evict(lane, count) for lane, count in enumerate(counts)):
            return None
        slots = [[self.free[lane].pop() for _ in range(count)] for lane, count in enumerate(counts)]
        for lane, mine in enumerate(slots):
            self.memory[lane, mine] = 0xDD
        lease = _Lease(self, [list(map(int, lane)) for lane in positions], slots)
        self.leases.append(lease)
        return lease

    def adopt(self, lease, tokens, *, namespace=None, spans=None, ok=None):
        assert spans is None
        tokens = [int(token) for token in tokens]
        size = self.block_size
        first_hole = len(tokens) // size
        for lane in range(self.num_full):
            here = dict(zip(lease.positions[lane], range(len(lease.positions[lane])), strict=True))
            for index in range(first_hole):
                arrived = index in here and (ok is None or ok[lane][here[index]])
                if not arrived and (namespace, tuple(tokens[: (index + 1) * size])) not in self.entries[lane]:
                    first_hole = index
                    break
        for lane, (places, slots) in enumerate(zip(lease.positions, lease.slots, strict=True)):
            for number, (index, slot) in enumerate(zip(places, slots, strict=True)):
                key = (namespace, tuple(tokens[: (index + 1) * size]))
                arrived = ok is None or ok[lane][number]
                if arrived and index < first_hole and key not in self.entries[lane]:
                    self.now += 1
                    self.entries[lane][key] = [slot, self.now]
                else:
                    self.free[lane].append(slot)
        self.leases.remove(lease)
        return first_hole * size

    def piece(self, lane, slot):
        return self.memory[lane, slot].ctypes.data, self.payload_bytes[lane]

    def check(self):
        """Check that every entry has its bytes, and that no slot is lost."""
        for lane in range(self.num_lanes):
            nbytes = self.payload_bytes[lane]
            for (namespace, tokens), (slot, _) in self.entries[lane].items():
                assert bytes(self.memory[lane, slot, :nbytes]) == bytes(payload(namespace, tokens, lane, nbytes))
            leased = sum(len(lease.slots[lane]) for lease in self.leases)
            assert len(self.free[lane]) + len(self.entries[lane]) + leased == self.memory.shape[1]

    check_invariants = check


class _Pin:
    def __init__(self, host, keys):
        self.host, self.keys = host, keys

    def entries(self, lane):
        places = [len(tokens) // self.host.block_size - 1 for _, tokens in self.keys[lane]]
        pieces = [self.host.piece(lane, self.host.entries[lane][key][0]) for key in self.keys[lane]]
        return np.array(places, np.int64), np.array(pieces, np.uint64).reshape(-1, 2)

    def release(self):
        self.host.pins.remove(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()


class _Lease:
    def __init__(self, host, positions, slots):
        self.host, self.positions, self.slots = host, positions, slots

    def pieces(self, lane):
        return np.array([self.host.piece(lane, slot) for slot in self.slots[lane]], np.uint64).reshape(-1, 2)

    def release(self):
        for lane, slots in enumerate(self.slots):
            self.host.memory[lane, slots] = 0xCC
            self.host.free[lane] += slots
        self.host.leases.remove(self)


NO_DEVICE = SimpleNamespace(match_length=lambda tokens, **_options: 0)
