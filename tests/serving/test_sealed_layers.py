"""The scheduler over caches with sealed blocks: it makes progress, and steps find the blocks that they read."""

import random

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec, SwapSpace
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers
from tests.faults import is_full
from tests.serving.any_specs import POISON, AnyEngine

BLOCK = 16


def sealed(residual):
    return AttentionSpec(1, 16, format="kivi2", residual=residual, group_size=16, block_size=BLOCK)


def recurrent(draw):
    rules = {"chunk": draw.choice([1, 4, 16]), "in_place": draw.random() < 0.6}
    return StateSpec((Plane("hash", (1,), "int32", per="sequence"),), interval=16, **rules)


class SealedEngine(AnyEngine):
    """Serves random requests; blocks of sealed tokens count as right, and plain tokens are compared."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.layers = [sealed(draw.choice([0, 3, 20]))]
        self.layers += draw.choice([[], [AttentionSpec(1, 8)], [AttentionSpec(1, 8, window=7)]])
        self.layers += draw.choice([[], [recurrent(draw)]])
        self.state = next((n for n, spec in enumerate(self.layers) if isinstance(spec, StateSpec)), None)
        self.tiers, self.has_blocks = None, True
        self.cache = PagedKVCache(
            self.layers,
            block_size=BLOCK,
            max_sequences=draw.choice([1, 2, 4]),
            prefix_cache=draw.random() < 0.85,
            **self.sizes(draw.choice([6, 9, 20]), draw.choice([3, 4, 9])),
        )
        space = None
        if draw.random() < 0.45:
            space = SwapSpace(self.cache, **self.sizes(draw.choice([3, 8, 30]), draw.choice([3, 6])))
        if self.cache.has_prefix_cache and draw.random() < 0.4:
            host = HostTier(self.cache, **self.sizes(draw.choice([6, 30]), draw.choice([3, 6])))
            self.tiers = Tiers(self.cache, host, write=draw.choice(["through", "on_release", "on_evict"]))
        self.scheduler = Scheduler(self.cache, swap_space=space, **self.options())
        attending = [n for n in range(len(self.layers)) if n != self.state]
        self.keys = {n: self.cache.key(n).numpy().view(np.uint8)[:, :, 0] for n in attending}
        if self.state is not None:
            self.states = self.cache.plane("hash", self.state).numpy()[:, 0]
            self.states[1:] = POISON
        self.runs, self.requests, self.ended, self.last, self.cancelled = {}, {}, {}, {}, set()
        self.previous = self.sampled = None

    def check_keys(self, batch, layer, spec, texts):
        group = batch.group(layer)
        if group.sealed is None:
            super().check_keys(batch, layer, spec, texts)
            return
        tail, whole = np.asarray(group.block_table), np.asarray(group.sealed.block_table)
        lens, rows = np.asarray(group.sealed.lens), np.asarray(batch.host.rows)
        for row, entry in enumerate(texts):
            for place in range(len(entry[1]) if entry else 0):
                assert whole[rows[row], place // BLOCK] > 0
                if place >= lens[row]:
                    held = self.keys[layer][tail[rows[row], place // BLOCK], place % BLOCK, :2].tolist()
                    assert held == [entry[2][place] & 255, entry[2][place] >> 8]


@pytest.mark.parametrize("seed", range(400 if is_full() else 12))
def test_requests_are_served(seed):
    engine = SealedEngine(seed)
    engine.serve(engine.draw.choice([4, 10, 25]))
