"""CUDA IPC between two processes on a GPU, and registration of host memory with the driver."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from pagecore import AttentionSpec, KVPool
from pagecore.errors import UnsupportedOption
from pagecore.storage import HostMemory
from pagecore.tiers.engine import export_ipc

SPEC = AttentionSpec(2, 64, dtype="float16")
CHILD = """
import sys
from pagecore.arrays import cuda
from pagecore.tiers.engine import IpcHandle, open_ipc
pool = open_ipc(IpcHandle.from_bytes(sys.stdin.buffer.read()))
view = pool.value(2).cupy()
assert (view[5] == 3).all(), view[5]
view[5] = 7
cuda.runtime().synchronize(0)
print("written")
"""


@pytest.mark.parametrize("layout", ["layerwise", "BNHD"])
def test_another_process_opens_the_pool_without_a_copy(cuda, layout):
    pool = KVPool(SPEC, 3, 9, 16, layout, "cuda")
    pool.value(2).cupy()[5] = 3
    cuda.runtime.synchronize(0)
    message = export_ipc(pool).to_bytes()
    child = subprocess.run([sys.executable, "-c", CHILD], input=message, capture_output=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr.decode()
    assert cuda.get(pool.value(2))[5].min() == cuda.get(pool.value(2))[5].max() == 7


def test_pinned_memory_has_no_handle(cuda):
    from pagecore.arrays.tensors._make import pinned

    held = KVPool(SPEC, 1, 3, 16, device="cuda", buffers=pinned(KVPool(SPEC, 1, 3, 16).nbytes, "cuda:0"))
    with pytest.raises(UnsupportedOption, match="has no IPC handle"):
        export_ipc(held)


def test_registered_memory_is_read_by_the_device(cuda):
    memory = HostMemory(1 << 22)
    memory.register("cuda:0", [(0, 1 << 21), (1 << 21, 1 << 22)])
    assert memory.wait_registered(60)
    memory.tensor().numpy()[:] = np.arange(1 << 22) % 251
    view = memory.tensor("cuda:0").cupy()
    assert int(view.astype("int64").sum()) == int(memory.tensor().numpy().sum(dtype=np.int64))
    cuda.runtime.synchronize(0)
    memory.close()
