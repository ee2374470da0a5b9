"""Copies through leased blocks that fail at any point: caches, trees and pools stay consistent, and nothing is held."""

import gc
from functools import partial

import numpy as np
import pytest

from tests.faults import PythonAllocations, fail_allocation, raise_at, runs
from tests.tiers.manager.served import BLOCK, Served, vectors

PROMPT = np.arange(61, dtype=np.int32)


def stage(served):
    """Return a call that copies the blocks for which the host has no room."""
    return lambda: served.tiers.host.stage(PROMPT, 8, 11).release()


def deliver(served):
    """Return a call that delivers the last blocks of a prefix, which the device has evicted."""
    served.cache.evict_prefix(PROMPT, keep=40)
    host = served.tiers.host
    lease = host.reserve([np.arange(10, 15)])
    for layer in range(len(served.layers)):
        rows = vectors(PROMPT, None, layer)[40:60].reshape(5, BLOCK, 1, -1)
        host.kv_pools[0].plane("key", layer).numpy()[lease.blocks[0]] = rows
        host.kv_pools[0].plane("value", layer).numpy()[lease.blocks[0]] = -rows
    ok = [np.ones(5, np.bool_)]
    return partial(host.deliver, lease, PROMPT[:60], ok=ok)


@pytest.mark.parametrize("fault", ["interrupt", "allocation"])
@pytest.mark.parametrize("call", [stage, deliver])
def test_a_failure_at_any_point_holds_nothing(call, fault):
    with Served(num_blocks=40, host_blocks=9) as served:
        served.compute(PROMPT)
        inject = partial(fail_allocation, allocations=PythonAllocations()) if fault == "allocation" else raise_at
        failed = 0
        for run in runs(lambda n: inject(call(served), n), stride=3):
            failed += not run.finished
            gc.collect()
            served.tiers.host.poll()
            served.tiers.check_invariants()
            assert served.tiers.host.num_leases == 0
            assert served.cache.match_length(PROMPT) in (40, 60)
        assert failed > 5
        assert served.compute(PROMPT) in (40, 60)  # compares what is reused
