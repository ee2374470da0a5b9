"""A StoreSide over a host in plain Python and stores whose batches end on command."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.tiers.keys import Fingerprint, content_chain, lane_keys
from pagecore.tiers.manager.stores import StoreSide
from tests.tiers.manager.plain_host import NO_DEVICE, PlainHost, payload
from tests.tiers.manager.scripted_store import ScriptedStore

BLOCK = 4
MEDIUMS = ("DISK", "EXTERNAL", "EXTERNAL")
FINGERPRINT = Fingerprint.of(
    PagedKVCache(AttentionSpec(1, 8), block_size=BLOCK, num_blocks=9, device="none"), model="plain"
)
# A prompt of 6 whole blocks and the last token, which is always computed.
PROMPT = np.arange(100, 125, dtype=np.int32)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def chain_of(tokens, namespace=None):
    return content_chain(FINGERPRINT, tokens, namespace=namespace)


def put(store, host, tokens, *, namespace=None, lanes=None, stop=None):
    """Keep the entries of a prefix in a store."""
    stop = len(tokens) // BLOCK if stop is None else stop // BLOCK
    chain = chain_of(tokens, namespace)
    for lane in range(host.num_lanes) if lanes is None else lanes:
        for index, key in enumerate(lane_keys(chain, lane)[:stop]):
            before = [int(token) for token in tokens[: (index + 1) * BLOCK]]
            store.entries[bytes(key)] = bytes(payload(namespace, before, lane, host.payload_bytes[lane]))


@pytest.fixture
def world():
    """Make a StoreSide, and check at the end that nothing is held and everything is as it must be."""
    made = []

    def make(
        stores=1,
        *,
        device=NO_DEVICE,
        host_type=None,
        min_tokens=1,
        chunk_bytes=1 << 20,
        agree=None,
        mediums=MEDIUMS,
        num_slots=0,
        **options,
    ):
        host = PlainHost(**options) if host_type is None else host_type(device, **options)
        stores = [ScriptedStore(f"s{number}", mediums[number]) for number in range(stores)]
        clock = Clock()
        side = StoreSide(
            device,
            host,
            stores,
            fingerprint=FINGERPRINT,
            tree_lanes=host.lanes,
            min_tokens=min_tokens,
            chunk_bytes=chunk_bytes,
            agree=agree,
            num_slots=num_slots,
            num_origins=64,
            clock=clock,
        )
        made.append((side, host, stores))
        return SimpleNamespace(side=side, host=host, stores=stores, clock=clock)

    descriptors = len(os.listdir("/proc/self/fd"))
    yield make
    for side, host, stores in made:
        side.check_invariants()
        host.check()
        side.close(timeout=0.0)
        host.check()
        assert not host.pins
        assert not host.leases
        assert all(not store.holds and not store.batches for store in stores)
    assert len(os.listdir("/proc/self/fd")) == descriptors
