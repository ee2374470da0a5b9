"""Foreign arguments of every public method: each call succeeds or raises a typed error, and breaks nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cache.fuzz_targets import TARGETS
from tests.faults import is_full

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
CALLS = 40_000 if is_full() else 1_500


def fuzz(seed, count, timeout):
    """Return the findings of a separate process: [method, foreign arguments, exception, message]."""
    command = [sys.executable, "-m", "tests.cache.fuzz", ",".join(TARGETS), str(seed), str(count)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=timeout, check=False)
    lines = ran.stdout.decode(errors="backslashreplace").splitlines()
    findings = [json.loads(line) for line in lines if line.startswith("[")]
    if ran.returncode:
        calls = [line for line in lines if line.startswith("call ")]
        trace = ran.stderr.decode(errors="backslashreplace").strip().splitlines()[:6]
        findings.append([calls[-1] if calls else "", {}, f"the process ended with {ran.returncode}", " / ".join(trace)])
    return findings


def test_fuzz_foreign_arguments_are_typed_errors_and_break_nothing():
    findings = []
    for seed in range(10 if is_full() else 1):
        findings += fuzz(seed, CALLS, timeout=6000 if is_full() else 300)
    distinct = {(method, kind, *sorted(foreign)): (foreign, message) for method, foreign, kind, message in findings}
    lines = [f"{key[0]} {foreign}: {key[1]}: {message}" for key, (foreign, message) in distinct.items()]
    print(f"\n{len(findings)} findings, {len(lines)} distinct")
    assert not lines, "\n".join(lines)
