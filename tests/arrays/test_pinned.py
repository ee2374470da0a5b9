"""Pinned memory of uploads: when it grows, and how it is freed."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from pagecore.arrays.cuda.current import use_runtime
from pagecore.arrays.cuda.pinned import PinnedRing, room_for
from pagecore.arrays.tensors import uploads
from pagecore.errors import DeviceError, NotEnoughMemory
from tests.arrays.fake_runtime import FakeRuntime


@pytest.mark.parametrize(("num_bytes", "room"), [(1, 4096), (4096, 4096), (4097, 8192), (1 << 20, 1 << 20)])
def test_an_upload_reserves_more_than_its_size(monkeypatch, num_bytes, room):
    runtime, asked = FakeRuntime(), []
    plain = runtime.allocate_pinned
    monkeypatch.setattr(runtime, "allocate_pinned", lambda size: asked.append(size) or plain(size))
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    with use_runtime(runtime):
        uploads.upload(source.ctypes.data, num_bytes, target.ctypes.data, 7, 0)
    assert asked == [room]
    assert target.all()


def test_uploads_of_many_sizes_allocate_seldom(monkeypatch):
    runtime, asked = FakeRuntime(), []
    plain = runtime.allocate_pinned
    monkeypatch.setattr(runtime, "allocate_pinned", lambda size: asked.append(size) or plain(size))
    source, target = np.ones(9000, np.uint8), np.zeros(9000, np.uint8)
    with use_runtime(runtime):
        for num_bytes in range(1, 9000, 7):
            uploads.upload(source.ctypes.data, num_bytes, target.ctypes.data, 7, 0)
    assert len(asked) <= 3 * uploads.NUM_SLOTS


@pytest.mark.parametrize(
    ("num_bytes", "room"), [(0, 1), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192), ((1 << 40) + 1, 1 << 41)]
)
def test_room_is_the_next_power_of_two(num_bytes, room):
    assert room_for(num_bytes) == room


class Busy(FakeRuntime):
    """A runtime whose copies are done when an event is waited for, or is made to pass."""

    def __init__(self):
        super().__init__()
        self.passed, self.waited, self.freed = set(), [], []

    def make_event(self, device):
        event = super().make_event(device)
        event.is_done = lambda: event.number in self.passed
        event.synchronize = lambda: (self.waited.append(event.number), self.passed.add(event.number))
        return event

    def allocate_pinned(self, num_bytes):
        memory = super().allocate_pinned(num_bytes)
        weakref.finalize(memory, self.freed.append, num_bytes)
        return memory


def test_a_buffer_that_is_replaced_stays_until_its_copy_is_done():
    runtime = Busy()
    ring, target = PinnedRing(runtime, 0, 1), np.zeros(32, np.uint8)
    for num_bytes in (8, 16, 32):
        ring.reserve(num_bytes)
        slot = ring.latest
        assert slot.memory.nbytes == num_bytes
        slot.send(0, num_bytes, target.ctypes.data, 7)
    assert (runtime.waited, runtime.freed) == ([], [])
    runtime.passed.add(2)
    assert ring.take() is slot
    assert runtime.waited == [3]
    assert runtime.freed == [16]
    del ring, slot
    assert runtime.waited == [3, 1]
    assert sorted(runtime.freed) == [8, 16, 32]


def test_memory_that_cannot_grow_stays_as_it_is(monkeypatch):
    runtime = FakeRuntime()
    ring, target = PinnedRing(runtime, 0, 1), np.zeros(8, np.uint8)
    ring.reserve(8)
    ring.latest.send(0, 8, target.ctypes.data, 7)
    monkeypatch.setattr(runtime, "allocate_pinned", lambda size: (_ for _ in ()).throw(NotEnoughMemory("full")))
    with pytest.raises(NotEnoughMemory):
        ring.reserve(9)
    assert ring.latest.memory.nbytes == 8
    ring.take()
    assert ("synchronize_event", 1) in runtime.calls


def test_the_destructor_of_a_ring_waits_for_every_slot_and_warns_of_failures(monkeypatch):
    """An error raised in a destructor cannot be caught, so the ring warns instead."""
    runtime = FakeRuntime()
    ring = PinnedRing(runtime, 0)
    target = np.zeros(8, np.uint8)
    for _ in range(3):
        slot = ring.take()
        slot.reserve(8)
        slot.send(0, 8, target.ctypes.data, 7)
    waited = []

    def synchronize(event):
        waited.append(event.number)
        raise DeviceError(f"event {event.number} is gone")

    monkeypatch.setattr(type(ring.latest._event), "synchronize", synchronize)
    with pytest.warns(ResourceWarning, match="event 1 is gone") as warned:
        ring.__del__()
    assert waited == [1, 2, 3]
    assert len(warned) == 1
    monkeypatch.undo()
