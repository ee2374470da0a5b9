"""Pinned memory of uploads: when it grows, and how it is freed."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pagecore.arrays.cuda.current import use_runtime
from pagecore.arrays.cuda.pinned import PinnedRing, room_for
from pagecore.arrays.tensors import uploads
from pagecore.errors import DeviceError, NotEnoughMemory
from tests.arrays.fake_runtime import FakeEvent, FakeRuntime

SMALL, LARGE = uploads.SMALL_BYTES, 1 << 17


class Busy(FakeRuntime):
    """A runtime whose copies are done when an event is waited for, or is made to pass."""

    def __init__(self):
        super().__init__()
        self.passed, self.waited, self.freed = set(), [], []

    def make_event(self, device):
        event = super().make_event(device)
        event.record = lambda stream: self.passed.discard(event.number)
        event.is_done = lambda: event.number in self.passed
        event.synchronize = lambda: (self.waited.append(event.number), self.passed.add(event.number))
        return event

    def allocate_pinned(self, num_bytes):
        memory = super().allocate_pinned(num_bytes)
        weakref.finalize(memory, self.freed.append, num_bytes)
        return memory


@pytest.fixture
def asked(monkeypatch):
    """Sizes of pinned memory that fake runtimes are asked for."""
    sizes, plain = [], FakeRuntime.allocate_pinned
    monkeypatch.setattr(FakeRuntime, "allocate_pinned", lambda self, size: sizes.append(size) or plain(self, size))
    return sizes


@pytest.mark.parametrize(
    ("num_bytes", "copies"),
    [(1, 1), (SMALL, 1), (SMALL + 1, 1), (LARGE, 1), (LARGE + 1, 2), (20 * LARGE, 20)],
)
def test_an_upload_is_staged_in_pieces_of_a_slot(monkeypatch, asked, num_bytes, copies):
    monkeypatch.setattr(uploads, "LARGE_BYTES", LARGE)
    runtime = Busy()
    source, target = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    with use_runtime(runtime):
        uploads.upload(source.ctypes.data, num_bytes, target.ctypes.data, 7, 0)
    assert asked == [64 * SMALL if num_bytes <= SMALL else 16 * LARGE]
    np.testing.assert_array_equal(source, target)
    assert [name for name, *_ in runtime.calls].count("copy") == copies
    assert "synchronize" not in [name for name, *_ in runtime.calls]  # of a stream
    assert len(runtime.waited) == max(copies - uploads.NUM_LARGE, 0)


def test_uploads_of_many_sizes_allocate_once_for_each_device(asked):
    runtime = FakeRuntime()
    source, target = np.ones(9000, np.uint8), np.zeros(9000, np.uint8)
    with use_runtime(runtime):
        for num_bytes in range(1, 9000, 7):
            for device in (0, 1):
                uploads.upload(source.ctypes.data, num_bytes, target.ctypes.data, 7, device)
    assert asked == [64 * SMALL] * 2


def test_uploads_of_other_threads_go_on_while_one_waits_for_a_slot(monkeypatch):
    monkeypatch.setattr(uploads, "NUM_SMALL", 2)
    runtime, waits, passes = Busy(), threading.Event(), threading.Event()
    make_event = runtime.make_event

    def make_slow(device):
        event = make_event(device)
        if event.number == 1:  # of the first slot
            event.synchronize = lambda: (waits.set(), passes.wait(30))
        return event

    monkeypatch.setattr(runtime, "make_event", make_slow)
    source, targets = np.ones(8, np.uint8), np.zeros((4, 8), np.uint8)

    def send(number):
        uploads.upload(source.ctypes.data, 8, targets[number].ctypes.data, 7, 0)

    with use_runtime(runtime):
        send(0)
        send(1)
        thread = threading.Thread(target=send, args=(2,))
        thread.start()
        assert waits.wait(30)
        send(3)  # in the second slot
        assert targets[3].all()
        assert not targets[2].any()
        passes.set()
        thread.join(30)
    assert targets.all()


def test_an_upload_takes_a_slot_that_is_done_and_waits_only_if_none_is(monkeypatch):
    monkeypatch.setattr(uploads, "NUM_SMALL", 3)
    runtime = Busy()
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)

    def send():
        uploads.upload(source.ctypes.data, 8, target.ctypes.data, 7, 0)

    with use_runtime(runtime):
        for _ in range(3):
            send()
        for number in (2, 2, 3, 1, 3):
            runtime.passed.add(number)
            send()
        assert (runtime.waited, runtime.passed) == ([], set())
        send()
        assert len(runtime.waited) == 1


def test_an_error_of_a_device_leaves_the_slots_to_later_uploads(monkeypatch):
    monkeypatch.setattr(uploads, "NUM_SMALL", 1)
    runtime = FakeRuntime()
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)

    def fail(*_):
        raise DeviceError("planted")

    with use_runtime(runtime):
        uploads.upload(source.ctypes.data, 8, target.ctypes.data, 7, 0)
        for place, name in ((FakeEvent, "is_done"), (runtime, "copy")):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, fail)
                with pytest.raises(DeviceError, match="planted"):
                    uploads.upload(source.ctypes.data, 8, target.ctypes.data, 7, 0)
        target[:] = 0
        uploads.upload(source.ctypes.data, 8, target.ctypes.data, 7, 0)
    assert target.all()


def test_uploads_of_many_threads_keep_their_bytes(monkeypatch):
    monkeypatch.setattr(uploads, "NUM_SMALL", 3)
    sources = np.random.default_rng(0).integers(0, 256, (64, 999), np.uint8)
    targets = np.zeros_like(sources)

    def send(first):
        for number in range(first, 64, 4):
            uploads.upload(sources[number].ctypes.data, 999, targets[number].ctypes.data, 7, 0)

    with use_runtime(FakeRuntime()), ThreadPoolExecutor(4) as pool:
        list(pool.map(send, range(4)))
    np.testing.assert_array_equal(sources, targets)


@pytest.mark.parametrize(
    ("num_bytes", "room"), [(0, 1), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192), ((1 << 40) + 1, 1 << 41)]
)
def test_room_is_the_next_power_of_two(num_bytes, room):
    assert room_for(num_bytes) == room


def test_a_buffer_that_is_replaced_stays_until_its_copy_is_done():
    runtime = Busy()
    ring, target = PinnedRing(runtime, 0, 1), np.zeros(32, np.uint8)
    for num_bytes in (8, 16, 32):
        ring.reserve(num_bytes)
        (slot,) = ring.slots
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
    ring.slots[0].send(0, 8, target.ctypes.data, 7)
    monkeypatch.setattr(runtime, "allocate_pinned", lambda size: (_ for _ in ()).throw(NotEnoughMemory("full")))
    with pytest.raises(NotEnoughMemory):
        ring.reserve(9)
    assert ring.slots[0].memory.nbytes == 8
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

    monkeypatch.setattr(type(slot._event), "synchronize", synchronize)
    with pytest.warns(ResourceWarning, match="event 1 is gone") as warned:
        ring.__del__()
    assert waited == [1, 2, 3]
    assert len(warned) == 1
    monkeypatch.undo()
