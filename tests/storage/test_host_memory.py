"""HostMemory: mappings, first touch, sharing by descriptor, and registration in the background."""

import gc
import os
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from pagecore.arrays.cuda.current import use_runtime
from pagecore.arrays.cuda.protocol import RefusedDuringCapture
from pagecore.errors import DeviceError, NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.storage.memory import host_memory, registration
from pagecore.storage.memory.host_memory import PAGE, HostMemory
from pagecore.storage.memory.registration import CHUNK_BYTES, joined, whole_chunks
from tests.arrays.fake_runtime import FakeRuntime
from tests.together import together

MIB = 1 << 20


def resident(memory):
    """Return the bytes of a mapping that are in memory, as the kernel counts them."""
    begin = f"{memory.address:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.split(" ")[0].partition("-")[0] + "-" == begin:
            return next(int(each.split()[1]) * 1024 for each in lines if each.startswith("Rss:"))
    # A neighbour of equal attributes is merged with it.
    raise AssertionError("the mapping is not listed on its own")


def mapped(address):
    ranges = [line.split(" ")[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def descriptors():
    return set(os.listdir("/proc/self/fd"))


class Gate(FakeRuntime):
    """A runtime that registers chunks when it is allowed to."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.open, self.reached, self.fails_at = threading.Semaphore(0), threading.Event(), fails_at

    def register_host(self, address, num_bytes, device):
        self.reached.set()
        self.open.acquire()
        if self.fails_at == len(self.registered):
            raise DeviceError("cudaErrorMemoryAllocation")
        super().register_host(address, num_bytes, device)

    @property
    def registered(self):
        return [call[1:] for call in self.calls if call[0] == "register_host"]

    @property
    def unregistered(self):
        return [call[1] for call in self.calls if call[0] == "unregister_host"]


@together("shared", [False, True])
@together("size", [1, PAGE, 3 * PAGE + 1, 2 * MIB, 5 * MIB])
def test_memory_is_whole_pages_of_zeros(size, shared):
    memory = HostMemory(size, shared=shared)
    assert memory.nbytes == -(-size // PAGE) * PAGE
    assert memory.address % PAGE == 0
    if size >= 2 * MIB and not shared:
        assert memory.address % (2 * MIB) == 0
    bytes_ = memory.tensor().numpy()
    assert (bytes_.shape, bytes_.ctypes.data) == ((memory.nbytes,), memory.address)
    assert not bytes_.any()
    bytes_[:] = 255
    assert (memory.fd is not None) == shared
    memory.close()
    assert memory.fd is None
    memory.close()


def test_all_pages_are_present_unless_the_first_touch_is_left_to_the_user():
    touched = HostMemory(64 * MIB, shared=True)  # shared memory has a mapping of its own
    lazy = HostMemory(64 * MIB, shared=True, touch=False)
    assert resident(touched) == 64 * MIB
    assert resident(lazy) == 0
    lazy.tensor().numpy()[: 4 * MIB] = 1
    assert 4 * MIB <= resident(lazy) < 8 * MIB


def test_pages_are_touched_by_several_threads(monkeypatch):
    seen, touch = [], host_memory._touch_range
    monkeypatch.setattr(host_memory, "_BYTES_PER_THREAD", MIB)
    monkeypatch.setattr(host_memory.os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(
        host_memory, "_touch_range", lambda address, size: seen.append((address, size)) or touch(address, size)
    )
    memory = HostMemory(7 * MIB, huge_pages=False)
    ranges = sorted((address - memory.address, size) for address, size in seen)
    assert ranges == [(0, 4 * MIB), (4 * MIB, 3 * MIB)]  # whole huge pages each


def test_a_kernel_without_populate_is_served_by_writing_zeros(monkeypatch):
    monkeypatch.setattr(host_memory, "_MADV_POPULATE_WRITE", 9999)
    memory = HostMemory(2 * MIB, shared=True)
    assert resident(memory) == 2 * MIB


def test_a_size_that_does_not_fit_is_refused_and_leaves_nothing(monkeypatch):
    before = descriptors()
    for shared in (False, True):
        with pytest.raises(NotEnoughMemory, match="are available"):
            HostMemory(1 << 50, shared=shared)
        with pytest.raises(NotEnoughMemory, match="the system cannot"):
            HostMemory(1 << 61, touch=False, shared=shared)
    monkeypatch.setattr(host_memory, "_advise", lambda *_: 12)
    with pytest.raises(NotEnoughMemory, match="Cannot allocate memory"):
        HostMemory(MIB, shared=True, huge_pages=False)
    for wrong in (0, -1, 1.5, None, 1 << 63):
        with pytest.raises(ShapeError, match="nbytes"):
            HostMemory(wrong)
    with pytest.raises(UnsupportedOption, match="shared"):
        HostMemory(1, shared=1)
    assert descriptors() == before


def test_memory_stays_mapped_while_a_tensor_is_over_it():
    memory = HostMemory(5 * MIB)
    address, tensor = memory.address, memory.tensor()
    memory.close()
    del memory
    gc.collect()
    tensor.numpy()[:] = 3
    assert int(tensor[-1].item()) == 3
    assert mapped(address)
    del tensor
    gc.collect()
    assert not mapped(address)


def test_memory_that_is_collected_closes_its_descriptor():
    before = descriptors()
    memory = HostMemory(MIB, shared=True)
    assert len(descriptors()) == len(before) + 1
    del memory
    gc.collect()
    assert descriptors() == before


# -- shared by descriptor ----------------------------------------------------------------------------------------------


def test_both_mappings_of_shared_memory_see_each_write():
    one = HostMemory(3 * PAGE, shared=True)
    other = HostMemory.from_fd(os.dup(one.fd), one.nbytes)
    assert other.address != one.address
    one.tensor().numpy()[:] = 7
    assert (other.tensor().numpy() == 7).all()
    other.tensor().numpy()[PAGE] = 9
    assert int(one.tensor()[PAGE].item()) == 9
    one.close()
    del one
    gc.collect()
    assert int(other.tensor()[PAGE].item()) == 9


def test_shared_memory_cannot_be_resized():
    memory = HostMemory(2 * PAGE, shared=True)
    for size in (PAGE, 3 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)


def test_descriptors_that_are_not_sealed_memory_of_the_size_are_refused_and_closed(tmp_path):
    before = descriptors()
    memory = HostMemory(2 * PAGE, shared=True)
    with pytest.raises(ShapeError, match="has 8,192 bytes; expected 4,096"):
        HostMemory.from_fd(os.dup(memory.fd), PAGE)
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE))
    for fd in (os.open(path, os.O_RDWR), os.memfd_create("unsealed"), os.pipe()[0]):
        with pytest.raises(UnsupportedOption, match="not sealed shared memory"):
            HostMemory.from_fd(fd, PAGE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    memory.close()
    assert len(descriptors() - before) == 1  # the other end of the pipe
    for fd in descriptors() - before:
        os.close(int(fd))


# -- registration ------------------------------------------------------------------------------------------------------


def test_chunks_are_cut_at_units_and_joined_up_to_their_limit():
    assert whole_chunks(10, 3, 7) == [(0, 6), (6, 10)]
    assert whole_chunks(10, 20, 7) == [(0, 10)]
    assert whole_chunks(3 * CHUNK_BYTES, PAGE) == [(i * CHUNK_BYTES, (i + 1) * CHUNK_BYTES) for i in range(3)]
    assert joined([(0, 3), (3, 6), (6, 8), (8, 9)], 6) == [(0, 6), (6, 9)]
    assert joined([], 6) == []
    random = np.random.default_rng(0)
    for _ in range(200):
        nbytes, unit, most = (int(n) for n in random.integers(1, 100, 3))
        chunks = whole_chunks(nbytes, unit, most)
        assert [begin for begin, _ in chunks] == [0, *(end for _, end in chunks[:-1])]
        assert chunks[-1][1] == nbytes
        assert all(end % unit == 0 for _, end in chunks[:-1])
        assert all(end - begin <= max(most, unit) for begin, end in chunks)


def test_memory_is_registered_chunk_by_chunk_in_the_background():
    runtime = Gate()
    with use_runtime(runtime):
        memory = HostMemory(4 * PAGE)
        assert not memory.is_registered(0, 1)
        assert not memory.wait_registered(0)
        memory.register("cuda:1", [(0, PAGE), (PAGE, 4 * PAGE)])
        assert runtime.reached.wait(10)
        assert not memory.is_registered(0, PAGE)
        assert not memory.wait_registered(0)
        runtime.open.release(2)
        assert memory.wait_registered(10)
        assert memory.is_registered(0, 4 * PAGE)
        assert memory.is_registered(PAGE - 1, PAGE + 1)
        assert runtime.registered == [(memory.address, PAGE, 1), (memory.address + PAGE, 3 * PAGE, 1)]
        with pytest.raises(DeviceError, match="registered already"):
            memory.register("cuda:1")
        memory.close()
        assert sorted(runtime.unregistered) == [memory.address, memory.address + PAGE]
        assert not memory.is_registered(0, PAGE)
        assert not memory.wait_registered(0)
        with pytest.raises(DeviceError, match="closed"):
            memory.register("cuda:1")


def test_memory_is_registered_in_ranges_of_at_most_one_gibibyte():
    runtime = FakeRuntime()
    with use_runtime(runtime):
        memory = HostMemory((1 << 30) + PAGE, touch=False)
        memory.register("cuda:0")
        assert memory.wait_registered(10)
        memory.close()
    sizes = [size for name, _, *size in runtime.calls if name == "register_host"]
    assert sizes == [[1 << 30, 0], [PAGE, 0]]


def test_the_first_chunk_is_usable_before_the_last():
    runtime = Gate()
    with use_runtime(runtime):
        memory = HostMemory(3 * PAGE)
        memory.register("cuda:0", [(0, PAGE), (PAGE, 2 * PAGE), (2 * PAGE, 3 * PAGE)])
        runtime.open.release()
        while not memory.is_registered(0, PAGE):
            assert runtime.reached.wait(10)
        assert not memory.is_registered(0, PAGE + 1)
        assert not memory.is_registered(PAGE, 2 * PAGE)
        closing = threading.Thread(target=memory.close)
        closing.start()  # waits for the chunk in progress
        while not memory._held.registration._is_closed:
            assert closing.is_alive()
        runtime.open.release(5)
        closing.join(10)
        assert not closing.is_alive()
        assert len(runtime.registered) == 2
        assert set(runtime.unregistered) == {address for address, *_ in runtime.registered}


def test_a_chunk_that_fails_is_an_error_of_the_waiting_call_and_the_others_are_given_back():
    runtime = Gate(fails_at=1)
    runtime.open.release(5)
    with use_runtime(runtime):
        memory = HostMemory(3 * PAGE)
        memory.register("cuda:0", whole_chunks(memory.nbytes, PAGE, PAGE))
        with pytest.raises(DeviceError, match="cudaErrorMemoryAllocation"):
            memory.wait_registered(10)
        assert memory.is_registered(0, PAGE)
        assert not memory.is_registered(PAGE, 2 * PAGE)
        memory.close()
    assert runtime.unregistered == [memory.address]


class Captured(FakeRuntime):
    """A runtime that refuses registrations while a graph is being captured."""

    def __init__(self):
        super().__init__()
        self.num_refused, self.refused, self.ended = 0, threading.Event(), False

    def register_host(self, address, num_bytes, device):
        if not self.ended:
            self.num_refused += 1
            if self.num_refused == 2:
                self.refused.set()
            raise RefusedDuringCapture("cudaErrorStreamCaptureUnsupported")
        super().register_host(address, num_bytes, device)


def test_a_registration_that_a_capture_forbids_is_made_after_it(monkeypatch):
    monkeypatch.setattr(registration, "RETRY_PAUSE", 0.001)
    runtime = Captured()
    with use_runtime(runtime):
        memory = HostMemory(PAGE)
        memory.register("cuda:0")
        assert runtime.refused.wait(10)
        assert not memory.wait_registered(0)
        runtime.ended = True
        assert memory.wait_registered(10)
        assert [call for call in runtime.calls if call[0] == "register_host"] == [
            ("register_host", memory.address, PAGE, 0)
        ]
        memory.close()


def test_memory_is_closed_while_a_capture_forbids_its_registration():
    runtime = Captured()
    with use_runtime(runtime):
        memory = HostMemory(PAGE)
        memory.register("cuda:0")
        assert runtime.refused.wait(10)
        memory.close()
        assert not memory.wait_registered(0)
    assert runtime.calls == []


def test_memory_that_is_collected_is_unregistered_after_its_last_tensor():
    runtime = Gate()
    runtime.open.release(5)
    with use_runtime(runtime):
        memory = HostMemory(PAGE)
        memory.register("cuda:0")
        assert memory.wait_registered(10)
        tensor, gone = memory.tensor("cuda:0"), weakref.ref(memory)
        assert (tensor.device, tensor.pointer, tensor.shape) == ("cuda:0", memory.address, (PAGE,))
        del memory
        gc.collect()
        assert gone() is None
        assert runtime.unregistered == []
        del tensor
        gc.collect()
        assert len(runtime.unregistered) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "pagecore-register"]


def test_memory_that_is_dropped_while_it_is_registered_is_given_back_at_the_end():
    runtime = Gate()
    with use_runtime(runtime):
        memory = HostMemory(2 * PAGE)
        memory.register("cuda:0", [(0, PAGE), (PAGE, 2 * PAGE)])
        assert runtime.reached.wait(10)
        thread = memory._held.registration._thread
        del memory
        gc.collect()
        assert runtime.unregistered == []
        runtime.open.release(5)
        thread.join(10)
        assert not thread.is_alive()
        assert sorted(runtime.unregistered) == sorted(address for address, *_ in runtime.registered)
        assert len(runtime.unregistered) == 2


def test_only_devices_that_exist_register_memory():
    with use_runtime(FakeRuntime(num_devices=1)):
        memory = HostMemory(PAGE)
        for device, says in [("cpu", "only CUDA devices"), ("cuda:1", "sees 1 CUDA device")]:
            with pytest.raises(DeviceError, match=says):
                memory.register(device)


def test_a_failure_to_unregister_is_a_warning():
    runtime = FakeRuntime()
    with use_runtime(runtime):
        memory = HostMemory(PAGE)
        memory.register("cuda:0")
        assert memory.wait_registered(10)
        runtime.unregister_host = lambda address: (_ for _ in ()).throw(DeviceError("lost"))
        with pytest.warns(ResourceWarning, match="stays page-locked: lost"):
            memory.close()
