"""Page-locked memory of any size: registered in chunks where one piece would be too large."""

import gc

import pytest

from pagecore.arrays.cuda.current import use_runtime
from pagecore.arrays.cuda.protocol import RefusedDuringCapture
from pagecore.storage.memory import registration
from pagecore.storage.memory.page_locked import page_locked
from tests.arrays.fake_runtime import FakeRuntime

CHUNK = 1 << 16


@pytest.fixture
def runtime(monkeypatch):
    monkeypatch.setattr(registration, "CHUNK_BYTES", CHUNK)
    made = FakeRuntime()
    with use_runtime(made):
        yield made


def registered(runtime):
    """Return address and bytes of what is registered now."""
    found = {}
    for name, address, *nbytes in runtime.calls:
        if name == "register_host":
            found[address] = nbytes[0]
        elif name == "unregister_host":
            del found[address]
    return found


@pytest.mark.parametrize("nbytes", [CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5000])
def test_large_memory_is_registered_in_chunks_for_as_long_as_a_tensor_has_it(runtime, nbytes):
    memory = page_locked(nbytes, "cuda:1")
    assert (memory.shape, str(memory.dtype), memory.device) == ((nbytes,), "uint8", "cuda:1")
    parts = registered(runtime)
    assert list(parts) == list(range(memory.pointer, memory.pointer + nbytes, CHUNK))
    assert max(parts.values()) == CHUNK
    assert nbytes <= sum(parts.values()) < nbytes + 4096
    view = memory[8:16]
    del memory
    gc.collect()
    assert registered(runtime) == parts
    del view
    gc.collect()
    assert registered(runtime) == {}


def test_memory_of_a_chunk_is_one_allocation(runtime):
    assert page_locked(CHUNK, "cuda:0").shape == (CHUNK,)
    assert registered(runtime) == {}


def test_memory_that_is_asked_for_during_a_capture_is_refused_and_leaves_nothing(runtime, monkeypatch):
    register = runtime.register_host

    def refuse_later_chunks(address, nbytes, device):
        if registered(runtime):
            raise RefusedDuringCapture("a stream is being captured")
        register(address, nbytes, device)

    monkeypatch.setattr(runtime, "register_host", refuse_later_chunks)
    with pytest.raises(RefusedDuringCapture, match="a stream is being captured"):
        page_locked(3 * CHUNK, "cuda:0")
    assert registered(runtime) == {}
