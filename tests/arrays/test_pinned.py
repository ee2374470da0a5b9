"""Pinned memory of uploads: when it grows, and how it is freed."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore.arrays.cuda.current import use_runtime
from pagecore.arrays.cuda.pinned import PinnedRing
from pagecore.arrays.tensors import uploads
from pagecore.errors import DeviceError
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
