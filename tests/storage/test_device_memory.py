"""Device memory that is dropped while a graph is being captured: freed by a later call."""

import gc
import warnings

import pytest

from pagecore.arrays.cuda.current import use_runtime
from pagecore.arrays.cuda.protocol import RefusedDuringCapture
from pagecore.storage.memory.device_memory import DeviceMemory
from tests.arrays.fake_runtime import FakeRuntime

NBYTES = 3 << 16


class Capturing(FakeRuntime):
    is_captured = False

    def unmap_memory(self, address, num_bytes, device):
        if self.is_captured:
            raise RefusedDuringCapture("a stream is being captured")
        super().unmap_memory(address, num_bytes, device)


@pytest.mark.parametrize("call", ["make", "discard", "restore"])
def test_memory_that_is_dropped_during_a_capture_is_freed_by_the_next_call_after_it(call):
    runtime = Capturing()
    with use_runtime(runtime), warnings.catch_warnings():
        warnings.simplefilter("error")
        room = runtime.room
        memories = [DeviceMemory(NBYTES, "cuda:0") for _ in range(3)]
        kept = memories.pop()
        tensor = memories[0].tensor()
        if call == "restore":
            kept.discard()
        held = runtime.room
        runtime.is_captured = True
        del memories
        gc.collect()
        del tensor
        gc.collect()
        if call != "restore":
            kept.restore()  # during the capture; it has its memory
        assert (runtime.room, len(runtime.ranges)) == (held, 3)
        runtime.is_captured = False
        made = DeviceMemory(NBYTES, "cuda:0") if call == "make" else getattr(kept, call)()
        left = {"make": 2, "discard": 0, "restore": 1}[call]
        assert (runtime.room, len(runtime.ranges)) == (room - left * NBYTES, 1 + (call == "make"))
        del kept, made
        gc.collect()
        assert (runtime.room, runtime.ranges) == (room, {})
