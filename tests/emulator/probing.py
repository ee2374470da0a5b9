"""Launches of the kernels in tests/emulator/kernels, for the emulator's own tests."""

from __future__ import annotations

import ctypes
import enum
import re
from typing import Any

from tests.emulator.build import PROBES
from tests.emulator.runtime import EmulatedRuntime

KERNELS = PROBES


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
    """Launch one of the kernels; `input`, `output` and `extra` are tensors or have a `pointer`."""
    addresses = [0 if tensor is None else tensor.pointer for tensor in (input, output, extra)]
    runtime.run(name, grid, threads, shared_bytes, Probe(*addresses, n, m))


def enum_of(file: str, name: str) -> type[enum.IntEnum]:
    """Return an enum that a kernel declares, numbered from 0, without the prefix ``NAME_`` of its members."""
    declared = re.search(rf"enum {name} : pc_int32 {{(.*?)}};", (KERNELS / file).read_text(), re.DOTALL)
    if declared is None:
        raise ValueError(f"expected 'enum {name} : pc_int32 {{...}};' in {file}, found none")
    members = re.findall(rf"^\s*{name.upper()}_(\w+),", declared[1], re.MULTILINE)
    return enum.IntEnum(name, members, start=0)
