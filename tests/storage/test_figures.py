"""Figures of memory: those of the process, and those of stubs of frameworks on CUDA."""

import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.arrays.cuda.current import use_runtime
from pagecore.errors import DeviceError, UnsupportedOption
from pagecore.storage import free_memory
from pagecore.storage.memory.figures import memory_figures
from tests.arrays.fake_runtime import FakeRuntime

COUNTS = {"bytes_in_use": 5, "pool_bytes": 9, "peak_bytes_in_use": 7}
POOL = SimpleNamespace(used_bytes=lambda: 5, total_bytes=lambda: 9)


def frameworks():
    """Return modules that count 5 bytes allocated, 9 held and, but for CuPy, a peak of 7."""
    entered = []

    @contextlib.contextmanager
    def device(index):
        entered.append(index)
        yield

    cuda = SimpleNamespace(
        memory_allocated=lambda index: 5 * index,
        memory_reserved=lambda index: 9 * index,
        max_memory_allocated=lambda index: 7 * index,
    )
    return {
        "cupy": SimpleNamespace(cuda=SimpleNamespace(Device=device), get_default_memory_pool=lambda: POOL),
        "torch": SimpleNamespace(cuda=cuda),
        "jax": SimpleNamespace(devices=lambda _kind: [None, SimpleNamespace(memory_stats=lambda: COUNTS)]),
    }


def test_the_host_counts_the_memory_of_the_process():
    before = memory_figures()
    assert (before.device, before.framework) == ("cpu", "host")
    assert 0 < before.allocated <= before.peak
    assert before.allocated < before.reserved
    assert 0 < before.free <= before.total
    size = 64 << 20
    cache = PagedKVCache(AttentionSpec(8, 128, dtype="float32"), memory=size, memory_saver=True)
    reserved = memory_figures()
    assert reserved.allocated - before.allocated < size // 2
    for view in (cache.key(0), cache.value(0)):
        view.numpy()[...] = 1
    used = memory_figures()
    assert used.allocated - reserved.allocated > 0.9 * size
    assert used.peak > used.allocated - (1 << 22)
    cache.release_memory()
    assert used.allocated - memory_figures().allocated > 0.9 * size
    assert memory_figures().peak > used.peak - (1 << 22)  # the kernel counts in batches
    assert abs(memory_figures().free - free_memory()) < 1 << 30
    assert np.asarray(cache.key(0).numpy()).size


@pytest.mark.parametrize("name", ["cupy", "torch", "jax"])
def test_frameworks_count_their_own(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, frameworks()[name])
    with use_runtime(FakeRuntime(num_devices=2)) as _:
        found = memory_figures("cuda:1", name)
        assert (found.device, found.framework, found.allocated, found.reserved) == ("cuda:1", name, 5, 9)
        assert found.peak == (None if name == "cupy" else 7)
        assert 0 < found.free <= found.total
        if name == "cupy":
            assert memory_figures("cuda:1") == found


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        (("cpu", "abacus"), UnsupportedOption, "framework is 'abacus'; use one of host, cupy, torch, jax"),
        (("cpu", 5), UnsupportedOption, "framework is 5; use one of"),
        (("cpu", "torch"), UnsupportedOption, "does not count the memory of 'cpu'"),
        (("cuda:0", "host"), UnsupportedOption, "does not count the memory of 'cuda:0'"),
        (("cuda:0", "cupy"), UnsupportedOption, "'cupy', which was not imported; it has allocated nothing"),
        (("cuda:7",), DeviceError, "7"),
        (("tpu",), DeviceError, "tpu"),
    ],
)
def test_what_cannot_be_counted_is_refused(arguments, error, reason, monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with use_runtime(FakeRuntime(num_devices=1)), pytest.raises(error, match=reason):
        memory_figures(*arguments)
