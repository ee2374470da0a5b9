"""The GPU benches, run on the host: figures, checks, jobs, and messages without a GPU."""

from __future__ import annotations

import builtins
import contextlib
import gc
import inspect
import sys
import time
import types
import weakref
from importlib import import_module

import pytest

import pagecore
from bench import cli
from bench.cli import GPU_NAMES
from bench.gpu import controls, device, gpu_write
from bench.gpu.checks import TOLERANCE, assert_close
from bench.gpu.device import COLD_BYTES, Gpu, GpuMissing, in_turn, num_sets, require_gpu
from bench.gpu.load import GpuLoad, GpuSealed
from bench.harness.runner import Bench
from bench.host.attention_load import Shape
from bench.host.formats import PLAIN
from pagecore.arrays.cuda.current import use_runtime
from pagecore.arrays.dtypes.formats import FORMATS, SEALED_FORMATS
from tests.arrays.fake_runtime import FakeRuntime

pytestmark = pytest.mark.slow


class HostEvent:
    """CUDA event on the host: recorded at once, readable only after it was synchronised."""

    def __init__(self, enable_timing=False):
        self.enable_timing, self.seconds, self.is_done = enable_timing, None, False

    def record(self):
        self.seconds, self.is_done = time.perf_counter(), False

    def synchronize(self):
        self.is_done = True

    def elapsed_time(self, end):
        assert {self.enable_timing, end.enable_timing} == {True}, "an event without timing has no time"
        assert end.is_done, "the event is not reached yet"
        return 1e3 * (end.seconds - self.seconds)


class HostStream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


class HostGraph:
    """CUDA graph on the host; like CUDA's, it does not keep its calls' arrays alive."""

    def __init__(self):
        self.captured = []

    def replay(self):
        for reference in self.captured:
            call = reference()
            assert call is not None, "a graph is replayed over arrays that were freed"
            call.call()


class HostCuda:
    """`torch.cuda`, on the host: events, streams and graphs."""

    Event, Stream, CUDAGraph, current_stream = HostEvent, HostStream, HostGraph, HostStream

    def __init__(self):
        self.capturing = None

    def stream(self, stream):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def graph(self, graph, stream, capture_error_mode):
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None


class HostTorch:
    """torch with another `torch.cuda`."""

    def __init__(self, torch):
        self.torch, self.cuda = torch, HostCuda()

    def __getattr__(self, name):
        return getattr(self.torch, name)


class HostCall:
    """A call that runs, or is captured."""

    def __init__(self, call, cuda):
        self.call, self.cuda = call, cuda

    def __call__(self):
        if self.cuda.capturing is None:
            self.call()
        else:
            self.cuda.capturing.captured.append(weakref.ref(self))


class HostStandIn(Gpu):
    """The host in place of a GPU, with the GPU's jobs and timing."""

    def __init__(self, torch):
        super().__init__(HostTorch(torch))
        self.place, self.name = torch.device("cpu"), "cpu"

    def job(self, calls):
        return super().job([HostCall(call, self.torch.cuda) for call in calls])


@pytest.fixture
def host(torch, monkeypatch):
    monkeypatch.setattr(device, "COLD_BYTES", 1 << 12)
    monkeypatch.setattr(device, "CALLS_MIN", 4)  # the host takes longer for a call than a GPU
    return HostStandIn(torch)


@pytest.fixture
def bench():
    return Bench(kind="smoke", write=lambda line: None)


@pytest.fixture(scope="module")
def known():
    """Figures by bench, of runs in which nothing fails."""
    return {}


def figures_of(name, host, known):
    """Return the figures of a bench in which nothing fails."""
    if name not in known:
        gc.collect()
        gc.freeze()  # each figure starts with a collection, which would walk the modules of torch
        bench = Bench(kind="smoke", write=lambda line: None)
        import_module(cli.module_of(name)).run_on(bench, host)
        assert not bench.failures
        known[name] = bench.figures
    return known[name]


@pytest.mark.parametrize("name", GPU_NAMES)
def test_every_figure_is_checked_and_has_a_control(host, known, name):
    figures = figures_of(name, host, known)
    assert figures
    for figure in figures:
        assert figure.controls
        assert figure.sizes
        assert figure.nbytes or figure.flop
        assert figure.subject.median > 0


WRONG = {
    "gpu_write": ("write_kv", "a slot does not hold its token"),
    "gpu_decode": ("paged_attention", "a row"),
    "gpu_latent": ("latent_attention", "a row"),
    "gpu_prefill": ("paged_attention", "a row"),
    "gpu_sparse": ("paged_attention", "a row"),
}


@pytest.mark.parametrize("fault", ["nothing", "other numbers"])
@pytest.mark.parametrize("name", GPU_NAMES)
def test_a_wrong_kernel_has_no_figure(bench, host, monkeypatch, name, fault):
    op, message = WRONG[name]

    def wrong(*arguments, out=None, **options):
        if fault == "other numbers":
            (arguments[2] if out is None else out).fill_(0.5)

    monkeypatch.setattr(pagecore, op, wrong)
    import_module(cli.module_of(name)).run_on(bench, host)
    assert [figure.name for figure in bench.figures if not figure.name.startswith(OTHERS)] == []
    assert bench.failures
    assert all(message in failure["error"] for failure in bench.failures)


@pytest.mark.parametrize("name", ["gpu_decode", "gpu_prefill"])
def test_rows_that_are_off_by_a_twentieth_have_no_figure_in_any_format(bench, host, monkeypatch, name):
    plain = pagecore.paged_attention
    monkeypatch.setattr(pagecore, "paged_attention", lambda *arrays, **options: plain(*arrays, **options).mul_(1.05))
    import_module(cli.module_of(name)).run_on(bench, host)
    assert [figure.name for figure in bench.figures] == []
    assert {failure["name"].split(", ")[-1] for failure in bench.failures} >= {*FORMATS, *SEALED_FORMATS}


MOVES = ("copy_blocks", "gather_blocks", "scatter_blocks")
OTHERS = (*MOVES, "save", "load", "score_blocks", "select")  # figures of other functions


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("copy_blocks", "the copy of its source"),
        ("gather_blocks", "what its block holds"),
        ("scatter_blocks", "does not hold its tokens"),
    ],
)
def test_a_wrong_move_has_no_figure_and_the_other_moves_do(bench, host, monkeypatch, op, message):
    monkeypatch.setattr(pagecore, op, lambda *arguments, **options: None)
    gpu_write.run_moves(bench, host)
    (failure,) = bench.failures
    assert failure["name"].startswith(op)
    assert message in failure["error"]
    assert [figure.name.split()[0] for figure in bench.figures] == [name for name in MOVES if name != op]


def test_wrong_checkpoints_have_no_figure(bench, host, monkeypatch):
    monkeypatch.setattr(pagecore.CheckpointPool, "save", lambda *arguments, **options: None)
    monkeypatch.setattr(pagecore.CheckpointPool, "load", lambda *arguments, **options: None)
    gpu_write.run_states(bench, host)
    assert bench.figures == []
    for failure, message in zip(bench.failures, ("a checkpoint differs", "a state differs"), strict=True):
        assert message in failure["error"]


@pytest.mark.parametrize("name", GPU_NAMES)
def test_a_case_that_fails_costs_no_figure_of_another(bench, host, known, monkeypatch, name):
    op, _ = WRONG[name]
    plain, calls = getattr(pagecore, op), []

    def fails_at_first(*arguments, **options):
        calls.append(op)
        if len(calls) == 1:
            raise pagecore.DeviceError("CUDA failed on cuda:0: an illegal memory access")
        return plain(*arguments, **options)

    whole = figures_of(name, host, known)
    monkeypatch.setattr(pagecore, op, fails_at_first)
    import_module(cli.module_of(name)).run_on(bench, host)
    (failure,) = bench.failures
    assert failure == {
        "name": whole[0].name,
        "error": "DeviceError: CUDA failed on cuda:0: an illegal memory access",
    }
    assert [figure.name for figure in bench.figures] == [figure.name for figure in whole[1:]]


def test_a_control_that_refuses_a_case_is_left_out_with_a_note(bench, host, monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(host.torch.torch.nn.functional, "scaled_dot_product_attention", refuse)
    import_module("bench.gpu.gpu_decode").run_on(bench, host)
    assert bench.failures == []
    for figure in bench.figures:
        stored = "format" in figure.sizes  # compared with plain caches, and not with SDPA
        assert list(figure.controls) == [controls.COPY, *([PLAIN] if stored else [])]
    assert any("SDPA, contiguous KV is left out: RuntimeError: No available kernel" in note for note in bench.notes)


# ---- jobs


def test_a_job_keeps_the_arrays_of_its_graph(host, torch):
    array, seen = torch.zeros(3), []
    freed = weakref.ref(array)

    def call(array=array):
        array += 1
        seen.append(array.sum().item())

    job = host.job(in_turn([call], 2))
    del array, call
    gc.collect()
    assert freed() is not None
    job.run()
    assert seen == [3, 6, 9, 12]  # two calls before the capture, two in the graph
    del job
    gc.collect()
    assert freed() is None


def test_the_stand_in_detects_freed_arrays(host, torch):
    graph = host.torch.cuda.CUDAGraph()
    with host.torch.cuda.graph(graph, None, "thread_local"):
        HostCall(lambda: None, host.torch.cuda)()
    with pytest.raises(AssertionError, match="over arrays that were freed"):
        graph.replay()


def test_the_stand_in_has_the_interface_of_torch(torch):
    for name in ("Event", "Stream", "CUDAGraph", "current_stream", "stream", "graph"):
        assert hasattr(HostCuda, name)
        assert hasattr(torch.cuda, name)
    parameters = inspect.signature(torch.cuda.graph.__init__).parameters
    assert {"stream", "capture_error_mode"} <= set(parameters)
    assert hasattr(torch.cuda.CUDAGraph, "replay")
    for ours, theirs in ((HostEvent, torch.cuda.Event), (HostStream, torch.cuda.Stream)):
        assert [name for name in vars(ours) if not name.startswith("_") and not hasattr(theirs, name)] == []


def test_a_job_is_timed_by_the_device_s_events_after_other_work(host, torch, monkeypatch):
    order = []

    class Event(HostEvent):
        def record(self):
            order.append("record")

        def elapsed_time(self, end):
            assert end.is_done
            return 6.0

    host._start, host._end = Event(enable_timing=True), Event(enable_timing=True)
    host._cold = types.SimpleNamespace(sum=lambda: order.append("read"))
    job = host.job([lambda: order.append("call")] * 3)
    del order[:]
    assert job.timer(job.run) == 6e-3
    assert order == ["read", "read", "record", *["call"] * 3, "record"]
    bench = Bench(kind="smoke", write=lambda line: None, clock=lambda: 0.0)
    figure = bench.compare("x", job, {"c": job}, check=lambda: None)
    assert figure.subject.median == 2e-3


def test_batches_have_disjoint_blocks_and_the_controls_the_same_tokens(host, torch):
    load = GpuLoad(host, Shape(4, 2, 8, 3, 21), "float32", batches=2, block_size=4)
    ids = torch.cat([table.flatten() for table in load.tables])
    assert sorted(ids.tolist()) == list(range(1, 2 * 3 * 6 + 1))
    key, value = load.contiguous(1)
    assert key.shape == value.shape == (3, 2, 21, 8)
    assert torch.equal(key[2, 1, 17], load.key_cache[load.tables[1][2, 4], 1, 1])
    query = load.query(3)
    expected = load.expected(1, query[2, 3], 17, 2, 3)
    scores = key[2, 1, :18].double() @ query[2, 3].double() / 8**0.5
    assert torch.allclose(expected, torch.softmax(scores, 0) @ value[2, 1, :18].double())


@pytest.mark.parametrize("name", SEALED_FORMATS)
def test_a_sealed_load_has_blocks_of_one_kind_or_the_other(host, torch, name):
    load = GpuLoad(host, Shape(4, 2, 64, 3, 200), "bfloat16", batches=2, block_size=32)
    key, value = load.key_cache.clone(), load.value_cache.clone()
    sealed = GpuSealed(load, name)
    bits = sealed.bits
    plan = load.plan(None, 3)
    for batch, blocks in enumerate(sealed.batches):
        assert blocks.lens.tolist() == [96, 96, 96]  # half of the context, as whole blocks: it is short
        assert torch.equal(blocks.block_table, load.tables[batch][:, :3])
        query = load.query(3)
        arguments = (query, key, value, load.tables[batch], load.seq_lens)
        got = pagecore.paged_attention(*arguments, sealed=blocks, plan=plan)
        expected = sealed.read.expected(batch, query[2, 3], 199, 2, 3)
        assert_close(got[2, 3].double(), expected, TOLERANCE["bfloat16"])
    assert torch.equal(load.key_cache, key)
    assert sealed.nbytes == 3 * (96 * 2 * 2 * 64 * (bits + 1) // 8 + 104 * 2 * 2 * 64 * 2)


def test_calls_go_through_more_memory_than_caches_hold():
    assert num_sets(COLD_BYTES) == num_sets(COLD_BYTES * 5) == 1
    assert num_sets(COLD_BYTES - 1) == 2
    assert num_sets(1, most=7) == 7
    assert in_turn("ab", 8) == list("abababab")
    assert in_turn("abc", 8) == list("abcabcabc")
    assert len(in_turn(range(100), 8)) == 100
    assert len(in_turn("ab")) == 64


# ---- without a GPU


def test_without_a_device_the_reason_is_reported(monkeypatch):
    def no_device():
        raise pagecore.DeviceError("there is no CUDA driver: install it")

    monkeypatch.setattr(device, "runtime", no_device)
    with pytest.raises(GpuMissing, match="the gpu benches need a CUDA device: there is no CUDA driver: install it"):
        require_gpu()


def test_without_torch_or_with_a_torch_without_devices_torch_is_named(monkeypatch):
    plain = builtins.__import__

    def no_torch(name, *arguments, **options):
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return plain(name, *arguments, **options)

    with use_runtime(FakeRuntime()):
        blind = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False), __version__="2.13.0+cpu")
        monkeypatch.setitem(sys.modules, "torch", blind)
        with pytest.raises(GpuMissing, match=r"torch 2.13.0\+cpu does not"):
            require_gpu()
        monkeypatch.setattr(builtins, "__import__", no_torch)
        with pytest.raises(GpuMissing, match=r"pip install 'pagecore\[bench\]'"):
            require_gpu()


@pytest.mark.parametrize("name", GPU_NAMES)
def test_the_command_refuses_with_one_line_before_anything_runs(monkeypatch, capsys, name):
    def missing():
        raise GpuMissing("the gpu benches need a CUDA device: none")

    monkeypatch.setattr(cli, "require_gpu", missing)
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "prepare", "--smoke"])
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "bench: the gpu benches need a CUDA device: none\n"
