"""The gpu benches: what they time and check, run on the host, and what they say where there is no GPU."""

from __future__ import annotations

import builtins
import sys
import types
from importlib import import_module

import pytest

import pagecore
from bench import cli, gpu, gpu_write
from bench.attention_load import Shape
from bench.cli import GPU_NAMES
from bench.gpu import COLD_BYTES, Gpu, GpuMissing, in_turn, num_sets, require_gpu
from bench.gpu_load import GpuLoad
from bench.runner import Bench, Job
from pagecore.arrays.cuda import use_runtime
from tests.arrays.fake_runtime import FakeRuntime


class HostStandIn(Gpu):
    """The host in the GPU's place: what a graph would hold is called one by one."""

    def __init__(self, torch):
        self.torch, self.place, self.name = torch, torch.device("cpu"), "cpu"

    def job(self, calls):
        def run():
            for call in calls:
                call()

        return Job(run, calls=len(calls))


@pytest.fixture
def host(torch):
    return HostStandIn(torch)


@pytest.fixture
def bench():
    return Bench(kind="smoke", write=lambda line: None)


@pytest.mark.parametrize("name", GPU_NAMES)
def test_every_figure_is_checked_and_has_a_control(bench, host, name):
    import_module(f"bench.{name}").run_on(bench, host)
    assert bench.figures
    for figure in bench.figures:
        assert figure.controls
        assert figure.sizes
        assert figure.nbytes or figure.flop
        assert figure.subject.median > 0


WRONG = {
    "gpu_write": ("write_kv", "a slot does not hold its token"),
    "gpu_decode": ("paged_attention", "a row"),
    "gpu_prefill": ("paged_attention", "a row"),
}


@pytest.mark.parametrize("fault", ["nothing", "other numbers"])
@pytest.mark.parametrize("name", GPU_NAMES)
def test_a_kernel_that_is_wrong_has_no_figure(bench, host, monkeypatch, name, fault):
    op, told = WRONG[name]

    def wrong(*arguments, out=None, **options):
        if fault == "other numbers":
            (arguments[2] if out is None else out).fill_(0.5)

    monkeypatch.setattr(pagecore, op, wrong)
    with pytest.raises(AssertionError, match=told):
        import_module(f"bench.{name}").run_on(bench, host)
    assert bench.figures == []


@pytest.mark.parametrize(
    ("op", "told"),
    [
        ("copy_blocks", "the copy of its source"),
        ("gather_blocks", "what its block holds"),
        ("scatter_blocks", "does not hold its tokens"),
    ],
)
def test_a_move_that_is_wrong_has_no_figure(bench, host, monkeypatch, op, told):
    monkeypatch.setattr(pagecore, op, lambda *arguments, **options: None)
    with pytest.raises(AssertionError, match=told):
        gpu_write.run_moves(bench, host)


def test_batches_have_blocks_of_their_own_and_the_controls_the_same_tokens(host, torch):
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


def test_calls_go_through_more_memory_than_caches_hold():
    assert num_sets(COLD_BYTES) == num_sets(COLD_BYTES * 5) == 1
    assert num_sets(COLD_BYTES - 1) == 2
    assert num_sets(1, most=7) == 7
    assert in_turn("ab") == list("abababab")
    assert in_turn("abc") == list("abcabcabc")
    assert len(in_turn(range(100))) == 100


# ---- without a GPU


def test_without_a_device_the_reason_is_told(monkeypatch):
    def no_device():
        raise pagecore.DeviceError("there is no CUDA driver: install it")

    monkeypatch.setattr(gpu, "runtime", no_device)
    with pytest.raises(GpuMissing, match="the gpu benches need a CUDA device: there is no CUDA driver: install it"):
        require_gpu()


def test_without_torch_or_with_one_that_sees_no_device_it_is_named(monkeypatch):
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
def test_the_command_refuses_in_one_line_before_anything_runs(monkeypatch, capsys, name):
    def missing():
        raise GpuMissing("the gpu benches need a CUDA device: none")

    monkeypatch.setattr(cli, "require_gpu", missing)
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "prepare", "--smoke"])
    assert stopped.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "bench: the gpu benches need a CUDA device: none\n"
