"""No usable device: each reason has an error of its own, which names what to install."""

from __future__ import annotations

import builtins
import sys

import pytest

import pagecore
from pagecore.arrays import cuda
from pagecore.arrays.cuda import use_runtime
from pagecore.errors import DeviceError
from tests.arrays.fake_cupy import CUDARuntimeError


def refusal():
    with use_runtime(None), pytest.raises(DeviceError) as caught:
        cuda.runtime()
    return str(caught.value)


def import_fails(monkeypatch, error):
    plain = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "cupy":
            raise error
        return plain(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)


def test_without_cupy_the_extras_are_named(monkeypatch):
    import_fails(monkeypatch, ModuleNotFoundError("No module named 'cupy'", name="cupy"))
    assert "CuPy, which is not installed: install pagecore[cuda12] or pagecore[cuda13]" in refusal()


@pytest.mark.parametrize(
    "error",
    [
        ImportError("\n=====\nFailed to import CuPy.\nlibcublas.so.12: cannot open\n====="),
        ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock"),
        AttributeError("module has no attribute"),
    ],
)
def test_a_broken_cupy_is_named_with_the_first_line_of_its_error(monkeypatch, error):
    import_fails(monkeypatch, error)
    message = refusal()
    assert "CuPy is installed and does not work" in message
    assert "\n" not in message
    assert "install pagecore[cuda12]" in message


def test_cupy_for_rocm_is_refused(fake):
    sys.modules["cupy"].cuda.runtime.is_hip = True
    assert "built for ROCm" in refusal()


@pytest.mark.parametrize(
    ("driver", "error", "message"),
    [
        (0, "cudaErrorInsufficientDriver: CUDA driver version is insufficient", "no CUDA driver found"),
        (
            12080,
            "cudaErrorInsufficientDriver: CUDA driver version is insufficient",
            r"supports CUDA 12.8 and CuPy is built for CUDA 13.2: install pagecore[cuda12]",
        ),
        (13020, "cudaErrorNoDevice: no CUDA-capable device is detected", "sees no device (cudaErrorNoDevice"),
        (13020, "cudaErrorSystemDriverMismatch: mismatch", "sees no device (cudaErrorSystemDriverMismatch"),
    ],
)
def test_a_missing_driver_an_old_one_and_a_missing_device_are_distinct_errors(fake, driver, error, message):
    fake.driver_version = driver
    fake.failures["getDeviceCount"] = CUDARuntimeError(error)
    assert message in refusal()


def test_a_driver_without_devices_is_refused(fake):
    fake.num_devices = 0
    assert "sees no device (it counts 0): check nvidia-smi and CUDA_VISIBLE_DEVICES" in refusal()


def test_a_missing_device_is_named(fake):
    with use_runtime(None), pytest.raises(DeviceError, match="'cuda:2', but this process sees 2 CUDA devices"):
        pagecore.empty(3, device="cuda:2")
