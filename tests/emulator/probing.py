"""The kernels of tests/emulator/kernels, for the emulator's own tests."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

from tests.emulator.runtime import EmulatedRuntime

KERNELS = Path(__file__).parent / "kernels"


class Probe(ctypes.Structure):
    """PcProbe of kernels/probe.h."""

    _fields_ = [
        ("input", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("extra", ctypes.c_uint64),
        ("n", ctypes.c_int32),
        ("m", ctypes.c_int32),
    ]


def probe(
    runtime: EmulatedRuntime,
    name: str,
    *,
    input: Any = None,
    output: Any = None,
    extra: Any = None,
    n: int = 0,
    m: int = 0,
    grid: tuple[int, int, int] = (1, 1, 1),
    threads: int = 32,
    shared_bytes: int = 0,
) -> None:
    """Launch one of the kernels with tensors for its arrays."""
    addresses = [0 if tensor is None else tensor.pointer for tensor in (input, output, extra)]
    runtime.run(name, grid, threads, shared_bytes, Probe(*addresses, n, m))


def mutated(folder: Path, file: str, before: str, after: str, sources: Path = KERNELS) -> Path:
    """Return a copy of a folder of kernels with one piece of text, which must occur once, replaced."""
    copy = Path(shutil.copytree(sources, folder / "sources"))
    text = (copy / file).read_text()
    if text.count(before) != 1:
        raise AssertionError(f"{before!r} occurs {text.count(before)} times in {file}")
    (copy / file).write_text(text.replace(before, after))
    return copy
