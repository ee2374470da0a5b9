"""Order of streams, lifetimes and captures of the emulated device."""

from __future__ import annotations

import ctypes
import gc

import ml_dtypes
import numpy as np
import pytest

from pagecore.arrays import strided
from pagecore.arrays.cuda.protocol import Runtime
from pagecore.errors import DeviceError
from tests.cuda.kit import DeviceBytes, Kit
from tests.emulator.probing import KERNELS, Probe, enum_of
from tests.emulator.runtime import EmulatedRuntime, EmulatorError

Slip = enum_of("slips.cu", "Slip")


@pytest.fixture
def runtime():
    return EmulatedRuntime(KERNELS)


@pytest.fixture
def late(runtime):
    runtime.streams.deferred = True
    return runtime


def device_bytes(runtime, values):
    memory = DeviceBytes(runtime, len(values))
    runtime.copy(memory.address, np.array(values, np.uint8).ctypes.data, len(values), 0)
    return memory


def read(runtime, memory, stream=0):
    held = np.zeros(memory.__cuda_array_interface__["shape"], np.uint8)
    runtime.copy(held.ctypes.data, memory.address, len(held), stream)
    return held.tolist()


def test_the_emulated_runtime_has_every_method_of_the_protocol(runtime):
    wanted = {name for name in vars(Runtime) if not name.startswith("_")}
    assert wanted <= set(dir(runtime))


def test_memory_is_counted_poisoned_and_aligned_to_256_bytes_and_no_more(runtime):
    free, total = runtime.memory_info(0)
    memory = DeviceBytes(runtime, 1000)
    assert runtime.memory_info(0) == (free - 1000, total)
    assert memory.address % 256 == 0
    assert memory.address % 512 != 0
    assert set(read(runtime, memory)) == {0xFF}
    del memory
    gc.collect()
    assert runtime.memory_info(0) == (free, total)
    assert runtime.counts["allocations"] == 1


def test_a_large_allocation_takes_only_the_pages_that_are_used(runtime):
    kit = Kit(runtime)
    tensor = kit.empty((2**33 + 8,), "float32")
    part = tensor[2**33 :]
    assert part.pointer - tensor.pointer == 2**35
    runtime.fill(part.pointer, 0, 32, 0)
    np.testing.assert_array_equal(kit.get(part), np.zeros(8, np.float32))


def test_an_allocation_larger_than_the_device_is_refused(runtime):
    with pytest.raises(DeviceError, match="the emulated device cannot allocate"):
        runtime.allocate(1 << 50, 0, 0)


@pytest.mark.parametrize(
    "reach",
    [
        lambda runtime, device, host: runtime.copy(host, device, 101, 0),
        lambda runtime, device, host: runtime.copy(device, host, 101, 0),
        lambda runtime, device, host: runtime.fill(device, 0, 101, 0),
    ],
    ids=["source", "target", "fill"],
)
def test_copies_and_fills_stay_inside_their_memory(runtime, reach):
    memory, host = DeviceBytes(runtime, 100), np.zeros(101, np.uint8)
    with pytest.raises(EmulatorError, match=r"101 bytes at 0x.* before the end of the allocation of 100 bytes"):
        reach(runtime, memory.address, host.ctypes.data)


def test_deferred_work_runs_when_the_host_waits_for_it(late):
    memory, pinned = device_bytes(late, [0] * 4), late.allocate_pinned(4)
    pinned[:] = [1, 2, 3, 4]
    late.copy(memory.address, pinned.ctypes.data, 4, 0)
    pinned[:] = [5, 6, 7, 8]  # too early: the copy has not read it
    assert read(late, memory) == [5, 6, 7, 8]
    late.copy(memory.address, pinned.ctypes.data, 4, 0)
    late.synchronize(0)
    pinned[:] = 0
    assert read(late, memory) == [5, 6, 7, 8]


def test_pageable_memory_is_read_before_a_copy_returns(late):
    memory, host = device_bytes(late, [0] * 4), np.arange(4, dtype=np.uint8)
    late.copy(memory.address, host.ctypes.data, 4, 0)
    host[:] = 9
    assert read(late, memory) == [0, 1, 2, 3]


def test_streams_wait_only_for_events(late):
    memory, first, second = device_bytes(late, [0] * 4), late.streams.make(), late.streams.make()
    late.synchronize(0)
    late.fill(memory.address, 1, 2, first)
    event = late.make_event(0)
    event.record(first)
    late.fill(memory.address + 2, 1, 2, first)
    assert read(late, memory, second) == [0, 0, 0, 0]
    late.wait_event(second, event)
    assert read(late, memory, second) == [1, 1, 0, 0]
    event.record(first)
    event.synchronize()
    assert read(late, memory, second) == [1, 1, 1, 1]


def test_a_wait_for_an_unrecorded_event_returns_at_once(late):
    event = late.make_event(0)
    late.wait_event(0, event)
    event.synchronize()


def test_memory_is_freed_in_the_order_of_its_stream(late):
    memory, side = device_bytes(late, [1, 2, 3, 4]), late.streams.make()
    copy = DeviceBytes(late, 4)
    late.copy(copy.address, memory.address, 4, 0)
    late.copy(copy.address, memory.address, 4, side)  # not ordered before the release of the memory
    del memory
    gc.collect()
    assert read(late, copy) == [1, 2, 3, 4]
    with pytest.raises(EmulatorError, match="into the freed allocation of 4 bytes"):
        late.synchronize(side)


def test_an_error_of_a_kernel_is_raised_by_the_wait_for_it(late):
    kernel = late.load("slips", 0, None, 0)
    parameters = Probe(n=Slip.READ_GLOBAL)
    late.launch(kernel, (1, 1, 1), 32, 0, 0, ctypes.addressof(parameters))
    parameters.n = Slip.NONE  # the launch has its own copy
    with pytest.raises(EmulatorError, match="reads 4 bytes"):
        late.synchronize(0)
    late.synchronize(0)


def test_a_graph_repeats_its_work(late):
    kit = Kit(late)
    pinned, memory, other = late.allocate_pinned(4), DeviceBytes(late, 4), DeviceBytes(late, 4)

    def work(stream):
        late.copy(memory.address, pinned.ctypes.data, 4, stream)
        late.copy(other.address, memory.address, 4, stream)

    replay = kit.capture(work)
    assert set(read(late, other)) == {0xFF}  # nothing has run yet
    for value in (1, 2):
        pinned[:] = value
        replay()
        assert read(late, other) == [value] * 4


@pytest.mark.parametrize(
    "what",
    [
        lambda runtime, stream: runtime.synchronize(stream),
        lambda runtime, stream: runtime.allocate(8, 0, stream),
        lambda runtime, stream: runtime.allocate_pinned(8),
        lambda runtime, stream: runtime.copy(
            runtime.kept.address, np.zeros(8, np.uint8).ctypes.data, 8, stream
        ),
        lambda runtime, stream: runtime.make_event(0).is_done(),
        lambda runtime, stream: runtime.map_memory(runtime.reserve_address(1 << 16, 0), 1 << 16, 0),
        lambda runtime, stream: runtime.unmap_memory(runtime.mapped, 1 << 16, 0),
    ],
    ids=[
        *("waits", "allocates", "allocates pinned", "copies pageable memory", "queries an event", "maps memory"),
        "waits for the device",
    ],
)  # fmt: skip
def test_calls_that_end_a_capture_are_refused(runtime, what):
    runtime.kept, runtime.mapped = DeviceBytes(runtime, 8), runtime.reserve_address(1 << 16, 0)
    runtime.map_memory(runtime.mapped, 1 << 16, 0)
    with pytest.raises(DeviceError, match="is captured"):
        Kit(runtime).capture(lambda stream: what(runtime, stream))
    runtime.unmap_memory(runtime.mapped, 1 << 16, 0)
    runtime.synchronize(0)


def test_events_join_no_stream_to_a_capture_of_another(runtime):
    outside, inside = runtime.make_event(0), runtime.make_event(0)
    outside.record(runtime.make_stream(0))

    def work(stream):
        inside.record(stream)
        runtime.wait_event(stream, inside)
        with pytest.raises(DeviceError, match="not in its capture"):
            runtime.wait_event(stream, outside)
        with pytest.raises(DeviceError, match="not in its capture"):
            runtime.wait_event(runtime.make_stream(0), inside)

    Kit(runtime).capture(work)
    for call in (inside.synchronize, inside.is_done):
        with pytest.raises(DeviceError, match="was captured"):
            call()
    with pytest.raises(DeviceError, match="not in its capture"):
        runtime.wait_event(0, inside)


# ---- the kit


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, ml_dtypes.float8_e4m3fn])
def test_put_and_get_keep_values_strides_and_gaps(runtime, dtype):
    kit = Kit(runtime)
    base = np.arange(6 * 7 * 8).reshape(6, 7, 8).astype(dtype)
    for view in (base, base[::-1, 2:5, ::3], base.transpose(2, 0, 1), base[:0], base[3, 2, 1], base[:, ::-2]):
        tensor = kit.put(view)
        assert tensor.device == "cuda:0"
        assert tensor.dtype.numpy == dtype
        assert tensor.strides == view.strides
        got = kit.get(tensor)
        assert got.strides == view.strides
        np.testing.assert_array_equal(got, view)


def test_a_view_has_the_offset_from_256_bytes_that_it_has_from_its_base(runtime):
    kit = Kit(runtime)
    base = np.zeros((10, 24), np.int8)
    assert kit.put(base).pointer % 256 == 0
    assert kit.put(base[1:]).pointer % 256 == 24
    assert kit.put(base[1:, ::-1]).pointer % 256 == 47


def test_get_returns_a_part_of_a_put_array(runtime):
    kit = Kit(runtime)
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensor = kit.put(values)
    np.testing.assert_array_equal(kit.get(tensor[1:3, ::-2]), values[1:3, ::-2])
    np.testing.assert_array_equal(kit.get(strided(tensor[1], (6,))), values[1])


def test_empty_memory_is_poisoned(runtime):
    kit = Kit(runtime)
    assert np.isnan(kit.get(kit.empty((3, 4), "bfloat16")).astype(np.float32)).all()
    assert (kit.get(kit.empty(5, "int32")) == -1).all()
    assert kit.empty((0, 4)).shape == (0, 4)
