"""Host tier: backup and promotion against one memory copy, matches in two trees against one, decode steps that save.

The control of the copies is `numpy.copyto` between arrays of the same bytes. Bookkeeping of both trees is included.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np

from bench.harness.runner import Bench, Job
from bench.saving import saving
from pagecore.cache import PagedKVCache, Sequence
from pagecore.storage import AttentionSpec
from pagecore.tiers.host.tier import HostTier

COPY_TARGET = 0.8
MATCH_TARGET = 0.5
BLOCK = 16
MIB = 1 << 20


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run prompts of several lengths, and matches of a long one."""
    for num_blocks in bench.pick((16, 128, 256), (4,)):
        _moves(bench, num_blocks)
    for num_blocks in bench.pick((64, 1024), (4,)):
        _matches(bench, num_blocks)
    saving(bench)


class _Prompt:
    """A cache, its host tier, and one prompt that is in both."""

    def __init__(self, num_blocks: int, num_layers: int, device: str = "cpu") -> None:
        spec = AttentionSpec(8, 128, dtype="bfloat16")
        count = num_blocks + 2
        self.cache = PagedKVCache(spec, num_layers=num_layers, num_blocks=count, block_size=BLOCK, device=device)
        self.tier = HostTier(self.cache, num_blocks=count)
        self.ids = np.arange(num_blocks * BLOCK + 1, dtype=np.int32)
        self.num_blocks = num_blocks
        self.sequence: Sequence | None = None
        for layer in range(num_layers if device == "cpu" else 0):
            self.cache.key(layer).numpy()[...] = layer + 1
            self.cache.value(layer).numpy()[...] = -layer - 1

    def compute(self) -> None:
        """Publish the prompt on the device; the host has nothing."""
        self.tier.clear()
        self.sequence = self.cache.add_sequence(self.ids)
        left = len(self.ids) - self.sequence.num_computed_tokens
        self.cache.commit(self.cache.prepare([self.sequence], left))

    def back_up(self) -> int:
        assert self.sequence is not None
        return self.tier.backup(self.sequence)

    def remove(self) -> None:
        assert self.sequence is not None
        self.cache.remove(self.sequence)
        self.tier.poll()

    def keep_in_host(self) -> None:
        """Leave the prompt in the host alone."""
        self.compute()
        self.back_up()
        self.remove()
        self.cache.clear_prefix_cache()

    def promote(self) -> int:
        return self.tier.promote(self.ids)


def _moves(bench: Bench, num_blocks: int) -> None:
    prompt = _Prompt(num_blocks, bench.pick(32, 2))
    nbytes = num_blocks * prompt.tier.payload_bytes[0]
    source, target = (np.ones(nbytes, np.uint8) for _ in range(2))
    copy = {"numpy.copyto": partial(np.copyto, target, source)}

    def check() -> None:
        prompt.keep_in_host()
        prompt.cache.key(0).numpy()[...] = 0
        assert prompt.promote() == num_blocks * BLOCK
        assert np.count_nonzero(prompt.cache.key(0).numpy()[:, 0, 0, 0]) == num_blocks
        prompt.cache.key(0).numpy()[...] = 1

    sizes = {"blocks": num_blocks, "bytes_per_block": prompt.tier.payload_bytes[0]}
    goal = {"numpy.copyto": COPY_TARGET} if nbytes >= 32 * MIB else None
    bench.compare(
        f"back up {num_blocks} blocks, {nbytes / MIB:.0f} MiB",
        Job(prompt.back_up, before=prompt.compute, after=prompt.remove),
        copy,
        check=check,
        nbytes=nbytes,
        at_least=goal,
        sizes=sizes,
    )
    prompt.keep_in_host()
    bench.compare(
        f"promote {num_blocks} blocks, {nbytes / MIB:.0f} MiB",
        Job(prompt.promote, before=prompt.cache.clear_prefix_cache),
        copy,
        check=check,
        nbytes=nbytes,
        at_least=goal,
        sizes=sizes,
    )
    prompt.tier.close()


def _matches(bench: Bench, num_blocks: int) -> None:
    prompt = _Prompt(num_blocks, 1, device="none")
    prompt.compute()
    prompt.back_up()

    def check() -> None:
        assert prompt.tier.match_both(prompt.ids) == (num_blocks * BLOCK, num_blocks * BLOCK)

    bench.compare(
        f"match {num_blocks} blocks in both trees",
        partial(prompt.tier.match_both, prompt.ids),
        {"cache.match_length": partial(prompt.cache.match_length, prompt.ids)},
        check=check,
        at_least={"cache.match_length": MATCH_TARGET},
        sizes={"blocks": num_blocks},
    )
    prompt.tier.close()
