"""A cache with tiers that serves prompts, and checks every byte that it reuses."""

from __future__ import annotations

import zlib

import numpy as np

from pagecore import AttentionSpec, PagedKVCache
from pagecore.tiers.guard import Breaker, Deadline, Guard
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.tiers import Tiers

BLOCK = 4
HEAD_DIM = 8
LAYERS = [AttentionSpec(1, HEAD_DIM, dtype="float32")] * 2
WINDOWED = [*LAYERS, AttentionSpec(1, HEAD_DIM, dtype="float32", window=7)]


def vectors(tokens, namespace, layer):
    """Return keys or values that depend on every token before a position, float32 ``[tokens, 1, HEAD_DIM]``."""
    chain = zlib.crc32(repr((namespace, layer)).encode())
    chains = np.empty(len(tokens), np.uint64)
    for place, token in enumerate(tokens):
        chain = zlib.crc32(int(token).to_bytes(4, "little", signed=True), chain)
        chains[place] = chain
    spread = chains[:, None] * np.arange(1, 2 * HEAD_DIM, 2, dtype=np.uint64)
    return ((spread >> np.uint64(9)) & np.uint64(0xFFFF)).astype(np.float32)[:, None, :]


class Served:
    """A cache, a host tier and stores of one process.

    Attributes
    ----------
    asked, reused, computed, missed : int
        Prompts; tokens that were reused and compared; tokens that were computed; prompts without a reused token.
    """

    def __init__(self, stores=(), *, layers=LAYERS, num_blocks=13, host_blocks=25, model="served", **options):
        self.layers = layers
        self.cache = PagedKVCache(layers, block_size=BLOCK, num_blocks=num_blocks, max_sequences=4)
        for layer in range(len(layers)):
            for plane in (self.cache.key(layer), self.cache.value(layer)):
                plane.numpy()[:] = np.nan
        self.fingerprint = Fingerprint.of(self.cache, model=model)
        opened = [make(self.fingerprint) if callable(make) else make for make in stores]
        # Patient guards: a busy machine is not a fault.
        patient = {"deadline": Deadline(20.0), "breaker": Breaker(failures=100)}
        stores = [store if isinstance(store, Guard) else Guard(store, **patient) for store in opened]
        self.tiers = Tiers(
            self.cache,
            HostTier(self.cache, num_blocks=host_blocks),
            stores,
            fingerprint=self.fingerprint,
            **{"min_tokens": 1, **options},
        )
        self.asked = self.reused = self.computed = self.missed = 0

    def serve(self, tokens, *, namespace=None, deadline=None, timeout=20.0):
        """Request a prompt, compare what is reused, and compute the other tokens; return the request."""
        request = self.tiers.request(tokens, namespace=namespace, deadline=deadline)
        self.tiers.wait(request, timeout)
        assert request.has_ended, request
        self.compute(tokens, namespace)
        request.release()
        return request

    def compute(self, tokens, namespace=None):
        """Add a sequence, compare its cached prefix, compute the rest and remove it; return the tokens reused."""
        self.asked += 1
        with self.tiers.add_sequence(tokens, namespace=namespace) as sequence:
            cached = sequence.num_cached_tokens
            self.verify(sequence, tokens, namespace, cached)
            batch = self.cache.prepare([sequence], len(tokens) - cached)
            for layer in range(len(self.layers)):
                new = vectors(tokens, namespace, layer)[cached:]
                self.cache.write(layer, new, -new, batch)
            self.cache.commit(batch)
            self.reused += cached
            self.missed += not cached
            self.computed += len(tokens) - cached
            return cached

    def verify(self, sequence, tokens, namespace, count):
        """Compare the keys and values of the first `count` tokens, those of windows that the next token sees."""
        for layer in range(len(self.layers)):
            group = self.cache.group_of(layer)
            first = self.cache.held_from(sequence, group)
            blocks = self.cache.block_table(group).numpy()[sequence.row]
            places = np.arange(first, count)
            slots = blocks[places // BLOCK], places % BLOCK
            expected = vectors(tokens, namespace, layer)[first:count]
            np.testing.assert_array_equal(self.cache.key(layer).numpy()[slots], expected)
            np.testing.assert_array_equal(self.cache.value(layer).numpy()[slots], -expected)

    def flush(self):
        """Wait until all stores have what they were given."""
        assert self.tiers.drain(20.0)

    def forget(self):
        """Empty device and host, so that only the stores are left."""
        self.flush()
        self.cache.clear_prefix_cache()
        self.tiers.host.clear()

    def close(self):
        self.tiers.check_invariants()
        self.tiers.close()
        self.tiers.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.close()
        else:
            self.tiers.close()
