"""Index arrays that another thread changes during a call give a typed error or other numbers, never a crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# At any moment each array holds valid or wild numbers; most of each call runs without the GIL.
CODE = """
import faulthandler, os, sys, threading, time
import numpy as np
from pagecore import ops, set_num_threads
from pagecore.errors import PagecoreError

faulthandler.enable()
seconds = float(sys.argv[1])
set_num_threads(2)
sys.setswitchinterval(1e-5)
random = np.random.default_rng(0)
BLOCKS, SIZE, HEADS, DIM, COUNT = 64, 16, 1, 8, 4096
cache = np.zeros((BLOCKS, SIZE, HEADS, DIM), np.float32)
other = np.zeros_like(cache)
lens = np.full(64, 200, np.int64)
good = {
    "slots": random.integers(0, BLOCKS * SIZE, COUNT),
    "table": random.integers(1, BLOCKS, (64, 16)),
    "lens": lens,
    "cu": np.arange(0, 65 * 4, 4),
    "rows": np.arange(64),
    "pairs": random.integers(1, BLOCKS, (COUNT, 2)),
}
given = {key: value.copy() for key, value in good.items()}
wild = {key: random.choice([-(2**62), -1, 2**31 - 2, 2**40, 2**62], value.shape) for key, value in good.items()}
new, packed = np.zeros((COUNT, HEADS, DIM), np.float32), np.zeros((int(lens.sum()), HEADS, DIM), np.float32)
query = np.zeros((256, HEADS, DIM), np.float32)
batch = dict(block_table=given["table"], seq_lens=given["lens"], rows=given["rows"])
calls = {
    "write_kv": (("slots",), lambda: ops.write_kv(new, new, cache, other, given["slots"])),
    "paged_attention": (
        ("table", "lens", "cu", "rows"),
        lambda: ops.paged_attention(query, cache, other, **batch, cu_query_lens=given["cu"]),
    ),
    "plan_attention": (
        ("lens", "cu"),
        lambda: ops.plan_attention(given["cu"], given["lens"], num_query_heads=1, num_kv_heads=1),
    ),
    "gather_blocks": (("table", "lens", "rows"), lambda: ops.gather_blocks(cache, **batch, out=packed)),
    "scatter_blocks": (("table", "lens", "rows"), lambda: ops.scatter_blocks(packed, cache, **batch)),
    "copy_blocks": (("pairs",), lambda: ops.copy_blocks([cache, other], given["pairs"])),
    "transfer_blocks": (("pairs",), lambda: ops.transfer_blocks(cache, other, given["pairs"])),
}
for name in calls:  # each in a child of a process that has imported NumPy and pagecore
    if not (child := os.fork()):
        break
    status = os.waitpid(child, 0)[1]
    if status:
        sys.exit(f"{name} ended with status {status}")
else:
    sys.exit()
changed, call = calls[name]
is_over = False


def change():
    while not is_over:
        for key in changed:
            at = random.integers(0, given[key].size, 4)
            given[key].flat[at] = wild[key].flat[at]
        for key in changed:
            np.copyto(given[key], good[key])


threads = [threading.Thread(target=change) for _ in range(2)]
for thread in threads:
    thread.start()
done = refused = 0
end = time.monotonic() + seconds
while time.monotonic() < end:
    try:
        call()
        done += 1
    except PagecoreError:
        refused += 1
is_over = True
for thread in threads:
    thread.join()
print(name, done, refused)
"""


def test_calls_survive_indices_that_change_under_them():
    ran = subprocess.run(
        [sys.executable, "-c", CODE, "0.5"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    counts = {name: int(done) + int(refused) for name, done, refused in map(str.split, ran.stdout.splitlines())}
    assert len(counts) == 7
    assert all(counts.values())
