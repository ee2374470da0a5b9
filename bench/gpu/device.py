"""The GPU of the gpu_* benches: torch allocates the memory and captures the graphs, for pagecore and the controls.

A figure times the replay of a graph of many calls, each on memory that the preceding calls have not touched recently,
so that neither launches from Python nor L2 hits are timed. CUDA events take the time on the device, after other work
that keeps it busy while the host submits the graph; submission and waiting on the host are not included.
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
from bench.harness.runner import Bench, Job, Work
from pagecore.arrays.cuda.current import runtime

# More than four times the L2 of an H200 (60 MB): reading this many bytes evicts everything that was in it.
COLD_BYTES = 256 << 20
# The launch of a graph is part of its time; over 64 calls it is a small share, even for calls of 3 us.
CALLS_MIN = 64
Call = Callable[[], object]


class GpuMissing(Exception):
    """No usable GPU; the message says why."""


def require_gpu() -> Gpu:
    """Return the first GPU; raise GpuMissing if pagecore or torch cannot use one."""
    try:
        runtime()
    except pagecore.DeviceError as error:
        raise GpuMissing(f"the gpu benches need a CUDA device: {error}") from error
    try:
        import torch
    except ImportError as error:
        raise GpuMissing("the gpu benches need torch for CUDA graphs: pip install 'pagecore[bench]'") from error
    if not torch.cuda.is_available():
        raise GpuMissing(f"the gpu benches need a torch that sees the device; torch {torch.__version__} does not")
    return Gpu(torch)


def described_gpu(bench: Bench) -> Gpu:
    """Return the first GPU, with facts about it added to the bench."""
    gpu = require_gpu()
    gpu.describe(bench)
    return gpu


def clock() -> float:
    """Wait for all work of the device; return the time in seconds."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Gpu:
    """One device and the timing of its work.

    Attributes
    ----------
    torch : module
    place : torch.device
        Device of torch arrays.
    name : str
        pagecore's name of the device.
    """

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.place = torch.device("cuda", 0)
        self.name = "cuda:0"
        self._stream = torch.cuda.Stream(self.place)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cold: Any = None

    def random(self, shape: Sequence[int], dtype: str, seed: int = 0) -> Any:
        """Return normally distributed numbers."""
        generator = self.torch.Generator(self.place).manual_seed(seed)
        kind = getattr(self.torch, dtype)
        return self.torch.randn(tuple(shape), generator=generator, dtype=kind, device=self.place)

    def current_stream(self) -> Any:
        """Return torch's current stream; None on the host."""
        return None if self.name == "cpu" else self.torch.cuda.current_stream(self.place)

    def permutation(self, count: int) -> Any:
        """Return a random permutation of the numbers below `count`, int64."""
        generator = self.torch.Generator(self.place).manual_seed(0)
        return self.torch.randperm(count, generator=generator, device=self.place)

    def describe(self, bench: Bench) -> None:
        """Add facts about the device to the bench."""
        properties = self.torch.cuda.get_device_properties(self.place)
        bench.fact("gpu", properties.name)
        bench.fact("multiprocessors", properties.multi_processor_count)
        bench.fact("driver", _driver())
        bench.fact("torch's CUDA", str(self.torch.version.cuda))

    def job(self, calls: Sequence[Call]) -> Job:
        """Return a job that replays all calls in order.

        The calls run once before the capture, so that the capture compiles and loads nothing. The job holds the calls:
        a graph does not keep the arrays that its kernels read and write alive, and torch would reuse their memory.
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
        for _ in range(2):  # about 120 us, in which the host submits the graph; evicts the graph's arrays from the L2
            self._cold.sum()
        self._start.record()
        run()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


@dataclass(frozen=True, slots=True)
class _Replay:
    """A captured graph, and the calls that own the arrays of its kernels."""

    graph: Any
    calls: tuple[Call, ...]

    def __call__(self) -> None:
        self.graph.replay()


def num_sets(nbytes: int, most: int = 1024) -> int:
    """Return the number of array sets that calls of `nbytes` must alternate between to miss the L2."""
    return min(-(-COLD_BYTES // nbytes), most)


def in_turn(calls: Sequence[Call], least: int | None = None) -> list[Call]:
    """Repeat the calls, each equally often, `least` (CALLS_MIN) times or more in total."""
    least = CALLS_MIN if least is None else least
    return list(islice(cycle(calls), -(-least // len(calls)) * len(calls)))


def copies(gpu: Gpu, nbytes: int, sets: int) -> list[Call]:
    """Return device-to-device copies of `nbytes` bytes, each of a different piece."""
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
