"""Decode steps of a cache whose blocks are saved to the host, against the same steps without saving.

A step prepares a batch, writes keys and values, attends in every layer and commits. Blocks of 16 tokens fill in turn,
so that each step publishes, and saves, one sequence in 16; the sequences have different lengths for that.
"""

from __future__ import annotations

import numpy as np

from bench.harness.runner import Bench, Job
from pagecore import set_num_threads
from pagecore.cache import PagedKVCache
from pagecore.storage import AttentionSpec
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers

TARGET = 0.95
BLOCK = 16


class _Decoding:
    """A batch of sequences that decode together, in a cache with a host tier.

    Both kinds of steps use the same cache: the pages of two caches differ, and with them the time of attention.
    """

    def __init__(self, num_layers: int, num_sequences: int, length: int) -> None:
        spec = AttentionSpec(8, 128, dtype="bfloat16", num_query_heads=32)
        self.most = length + 4 * BLOCK
        blocks = num_sequences * (self.most // BLOCK + 1) + 1
        self.cache = PagedKVCache(
            spec, num_layers=num_layers, num_blocks=blocks, block_size=BLOCK, max_sequences=num_sequences
        )
        self.tiers = Tiers(self.cache, HostTier(self.cache, num_blocks=blocks))
        self.num_layers, self.length, self.num_steps = num_layers, length, 0
        self.sequences = [
            self.cache.add_sequence(np.arange(length) + 100_000 * number) for number in range(num_sequences)
        ]
        for number, sequence in enumerate(self.sequences):
            self.cache.commit(self.cache.prepare([sequence], length - number % BLOCK))
            self.cache.truncate(sequence, length - number % BLOCK)
        random = np.random.default_rng(0)
        self.q = random.standard_normal((num_sequences, 32, 128)).astype(np.float32)
        self.k, self.v = (random.standard_normal((num_sequences, 8, 128)).astype(np.float32) for _ in range(2))
        self.step()

    def begin_plain(self) -> None:
        """Save nothing in the next step."""
        self.rewind()
        self.tiers.write = "explicit"

    def end_plain(self) -> None:
        """Save, untimed, what the step has published, so that a later step does not."""
        self.tiers.write = "through"
        self.tiers.host.backup(self.sequences)

    def rewind(self) -> None:
        """Shorten sequences that are about to fill their rows."""
        for number, sequence in enumerate(self.sequences):
            if sequence.num_computed_tokens + 1 >= self.most:
                self.cache.truncate(sequence, self.length - number % BLOCK)

    def step(self) -> None:
        self.num_steps += 1  # other tokens in each step, so that every filled block is new
        self.cache.append_tokens(self.sequences, [[self.num_steps]] * len(self.sequences))
        batch = self.cache.prepare(self.sequences, 1)
        for layer in range(self.num_layers):
            self.cache.write(layer, self.k, self.v, batch)
            self.cache.attend(layer, self.q, batch)
        self.cache.commit(batch)


def saving(bench: Bench) -> None:
    """Run decode steps with two threads."""
    set_num_threads(2)
    num_layers, num_sequences, length = bench.pick((4, 32, 512), (2, 4, 32))
    decoding = _Decoding(num_layers, num_sequences, length)

    def check() -> None:
        before = decoding.tiers.stats().host.num_backed_up_blocks
        for _ in range(BLOCK):
            decoding.step()
        assert decoding.tiers.stats().host.num_backed_up_blocks >= before + num_sequences

    bench.compare(
        "decode step with and without saving",
        Job(decoding.step, before=decoding.rewind),
        {"without saving": Job(decoding.step, before=decoding.begin_plain, after=decoding.end_plain)},
        check=check,
        at_least={"without saving": TARGET},
        sizes={"layers": num_layers, "sequences": num_sequences, "tokens": length},
    )
    decoding.tiers.close()
