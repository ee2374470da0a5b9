"""Calls on several threads: their number, forks, concurrent calls, and the end of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import pagecore
from pagecore import errors, ops
from pagecore.ops.cpu_count import usable_cores
from tests.ops.cases import Shape, make_case
from tests.ops.threaded_calls import DECODE, HEADS, MIXED, WRONG, signal_bits

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _given_back():
    yield
    pagecore.set_num_threads(None)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter, which must end."""
    helpers = "from tests.ops import threaded_calls as t\n" if "t." in code else ""
    code = f"import sys, os, threading\nimport pagecore\n{helpers}{code}"
    env = {name: value for name, value in os.environ.items() if name != "PAGECORE_NUM_THREADS"} | environment
    # Python 3.12 warns of forks in processes with threads.
    options = ["-W", "ignore:This process:DeprecationWarning", "-c", code]
    return subprocess.run(
        [sys.executable, *options], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def succeeds(code: str, **environment: str) -> str:
    done = run(code, **environment)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


# ---- number of threads


def test_the_default_is_the_number_of_cores():
    assert int(succeeds("print(pagecore.num_threads())")) == usable_cores()
    assert int(succeeds("print(pagecore.num_threads())", PAGECORE_NUM_THREADS="")) == usable_cores()
    assert int(succeeds("print(pagecore.num_threads())", PAGECORE_NUM_THREADS="7")) == 7


def test_set_num_threads_says_how_many_and_none_is_the_default_again():
    default = pagecore.set_num_threads(None)
    assert pagecore.set_num_threads(5) == pagecore.num_threads() == 5
    assert pagecore.set_num_threads(np.int64(1024)) == pagecore.num_threads() == 1024
    assert pagecore.set_num_threads(None) == pagecore.num_threads() == default


@pytest.mark.parametrize("count", [0, -1, 1025, 2**70, 2.0, "2", [2]])
def test_an_invalid_count_is_refused_and_changes_nothing(count):
    pagecore.set_num_threads(3)
    with pytest.raises(errors.UnsupportedOption, match="number of threads is"):
        pagecore.set_num_threads(count)
    assert pagecore.num_threads() == 3


def test_an_invalid_environment_variable_is_an_error_of_the_first_call_that_reads_it():
    """Each value is that of a process which has not read the variable yet: a child of one that has only imported."""
    said = succeeds(
        "def refused(call):\n"
        "  try: call()\n"
        "  except pagecore.UnsupportedOption as error: print(error)\n"
        "  else: print('served')\n"
        "t.decode_case()\n"
        "for wrong in t.WRONG:\n"
        "  if child := os.fork():\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    continue\n"
        "  os.environ['PAGECORE_NUM_THREADS'] = wrong\n"
        "  refused(pagecore.num_threads); refused(t.attend)\n"
        "  refused(lambda: pagecore.plan_attention(None, [9], **t.HEADS))\n"
        "  pagecore.set_num_threads(2); t.attend()\n"
        "  refused(lambda: pagecore.set_num_threads(None)); print(pagecore.num_threads())\n"
        "  break\n",
    ).splitlines()
    assert len(said) == 5 * len(WRONG)
    for wrong, lines in zip(WRONG, np.reshape(said, (len(WRONG), 5)).tolist(), strict=True):
        assert len(set(lines[:4])) == 1
        assert f"PAGECORE_NUM_THREADS is {wrong!r}" in lines[0]
        assert "1 to 1024, or unset" in lines[0]
        assert lines[4:] == ["2"]


def test_a_plan_is_for_the_number_of_threads_at_the_time_of_planning():
    pagecore.set_num_threads(2)
    plan = pagecore.plan_attention(None, [16384], **HEADS)
    assert plan.num_workers == 2
    pagecore.set_num_threads(16)
    given = pagecore.plan_attention(None, [16384], **HEADS, num_workers=3)
    assert given.num_workers == 3
    fewer = plan.num_items
    assert pagecore.plan_attention(None, [16384], **HEADS, out=plan) is plan
    assert plan.num_workers == 16
    assert plan.num_items > fewer
    with pytest.raises(errors.ShapeError):
        pagecore.plan_attention(None, [-1], **HEADS, num_workers=4, out=plan)
    assert plan.num_workers == 16


# ---- cores


def fake_root(tmp_path: Path, cgroup: str, **files: str) -> Path:
    """Create a tree with proc/self/cgroup, and files of sys/fs/cgroup by path (__ for /)."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def many_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))


V2 = "0::/system.slice/engine.service\n"
V1 = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/elsewhere\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("", {}, 12),
        (V2, {}, 12),
        (V2, {"system.slice__engine.service__cpu.max": "max 100000\n"}, 12),
        (V2, {"system.slice__engine.service__cpu.max": "400000 100000\n"}, 4),
        (V2, {"system.slice__engine.service__cpu.max": "250000 100000\n"}, 3),
        (V2, {"system.slice__engine.service__cpu.max": "1000 100000\n"}, 1),
        (V2, {"system.slice__engine.service__cpu.max": "9900000 100000\n"}, 12),
        (V2, {"system.slice__engine.service__cpu.max": "800000 100000", "system.slice__cpu.max": "200000 100000"}, 2),
        (V2, {"system.slice__engine.service__cpu.max": "nonsense"}, 12),
        (V2, {"system.slice__engine.service__cpu.max": "100000 0"}, 12),
        ("0::/\n", {"cpu.max": "500000 100000\n"}, 5),  # inside a container
        ("0::/../outside\n", {"cpu.max": "500000 100000\n"}, 5),
        (V1, {"cpu,cpuacct__docker__abc__cpu.cfs_quota_us": "300000\n"}, 12),
        (
            V1,
            {
                "cpu,cpuacct__docker__abc__cpu.cfs_quota_us": "300000\n",
                "cpu,cpuacct__docker__abc__cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (V1, {"cpu__cpu.cfs_quota_us": "150000\n", "cpu__cpu.cfs_period_us": "100000\n"}, 2),  # inside a container
        (V1, {"cpu__cpu.cfs_quota_us": "-1\n", "cpu__cpu.cfs_period_us": "100000\n"}, 12),
    ],
)
def test_cores_are_the_affinity_cut_to_the_quota_of_the_control_group(many_cores, tmp_path, cgroup, files, cores):
    assert usable_cores(fake_root(tmp_path, cgroup, **files)) == cores


def test_cores_are_the_affinity_without_control_groups(many_cores, tmp_path):
    assert usable_cores(tmp_path) == 12


# ---- the threads


def test_threads_start_with_the_first_call_that_they_share_and_block_every_signal_but_faults():
    said = succeeds(
        "pagecore.set_num_threads(3)\n"
        "t.make_case(t.Shape(seq_lens=(9, 5))).run(); print(sorted(t.own_threads()))\n"
        "t.attend(3); print(*t.own_threads().items())\n"
        "t.attend(5); print(sorted(t.own_threads()))\n"
        "t.attend(2); print(len(t.own_threads()))"
    )
    faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
    every = signal_bits(signal.valid_signals() - faults - {signal.SIGKILL, signal.SIGSTOP})
    assert said.splitlines() == [
        "[]",
        f"('pagecore-1', {every}) ('pagecore-2', {every})",
        "['pagecore-1', 'pagecore-2', 'pagecore-3', 'pagecore-4']",
        "4",
    ]


@pytest.mark.parametrize("shape", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_any_number_of_threads_gives_the_result(shape, num_threads):
    pagecore.set_num_threads(num_threads)
    make_case(shape, sinks=np.linspace(-1, 1, 8, dtype=np.float32)).check()


@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_merge_has_the_bits_of_one_thread(num_threads):
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((2, 301, 8, 128)).astype(np.float32)
    lses = rng.standard_normal((2, 301, 8)).astype(np.float32)
    given = outs[0], lses[0], outs[1], lses[1]
    pagecore.set_num_threads(1)
    expected = ops.merge_attention(*given)
    pagecore.set_num_threads(num_threads)
    for got, whole in zip(ops.merge_attention(*given), expected, strict=True):
        assert got.tobytes() == whole.tobytes()


def test_padding_rows_are_cleared_by_any_number_of_threads():
    for num_threads in (1, 4):
        pagecore.set_num_threads(num_threads)
        case = make_case(Shape(seq_lens=(2000, 2000), query_lens=(1, 1), heads=(32, 4), padding=700))
        out = np.full(case.query.shape, np.nan, np.float32)
        _, lse = case.run(out=out, return_lse=True)
        assert not out[2:].any()
        assert np.isneginf(lse[2:]).all()
        assert np.isfinite(out).all()


def test_calls_of_several_python_threads_at_once_give_the_same_bits_as_alone():
    case = make_case(DECODE)
    plan = pagecore.plan_attention(None, case.seq_lens, num_query_heads=8, num_kv_heads=4, num_workers=4)
    expected = case.run(plan=plan).tobytes()
    wrong = []

    def call(seed: int) -> None:
        for i in range(30):
            pagecore.set_num_threads((seed + i) % 6 + 1)
            if case.run(plan=plan).tobytes() != expected:
                wrong.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


# ---- forks


def test_a_forked_child_starts_threads_of_its_own():
    said = succeeds(
        "expected = t.attend(4).tobytes()\n"
        "for _ in range(3):\n"
        "  if child := os.fork():\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "  else:\n"
        "    assert not t.own_threads()\n"
        "    assert t.attend(4).tobytes() == expected and len(t.own_threads()) == 3\n"
        "    if grandchild := os.fork():\n"
        "      assert os.waitpid(grandchild, 0)[1] == 0\n"
        "    else: assert t.attend(3).shape\n"
        "    os._exit(0)\n"
        "assert t.attend(4).tobytes() == expected; print('done')"
    )
    assert said == "done\n"


def test_a_child_works_that_was_forked_while_other_threads_were_in_a_call():
    said = succeeds(
        "t.attend(3); stop = False\n"
        "def work():\n"
        "  while not stop: t.attend()\n"
        "workers = [threading.Thread(target=work, daemon=True) for _ in range(2)]\n"
        "for worker in workers: worker.start()\n"
        "for _ in range(10):\n"
        "  if child := os.fork():\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "  else:\n"
        "    t.attend(); assert len(t.own_threads()) == 2; os._exit(0)\n"
        "stop = True\n"
        # NumPy's own work, in a thread that the interpreter ends, would end the process.
        "for worker in workers: worker.join()\n"
        "print('done')"
    )
    assert said == "done\n"


def test_multiprocessing_forks():
    said = succeeds(
        "from multiprocessing import get_context\n"
        "expected = t.attend(4).tobytes()\n"
        "with get_context('fork').Pool(2) as pool:\n"
        "  assert [each.tobytes() for each in pool.map(t.attend, [4] * 6)] == [expected] * 6\n"
        "print('done')"
    )
    assert said == "done\n"


# ---- end of the process


ENDINGS = [
    "",
    "sys.exit(0)",
    "os._exit(0)",
    "import atexit; atexit.register(t.attend)",
    "import gc; del sys.modules['pagecore.ops.cpu._cpu']; gc.collect()",
    # A call alone: NumPy's own work, in a daemon thread, does not survive the end of the interpreter.
    "c = t.make_case(t.DECODE); threading.Thread(target=lambda: [c.run() for _ in [0] * 999], daemon=True).start()",
    "threading.Thread(target=lambda: [t.attend() for _ in range(5)]).start()",
]


def test_a_process_ends_while_its_threads_work():
    """Each ending but the last is of a child that has only imported; the last one is of the interpreter itself."""
    said = succeeds(
        f"endings = {ENDINGS}; t.decode_case()\n"
        "while len(endings) > 1 and (child := os.fork()):\n"
        "  status = os.waitpid(child, 0)[1]\n"
        "  assert status == 0, (endings[0], status)\n"
        "  del endings[0]\n"
        "t.attend(4); print(endings[0], flush=True)\n"
        "exec(endings[0])"
    )
    assert said.splitlines() == ENDINGS
