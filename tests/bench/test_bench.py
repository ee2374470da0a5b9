"""``python -m bench``: the names, a smoke run of each, the JSON, and what it says where something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli import GPU_NAMES, NAMES, PEERS
from tests.capabilities import require

ROOT = Path(__file__).parent.parent.parent


def run_bench(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "bench", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    """A folder that hides torch."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "torch.py").write_text("raise ImportError('torch is hidden')\n")
    return str(folder)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory, without_torch):
    """Lines and JSON of a smoke run of every bench, on a machine that might have no torch."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    ran = run_bench(*NAMES, "--smoke", "--json", path, PYTHONPATH=without_torch)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, json.loads(path.read_text())


def test_without_a_name_the_names_are_listed_with_a_line_each():
    ran = run_bench()
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*NAMES, *GPU_NAMES, *(["--peer"] * len(PEERS))]
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_every_bench_runs_and_holds_every_figure_against_a_control(smoke, name):
    text, report = smoke
    result = report["results"][name]
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


def test_the_json_says_where_and_with_what(smoke):
    _, report = smoke
    assert set(report) == {"machine", "versions", "commit", "started", "kind", "results"}
    assert report["kind"] == "smoke"
    assert {"cpu", "cores", "memory_gib", "governor", "load_1min", "isa"} <= set(report["machine"])
    assert {"python", "pagecore", "numpy", "torch"} <= set(report["versions"])
    assert list(report["results"]) == list(NAMES)


def test_without_torch_its_controls_are_left_out_and_a_line_says_so(smoke):
    text, report = smoke
    assert "torch is not installed; its controls are left out" in text
    for name in ("cpu_write", "cpu_attention"):
        controls = [control for figure in report["results"][name]["figures"] for control in figure["controls"]]
        assert not any("torch" in control for control in controls)


def test_torch_stands_beside_where_it_is_installed(torch, tmp_path):
    path = tmp_path / "out.json"
    ran = run_bench("cpu_write", "cpu_attention", "--smoke", "--json", path)
    assert ran.returncode == 0, ran.stderr
    for result in json.loads(path.read_text())["results"].values():
        # Block sizes and instruction sets are compared among themselves.
        figures = [
            figure for figure in result["figures"] if not {"block 16", "HND", "x86-64-v2"} & set(figure["controls"])
        ]
        assert figures
        for figure in figures:
            assert any("torch" in control for control in figure["controls"]), figure["name"]


def test_frameworks_that_are_not_installed_are_left_out_of_dispatch(smoke):
    text, report = smoke
    assert "torch is not installed and left out" in text
    names = [figure["name"] for figure in report["results"]["dispatch"]["figures"]]
    assert names[:2] == ["write_kv, NumPy", "paged_attention, NumPy"]
    assert not any("torch" in name for name in names)


def test_dispatch_holds_torch_against_the_plain_call_and_its_own_arrays(torch, tmp_path):
    path = tmp_path / "out.json"
    ran = run_bench("dispatch", "--smoke", "--json", path)
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(path.read_text())["results"]["dispatch"]["figures"]
    for name in ("write_kv, torch eager", "paged_attention, torch eager", "write_kv, torch.compile"):
        (figure,) = (figure for figure in figures if figure["name"] == name)
        assert list(figure["controls"]) == ["pagecore.Tensor", "pagecore's function, torch arrays"]


def test_replay_takes_a_trace_and_a_number_of_requests(tmp_path):
    line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    trace, out = tmp_path / "small.jsonl", tmp_path / "out.json"
    trace.write_text((json.dumps(line) + "\n") * 9)
    ran = run_bench("replay", "--smoke", "--trace", trace, "--requests", 4, "--json", out)
    assert ran.returncode == 0, ran.stderr
    facts = json.loads(out.read_text())["results"]["replay"]["facts"]
    assert facts["trace"] == "small.jsonl"
    assert facts["requests"] == 4


def test_a_picture_is_drawn_where_it_is_wanted(without_torch, tmp_path):
    require("matplotlib")
    ran = run_bench("cpu_attention", "--smoke", "--plot", tmp_path / "out.png", PYTHONPATH=without_torch)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_that_is_missing_is_refused_with_its_recipe_before_anything_runs(peer, tmp_path):
    ran = run_bench("prepare", "--peer", peer, PAGECORE_PEERS=str(tmp_path))
    assert ran.returncode == 2
    assert "pip download" in ran.stderr
    assert str(tmp_path) in ran.stderr
    assert ran.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["prepair"], "no bench 'prepair'"),
        (["replay", "--requests", "0"], "not a number of requests"),
        (["replay", "--trace", "/nowhere/trace.jsonl"], "/nowhere/trace.jsonl is no file"),
        (["prepare", "--json", "/nowhere/out.json"], "/nowhere/out.json cannot be written"),
        (["prepare", "--json", "/"], "cannot be written"),
        (["cpu_attention", "--plot", "/nowhere/out.png"], "/nowhere/out.png cannot be written"),
        (["prepare", "--plot", "out.png"], "draws what cpu_attention reaches"),
        (["prepare", "--quick", "--smoke"], "not allowed with"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(arguments, reason):
    ran = run_bench(*arguments)
    assert ran.returncode == 2
    assert reason in ran.stderr
    assert ran.stdout == ""
