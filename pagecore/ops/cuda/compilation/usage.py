"""Registers, shared memory, stack and spills of each kernel, read from the compiler's log."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pagecore.errors import PagecoreError
from pagecore.ops.cuda.compilation.cubins import cache_folder, cubin, set_cache_folder
from pagecore.ops.cuda.compilation.manifest import Instance

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '\w+'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel on one architecture.

    Attributes
    ----------
    kernel, architecture : str
    registers : int
        Registers per thread.
    stack_bytes : int
        Local memory per thread: spills and arrays with dynamic indices.
    spill_store_bytes, spill_load_bytes : int
        Bytes stored and loaded by spill instructions.
    static_shared_bytes : int
        Static shared memory per block; a launch sets the dynamic part.
    """

    kernel: str
    architecture: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int

    @property
    def spills(self) -> bool:
        """True if the kernel spills."""
        return self.spill_store_bytes + self.spill_load_bytes > 0


@dataclass(frozen=True)
class Failure:
    """A kernel that failed to compile for an architecture, or whose log lacks its resources."""

    kernel: str
    architecture: str
    message: str


def read_usage(log: str, symbol: str, kernel: str, architecture: str) -> Usage | Failure:
    """Return the resources of one kernel from a ptxas log."""
    parts = _ENTRY.split(log)
    about = dict(zip(parts[1::2], parts[2::2], strict=True)).get(symbol, "")
    registers, spills, shared = _USED.search(about), _SPILLS.search(about), _SHARED.search(about)
    if registers is None or spills is None:
        return Failure(kernel, architecture, f"the compiler's log says nothing of {symbol}:\n{log}")
    stack, stores, loads = map(int, spills.groups())
    return Usage(kernel, architecture, int(registers[1]), stack, stores, loads, int(shared[1]) if shared else 0)


def measure(
    instances: Iterable[Instance], architectures: Iterable[str], num_processes: int = 1
) -> Iterator[Usage | Failure]:
    """Compile every instance for every architecture, and yield the resources of each in that order.

    NVRTC compiles one program at a time in a process, so the work is shared among processes.
    """
    tasks = [(instance, architecture) for architecture in architectures for instance in instances]
    if num_processes == 1 or len(tasks) < 2:
        yield from map(_measure_one, tasks)
        return
    context = multiprocessing.get_context("spawn")  # a forked process would inherit state of the compiler
    with ProcessPoolExecutor(
        min(num_processes, len(tasks)), context, initializer=set_cache_folder, initargs=(cache_folder(),)
    ) as pool:
        yield from pool.map(_measure_one, tasks)


def _measure_one(task: tuple[Instance, str]) -> Usage | Failure:
    instance, architecture = task
    try:
        compiled = cubin([instance], architecture)
    except PagecoreError as error:
        return Failure(instance.name, architecture, str(error))
    return read_usage(compiled.log, compiled.symbols[instance.name], instance.name, architecture)


# Threads, blocks and bytes of shared memory of a multiprocessor: CUDA C++ Programming Guide, compute capabilities.
_MULTIPROCESSORS = {
    "sm_80": (2048, 32, 164 * 1024),
    "sm_86": (1536, 16, 100 * 1024),
    "sm_89": (1536, 24, 100 * 1024),
    "sm_90a": (2048, 32, 228 * 1024),
    "sm_100a": (2048, 32, 228 * 1024),
    "sm_120": (1536, 24, 100 * 1024),
}
_REGISTERS = 65536  # of a multiprocessor; a warp takes a multiple of 256


def resident_blocks(usage: Usage, threads: int, dynamic_shared_bytes: int) -> int:
    """Return the thread blocks of a kernel that a multiprocessor holds at once.

    Registers are allocated in units of 8 for each thread, so a few more or less mostly change nothing.
    """
    most_threads, most_blocks, shared_bytes = _MULTIPROCESSORS[usage.architecture]
    warps = -(-threads // 32)
    registers = -(-usage.registers // 8) * 8 * 32 * warps
    shared = dynamic_shared_bytes + usage.static_shared_bytes + 1024  # which the driver reserves for each block
    return min(most_blocks, most_threads // (32 * warps), shared_bytes // shared, _REGISTERS // registers)


def must_not_spill(instance: Instance) -> bool:
    """Return True for decode, prefill and latent attention, whose inner loops must not spill.

    The variants of prefill that hold a whole tile of scores serve comparisons only, and may spill.
    """
    if any(argument.endswith("WholeTile") for argument in instance.arguments):
        return False
    stem = Path(instance.source).stem
    return stem.startswith(("decode", "prefill")) or stem == "latent"
