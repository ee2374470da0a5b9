"""Calls that need a cache at rest end although other threads write on."""

import threading

import numpy as np

from pagecore.tiers.manager import eviction
from tests.tiers.manager.served import Served
from tests.tiers.memory_store import MemoryStore


def test_clear_ends_while_another_thread_writes_without_a_break(monkeypatch):
    monkeypatch.setattr(eviction, "ROUND_SECONDS", 0.005)
    store = MemoryStore(delay=0.02)  # longer than a prompt takes: something is always being written
    with Served([store], num_blocks=80, host_blocks=60) as served:
        ended, begun = threading.Event(), threading.Event()

        def serve():
            base = 0
            while not ended.is_set():
                served.compute(np.arange(33, dtype=np.int32) + base)
                base += 100
                if base == 500:
                    begun.set()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert begun.wait(20)
        clearing = threading.Thread(target=served.tiers.clear, args=(["CPU"],), daemon=True)
        clearing.start()
        clearing.join(20)
        assert not clearing.is_alive()
        ended.set()
        thread.join()
        served.flush()
