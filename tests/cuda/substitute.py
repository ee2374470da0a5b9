"""A substitute for a GPU: the emulator, of which tests see the methods of `Runtime` and nothing else.

    python -m pytest -p tests.cuda.substitute tests/cuda --runtime gpu

runs the tests that a GPU runs; those that need the emulator are skipped. A test that reads a count of the emulator,
relies on what it refuses during a capture, or does not wait for another stream fails here as it would on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest

from pagecore.arrays.cuda.current import use_runtime
from pagecore.arrays.cuda.protocol import Runtime
from pagecore.errors import DeviceError
from tests.cuda.kit import Kit
from tests.emulator.runtime import EmulatedRuntime

EMULATOR = pytest.StashKey[EmulatedRuntime]()


class Substitute:
    """The methods of `Runtime`, forwarded to an emulator that works as late as possible and reports no race."""

    def __init__(self, emulator: EmulatedRuntime) -> None:
        emulator.streams.deferred = emulator.may_overwrite = True
        for name, _ in inspect.getmembers(Runtime, inspect.isfunction):
            if not name.startswith("_"):
                setattr(self, name, getattr(emulator, name))


def pytest_configure(config: pytest.Config) -> None:
    """Take the place of CuPy before the tests look for a GPU."""
    emulator = config.stash[EMULATOR] = EmulatedRuntime()

    def refuse_capture(stream: int, what: str) -> None:
        # CuPy captures in the relaxed mode, which allows allocations.
        if emulator.is_capturing(stream) and not what.endswith("is allocated"):
            raise DeviceError(f"{what} in a capture")  # not the words of pagecore's refusals

    def capture(_: Kit, work: Callable[[int], None]) -> Callable[[], None]:
        stream = emulator.streams.make()
        emulator.streams.begin_capture(stream)
        emulator.stream = stream
        try:
            work(stream)
        finally:
            emulator.stream = 0
            graph = emulator.streams.end_capture(stream)

        def replay() -> None:
            graph.launch(stream)
            emulator.synchronize(stream)

        return replay

    emulator.streams.refuse_capture = refuse_capture
    Kit.stream = lambda _: emulator.streams.make()
    Kit.capture = capture
    running = use_runtime(Substitute(emulator))
    running.__enter__()
    config.add_cleanup(lambda: running.__exit__(None, None, None))


@pytest.fixture(autouse=True)
def _finish(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    request.config.stash[EMULATOR].finish()
