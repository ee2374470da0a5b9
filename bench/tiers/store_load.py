"""Loads of block stores for the bench "tiers": puts and gets of batches, timed until the store has ended them.

A medium is a module ``bench/tiers/NAME.py`` with ``run(bench, entry_bytes, count)``. It opens its store, and calls
`puts_and_gets` with the controls of its own.
"""

from __future__ import annotations

import mmap
import select
from collections.abc import Mapping
from itertools import count as counted

import numpy as np
from numpy.typing import NDArray

from bench.harness.runner import Bench, Job, Work
from pagecore.tiers.keys import Fingerprint, content_chain, lane_keys
from pagecore.tiers.store import BlockStore, Done

BLOCK = 16
MIB = 1 << 20
Bytes = NDArray[np.uint8]


def fingerprint_of(entry_bytes: int) -> Fingerprint:
    """Return the fingerprint of a cache with one group whose blocks have that many bytes."""
    return Fingerprint(model="bench", lanes=(f"{entry_bytes} bytes",), payload_bytes=(entry_bytes,), block_size=BLOCK)


class Entries:
    """Aligned memory of `count` entries of random bytes, and the pieces of each."""

    def __init__(self, count: int, entry_bytes: int, seed: int = 0) -> None:
        self.memory = mmap.mmap(-1, count * entry_bytes)
        self.rows: Bytes = np.frombuffer(self.memory, np.uint8).reshape(count, entry_bytes)
        self.rows[:] = np.random.default_rng(seed).integers(0, 256, self.rows.shape, np.uint8)
        base = self.rows.ctypes.data
        self.pieces = np.array([[base + i * entry_bytes, entry_bytes] for i in range(count)], np.uint64)


def wait(store: BlockStore, ticket: int) -> Done:
    """Return the end of a batch; raise RuntimeError if it does not come within a minute."""
    while select.select([store.fileno()], [], [], 60)[0]:
        for done in store.poll():
            if done.ticket == ticket:
                return done
    raise RuntimeError(f"{store.name} did not end batch {ticket}")


def puts_and_gets(
    bench: Bench,
    store: BlockStore,
    written: Entries,
    read: Entries,
    *,
    put_controls: Mapping[str, Work | Job],
    get_controls: Mapping[str, Work | Job],
    at_least: Mapping[str, float] | None = None,
) -> None:
    """Time batches of entries, stored from `written` under new keys and loaded to `read` in random order.

    Parameters
    ----------
    put_controls, get_controls
        Controls besides a copy in memory; each moves the same bytes. They use the same memory, because the speed of
        transfers depends on its pages.
    at_least : mapping, optional
        Targets of the gets.
    """
    count, entry_bytes = written.rows.shape
    fingerprint = fingerprint_of(entry_bytes)
    batches = counted()
    keys = _keys(fingerprint, next(batches), count)
    order = np.random.default_rng(2).permutation(count)

    def put() -> None:
        assert wait(store, store.submit_store(keys, written.pieces)).ok.all()

    def renew() -> None:
        nonlocal keys
        keys = _keys(fingerprint, next(batches), count)

    def get() -> None:
        assert wait(store, store.submit_load(keys[order], read.pieces[order])).ok.all()

    def check() -> None:
        put()
        read.rows[:] = 0
        get()
        np.testing.assert_array_equal(read.rows, written.rows)

    copies: dict[str, Work | Job] = {"numpy.copyto": lambda: np.copyto(read.rows, written.rows)}
    sizes = {"entry_bytes": entry_bytes, "entries": count, "store": store.name.split()[0]}
    nbytes = count * entry_bytes
    name = f"{store.name.split()[0]}, {entry_bytes / MIB:g} MiB"
    bench.compare(
        f"put, {name}", Job(put, before=renew), copies | dict(put_controls), check=check, nbytes=nbytes, sizes=sizes
    )
    bench.compare(
        f"get, {name}",
        Job(get),
        copies | dict(get_controls),
        check=check,
        at_least=at_least,
        nbytes=nbytes,
        sizes=sizes,
    )


def _keys(fingerprint: Fingerprint, batch: int, count: int) -> NDArray[np.uint8]:
    """Return keys that no other batch has."""
    return lane_keys(content_chain(fingerprint, np.full(count * BLOCK, batch, np.int32)), 0)
