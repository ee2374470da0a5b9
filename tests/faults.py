"""Fault injection: interrupts, failed allocations and signals at every point of a call.

Each tool runs a call once, with one fault, and returns a `Run`. The caller loops over the points until the call ends
before the fault:

    for run in runs(lambda n: raise_at(call, n, PAGECORE)):
        ...  # compare the state after the fault
"""

from __future__ import annotations

import ctypes
import dis
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

from tests.capabilities import missing

PAGECORE = Path(__file__).parent.parent / "pagecore"
SOURCE = Path(__file__).parent / "failing_malloc.cpp"
# Allocations made after a call: if one of them fails, the call itself did not reach the fault.
SLACK = 64
# Exit status of a process that exceeded its time limit.
HUNG = -999


class Interrupt(BaseException):
    """An exception in the middle of a call, like KeyboardInterrupt; handlers of `Exception` do not catch it."""


@dataclass(frozen=True)
class Run:
    """One run of a call.

    Attributes
    ----------
    reached : bool
        True if the fault was injected; False if the call ended before.
    finished : bool
        True if the call returned, False if it raised.
    error : tuple of (type, str), optional
        Type and message of the exception that left the call; the exception and its frames are freed.
    where : str
        File, line and event of the fault, if known.
    """

    reached: bool
    finished: bool
    error: tuple[type[BaseException], str] | None = None
    where: str = ""


def runs(inject: Callable[[int], Run], *, first: int = 1, stride: int = 1, limit: int = 100_000) -> Iterator[Run]:
    """Yield the runs of points `first`, `first + stride`, ... while they are reached; AssertionError at `limit`."""
    for n in range(first, limit, stride):
        run = inject(n)
        if not run.reached:
            return
        yield run
    raise AssertionError(f"point {limit} still lies within the call")


# -- exceptions at a line ----------------------------------------------------------------------------------------------


def raise_at(
    call: Callable[[], object],
    n: int,
    folder: Path | str = PAGECORE,
    error: type[BaseException] = Interrupt,
    *,
    opcodes: bool = False,
) -> Run:
    """Run `call`; raise at its n-th event (from 1) in Python code of files in `folder`.

    Events are the starts of functions, lines and returns; with `opcodes`, bytecodes too. An exception at a return loses
    the returned value, as a signal between the return and the assignment does. The end of a with block is not an event:
    the interpreter handles no signal between the block and the call of `__exit__`.
    """
    where = ""

    def hit(frame: FrameType, event: str) -> None:
        nonlocal where
        where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name} ({event})"
        raise error(where)

    seen, raised = _traced(call, str(folder), opcodes, n, hit)
    return Run(seen >= n, raised is None, raised, where)


def lines_of(call: Callable[[], object], folder: Path | str = PAGECORE, *, opcodes: bool = False) -> int:
    """Return the number of points of `raise_at` in a call, which must not raise."""
    seen, raised = _traced(call, str(folder), opcodes)
    assert raised is None, raised
    return seen


def _traced(
    call: Callable[[], object],
    folder: str,
    opcodes: bool,
    n: int = 0,
    hit: Callable[[FrameType, str], None] | None = None,
) -> tuple[int, tuple[type[BaseException], str] | None]:
    """Run a call, with `hit` at its n-th event; return the number of events and the exception."""
    seen = 0

    def note(frame: FrameType, event: str) -> None:
        nonlocal seen
        seen += 1
        if seen == n and hit is not None:
            hit(frame, event)

    def enter(frame: FrameType, event: str, _: object) -> Any:
        ends = _ends_within(folder, frame.f_code)
        if ends is None:
            return None
        trace = around_with if ends else anywhere
        if opcodes:
            frame.f_trace = trace  # Python 3.13 ignores the next line in frames without a trace function
            frame.f_trace_opcodes = True
        note(frame, event)
        return trace

    def anywhere(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        if event != "exception":
            seen += 1
            if seen == n and hit is not None:
                hit(frame, event)
        return anywhere

    def around_with(frame: FrameType, event: str, _: object) -> Any:
        leaves = event != "return" and frame.f_lasti in (_ends_within(folder, frame.f_code) or ())
        if event != "exception" and not leaves:
            note(frame, event)
        return around_with

    before, raised = sys.gettrace(), None
    with undisturbed():
        sys.settrace(enter)
        try:
            call()
        except BaseException as caught:
            raised = (type(caught), str(caught))
        finally:
            sys.settrace(before)
    return seen, raised


@contextmanager
def undisturbed() -> Iterator[None]:
    """Pause the garbage collector and other threads that run Python code, and ignore exceptions in destructors.

    A thread that ran meanwhile would meet the fault in place of the call: that of pytest-xdist would end its process.
    Code that releases the GIL still lets other threads run.
    """
    is_collecting, hook, interval = gc.isenabled(), sys.unraisablehook, sys.getswitchinterval()
    gc.disable()
    sys.unraisablehook = lambda _: None
    sys.setswitchinterval(1e6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        sys.unraisablehook = hook
        if is_collecting:
            gc.enable()


# Codes in and outside of folders, by folder and id, with the result of `_ends_within`. The hash of a code is slow.
_codes: dict[tuple[str, int], tuple[CodeType, frozenset[int] | None]] = {}


def _ends_within(folder: str, code: CodeType) -> frozenset[int] | None:
    """Return the result of `_ends_of_with`, or None for code outside of the folder."""
    known = _codes.get((folder, id(code)))
    if known is None:
        ends = _ends_of_with(code) if code.co_filename.startswith(folder) else None
        known = _codes[folder, id(code)] = code, ends
    return known[1]


def _ends_of_with(code: CodeType) -> frozenset[int]:
    """Return the offsets of the bytecode that calls `__exit__(None, None, None)`."""
    found: set[int] = set()
    steps = [step for step in dis.get_instructions(code) if step.opname not in {"PRECALL", "CACHE"}]
    for first in range(len(steps) - 3):
        i, loads, end = first, steps[first : first + 3], steps[first + 3]
        if end.opname == "CALL" and all(one.opname == "LOAD_CONST" and one.argval is None for one in loads):
            while i and steps[i - 1].opname in {"SWAP", "COPY", "NOP"}:
                i -= 1
            found.update(range(steps[i].offset, end.offset + 1))
    return frozenset(found)


# -- allocations -------------------------------------------------------------------------------------------------------


def _hold_code() -> None:
    """Take references to the code of pagecore and the tests, so that none is freed.

    Python 3.13 loses a reference to the code of a lambda or a generator expression whose function finds no memory.
    """
    if sys.version_info < (3, 12) or _held_with[0] == len(sys.modules):
        return
    _held_with[0] = len(sys.modules)
    ours = [each for name, each in sys.modules.copy().items() if name.split(".")[0] in ("pagecore", "tests")]
    waiting: list[Any] = [each.__dict__ for each in [*ours, sys.modules["__main__"]]]
    seen = set(map(id, waiting))
    while waiting:
        holder = waiting.pop()
        # The garbage collector does not list objects that were frozen, nor what code refers to.
        for each in holder.co_consts if isinstance(holder, CodeType) else gc.get_referents(holder):
            if not isinstance(each, _HOLDS_CODE) or id(each) in seen:
                continue
            seen.add(id(each))
            waiting.append(each)
            if isinstance(each, CodeType):
                references = ctypes.c_uint32.from_address(id(each))
                if references.value < _MANY:
                    references.value += _MANY


_MANY = 1 << 24
_HOLDS_CODE = (FunctionType, CodeType, type, property, classmethod, staticmethod, partial, dict, tuple, CellType)
_held_with = [0]  # the modules that were loaded when references were last taken


class PythonAllocations:
    """Allocations of all threads through the interpreter: objects, and memory that extensions request from Python.

    ``arm(n, count)`` makes `count` allocations fail from the n-th on (from 1), or all of them if `count` is 0;
    `disarm` ends the failures. Arm it in `undisturbed`, or another thread may run into the failure.
    """

    def __init__(self) -> None:
        try:
            import _testcapi
        except ImportError as error:
            missing("_testcapi", str(error))
        self._set, self.disarm = _testcapi.set_nomemory, _testcapi.remove_mem_hooks

    def arm(self, n: int, count: int = 1) -> None:
        _hold_code()
        self._set(n - 1, n - 1 + count if count else 0)


class NativeAllocations:
    """Calls of malloc, calloc and realloc by the arming thread, in a process started by `with_failing_malloc`.

    They serve `operator new` of C++, NumPy's data and, with PYTHONMALLOC=malloc, every Python object.
    """

    def __init__(self) -> None:
        library = ctypes.PyDLL(None)
        self._arm, self.disarm = library.failing_malloc_arm, library.failing_malloc_disarm
        self._arm.argtypes, self._arm.restype = (ctypes.c_long, ctypes.c_long), None
        self.disarm.argtypes, self.disarm.restype = (), ctypes.c_long

    def arm(self, n: int, count: int = 1) -> None:
        _hold_code()
        self._arm(n, n - 1 + count if count else 0)

    def count(self, call: Callable[[], object]) -> int:
        """Return the number of allocations that a call makes."""
        with undisturbed():
            self.arm(1 << 60)
            try:
                call()
            finally:
                made = self.disarm()
        return int(made)


def fail_allocation(
    call: Callable[[], object],
    n: int,
    *,
    count: int = 1,
    allocations: PythonAllocations | NativeAllocations | None = None,
) -> Run:
    """Run `call` while `count` allocations from its n-th on (from 1) fail; 0 makes all that follow fail.

    Python 3.11 itself cannot leave a with block while every allocation fails: for a call that has one, pass a `count`.
    The result knows whether the fault was reached only if the call's last allocation precedes the n-th by less than
    `SLACK`, so the caller's stride over n must be smaller than `SLACK`.
    """
    source = PythonAllocations() if allocations is None else allocations
    raised: BaseException | None = None
    error: tuple[type[BaseException], str] | None = None
    was_met = False
    with undisturbed():
        source.arm(n, count)
        try:
            try:
                call()
            except BaseException as caught:
                raised = caught
            if count == 1 or raised is None:
                was_met = _meets_failure()
        finally:
            source.disarm()
    if raised is not None:
        error = (type(raised), str(raised))
        raised = None
    return Run(not was_met, error is None, error, f"allocation {n}")


def _meets_failure() -> bool:
    """Return True if one of the next allocations fails."""
    try:
        for _ in range(SLACK):
            bytes(5000)
    except MemoryError:
        return True
    return False


def with_failing_malloc(
    folder: Path, command: list[str], *, timeout: float, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run ``python *command`` in a process in which `NativeAllocations` can fail; the library is built in `folder`.

    `text` is the standard input. The exit status of a process that is still running after `timeout` seconds is `HUNG`.
    """
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "__libc_malloc"):
        missing("failing malloc", "the library is built by g++ and wraps glibc")
    library = folder / "failing_malloc.so"
    if not library.exists():
        subprocess.run([str(compiler), "-O2", "-fPIC", "-shared", "-o", str(library), str(SOURCE)], check=True)
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "PYTHONMALLOC": "malloc",
        "PYTHONFAULTHANDLER": "1",
        "PAGECORE_NUM_THREADS": "1",
    }
    command = [sys.executable, *command]
    try:
        return subprocess.run(
            command,
            env=environment,
            input=text,
            cwd=PAGECORE.parent,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return subprocess.CompletedProcess(command, HUNG, output, f"still running after {timeout} seconds")


# -- signals -----------------------------------------------------------------------------------------------------------


def signal_at(call: Callable[[], object], delay: float) -> Run:
    """Run `call` on the main thread; a real signal raises KeyboardInterrupt after `delay` seconds of wall time.

    A timer sends the signal and Python's own handler of Ctrl-C handles it, so it arrives at the same points.
    """
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.default_int_handler(number, frame)

    previous = signal.signal(signal.SIGALRM, interrupt)
    finished = False
    error: tuple[type[BaseException], str] | None = None
    try:
        try:
            with undisturbed():
                signal.setitimer(signal.ITIMER_REAL, delay)
                call()
                finished = True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt as caught:
        error = (type(caught), str(caught))
    except Exception as caught:
        error = (type(caught), str(caught))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return Run(came, finished, error, f"after {1e6 * delay:.0f} us")


def is_full() -> bool:
    """Return True if ``PAGECORE_FAULTS=full`` selects every point of every case instead of a sample."""
    return os.environ.get("PAGECORE_FAULTS") == "full"
