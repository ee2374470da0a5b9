"""A device in plain Python, and a host through which prefixes pass to it and from it."""

from __future__ import annotations

import numpy as np

from pagecore.errors import PagecoreError
from tests.tiers.manager.plain_host import PlainHost, payload


class PlainDevice:
    """Payloads of each lane by the tokens before their end; the oldest are evicted first."""

    def __init__(self, num_blocks=32):
        self.num_blocks = num_blocks
        self.entries = {}  # (lane, namespace, tokens before the end) -> bytes
        self.streamed = []  # (tokens, start, media) of `note_streamed`
        self.host = None

    def fill(self, tokens, namespace=None):
        """Compute a prefix: put its entries there, with the right bytes."""
        host = self.host
        for index in range(len(tokens) // host.block_size):
            for lane in range(host.num_lanes):
                key = (lane, namespace, tuple(map(int, tokens[: (index + 1) * host.block_size])))
                self.put(key, bytes(payload(namespace, key[2], lane, host.payload_bytes[lane])))

    def put(self, key, content):
        self.entries.pop(key, None)
        self.entries[key] = content

    def room(self, lane):
        return self.num_blocks - sum(key[0] == lane for key in self.entries)

    def path(self, tokens, namespace):
        """Return the blocks that the groups without a window have."""
        size, count = self.host.block_size, 0
        tokens = tuple(map(int, tokens))
        while (count + 1) * size <= len(tokens) and all(
            (lane, namespace, tokens[: (count + 1) * size]) in self.entries for lane in range(self.host.num_full)
        ):
            count += 1
        return count

    def evict(self, count):
        for key in list(self.entries)[:count]:
            del self.entries[key]

    def check(self):
        for (lane, namespace, tokens), content in self.entries.items():
            assert content == bytes(payload(namespace, tokens, lane, self.host.payload_bytes[lane]))

    # -- DeviceSide --

    def match_length(self, tokens, *, namespace=None, spans=None, max_tokens=None):
        assert spans is None
        host = self.host
        tokens = [int(token) for token in tokens]
        for length in host.lengths(tokens, max_tokens):
            needed = host.needed(tokens, namespace, length)
            if not length or all((lane, *key) in self.entries for lane, keys in enumerate(needed) for key in keys):
                return length
        raise AssertionError("unreachable")

    def bring(self, tokens, *, namespace, spans, max_tokens):
        host = self.host
        length = host.match(tokens, namespace=namespace, max_tokens=max_tokens)
        for lane, keys in enumerate(host.needed([int(token) for token in tokens], namespace, length)):
            for key in keys if length else ():
                if (lane, *key) not in self.entries and self.room(lane):
                    slot = host.entries[lane][key][0]
                    self.put((lane, *key), bytes(host.memory[lane, slot, : host.payload_bytes[lane]]))

    def note_streamed(self, tokens, prefix, start, media):
        self.streamed.append((len(tokens), start, list(media)))


class StreamingHost(PlainHost):
    """A plain host with the methods of `StreamHost`.

    With `late_copies` a copy from the device ends at `finish_copies`. `fails` lets the next copies fail.
    """

    def __init__(self, device, *, late_copies=False, **options):
        super().__init__(**options)
        self.device, device.host = device, self
        self.late_copies = late_copies
        self.running = []
        self.fails = 0

    can_stream = True

    @property
    def is_copying(self):
        return bool(self.running)

    def room(self):
        pinned = [{key for pin in self.pins for key in pin.keys[lane]} for lane in range(self.num_lanes)]
        return [
            len(self.free[lane]) + sum(key not in pinned[lane] for key in self.entries[lane])
            for lane in range(self.num_lanes)
        ]

    def device_room(self):
        return [self.device.room(lane) for lane in range(self.num_lanes)]

    def fail(self):
        if self.fails:
            self.fails -= 1
            raise PagecoreError("planted")

    def stage(self, tokens, begin, end, *, namespace=None, spans=None):
        assert spans is None
        tokens = tuple(map(int, tokens))
        end = min(end, self.device.path(tokens, namespace))
        keys = [(namespace, tokens[: (index + 1) * self.block_size]) for index in range(begin, end)]
        positions = [
            [begin + index for index, key in enumerate(keys) if (lane, *key) in self.device.entries]
            for lane in range(self.num_lanes)
        ]
        room = self.room()
        if any(len(lane) > room[number] for number, lane in enumerate(positions)):
            return None
        lease = self.reserve(positions)
        staged = _Staged(self, lease)
        try:
            self.fail()
        except PagecoreError:
            staged.release()
            raise
        for lane, places in enumerate(positions):
            for place, slot in zip(places, lease.slots[lane], strict=True):
                content = self.device.entries[lane, namespace, tokens[: (place + 1) * self.block_size]]
                self.memory[lane, slot, : len(content)] = np.frombuffer(content, np.uint8)
        if self.late_copies:
            self.running.append(staged)
        return staged

    def finish_copies(self):
        self.running.clear()

    def deliver(self, lease, tokens, *, namespace=None, spans=None, ok):
        assert spans is None
        tokens = tuple(map(int, tokens))
        try:
            self.fail()
            lanes = zip(lease.positions, lease.slots, ok, strict=True)
            arrived = [{place: slot for place, slot, is_ok in zip(*lane, strict=True) if is_ok} for lane in lanes]
            count = self.device.path(tokens, namespace)
            while (count + 1) * self.block_size <= len(tokens):
                key = namespace, tokens[: (count + 1) * self.block_size]
                lanes = [lane for lane in range(self.num_lanes) if count in arrived[lane]]
                if not set(range(self.num_full)) <= set(lanes) or any(not self.device.room(lane) for lane in lanes):
                    break
                for lane in lanes:
                    content = self.memory[lane, arrived[lane][count], : self.payload_bytes[lane]]
                    self.device.put((lane, *key), bytes(content))
                count += 1
            return count * self.block_size
        finally:
            lease.release()


class _Staged:
    def __init__(self, host, lease):
        self.host, self.lease = host, lease
        self.positions = [np.array(lane, np.int64) for lane in lease.positions]
        self.is_released = False

    @property
    def is_running(self):
        return self in self.host.running

    def pieces(self, lane):
        return self.lease.pieces(lane)

    def release(self):
        assert not self.is_released
        self.is_released = True
        self.lease.release()
