"""One engine of the soak: a cache with tiers that serves prompts and compares every byte that it reuses."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagecore import AttentionSpec, Batch, PagedKVCache, Plane, StateSpec
from pagecore.arrays import as_dtype
from pagecore.cache import Sequence as CacheSequence
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.requests import Request
from pagecore.tiers.manager.tiers import Tiers
from pagecore.tiers.store import BlockStore

__all__ = ["ATTENTION", "HYBRID", "Engine", "Totals"]

BLOCK = 8
HEAD_DIM = 16
ATTENTION: tuple[AttentionSpec | StateSpec, ...] = (
    AttentionSpec(1, HEAD_DIM, dtype="float32"),
    AttentionSpec(1, HEAD_DIM, dtype="float32", window=20),
)
# A prefix of it can be reused at the checkpoints of its states only.
HYBRID = (
    *ATTENTION,
    StateSpec(
        (Plane("temporal", (1, HEAD_DIM), as_dtype("float32"), per="sequence"),), chunk=BLOCK, interval=2 * BLOCK
    ),
)
StoreMaker = Callable[[Fingerprint], BlockStore]
Tokens = NDArray[np.int32]


@dataclass
class Totals:
    """Counts of all engines.

    Attributes
    ----------
    asked, missed, late : int
        Prompts; those of which nothing was reused; requests that ended at their deadline or by a cancellation.
    asked_tokens, served_tokens, computed_tokens : int
        Tokens of the prompts: all, those reused, those computed.
    loaded_tokens : dict
        Tokens that stores delivered, by medium.
    compared_bytes, wrong_bytes : int
        Bytes of reused keys, values and states that were compared, and those that differed.
    """

    asked: int = 0
    missed: int = 0
    late: int = 0
    asked_tokens: int = 0
    served_tokens: int = 0
    computed_tokens: int = 0
    compared_bytes: int = 0
    wrong_bytes: int = 0
    loaded_tokens: dict[str, int] = field(default_factory=dict)


class Engine:
    """A cache, a host tier and stores.

    Parameters
    ----------
    makers : sequence of callable
        Each opens a store for a fingerprint.
    totals : Totals
    layers : sequence of AttentionSpec and StateSpec
    """

    def __init__(
        self,
        makers: Sequence[StoreMaker],
        totals: Totals,
        layers: Sequence[AttentionSpec | StateSpec] = ATTENTION,
    ) -> None:
        self.totals = totals
        self.state_layers = [layer for layer, spec in enumerate(layers) if isinstance(spec, StateSpec)]
        self.layers = [layer for layer in range(len(layers)) if layer not in self.state_layers]
        states, host_states = (12, 33) if self.state_layers else (None, None)
        self.cache = PagedKVCache(layers, block_size=BLOCK, num_blocks=49, num_states=states, max_sequences=4)
        planes = [plane for layer in self.layers for plane in (self.cache.key(layer), self.cache.value(layer))]
        for plane in [*planes, *(self.cache.plane("temporal", layer) for layer in self.state_layers)]:
            plane.numpy()[:] = np.nan
        fingerprint = Fingerprint.of(self.cache, model="soak")
        stores: list[BlockStore] = []
        try:
            stores.extend(make(fingerprint) for make in makers)
        except BaseException:
            for store in stores:
                store.close()
            raise
        self.host = HostTier(self.cache, num_blocks=65, num_states=host_states)
        self.tiers = Tiers(self.cache, self.host, stores, fingerprint=fingerprint, min_tokens=BLOCK, pin_seconds=0.5)
        self.requests: list[tuple[Request, Tokens, Hashable]] = []

    def ask(self, tokens: Tokens, namespace: Hashable, deadline: float | None) -> None:
        """Begin a request."""
        request = self.tiers.request(tokens, namespace=namespace, deadline=deadline)
        self.requests.append((request, tokens, namespace))

    def step(self) -> None:
        """Serve the requests that have ended."""
        self.tiers.poll()
        ended = [entry for entry in self.requests if entry[0].has_ended]
        self.requests = [entry for entry in self.requests if not entry[0].has_ended]
        for request, tokens, namespace in ended:
            self.totals.late += request.state == "late"
            for medium, count in request.loaded_tokens.items():
                self.totals.loaded_tokens[medium] = self.totals.loaded_tokens.get(medium, 0) + count
            self.serve(tokens, namespace)
            request.release()

    def serve(self, tokens: Tokens, namespace: Hashable) -> None:
        """Compare the cached prefix of a prompt, compute the other tokens, and remove the sequence."""
        with self.computed(tokens, namespace):
            pass

    def computed(self, tokens: Tokens, namespace: Hashable) -> CacheSequence:
        """Return a sequence after the prompt was computed; the bytes of its cached prefix are compared."""
        totals = self.totals
        sequence = self.tiers.add_sequence(tokens, namespace=namespace)
        cached = sequence.num_cached_tokens
        self._compare_rows(sequence, tokens[:cached], namespace)
        batch = self.cache.prepare([sequence], len(tokens) - cached)
        for layer in self.layers:
            new = vectors(tokens, namespace, layer)[cached:]
            self.cache.write(layer, new, -new, batch)
        for layer in self.state_layers:
            self._run_states(batch, cached, vectors(tokens, namespace, layer), layer)
        self.cache.commit(batch)
        totals.asked += 1
        totals.missed += not cached
        totals.asked_tokens += len(tokens)
        totals.served_tokens += cached
        totals.computed_tokens += len(tokens) - cached
        return sequence

    def compare(self, sequence: CacheSequence, tokens: Tokens, namespace: Hashable) -> None:
        """Compare all computed keys, values and states of a sequence."""
        computed = tokens[: sequence.num_computed_tokens]
        self._compare_rows(sequence, computed, namespace)
        for layer in self.state_layers if len(computed) else ():
            held = self.cache.plane("temporal", layer).numpy()[self.cache.state_slot(sequence)]
            self._count(held, vectors(computed, namespace, layer)[-1])

    def drain(self, timeout: float) -> bool:
        """Serve all requests and wait for all batches; return False if `timeout` seconds pass first."""
        done = self.tiers.drain(timeout)
        self.step()
        return done and not self.requests and self.tiers.drain(timeout)

    def close(self) -> None:
        """Check the counts, and close everything."""
        self.tiers.check_invariants()
        self.tiers.close()

    def _compare_rows(self, sequence: CacheSequence, tokens: Tokens, namespace: Hashable) -> None:
        for layer in self.layers:
            self._compare(sequence, vectors(tokens, namespace, layer), layer)

    def _compare(self, sequence: CacheSequence, expected: NDArray[np.float32], layer: int) -> None:
        group = self.cache.group_of(layer)
        places = np.arange(self.cache.held_from(sequence, group), len(expected))
        blocks = self.cache.block_table(group).numpy()[sequence.row]
        slots = blocks[places // BLOCK], places % BLOCK
        for plane, sign in ((self.cache.key(layer), 1), (self.cache.value(layer), -1)):
            self._count(plane.numpy()[slots], sign * expected[places])

    def _run_states(self, batch: Batch, cached: int, states: NDArray[np.float32], layer: int) -> None:
        """Compare the state that a step reads, and write those after its checkpoint and after its last token."""
        plane = self.cache.plane("temporal", layer).numpy()
        read = plane[batch.state_read.numpy()[0]]
        self._count(read, states[cached - 1] if cached else np.zeros_like(read))
        length = batch.checkpoint_lengths.numpy()[0]
        if length:
            plane[batch.checkpoint_write.numpy()[0]] = states[length - 1]
        plane[batch.state_write.numpy()[0]] = states[-1]

    def _count(self, served: NDArray[np.float32], right: NDArray[np.float32]) -> None:
        """Count the bytes that differ."""
        bits = [np.ascontiguousarray(each).view(np.uint32) for each in (served, right)]
        self.totals.compared_bytes += bits[0].nbytes
        self.totals.wrong_bytes += 4 * int((bits[0] != bits[1]).sum())


def vectors(tokens: Tokens, namespace: Hashable, layer: int) -> NDArray[np.float32]:
    """Return keys that depend on every token before a position, float32 ``[tokens, 1, HEAD_DIM]``, never zero."""
    chain = zlib.crc32(repr((namespace, layer)).encode())
    chains = np.empty(len(tokens), np.uint64)
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    for place in range(len(tokens)):
        chain = zlib.crc32(data[4 * place : 4 * place + 4], chain)
        chains[place] = chain
    spread = chains[:, None] * np.arange(1, 2 * HEAD_DIM, 2, dtype=np.uint64)
    bits: NDArray[np.uint64] = spread.astype(np.uint64) // np.uint64(512) % np.uint64(65536)
    keys = bits.astype(np.float32) + np.float32(1)
    return keys[:, None, :]
