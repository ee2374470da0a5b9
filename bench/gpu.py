"""The GPU of the gpu_* benches: torch allocates the memory and captures the graphs, of pagecore and of the controls.

A figure times the replay of a graph of many calls, each on memory that the calls before it have not touched lately, so
neither launches from Python nor hits in the L2 are timed. CUDA events take the time on the device after other work
that keeps it busy while the host submits the graph: the time in which the host submits and waits is not part of it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import pagecore
from bench.runner import Bench, Job, Work
from pagecore.arrays.cuda import runtime

# More than four times the L2 of an H200 (60 MB): reading this many bytes evicts everything that was in it.
COLD_BYTES = 256 << 20
# The start of a graph is part of its time; with this many calls it is a small share, even of calls of 3 us.
CALLS_MIN = 64
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
    """One device, with the clock of its benches.

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
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cold: Any = None

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
        """Return a job that replays all calls in their order.

        The calls run once before they are captured, so that the capture compiles and loads nothing. The job holds the
        calls: a graph keeps none of the arrays that its kernels read and write, and torch would reuse their memory.
        """
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
        return Job(_Replay(graph, tuple(calls)), calls=len(calls), timer=self.seconds)

    def seconds(self, run: Work) -> float:
        """Return the seconds that work of the current stream takes on the device, by CUDA events."""
        if self._cold is None:
            self._cold = self.torch.ones(COLD_BYTES // 4, device=self.place)
        for _ in range(2):  # some 120 us, in which the host submits what follows; the L2 then holds none of its arrays
            self._cold.sum()
        self._start.record()
        run()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


@dataclass(frozen=True, slots=True)
class _Replay:
    """A captured graph, and the calls whose arrays its kernels read and write."""

    graph: Any
    calls: tuple[Call, ...]

    def __call__(self) -> None:
        self.graph.replay()


def num_sets(nbytes: int, most: int = 1024) -> int:
    """Return how many sets of arrays calls of `nbytes` must alternate between to find none of their own in the L2."""
    return min(-(-COLD_BYTES // nbytes), most)


def in_turn(calls: Sequence[Call], least: int | None = None) -> list[Call]:
    """Return the calls over and over, each equally often and `least` (CALLS_MIN) or more together."""
    least = CALLS_MIN if least is None else least
    return list(islice(cycle(calls), -(-least // len(calls)) * len(calls)))


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
