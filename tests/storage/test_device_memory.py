"""Device memory that is dropped while a graph is being captured, or that an interrupt keeps: freed by a later call."""

import gc
import warnings

import pytest

from pagecore.arrays.cuda.current import use_runtime
from pagecore.arrays.cuda.protocol import RefusedDuringCapture
from pagecore.storage.memory.device_memory import DeviceMemory, free_dropped
from tests.arrays.fake_runtime import FakeRuntime

NBYTES = 3 << 16


class Refusing(FakeRuntime):
    refusal: BaseException | None = None

    def unmap_memory(self, address, num_bytes, device):
        if self.refusal is not None:
            raise self.refusal
        super().unmap_memory(address, num_bytes, device)


CAPTURE = RefusedDuringCapture("a stream is being captured")


@pytest.mark.parametrize("call", ["make", "discard", "restore"])
def test_memory_that_is_dropped_during_a_capture_is_freed_by_the_next_call_after_it(call):
    runtime = Refusing()
    with use_runtime(runtime), warnings.catch_warnings():
        warnings.simplefilter("error")
        room = runtime.room
        memories = [DeviceMemory(NBYTES, "cuda:0") for _ in range(3)]
        kept = memories.pop()
        tensor = memories[0].tensor()
        if call == "restore":
            kept.discard()
        held = runtime.room
        runtime.refusal = CAPTURE
        del memories
        gc.collect()
        del tensor
        gc.collect()
        if call != "restore":
            kept.restore()  # during the capture; it has its memory
        assert (runtime.room, len(runtime.ranges)) == (held, 3)
        runtime.refusal = None
        made = DeviceMemory(NBYTES, "cuda:0") if call == "make" else getattr(kept, call)()
        left = {"make": 2, "discard": 0, "restore": 1}[call]
        assert (runtime.room, len(runtime.ranges)) == (room - left * NBYTES, 1 + (call == "make"))
        del kept, made
        gc.collect()
        assert (runtime.room, runtime.ranges) == (room, {})


def test_a_range_whose_release_is_interrupted_is_freed_by_the_next_call():
    runtime = Refusing()
    with use_runtime(runtime), warnings.catch_warnings():
        warnings.simplefilter("error")
        room = runtime.room
        memory = DeviceMemory(NBYTES, "cuda:0")
        runtime.refusal = CAPTURE
        del memory
        gc.collect()
        runtime.refusal = KeyboardInterrupt()  # while it waits for the device
        with pytest.raises(KeyboardInterrupt):
            free_dropped()
        runtime.refusal = None
        free_dropped()
        assert (runtime.room, runtime.ranges) == (room, {})
