"""bench/gpu_check.sh: what it runs, how steps end, and that it refuses at once where there is no GPU."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import gpu_check
from bench.cli import GPU_NAMES
from bench.gpu_check import Outcome, Step, find_gpu, main, run_step, run_steps, steps, table

ROOT = Path(__file__).parent.parent.parent
GPU = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0"}


def step(code, name="one", limit_s=60.0):
    return Step(name, (sys.executable, "-c", code), limit_s)


def test_a_step_shows_what_it_prints_and_keeps_its_last_line(capfd):
    outcome = run_step(step("print('first'); import sys; print('last', file=sys.stderr); print()"), 60)
    assert (outcome.code, outcome.last) == (0, "last")
    assert capfd.readouterr().out == "first\nlast\n\n"


def test_a_step_that_fails_keeps_its_exit_code():
    assert run_step(step("raise SystemExit(3)"), 60).code == 3


def test_a_step_is_ended_with_all_that_it_started_when_its_time_is_up():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    begin = time.monotonic()
    outcome = run_step(step(code), 1.0)
    assert outcome.code == -9
    assert time.monotonic() - begin < 60


def test_what_a_step_needs_is_required_of_the_tests():
    outcome = run_step(step("import os; print(os.environ['PAGECORE_REQUIRE'])"), 60)
    assert outcome.last == "gpu,torch,nvrtc"


def test_steps_follow_each_other_whatever_became_of_the_last_and_none_passes_the_deadline():
    planned = [step("raise SystemExit(3)", "a"), step("import time; time.sleep(600)", "b"), step("print(1)", "c")]
    outcomes = run_steps(planned, time.monotonic() + 5)
    assert [outcome.code for outcome in outcomes.values()] == [3, -9, -9]
    assert list(outcomes) == ["a", "b", "c"]


def test_all_steps_together_fit_into_nine_minutes_and_the_benches_are_all_there(tmp_path):
    planned = steps(tmp_path, ("--quick",))
    assert [each.name for each in planned][:4] == ["build", "kernels", "tests", "bench"]
    assert sum(each.limit_s for each in planned[:4]) <= gpu_check.TOTAL_S < 540
    assert tuple(gpu_check.BENCHES) == GPU_NAMES


def test_the_memory_checker_is_run_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: f"/opt/{name}")
    assert steps(tmp_path, ())[-1].command[:3] == ("/opt/compute-sanitizer", "--error-exitcode", "9")
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)
    assert steps(tmp_path, ())[-1].name == "bench"


def test_the_table_has_a_line_a_step():
    lines = table(
        {"build": Outcome(0, 12.3, "done"), "tests": Outcome(1, 4.0, "2 failed"), "bench": Outcome(-9, 9, "")}
    )
    assert [line.split()[:2] for line in lines.splitlines()] == [
        ["build", "passed"],
        ["tests", "failed"],
        ["bench", "took"],
    ]


@pytest.mark.parametrize(("code", "expected"), [("pass", 0), ("raise SystemExit(1)", 1)])
def test_everything_is_written_where_it_is_wanted(tmp_path, monkeypatch, capsys, code, expected):
    def two_steps(out, kind):
        assert kind == ("--smoke",)
        figures = f"import json; json.dump({{'seen': 1}}, open({str(out / 'bench.json')!r}, 'w'))"
        return [step(figures, "bench"), step(code, "tests")]

    monkeypatch.setattr(gpu_check, "find_gpu", lambda: GPU)
    monkeypatch.setattr(gpu_check, "steps", two_steps)
    assert main(["--smoke", "--out", str(tmp_path / "deep" / "results")]) == expected
    (path,) = (tmp_path / "deep" / "results").iterdir()
    report = json.loads(path.read_text())
    assert path.name == f"nvidia-h200-{report['date'][:10]}-{report['commit']}.json"
    assert report | GPU == report
    assert (report["bench"], report["kernels"]) == ({"seen": 1}, None)
    assert report["steps"]["tests"]["code"] == expected
    assert str(path) in capsys.readouterr().out


def test_without_a_gpu_one_line_says_so_before_anything_is_built(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "find_gpu", lambda: "needs a GPU: the NVIDIA driver sees no device")
    assert main(["--out", str(tmp_path / "results")]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "gpu_check: needs a GPU: the NVIDIA driver sees no device\n")
    assert not (tmp_path / "results").exists()


class Driver:
    """libcuda.so.1 that starts and sees so many devices."""

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
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(1))
    monkeypatch.setattr(gpu_check, "_ask_smi", lambda field: "580.1")
    assert find_gpu() == {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.2"}


@pytest.mark.parametrize("driver", [Driver(0), Driver(1, code=100)])
def test_a_driver_without_a_device_is_no_gpu(monkeypatch, driver):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert find_gpu() == "needs a GPU: the NVIDIA driver sees no device"


def test_a_machine_without_a_driver_has_no_gpu(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert find_gpu() == "needs a GPU: the NVIDIA driver (libcuda.so.1) is not on this machine"


def test_the_script_starts_the_module_from_anywhere(tmp_path):
    ran = subprocess.run(
        ["bash", str(ROOT / "bench" / "gpu_check.sh"), "--help"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "bench/gpu_check.sh" in ran.stdout
