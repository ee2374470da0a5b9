"""The GPU of the gpu_* benches: torch has the memory and captures the graphs, pagecore and the controls work in them.

A figure is that of a graph replayed: calls in a row, each on memory that no call before it has touched lately, so that
neither launching from Python nor what the L2 holds is timed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import pagecore
from bench.runner import Bench, Job
from pagecore.arrays.cuda import runtime

# Five times the L2 of an H100 or H200, 50 MB: what so many bytes have gone through holds nothing of before.
COLD_BYTES = 256 << 20
# Fewer would let the start of a graph, some 10 us, be seen.
CALLS_MIN = 8
Call = Callable[[], object]


class GpuMissing(Exception):
    """There is no GPU to run on; the message says why."""


def require_gpu() -> Gpu:
    """Return the first GPU; GpuMissing where pagecore has no way to one, or torch has not."""
    try:
        runtime()
    except pagecore.DeviceError as error:
        raise GpuMissing(f"the gpu benches need a CUDA device: {error}") from error
    try:
        import torch
    except ImportError as error:
        raise GpuMissing(
            "the gpu benches need torch, whose graphs they replay: pip install 'pagecore[bench]'"
        ) from error
    if not torch.cuda.is_available():
        raise GpuMissing(f"the gpu benches need a torch that sees the device; torch {torch.__version__} does not")
    return Gpu(torch)


def clock() -> float:
    """Seconds, when all work of the device is done."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Gpu:
    """One device.

    Attributes
    ----------
    torch : module
    place : torch.device
        Where torch puts arrays.
    name : str
        What pagecore calls the device.
    """

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.place = torch.device("cuda", 0)
        self.name = "cuda:0"
        self._stream = torch.cuda.Stream(self.place)

    def random(self, shape: Sequence[int], dtype: str, seed: int = 0) -> Any:
        """Normally distributed numbers."""
        generator = self.torch.Generator(self.place).manual_seed(seed)
        kind = getattr(self.torch, dtype)
        return self.torch.randn(tuple(shape), generator=generator, dtype=kind, device=self.place)

    def permutation(self, count: int) -> Any:
        """The numbers below `count` in random order, as int64."""
        generator = self.torch.Generator(self.place).manual_seed(0)
        return self.torch.randperm(count, generator=generator, device=self.place)

    def describe(self, bench: Bench) -> None:
        """Say what the figures are taken on."""
        properties = self.torch.cuda.get_device_properties(self.place)
        bench.fact("gpu", properties.name)
        bench.fact("multiprocessors", properties.multi_processor_count)
        bench.fact("driver", _driver())
        bench.fact("torch's CUDA", str(self.torch.version.cuda))

    def job(self, calls: Sequence[Call]) -> Job:
        """All calls in their order, captured after they have run once, so that nothing is compiled or loaded then."""
        torch = self.torch
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for call in calls:
                call()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            for call in calls:
                call()
        return Job(graph.replay, calls=len(calls))


def num_sets(nbytes: int, most: int = 1024) -> int:
    """Sets of arrays that calls of so many bytes take turns with, so that none finds its own in the L2."""
    return min(-(-COLD_BYTES // nbytes), most)


def in_turn(calls: Sequence[Call]) -> list[Call]:
    """The calls over and over, until a graph has enough of them."""
    return list(islice(cycle(calls), max(len(calls), -(-CALLS_MIN // len(calls)) * len(calls))))


def copies(gpu: Gpu, nbytes: int, sets: int) -> list[Call]:
    """Device-to-device copies of so many bytes, each of a piece of its own."""
    torch = gpu.torch
    source = torch.randint(0, 256, (sets, nbytes), dtype=torch.uint8, device=gpu.place)
    target = torch.zeros_like(source)
    return [_copy(target[i], source[i]) for i in range(sets)]


def _copy(target: Any, source: Any) -> Call:
    return lambda: target.copy_(source)


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return ran.stdout.splitlines()[0].strip()
