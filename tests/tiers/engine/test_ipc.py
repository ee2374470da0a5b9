"""Pools of CUDA memory by handles of CUDA IPC, on a fake runtime that opens what it exports."""

import gc

import numpy as np
import pytest

from pagecore import AttentionSpec, KVPool
from pagecore.arrays.cuda.current import use_runtime
from pagecore.errors import DeviceError, PeerError, ShapeError, UnsupportedOption
from pagecore.tiers.engine import IpcHandle, export_ipc, open_ipc
from pagecore.tiers.engine.geometry import packed
from tests.arrays.fake_runtime import FakeRuntime
from tests.emulator.runtime import EmulatedRuntime
from tests.tiers.engine.engines import LAYOUTS

SPEC = AttentionSpec(2, 8, 12, "float16")
LAYERS, BLOCKS, SIZE = 3, 5, 4


class Arrays:
    """One array of device memory in an allocation of another framework."""

    def __init__(self, owner, pointer, nbytes):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


@pytest.fixture
def runtime():
    runtime = FakeRuntime()
    with use_runtime(runtime):
        yield runtime
        if len(calls(runtime, "open_ipc")) != len(calls(runtime, "close_ipc")):
            gc.collect()
        opened = [call[0] for call in runtime.calls]
        assert opened.count("open_ipc") == opened.count("close_ipc")


def calls(runtime, name):
    return [call for call in runtime.calls if call[0] == name]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_opened_pool_is_over_the_same_memory(runtime, layout):
    pool = KVPool(SPEC, LAYERS, BLOCKS, SIZE, layout, "cuda:1")
    handle = IpcHandle.from_bytes(export_ipc(pool).to_bytes())
    assert handle == export_ipc(pool)
    opened = open_ipc(handle)
    assert [buffer.pointer for buffer in opened.buffers] == [buffer.pointer for buffer in pool.buffers]
    assert opened.layout == pool.layout
    for view, other in zip(opened.planes(), pool.planes(), strict=True):
        assert (view.pointer, view.shape, view.strides, view.device) == (
            other.pointer, other.shape, other.strides, "cuda:1",
        )  # fmt: skip
    assert opened.device == "cuda:1"
    del view


def test_an_allocation_is_opened_once_and_closed_after_its_last_tensor(runtime):
    address, owner = runtime.allocate(65536, 0, 0)
    begin = -(-address // 4096) * 4096
    buffers = [Arrays(owner, begin + 1024 * i, 1024) for i in range(2)]
    pool = KVPool(AttentionSpec(1, 8, dtype="float32"), 2, 4, SIZE, "CBNHD", "cuda:0", buffers)
    opened = open_ipc(export_ipc(pool), device="cuda:1")
    assert len(calls(runtime, "open_ipc")) == 1
    assert calls(runtime, "open_ipc")[0][2] == 1
    assert opened.value(1).pointer == pool.value(1).pointer
    view = opened.key(1)
    del opened
    gc.collect()
    assert calls(runtime, "close_ipc") == []
    del view
    gc.collect()
    assert calls(runtime, "close_ipc") == [("close_ipc", begin, 1)]


def test_an_expected_spec_is_that_of_the_result(runtime):
    handle = export_ipc(KVPool(SPEC, LAYERS, BLOCKS, SIZE, device="cuda"))
    opened = open_ipc(handle, spec=SPEC, num_layers=LAYERS, block_size=SIZE)
    assert opened.spec is SPEC
    for expected, says in [
        ({"spec": AttentionSpec(2, 8, 12, "bfloat16")}, "has the planes"),
        ({"num_layers": 2}, "has 3 layers; expected 2"),
        ({"block_size": 8}, "has 4 tokens in a block; expected 8"),
    ]:
        with pytest.raises(ShapeError, match=says):
            open_ipc(handle, **expected)
    assert len(calls(runtime, "open_ipc")) == 1


def test_what_cannot_be_exported_or_opened_is_refused(runtime):
    with pytest.raises(DeviceError, match="host memory; share a HostPool"):
        export_ipc(KVPool(SPEC, 1, 3))
    with pytest.raises(UnsupportedOption, match="expected a KVPool"):
        export_ipc(np.zeros(3))
    handle = export_ipc(KVPool(SPEC, LAYERS, BLOCKS, SIZE, device="cuda"))
    with pytest.raises(UnsupportedOption, match="expected an IpcHandle"):
        open_ipc(handle.to_bytes())
    with pytest.raises(DeviceError, match="'cuda:5'"):
        open_ipc(handle, device="cuda:5")
    with pytest.raises(DeviceError, match="on a CUDA device"):
        open_ipc(handle, device="cpu")
    short = IpcHandle(handle.layout, handle.device, ())
    with pytest.raises(PeerError, match="has 0 buffers; its layout needs 1"):
        open_ipc(short)
    assert calls(runtime, "open_ipc") == []


@pytest.mark.parametrize(
    "message",
    [
        b"", b"null", b"[" * 100_000, 5,
        packed("host pool", {}), packed("CUDA pool", {}), packed("CUDA pool", {"buffers": [["!", "x"]]}),
        packed("CUDA pool", {"buffers": [], "layout": {"planes": 5}, "device": "cuda:0"}),
        packed("CUDA pool", {"buffers": [], "layout": {"planes": [["key", [1], "x", "token"]]}, "device": "cuda:0"}),
    ],
)  # fmt: skip
def test_messages_that_are_not_handles_are_refused(message):
    with pytest.raises(PeerError):
        IpcHandle.from_bytes(message)


def test_one_buffer_that_cannot_be_opened_leaves_none_open(runtime):
    handle = export_ipc(KVPool(SPEC, 1, BLOCKS, SIZE, "BNHD", "cuda"))
    distinct = IpcHandle(handle.layout, handle.device, tuple((bytes([i]) * 64, 0) for i in range(2)))
    plain = runtime.open_ipc

    def failing(content, device):
        if content[0] == 1:
            raise DeviceError("the exporting process must be still alive")
        return plain(content, device)

    runtime.open_ipc = failing
    with pytest.raises(DeviceError, match="still alive"):
        open_ipc(distinct)
    gc.collect()
    assert len(calls(runtime, "close_ipc")) == len(calls(runtime, "open_ipc")) == 1


def test_memory_without_a_handle_is_refused_by_name():
    class Virtual(FakeRuntime):
        export_ipc = EmulatedRuntime.export_ipc
        allocated = {}  # noqa: RUF012

    with use_runtime(Virtual()), pytest.raises(UnsupportedOption, match="memory of cuMemCreate has none"):
        export_ipc(KVPool(SPEC, 1, 3, device="cuda"))
