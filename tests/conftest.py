"""Options and fixtures of all tests; tests/README.md describes them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.capabilities import require
from tests.interpreters import Interpreters

FOLDER = Path(__file__).parent
# Parallel workers share the cores. Two threads keep the multi-threaded paths of pagecore covered; the math libraries of
# the frameworks and of NumPy need none of their own.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("PAGECORE_NUM_THREADS", "2")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# torch's inductor would compile and run a program to see if each instruction set works that the processor reports.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Its processes for compilation would import torch, for graphs of one or two kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# To precompile the header of its kernels takes longer than it saves for the few kernels of the tests.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
# Its caches of graphs outlive a run, and do not notice that the schema of an operator has changed.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
# JAX would look at each frame of a traceback for each exception that the tests expect.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--runtime",
        choices=("emulator", "gpu"),
        help="run tests/cuda on this runtime alone (default: the emulator, and a GPU if there is one)",
    )
    parser.addoption("--cases", type=int, help="run at most this many cases of each test, evenly spaced")


def pytest_configure(config: pytest.Config) -> None:
    """Let ``pytest tests/gpu`` run all tests that a GPU can run: those of tests/cuda too, without the emulator."""
    folders = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    if folders == [FOLDER / "gpu"]:
        config.args.append(str(FOLDER / "cuda"))
        config.option.runtime = config.option.runtime or "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that change from run to run: parallel workers must collect the same tests."""
    addresses = [item.nodeid for item in items if ADDRESS.search(item.nodeid)]
    if addresses:
        raise pytest.UsageError(f"expected test ids without addresses, got {addresses[0]}; pass ids= to parametrize")


@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)
def pytest_keep_few_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply --cases to the tests that -k and -m have left."""
    most = config.option.cases
    if most is None:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {case for same in cases.values() for case in same[:: max(1, -(-len(same) // most))]}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True, specname="pytest_collection")
def pytest_collect_without_garbage_collection() -> Iterator[None]:
    """Collect the tests without garbage collection, which takes a fifth of the time: nearly all objects stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Let each worker import other modules first: without stored bytecode, all would compile the same ones at once."""
    config = session.config
    if "PYTEST_XDIST_WORKER" in os.environ and config.args == config.getini("testpaths") and not config.option.ignore:
        import_from_own_share(sorted(FOLDER.rglob("test_*.py")))
    return (yield)


def import_from_own_share(files: list[Path]) -> None:
    """Import the test files from the first of this worker's share to the last of all."""
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    if number == 0:
        return  # it collects them in order
    for file in files[len(files) * number // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) :]:
        name = ".".join(file.relative_to(FOLDER.parent).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # which the collection reports
            importlib.import_module(name)


def pytest_collection_finish() -> None:
    """Exempt all modules and tests from garbage collection: a `gc.collect()` in a test would walk them each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # the default of 700 takes 3 percent of the tests of the index


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Let a parallel worker report a test that passes once: six messages would take longer than most tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Exempt as well what is left after the last test of a module: imported frameworks, above all."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def torch() -> Any:
    return require("torch")


@pytest.fixture(scope="session")
def jax() -> Any:
    return require("jax")


@pytest.fixture(scope="session")
def interpreters() -> Iterator[Interpreters]:
    started = Interpreters()
    yield started
    started.close()
