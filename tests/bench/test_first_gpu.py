"""bench/first_gpu.sh: its steps, their limits and files, and its stop after the facts without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from bench import first_gpu
from bench.cli import GPU_NAMES
from bench.first_gpu import archive, environment, main, make_private, steps, table
from bench.gpu import facts
from bench.gpu.facts import find_gpu
from bench.gpu.steps import LATE, Outcome, Step, run_step, tail, trimmed
from pagecore.ops.cuda.compilation.compiler import Cubin
from pagecore.ops.cuda.compilation.cubins import read_cubin, write_cubin

pytestmark = pytest.mark.serial  # steps have time limits

ROOT = Path(__file__).parent.parent.parent
GPU = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0"}


def step(code, name="one", limit_s=60.0):
    return Step(name, (sys.executable, "-c", code), limit_s)


def shell_step(script, name="one"):
    """A step that reaches its time limit: a shell has started, and set its traps, long before."""
    return Step(name, ("sh", "-c", script), 1.0)


@pytest.fixture
def run(tmp_path):
    """Run one step; return its outcome and its output."""

    def run_one(code, limit_s=60.0):
        output = tmp_path / "step.log"
        outcome = run_step(step(code), limit_s, output, os.environ, ROOT)
        return outcome, output.read_text()

    return run_one


# ---- steps


def test_a_step_writes_its_output_to_a_file_and_keeps_the_last_line(run):
    outcome, output = run("print('first', flush=True); import sys; print('last', file=sys.stderr); print()")
    assert (outcome.code, outcome.verdict, outcome.last) == (0, "passed", "last")
    assert sorted(output.split()) == ["first", "last"]


def test_a_step_that_fails_keeps_its_exit_code_or_signal(run):
    assert run("raise SystemExit(3)")[0].verdict == "failed (3)"
    assert run("import os; os.kill(os.getpid(), 11)")[0].verdict == "signal 11"


def test_a_step_that_cannot_be_started_fails_with_the_reason(tmp_path):
    outcome = run_step(Step("a", ("/nowhere/a",), 1), 1, tmp_path / "step.log", os.environ, ROOT)
    assert outcome.code == 127
    assert "/nowhere/a cannot be started" in outcome.last


def test_a_step_without_time_is_not_started(run):
    outcome, output = run("print('started')", limit_s=0.0)
    assert outcome.code == LATE
    assert output == "no time left for this step\n"


@pytest.mark.parametrize("parent", ["accepts interrupts", "ignores them"])
def test_a_step_that_takes_too_long_is_interrupted_and_can_still_print(tmp_path, parent):
    late = shell_step("trap 'echo 2 failed so far' INT; sleep 600")  # a shell cannot trap what its parent ignores
    before = signal.getsignal(signal.SIGINT)
    own = signal.SIG_IGN if parent == "ignores them" else before
    signal.signal(signal.SIGINT, own)
    try:
        outcome = run_step(late, late.limit_s, tmp_path / "step.log", os.environ, ROOT)
        assert signal.getsignal(signal.SIGINT) == own
    finally:
        signal.signal(signal.SIGINT, before)
    assert (outcome.code, outcome.verdict, outcome.last) == (LATE, "took too long", "2 failed so far")


def test_a_step_that_ignores_the_interrupt_is_killed_with_its_children(monkeypatch, tmp_path):
    monkeypatch.setattr("bench.gpu.steps.GRACE_S", 0.5)
    late = shell_step("trap '' INT; sleep 600 & echo $!; wait")
    begin = time.monotonic()
    outcome = run_step(late, late.limit_s, tmp_path / "step.log", os.environ, ROOT)
    assert outcome.code == LATE
    assert time.monotonic() - begin < 60
    pid = int((tmp_path / "step.log").read_text())
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() - begin < 60, "the child is alive"


def test_a_long_output_keeps_its_begin_and_its_end():
    text = b"begin" + bytes(10_000) + b"end"
    kept = trimmed(text, 1000)
    assert len(kept) < 1100
    assert kept.startswith(b"begin")
    assert kept.endswith(b"end")
    assert b"9,008 bytes left out" in kept
    assert trimmed(text, len(text)) == text
    assert tail(b"a\n\nb\nccc\n", 2, width=2) == "b\ncc\n"


# ---- the plan


def test_all_steps_together_fit_into_nine_minutes(tmp_path):
    planned = steps(tmp_path, ("--quick",))
    assert sum(each.limit_s for each in planned) + 20 <= first_gpu.TOTAL_S < 540
    assert planned[0].name == "build"
    assert planned[0].limit_s <= 110


def test_smoke_runs_may_take_what_earlier_steps_left(tmp_path, monkeypatch):
    limits = []

    def record(step, limit_s, output, environment, folder):
        output.write_bytes(b"")
        limits.append(limit_s)
        return Outcome(0, 4.0, "")

    monkeypatch.setattr(first_gpu, "run_step", record)
    run = first_gpu.Run(tmp_path, time.monotonic() + 100)
    for step in (Step("one", (), 10), Step("two", (), 15, 45), Step("three", (), 15, 5), Step("four", (), 15)):
        run.take(step)
    assert limits == [10, 21, 20, 15]
    run.take(Step("five", (), 99, 45))
    assert 90 < limits[-1] <= 100
    assert {each.extra_s for each in steps(tmp_path, ()) if each.name.startswith("smoke")} == {45}
    assert {each.extra_s for each in steps(tmp_path, ()) if each.name.startswith("bench")} == {30}


def test_kernels_that_came_with_the_tree_become_private(tmp_path):
    folder = tmp_path / "cubins"
    folder.mkdir()
    first = tmp_path / "one"
    first.write_bytes(b"image")
    found = Cubin(b"image", {"k": "_Zk"}, "")
    assert write_cubin(folder / "a.cubin", found)
    folder.chmod(0o777)
    (folder / "a.cubin").chmod(0o666)
    (folder / "link").symlink_to(first)
    with pytest.warns(RuntimeWarning, match="is not used"):
        assert read_cubin(folder / "a.cubin") is None
    make_private(folder)
    assert read_cubin(folder / "a.cubin") == found
    assert [each.name for each in folder.iterdir()] == ["a.cubin"]
    assert first.read_bytes() == b"image"
    make_private(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_kernels_become_private_although_their_former_folder_cannot_be_removed(tmp_path, monkeypatch):
    folder, rmtree = tmp_path / "cubins", shutil.rmtree
    (folder / "other").mkdir(parents=True)
    (folder / "a.cubin").write_bytes(b"image")

    def remove(path, ignore_errors=False, **options):
        if (path / "other").is_dir():
            (path / "a.cubin").unlink()
            if ignore_errors:
                return
            raise PermissionError("a folder of another user")
        rmtree(path, ignore_errors, **options)

    monkeypatch.setattr(shutil, "rmtree", remove)
    make_private(folder)
    assert [each.name for each in folder.iterdir()] == ["a.cubin"]
    assert (folder / "a.cubin").read_bytes() == b"image"


def test_all_smoke_runs_and_the_benches_of_decode_precede_the_tests(tmp_path):
    planned = {each.name: each.command for each in steps(tmp_path, ("--quick",))}
    assert list(planned) == [
        "build",
        "kernels",
        *(f"smoke {name}" for name in GPU_NAMES),
        "bench gpu_decode",
        "bench gpu_latent",
        "tests",
        *(f"bench {name}" for name in GPU_NAMES[2:]),
    ]
    for name in GPU_NAMES:
        assert planned[f"smoke {name}"][1:] == ("-m", "bench", name, "--smoke")
        path = str(tmp_path / f"{name}.json")
        assert planned[f"bench {name}"][1:] == ("-m", "bench", name, "--quick", "--json", path)


def test_the_tests_run_in_eight_processes_where_xdist_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(first_gpu, "find_spec", lambda name: object())
    (command,) = (each.command for each in steps(tmp_path, ()) if each.name == "tests")
    text = " ".join(command)
    assert "pytest tests/gpu -v" in text
    assert "-n 8 --dist loadfile" in text
    assert "-Wdefault" in text
    monkeypatch.setattr(first_gpu, "find_spec", lambda name: None)
    (command,) = (each.command for each in steps(tmp_path, ()) if each.name == "tests")
    assert "-n" not in command


def test_the_build_is_a_command_that_setup_knows(tmp_path):
    (build,) = (each for each in steps(tmp_path, ()) if each.name == "build")
    variables = os.environ | {"PAGECORE_PREBUILT": "1"}
    ran = subprocess.run([*build.command, "--help"], cwd=ROOT, env=variables, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert b"--parallel" in ran.stdout


def test_the_environment_of_a_step_names_required_capabilities_and_the_kernel_cache():
    found = environment("0123456789ab")
    assert found["PAGECORE_REQUIRE"] == "gpu,torch,nvrtc"
    assert found["PAGECORE_COMMIT"] == "0123456789ab"
    assert Path(found["PAGECORE_CACHE_DIR"]).is_relative_to(ROOT / "build")


# ---- the files


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Fake a GPU, a tree and steps; return the function that runs them."""
    (tmp_path / "tree" / "pagecore").mkdir(parents=True)
    cubins = tmp_path / "tree" / "build" / "cubins"
    monkeypatch.setattr(first_gpu, "ROOT", tmp_path / "tree")
    monkeypatch.setattr(first_gpu, "CUBINS", cubins)
    monkeypatch.setattr(first_gpu, "find_gpu", lambda: GPU)
    monkeypatch.setenv("PAGECORE_COMMIT", "0123456789ab")
    out = tmp_path / "deep" / "out"

    def run(*planned, total_s=60.0):
        monkeypatch.setattr(first_gpu, "TOTAL_S", total_s)
        monkeypatch.setattr(first_gpu, "steps", lambda folder, kind: list(planned))
        return main(["--out", str(out)]), json.loads((out / "summary.json").read_text()), out

    monkeypatch.setattr(first_gpu.Run, "take", without_facts(first_gpu.Run.take))
    return run


def without_facts(take):
    """Replace the facts step, whose module is not in the fake tree."""
    return lambda self, each: take(self, step("print('facts')", "facts") if each.name == "facts" else each)


def test_a_failed_step_does_not_stop_the_next_and_none_passes_the_deadline(machine):
    planned = [step("raise SystemExit(3)", "a"), Step("b", ("sleep", "600"), 60.0), step("print(1)", "c")]
    code, summary, _ = machine(*planned, total_s=2.0)
    assert code == 1
    assert {name: each["code"] for name, each in summary["steps"].items()} == {"facts": 0, "a": 3, "b": LATE, "c": LATE}
    assert "no time left" in summary["steps"]["c"]["last"]


def test_a_run_writes_few_files_and_ends_with_a_summary(machine, capsys):
    begin = "from pathlib import Path; Path('pagecore/_a" + first_gpu.EXTENSION_SUFFIXES[0] + "').write_text('built'); "
    build = step(begin + "import os; os.makedirs('build/cubins', 0o700); print('x' * 900)", "build")
    code, summary, out = machine(build, step("print('12 passed')", "tests"))
    assert code == 0
    assert sorted(each.name for each in out.iterdir()) == ["built.tar.gz", "log.txt", "summary.json"]
    assert summary | GPU == summary
    assert summary["commit"] == "0123456789ab"
    assert summary["steps"]["tests"]["last"] == "12 passed"
    log = (out / "log.txt").read_text()
    assert "x" * 900 in log
    shown = capsys.readouterr().out
    assert "x" * 400 + "\n" in shown
    assert "x" * 401 not in shown
    assert log.endswith(shown[shown.rindex("\nfacts ") :])
    assert shown.splitlines()[-2].split() == ["tests", "passed", *shown.splitlines()[-2].split()[2:4], "12", "passed"]
    with tarfile.open(out / "built.tar.gz") as packed:
        names = packed.getnames()
        assert names == [f"pagecore/_a{first_gpu.EXTENSION_SUFFIXES[0]}", "build/cubins"]
        assert packed.getmember("build/cubins").mode == 0o700


def test_the_files_are_complete_before_every_step(machine, monkeypatch):
    seen = []

    def look(outcome_of):
        def take(self, each):
            seen.append(sorted(path.name for path in self.out.iterdir()) if self.outcomes else [])
            return outcome_of(self, each)

        return take

    monkeypatch.setattr(first_gpu.Run, "take", look(first_gpu.Run.take))
    machine(step("print(1)", "build"), step("print(2)", "tests"))
    assert seen == [[], ["log.txt", "summary.json"], ["built.tar.gz", "log.txt", "summary.json"]]


def test_the_archive_holds_only_extensions_of_this_interpreter(tmp_path, monkeypatch):
    monkeypatch.setattr(first_gpu, "ROOT", tmp_path)
    monkeypatch.setattr(first_gpu, "CUBINS", tmp_path / "none")
    folder = tmp_path / "pagecore" / "index"
    folder.mkdir(parents=True)
    for suffix in (first_gpu.EXTENSION_SUFFIXES[0], ".cpython-27-x.so", ".py"):
        (folder / f"_a{suffix}").write_text(suffix)
    archive(tmp_path / "built.tar.gz")
    with tarfile.open(tmp_path / "built.tar.gz") as packed:
        assert packed.getnames() == [f"pagecore/index/_a{first_gpu.EXTENSION_SUFFIXES[0]}"]


def test_the_table_has_a_line_for_each_step():
    lines = table(
        {"build": Outcome(0, 12.3, "done"), "tests": Outcome(1, 4.0, "2 failed"), "bench": Outcome(LATE, 9, "")}
    )
    assert [line.split()[:2] for line in lines.splitlines()] == [
        ["build", "passed"],
        ["tests", "failed"],
        ["bench", "took"],
    ]


# ---- without a GPU


def test_without_a_gpu_the_script_stops_after_the_facts_with_a_reason_and_exits_with_2(tmp_path):
    out = tmp_path / "out"
    variables = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OUT": str(out), "PAGECORE_COMMIT": "0123456789ab"}
    ran = subprocess.run(
        ["bash", str(ROOT / "bench" / "first_gpu.sh")],
        cwd=tmp_path,
        env=variables | {"CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 2, ran.stderr
    assert "first_gpu: needs a GPU: the NVIDIA driver" in ran.stderr
    assert "== facts: passed" in ran.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["steps"]) == ["facts"]
    assert summary["error"].startswith("needs a GPU")
    assert summary["commit"] == "0123456789ab"
    assert sorted(each.name for each in out.iterdir()) == ["log.txt", "summary.json"]
    log = (out / "log.txt").read_text()
    for fact in ("gpu: needs a GPU", "python: ", "packages: ", "cores: ", "tools: g++ "):
        assert f"\n{fact}" in log


def test_the_files_go_to_an_ignored_folder_by_default(monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    out = first_gpu._parser().parse_args([]).out
    ran = subprocess.run(["git", "-C", str(ROOT), "check-ignore", "-q", str(out / "log.txt")], check=False)
    assert ran.returncode in (0, 128)  # 128: the tree is not a repository
    assert out.is_relative_to(ROOT / "build")
    monkeypatch.setenv("OUT", "/elsewhere")
    assert first_gpu._parser().parse_args([]).out == Path("/elsewhere")


class Driver:
    """Fake libcuda.so.1 with `count` devices."""

    def __init__(self, count, code=0):
        self.count, self.code = count, code

    def cuInit(self, flags):
        return self.code

    def cuDeviceGetCount(self, count):
        count._obj.value = self.count
        return 0

    def cuDriverGetVersion(self, version):
        version._obj.value = 13020
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = b"NVIDIA H200"
        return 0


def test_the_gpu_and_its_driver_are_found(monkeypatch):
    monkeypatch.setattr(facts.ctypes, "CDLL", lambda name: Driver(1))
    monkeypatch.setattr(facts, "ask_smi", lambda field: "580.1")
    assert find_gpu() == {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.2"}


@pytest.mark.parametrize("driver", [Driver(0), Driver(1, code=100)])
def test_a_driver_without_a_device_is_reported(monkeypatch, driver):
    monkeypatch.setattr(facts.ctypes, "CDLL", lambda name: driver)
    assert find_gpu() == "needs a GPU: the NVIDIA driver sees no device"


def test_a_missing_driver_is_reported(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(facts.ctypes, "CDLL", missing)
    assert find_gpu() == "needs a GPU: the NVIDIA driver (libcuda.so.1) is not on this machine"


def test_the_commit_comes_from_the_environment_or_the_repository_or_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGECORE_COMMIT", "0123456789ab")
    assert facts.commit(tmp_path) == "0123456789ab"
    monkeypatch.delenv("PAGECORE_COMMIT")
    assert facts.commit(tmp_path) == "unknown"
