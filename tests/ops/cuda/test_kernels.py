"""Loading of kernels by name: once for each runtime and device, at the first use."""

from __future__ import annotations

import threading

import pytest

from pagecore.arrays.cuda.current import use_runtime
from pagecore.errors import DeviceError
from pagecore.ops.cuda.compilation.compiler import Cubin
from pagecore.ops.cuda.compilation.kernels import kernel, launch
from tests.arrays.fake_runtime import FakeRuntime


@pytest.fixture
def runtime(toys):
    fake = FakeRuntime()
    with use_runtime(fake):
        yield fake


def loads(runtime):
    return [call for call in runtime.calls if call[0] == "load"]


def test_a_kernel_is_loaded_once_for_each_device(runtime):
    assert kernel("add<float,1>", 0) is kernel("add<float,1>", 0)
    kernel("add<float,1>", 1)
    assert loads(runtime) == [("load", "add<float,1>", 0, 100_000), ("load", "add<float,1>", 1, 100_000)]


def test_another_runtime_has_kernels_of_its_own(runtime):
    kernel("add<float,1>", 0)
    other = FakeRuntime()
    with use_runtime(other):
        kernel("add<float,1>", 0)
    assert len(loads(runtime)) == len(loads(other)) == 1


def test_a_launch_passes_all_arguments_to_the_runtime(runtime):
    launch("add<float,2>", (3, 4, 5), 128, 1024, 77, 4096, 1)
    assert runtime.calls[-1] == ("launch", ("add<float,2>", 1), (3, 4, 5), 128, 1024, 77, 4096)


def test_a_launch_during_a_capture_does_not_load_a_kernel(runtime):
    runtime.capturing = (77,)
    with pytest.raises(DeviceError, match=r"add<float,2> is not loaded yet.*run the call once before the capture"):
        launch("add<float,2>", (1, 1, 1), 128, 0, 77, 4096, 0)
    assert loads(runtime) == []
    kernel("add<float,2>", 0)
    launch("add<float,2>", (1, 1, 1), 128, 0, 77, 4096, 0)


def test_a_kernel_that_is_not_in_the_manifest_is_refused(runtime):
    with pytest.raises(KeyError, match="no kernel is called add<double,1>"):
        kernel("add<double,1>", 0)


def test_the_image_is_compiled_for_the_device_at_the_first_use(runtime, monkeypatch):
    asked = []

    def cubin(instances, architecture):
        asked.append(([each.name for each in instances], architecture))
        return Cubin(b"code", {"add<float,1>": "_Z3add"})

    monkeypatch.setattr("pagecore.ops.cuda.compilation.cubins.cubin", cubin)
    images = []
    monkeypatch.setattr(runtime, "load", lambda name, device, image, shared_bytes: images.append(image) or name)
    kernel("add<float,1>", 0)
    assert asked == []
    assert images[0]() == (b"code", "_Z3add")
    assert asked == [(["add<float,1>"], "sm_90a")]


def test_a_kernel_that_failed_to_load_is_tried_again(runtime, monkeypatch):
    plain = runtime.load

    def fail(*arguments):
        raise DeviceError("not now")

    monkeypatch.setattr(runtime, "load", fail)
    with pytest.raises(DeviceError, match="not now"):
        kernel("add<float,1>", 0)
    monkeypatch.setattr(runtime, "load", plain)
    assert kernel("add<float,1>", 0) == ("add<float,1>", 0)


def test_a_device_that_is_too_old_is_refused_before_anything_is_compiled(runtime, monkeypatch):
    properties = runtime.properties(0)
    monkeypatch.setattr(runtime, "properties", lambda device: type(properties)("old", "sm_75", 1, 1, 1))
    with pytest.raises(DeviceError, match="of sm_75; the kernels need sm_80"):
        kernel("add<float,1>", 0)
    assert loads(runtime) == []


def test_concurrent_threads_load_a_kernel_once(runtime):
    threads = [threading.Thread(target=kernel, args=("add<float,1>", 0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads(runtime)) == 1
