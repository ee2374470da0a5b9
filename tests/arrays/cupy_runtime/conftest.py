"""A driver and a CuPy that record their calls, and a runtime that uses them."""

from __future__ import annotations

import sys

import pytest

from pagecore.arrays.cuda.cupy_runtime import CupyRuntime
from tests.arrays.fake_cupy import FakeCuda, make_cupy
from tests.arrays.fake_driver import FakeDriver, install


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    driver = install(monkeypatch, FakeDriver())
    driver.in_use = {0, 1}
    return driver


@pytest.fixture
def fake(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", make_cupy(fake))
    return fake


@pytest.fixture
def runtime(fake):
    made = CupyRuntime()
    made.current_stream(0)  # gives this thread its context
    del fake.calls[:]
    return made
