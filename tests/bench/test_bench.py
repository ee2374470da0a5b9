"""``python -m bench``: the list of names, a smoke run of each bench, the JSON, and messages about what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench import cli
from bench.cli import GPU_NAMES, NAMES, PEERS
from bench.harness import machine
from tests.capabilities import require

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


# Benches one after another in one process: a process of its own for each takes twice the time.
IN_ONE_PROCESS = """
import sys
from bench import cli
folder, *names = sys.argv[1:]
for name in names:
    if cli.main([name, "--smoke", "--json", f"{folder}/{name}.json"]):
        sys.exit(f"{name} failed")
"""


AS_MODULE = """
import os, runpy, sys
os.environ["PAGECORE_PEERS"] = sys.argv.pop(1)
runpy.run_module("bench", run_name="__main__")
"""


@pytest.fixture
def run_bench(interpreters, tmp_path):
    """Run ``python -m bench`` with these arguments; the packages of peers are expected in `tmp_path`."""
    interpreter = interpreters.with_modules("pagecore")
    return lambda *arguments: interpreter.run(AS_MODULE, str(tmp_path), *map(str, arguments))


def hidden(tmp_path_factory, name):
    """Return a folder that hides a module if it is on the path."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / f"{name}.py").write_text(f"raise ImportError('{name} is hidden')\n")
    return folder


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    return hidden(tmp_path_factory, "torch")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory, without_torch, interpreters):
    """Output and JSON by bench of a smoke run of every bench, without torch."""
    folder = tmp_path_factory.mktemp("bench")
    ran = interpreters.with_modules("pagecore").run(IN_ONE_PROCESS, str(folder), *NAMES, path=[without_torch])
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, {name: json.loads((folder / f"{name}.json").read_text()) for name in NAMES}


def test_several_benches_write_a_file_each_and_draw_on_request(without_torch, tmp_path):
    folder, picture = tmp_path / "new", tmp_path / "out.png"
    plot = ["--plot", picture] if find_spec("matplotlib") else []
    command = [sys.executable, "-m", "bench", "prepare", "cpu_attention", "--smoke", "--json", folder, *plot]
    environment = os.environ | {"PYTHONPATH": str(without_torch)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert {path.name for path in folder.iterdir()} == {"prepare.json", "cpu_attention.json"}
    assert "\nprepare: " in ran.stdout
    assert "\ncpu_attention: " in ran.stdout
    require("matplotlib")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_without_a_name_every_bench_is_listed_on_a_line(run_bench):
    ran = run_bench()
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*NAMES, *GPU_NAMES, *(["--peer"] * len(PEERS))]
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_every_bench_runs_and_every_figure_has_a_control(smoke, name):
    text, reports = smoke
    assert list(reports[name]["results"]) == [name]
    result = reports[name]["results"][name]
    assert result["failures"] == []
    assert f"\n{name}: " in text
    assert result["figures"]
    for figure in result["figures"]:
        assert figure["name"] in text
        assert figure["rounds"] >= 2
        assert figure["sizes"]
        times = [figure["subject"], *figure["controls"].values()]
        assert len(times) >= 2
        for spread in (*times, *(control["ratio"] for control in figure["controls"].values())):
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]


def test_the_json_holds_machine_versions_and_commit(smoke):
    _, reports = smoke
    report = reports["prepare"]
    assert set(report) == {"machine", "versions", "commit", "started", "kind", "results"}
    assert report["kind"] == "smoke"
    assert {"cpu", "cores", "memory_gib", "governor", "load_1min", "isa"} <= set(report["machine"])
    assert {"python", "pagecore", "numpy", "torch"} <= set(report["versions"])


def test_without_torch_its_controls_are_left_out_and_a_line_says_so(smoke):
    text, reports = smoke
    assert "torch is not installed; its controls are left out" in text
    for name in ("cpu_write", "cpu_attention"):
        controls = [control for figure in reports[name]["results"][name]["figures"] for control in figure["controls"]]
        assert not any("torch" in control for control in controls)


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory, interpreters):
    """Figures by bench of smoke runs with torch and without JAX, in one process: its import takes longer than each."""
    folder, without_jax = tmp_path_factory.mktemp("with_torch"), hidden(tmp_path_factory, "jax")
    names = ("cpu_write", "cpu_attention", "dispatch")
    ran = interpreters.run_with_frameworks(["torch"], IN_ONE_PROCESS, str(folder), *names, path=[without_jax])
    assert ran.returncode == 0, ran.stderr
    assert "JAX is left out, because it is not installed" in ran.stdout
    reports = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    return {name: report["results"][name]["figures"] for name, report in reports.items()}


@pytest.mark.parametrize("name", ["cpu_write", "cpu_attention"])
def test_torch_is_a_control_if_it_is_installed(torch, with_torch, name):
    # Block sizes and instruction sets are compared among themselves.
    figures = [figure for figure in with_torch[name] if not {"block 16", "HND", "x86-64-v2"} & set(figure["controls"])]
    assert figures
    for figure in figures:
        assert any("torch" in control for control in figure["controls"]), figure["name"]


def test_frameworks_that_are_not_installed_are_left_out_of_dispatch(smoke):
    text, reports = smoke
    assert "torch is left out, because it is not installed" in text
    names = [figure["name"] for figure in reports["dispatch"]["results"]["dispatch"]["figures"]]
    assert names[:2] == ["write_kv, NumPy", "paged_attention, NumPy"]
    assert not any("torch" in name for name in names)


def test_dispatch_compares_torch_with_the_plain_call_and_with_its_own_arrays(torch, with_torch):
    for name in ("write_kv, torch eager", "paged_attention, torch eager", "write_kv, torch.compile"):
        (figure,) = (figure for figure in with_torch["dispatch"] if figure["name"] == name)
        assert list(figure["controls"]) == ["pagecore.Tensor", "pagecore's function, torch arrays"]


def test_replay_takes_a_trace_and_a_number_of_requests(run_bench, tmp_path):
    line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    trace, out = tmp_path / "small.jsonl", tmp_path / "out.json"
    trace.write_text((json.dumps(line) + "\n") * 9)
    ran = run_bench("replay", "--smoke", "--trace", trace, "--requests", 4, "--json", out)
    assert ran.returncode == 0, ran.stderr
    facts = json.loads(out.read_text())["results"]["replay"]["facts"]
    assert facts["trace"] == "small.jsonl"
    assert facts["requests"] == 4


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_that_is_missing_is_refused_with_its_recipe_before_anything_runs(peer, run_bench, tmp_path):
    ran = run_bench("prepare", "--peer", peer)
    assert ran.returncode == 2
    assert "pip download" in ran.stderr
    assert str(tmp_path) in ran.stderr
    assert ran.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["prepar"], "unknown bench 'prepar'"),
        (["replay", "--requests", "0"], "expected a number of requests"),
        (["replay", "--trace", "/nowhere/trace.jsonl"], "/nowhere/trace.jsonl is not a file"),
        (["prepare", "--json", "/nowhere/out.json"], "/nowhere/out.json cannot be written"),
        (["prepare", "--json", "/"], "cannot be written"),
        (["prepare", "index", "--json", "/nowhere/out"], "/nowhere/out cannot be written; name a folder"),
        (["prepare", "index", "--json", "pyproject.toml"], "pyproject.toml is a file, and several benches"),
        (["cpu_attention", "--plot", "/nowhere/out.png"], "/nowhere/out.png cannot be written"),
        (["prepare", "--plot", "out.png"], "draws the figures of cpu_attention"),
        (["prepare", "--quick", "--smoke"], "not allowed with"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(arguments, reason, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert reason in shown.err
    assert shown.out == ""


# ---- a bench that fails


class Clockless:
    """Fake bench module: a docstring and `run`."""

    def __init__(self, run):
        self.__doc__, self.run = "A bench of the tests.", run


def one_figure(bench, name="good"):
    bench.compare(name, lambda: None, {"control": lambda: None}, check=lambda: None, sizes={"n": 1})


@pytest.fixture
def bench_named(monkeypatch):
    """Replace a bench by a fake."""

    def put(name, run):
        monkeypatch.setitem(sys.modules, cli.module_of(name), Clockless(run))

    return put


def test_a_bench_that_fails_keeps_its_figures_and_the_exit_status_says_so(bench_named, tmp_path, capfd):
    def run(bench, options):
        one_figure(bench)
        raise AssertionError("a row was not written")

    bench_named("prepare", run)
    path = tmp_path / "out.json"
    assert cli.main(["prepare", "--smoke", "--json", str(path)]) == 1
    result = json.loads(path.read_text())["results"]["prepare"]
    assert [figure["name"] for figure in result["figures"]] == ["good"]
    assert result["failures"] == [{"name": "prepare", "error": "AssertionError: a row was not written"}]
    shown = capfd.readouterr()
    assert "FAILED prepare: AssertionError: a row was not written" in shown.out
    assert "Traceback" in shown.err
    assert shown.err.endswith("bench: prepare: 1 failed\n")


def test_a_bench_that_is_killed_keeps_its_figures(tmp_path):
    path = tmp_path / "out.json"
    code = (
        "import os, sys, types\n"
        "from bench import cli\n"
        "def run(bench, options):\n"
        "    bench.compare('good', list, {'control': list}, check=list)\n"
        "    os.kill(os.getpid(), 9)\n"
        "sys.modules['bench.index.prepare'] = types.SimpleNamespace(__doc__='One.', run=run)\n"
        f"cli.main(['prepare', '--smoke', '--json', {str(path)!r}])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert ran.returncode == -9
    (figure,) = json.loads(path.read_text())["results"]["prepare"]["figures"]
    assert figure["name"] == "good"
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]


def commands_of(monkeypatch, codes):
    """Stub subprocess.run: each process ends with the next code; return the commands."""
    commands, left = [], list(codes)

    def run(command, **options):
        commands.append(command[3:])
        return subprocess.CompletedProcess(command, left.pop(0))

    monkeypatch.setattr(cli.subprocess, "run", run)
    return commands


def test_each_of_several_benches_has_a_process_and_a_file_even_if_others_fail(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "require_gpu", lambda: None)
    commands = commands_of(monkeypatch, [1, -11, *[0] * (len(GPU_NAMES) - 2)])
    assert cli.main([*GPU_NAMES, "--quick", "--json", str(tmp_path / "new")]) == 1
    assert commands == [[name, "--quick", "--json", str(tmp_path / "new" / f"{name}.json")] for name in GPU_NAMES]
    err = capsys.readouterr().err
    assert f"bench: {GPU_NAMES[1]}: ended by signal 11\n" in err
    assert err.endswith(f"bench: 2 of {len(GPU_NAMES)} failed\n")


def test_options_are_passed_to_the_process_of_each_bench(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "_load_peers", lambda options: {})
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").touch()
    commands = commands_of(monkeypatch, [0, 0, 0])
    names = ["prefix", "replay", "--peer", "vllm", "--trace", "trace.jsonl", "--requests", "7", "--json", "out"]
    assert cli.main(names) == 0
    shared = ["--trace", str(tmp_path / "trace.jsonl"), "--requests", "7"]
    assert commands == [
        ["prefix", "--peer", "vllm", "--json", str(tmp_path / "out" / "prefix.json"), *shared],
        ["replay", "--json", str(tmp_path / "out" / "replay.json"), *shared],
        ["--peer", "vllm", "--json", str(tmp_path / "out" / "peer_vllm.json"), *shared],
    ]


def test_only_the_bench_with_a_picture_gets_the_plot_option(monkeypatch, tmp_path):
    require("matplotlib")
    commands = commands_of(monkeypatch, [0, 0])
    assert cli.main(["prepare", "cpu_attention", "--plot", str(tmp_path / "a.png"), "--smoke"]) == 0
    assert commands == [["prepare", "--smoke"], ["cpu_attention", "--smoke", "--plot", str(tmp_path / "a.png")]]


def test_the_commit_of_a_copy_without_a_repository_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("PAGECORE_COMMIT", "0123456789ab")
    assert machine.commit() == "0123456789ab"
    monkeypatch.setenv("PAGECORE_COMMIT", "")
    assert machine.commit() != ""
