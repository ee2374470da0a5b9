"""Random operations on caches of random layers: windows, chunks, sinks, lookaheads, states and drafts of any sizes."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from pagecore import AttentionSpec, StateSpec, SwapSpace
from tests.cache.hybrid_models import CONV, TEMPORAL
from tests.cache.test_hybrid_machine import HybridMachine
from tests.cache.test_prefix_machine import PrefixMachine
from tests.faults import is_full
from tests.machines import drawn

ROTATIONS = ("key_rotation", "value_rotation")
ROOM = 40  # tokens of the smallest pool


@st.composite
def attention(draw):
    """Return a spec of one of the kinds of layers with attention."""
    heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 2)]))
    dims = draw(st.sampled_from([(8, 8), (8, 4), (4, 12)]))
    limits = {}
    kind = draw(st.sampled_from(["full", "window", "window", "sinks", "chunk"]))
    if kind == "chunk":
        limits = {"chunk": draw(st.integers(1, 14))}
    elif kind != "full":
        limits = {"window": draw(st.integers(1, 14))}
    if kind == "sinks":
        limits["sink_tokens"] = draw(st.integers(1, 9))
    if limits:
        most = limits.get("chunk", limits.get("window"))
        limits["lookahead"] = draw(st.sampled_from([0, 0, min(2, most), most]))
    turned = [name for name, dim in zip(ROTATIONS, dims, strict=True) if dim % 8 == 0 and draw(st.booleans())]
    rotations = dict.fromkeys(turned, "hadamard")
    return AttentionSpec(heads, *dims, dtype="float32", num_query_heads=heads * group, **limits, **rotations)


@st.composite
def recurrent(draw):
    """Return rules of states, without planes."""
    chunk = draw(st.integers(1, 6))
    return {
        "chunk": chunk,
        "interval": chunk * draw(st.integers(1, 3)),
        "in_place": draw(st.booleans()),
        "draft_tokens": draw(st.sampled_from([0, 0, 1, 3, 5])),
        "checkpoint_format": draw(st.sampled_from([None, None, "int8"])),
    }


OPTIONS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 3, 4, 5, 8]),
        "eviction_policy": st.sampled_from(["lru", "lfu", "fifo", "slru", "mru", "filo"]),
        "recompute_last_block": st.booleans(),
        "scrub": st.booleans(),
    }
)


class AnySpecs:
    """Caches of drawn layers and sizes, for the machines of caches."""

    def start(self, options, blocks, **slots):
        """Make the cache with room for `blocks * ROOM` tokens in each group."""
        count = int(blocks * -(-ROOM // options["block_size"])) + 2
        sizes = {"num_blocks": count} if any(isinstance(each, AttentionSpec) for each in self.layers) else {}
        self.cache = self.make_cache(
            self.layers,
            max_sequences=6,
            max_tokens_per_sequence=options["block_size"] * (count + 1),
            **sizes,
            **slots,
            **options,
        )
        sizes = {"num_blocks": count // 2 + 1} if sizes else {}
        self.space = SwapSpace(self.cache, **sizes, **({"num_states": 5} if slots else {}))
        self.random = np.random.default_rng(0)
        self.twins = {}


class RandomPrefixMachine(AnySpecs, PrefixMachine):
    @initialize(
        layers=st.lists(attention(), min_size=1, max_size=4), options=OPTIONS, blocks=st.sampled_from([1, 1.5, 3])
    )
    def make(self, layers, options, blocks):
        self.layers = layers
        self.start(options, blocks)

    def poison(self):
        if not self.cache.scrub:
            super().poison()


class RandomHybridMachine(AnySpecs, HybridMachine):
    @initialize(
        layers=st.lists(attention(), max_size=3),
        rules=recurrent(),
        options=OPTIONS,
        blocks=st.sampled_from([1, 1.5, 3]),
        slots=st.integers(1, 10),
        caches=st.sampled_from([True, True, True, False]),
    )
    def make(self, layers, rules, options, blocks, slots, caches):
        self.layers = [StateSpec((CONV, TEMPORAL), **rules), *layers, StateSpec((TEMPORAL,), **rules)]
        self.rules = self.layers[0]
        least = 1 + (1 if rules["in_place"] else 2) + rules["draft_tokens"]
        sizes = {"num_states": max(3, least + slots - 1), "prefix_cache": caches}
        if rules["checkpoint_format"]:
            sizes["num_checkpoints"] = 2 + slots
        self.start(options, blocks, **sizes)

    def poison(self):
        if not self.cache.scrub:
            super().poison()


TestRandomPrefixMachine = pytest.mark.slow(drawn(RandomPrefixMachine))
TestRandomPrefixMachine.settings = settings(max_examples=60 if is_full() else 26, stateful_step_count=30, deadline=None)
TestRandomHybridMachine = pytest.mark.slow(drawn(RandomHybridMachine))
TestRandomHybridMachine.settings = settings(max_examples=60 if is_full() else 26, stateful_step_count=30, deadline=None)
