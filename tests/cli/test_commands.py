"""Commands: printed output, exit codes, and errors of one line."""

import functools
import importlib.util
import json
import random
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from pagecore.arrays.cuda.current import use_runtime
from pagecore.cache import PagedKVCache
from pagecore.errors import DeviceError
from pagecore.serving import info
from pagecore.serving.demo import DemoConfig
from tests.arrays.fake_runtime import FakeRuntime
from tests.cli.command_line import call, refused
from tests.models.published import PUBLISHED

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["pagecore.serving.replay.replay", "pagecore.cli.arguments.parser"])
def test_an_interrupted_command_ends_in_one_line(capsys, trace, monkeypatch, name):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(name, interrupt)
    assert call(capsys, "replay", trace) == (130, "", "pagecore: interrupted\n")


@pytest.mark.parametrize("command", ["demo", "replay"])
def test_without_rich_the_extra_is_named(capsys, trace, monkeypatch, command):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = [trace] if command == "replay" else []
    assert "pip install 'pagecore[cli]'" in refused(capsys, command, *arguments)


def test_info_lists_versions_instruction_set_threads_and_cuda(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)  # info does not need it
    code, out, _ = call(capsys, "info")
    assert code == 0
    names = [line.split("  ")[0] for line in out.splitlines()]
    assert names == [
        "pagecore",
        "python",
        "numpy",
        "ml_dtypes",
        "torch",
        "jax",
        "cupy",
        "instruction set",
        "threads",
        "cuda",
    ]


def test_info_lists_the_devices_and_the_compiler(monkeypatch):
    monkeypatch.setattr(info, "compiler_version", lambda: "13.5")
    with use_runtime(FakeRuntime(num_devices=2)):
        assert info.cuda_status() == (
            "cuda:0 fake (sm_90a, 3.0 of 4.0 GiB free), cuda:1 fake (sm_90a, 3.0 of 4.0 GiB free); "
            "NVRTC 13.5 compiles kernels"
        )


@pytest.mark.parametrize(
    ("device", "compiler", "shown"),
    [
        ("CuPy is missing", "CuPy is missing", "unavailable, and kernels cannot be compiled: CuPy is missing"),
        ("no driver", "no NVRTC", "unavailable: no driver; kernels cannot be compiled: no NVRTC"),
    ],
)
def test_info_prints_each_reason_once(monkeypatch, device, compiler, shown):
    def refuse(reason):
        raise DeviceError(reason)

    monkeypatch.setattr(info, "runtime", lambda: refuse(device))
    monkeypatch.setattr(info, "compiler_version", lambda: refuse(compiler))
    assert info.cuda_status() == shown


def test_info_names_the_compiler_without_a_device(monkeypatch):
    def refuse():
        raise DeviceError("no driver")

    monkeypatch.setattr(info, "runtime", refuse)
    monkeypatch.setattr(info, "compiler_version", lambda: "13.5")
    assert info.cuda_status() == "unavailable: no driver; NVRTC 13.5 compiles kernels"


@pytest.mark.parametrize("module", ["pagecore", "pagecore.cli"])
def test_the_version_is_that_of_the_package(module, interpreters):
    program = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    done = interpreters.run_with_frameworks([], program, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"pagecore {info.installed_version('pagecore') or 'unknown'}\n"


@pytest.fixture
def _few_requests(monkeypatch):
    monkeypatch.setattr("pagecore.serving.demo.DemoConfig", functools.partial(DemoConfig, num_requests=5))


@pytest.mark.usefixtures("_few_requests")
def test_the_demo_prints_its_table_and_verdict(capsys):
    code, out, _ = call(capsys, "demo")
    assert code == 0
    assert "preemptions" in out
    assert out.endswith("all tokens verified\n")


@pytest.mark.parametrize("policy", ["lfu", "none"])
def test_the_demo_evicts_by_the_given_policy(capsys, monkeypatch, policy):
    monkeypatch.setattr("pagecore.serving.demo.DemoConfig", functools.partial(DemoConfig, num_requests=8))
    code, out, _ = call(capsys, "demo", "--evict", policy)
    assert code == 0
    assert ("policy lfu" in out, "follow-up turns" in out) == ((policy == "lfu"),) * 2
    assert out.endswith("all tokens verified\n")
    assert "evict is 'random'" in refused(capsys, "demo", "--evict", "random")


def test_the_demo_serves_a_hybrid_model(capsys, monkeypatch):
    few = functools.partial(DemoConfig.hybrid, num_requests=5)
    monkeypatch.setattr("pagecore.serving.demo.DemoConfig", types.SimpleNamespace(hybrid=few))
    code, out, _ = call(capsys, "demo", "--model", "hybrid")
    assert code == 0
    assert "pagecore demo --model hybrid" in out
    assert "from scratch" in out
    assert "state hits" in out
    assert out.endswith("all tokens verified\n")


def test_the_demo_refuses_an_unknown_model(capsys):
    assert "invalid choice: 'mamba'" in refused(capsys, "demo", "--model", "mamba")


def test_the_demo_swaps_with_the_option_swap(capsys, monkeypatch):
    few = functools.partial(DemoConfig, num_requests=6, num_blocks=(45, 30))
    monkeypatch.setattr("pagecore.serving.demo.DemoConfig", few)
    code, out, _ = call(capsys, "demo", "--swap")
    assert code == 0
    assert re.search(r"\b[1-9]\d* swapped out, 0 recomputed", out)
    assert "swap space" in out
    assert out.endswith("all tokens verified\n")


@pytest.mark.usefixtures("_few_requests")
def test_a_demo_with_wrong_attention_fails(capsys, monkeypatch):
    monkeypatch.setattr(PagedKVCache, "attend", lambda self, layer, query, batch: query)
    code, out, err = call(capsys, "demo")
    assert code == 1
    assert "verified" not in out
    assert "dense attention chooses" in err


WORDS = [
    *("", "0", "-1", "1", "x", "nan", "inf", "1e9", "1GiB", "9" * 30, "9" * 5000, "\0", "\ud800", "/tmp", "/dev/null"),
    *("/no/such/folder", "-", "--", "16", "none", "lru", "unbounded", "1.5", "0x10", "1_000", "a" * 5000),
]


OPTIONS = {
    "replay": "memory blocks model bytes-per-token swap-memory evict block-size max-tokens-per-step max-running seed "
    "requests json plot",
    "plan": "memory ranks block-size context dtype json",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_random_arguments_end_in_an_exit_code_and_one_line(capsys, tmp_path, trace, monkeypatch, command):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["gemma-2-9b"]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", None)
    choice = random.Random(command)
    for _ in range(120):
        file = trace if command == "replay" else tmp_path
        argv = [command, choice.choice([file, file, choice.choice(WORDS)])]
        if command == "plan":
            argv += ["--memory", "40GiB"]
        for name in choice.sample(OPTIONS[command].split(), choice.randint(1, 2)):
            argv += [f"--{name}", choice.choice(WORDS)]
        code, out, err = call(capsys, *argv)
        assert code in (0, 2), argv
        assert code == 0 or "requests were refused" in err or (out, err.count("\n")) == ("", 1), argv


@pytest.mark.parametrize("argv", [[], ["fly"]])
def test_an_unknown_command_is_refused(capsys, argv):
    assert "--help" in refused(capsys, *argv)


def test_the_module_runs_and_imports_no_framework():
    script = (
        "import sys, pagecore.cli\n"
        "assert not {'torch', 'jax', 'cupy', 'transformers', 'rich', 'matplotlib'} & set(sys.modules), 'imported'\n"
        "sys.exit(pagecore.cli.main(['info']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "instruction set" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is missing")
def test_a_full_disk_prints_one_line_without_a_traceback(trace):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "pagecore.cli", "replay", str(trace)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "pagecore: cannot write output: No space left on device\n")


def test_a_closed_output_prints_no_traceback(trace):
    command = f'"{sys.executable}" -m pagecore.cli replay "{trace}" >&-'
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", ["replay '{trace}'", "plan --families"])
def test_a_reader_that_exits_early_causes_no_traceback(trace, arguments):
    command = f"{sys.executable} -m pagecore.cli {arguments.format(trace=trace)} | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
