"""Random operations on caches with a host tier: every sequence has the bytes of its own tokens, wherever they were."""

import os

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from pagecore.cache import SwapSpace
from tests.cache import test_hybrid_machine as hybrid
from tests.cache import test_prefix_machine as plain
from tests.machines import drawn
from tests.tiers.host.rules import WRITES, TierRules

EXAMPLES = 300 if os.environ.get("PAGECORE_FAULTS") == "full" else 13


class TierMachine(TierRules, plain.PrefixMachine):
    @initialize(
        model=st.sampled_from(sorted(plain.MODELS)),
        policy=st.sampled_from(["lru", "lfu", "slru:0.5"]),
        num_blocks=st.sampled_from([4, 8, 20]),
        write=st.sampled_from(WRITES),
        shares=st.booleans(),
        scrub=st.booleans(),
    )
    def make(self, model, policy, num_blocks, write, shares, scrub):
        self.layers, blocks = plain.MODELS[model]
        self.cache = self.make_cache(
            self.layers,
            block_size=plain.BLOCK,
            num_blocks=blocks,
            max_sequences=6,
            max_tokens_per_sequence=64,
            eviction_policy=policy,
            scrub=scrub,
        )
        self.space = SwapSpace(self.cache, num_blocks=9)
        self.random = np.random.default_rng(0)
        self.twins = {}
        self.start_tier(num_blocks, write, shares)


class HybridTierMachine(TierRules, hybrid.HybridMachine):
    @initialize(
        model=st.sampled_from(sorted(name for name in hybrid.MODELS if "latent" not in name)),
        num_blocks=st.sampled_from([8, 20]),
        num_states=st.sampled_from([3, 8]),
        write=st.sampled_from(WRITES),
        shares=st.booleans(),
    )
    def make(self, model, num_blocks, num_states, write, shares):
        self.layers, blocks, slots = hybrid.MODELS[model]
        self.rules = self.layers[0]
        self.cache = self.make_cache(
            self.layers,
            block_size=plain.BLOCK,
            num_blocks=blocks,
            num_states=slots,
            max_sequences=6,
            max_tokens_per_sequence=64,
        )
        if blocks is None:
            num_blocks = None
        self.space = SwapSpace(self.cache, num_blocks=num_blocks and 9, num_states=5)
        self.random = np.random.default_rng(0)
        self.twins = {}
        self.start_tier(num_blocks, write, shares, num_states=num_states)


TestTierMachine = pytest.mark.slow(drawn(TierMachine))
TestTierMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestHybridTierMachine = pytest.mark.slow(drawn(HybridTierMachine))
TestHybridTierMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
