"""Random walks of caches with scrub=True: rows hold values of their own namespace alone."""

import numpy as np
import pytest
from hypothesis import settings

from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.errors import UnsupportedOption
from tests.cache import test_prefix_machine
from tests.cache.caches import SPEC, WINDOWED, make
from tests.cache.marked import LAYOUTS, mark, numbers_of
from tests.faults import is_full
from tests.machines import drawn

NAMES = [None, "a", "b", 1, True]


def shown_marker(namespace):
    return 1.0 + [(type(name), name) for name in NAMES].index((type(namespace), namespace))


@pytest.mark.parametrize("seed", range(12))
def test_rows_hold_no_value_of_another_namespace_throughout_a_random_walk(seed):
    random = np.random.default_rng(seed)
    layers = [[SPEC], [SPEC, WINDOWED], [WINDOWED, AttentionSpec(1, 4, 8, dtype="float16", num_query_heads=1)]][
        seed % 3
    ]
    cache = make(
        layers,
        num_blocks=12,
        max_sequences=6,
        scrub=True,
        layout=LAYOUTS[seed % len(LAYOUTS)],
        prefix_cache=seed % 4 > 0,
    )
    space, tenants = SwapSpace(cache, num_blocks=8), {}

    def pick(is_swapped=False):
        among = [one for one in tenants if one.is_swapped == is_swapped]
        count = min(len(among), int(random.integers(1, 3)))
        return [among[i] for i in random.permutation(len(among))[:count]]

    def add():
        if cache.num_sequences < 6:
            namespace = NAMES[random.integers(len(NAMES))]
            tenants[cache.add_sequence(random.integers(0, 2, random.integers(0, 30)), namespace=namespace)] = namespace

    def step():
        listed = pick()
        counts = [int(random.integers(0, 12)) for _ in listed]
        fits = all(one.num_computed_tokens + n <= 44 for one, n in zip(listed, counts, strict=True))
        batch = cache.try_prepare(listed, counts) if fits else None
        if batch is None:
            return
        expect()
        begin = 0
        for one, count in zip(listed, counts, strict=True):
            if random.random() < 0.7:
                mark(cache, batch, shown_marker(tenants[one]), slice(begin, begin + count))
            begin += count
        if random.random() < 0.3:
            cache.abandon(batch)
            return
        if random.random() < 0.1 and listed:
            remove(listed[0])
        cache.commit(batch, [int(random.integers(0, n + 1)) for n in counts] if random.random() < 0.4 else None)

    def fork():
        if pick() and cache.num_sequences < 6:
            parent = pick()[0]
            tenants[cache.fork(parent)] = tenants[parent]

    def reorder():
        listed = pick()
        parents = [pick()[0] for _ in listed]
        cache.reorder(listed, parents)
        tenants.update(dict(zip(listed, [tenants[one] for one in parents], strict=True)))

    def truncate():
        for one in pick():
            try:
                cache.truncate(one, int(random.integers(0, max(one.num_tokens, one.num_computed_tokens) + 1)))
            except UnsupportedOption:
                assert cache.num_groups > 0

    def remove(one=None):
        for gone in [one] if one else pick(is_swapped=random.random() < 0.3):
            cache.remove(gone)
            del tenants[gone]

    def expect():
        cache.check_invariants()
        for one, namespace in tenants.items():
            assert numbers_of(cache, one) <= {0.0, shown_marker(namespace)}

    moves = [add, add, step, step, step, step, fork, reorder, truncate, remove]
    moves += [lambda: cache.try_swap_out(pick(), space), lambda: cache.try_swap_in(pick(is_swapped=True))]
    moves += [lambda: cache.clear_prefix_cache() if random.random() < 0.2 else None]
    for _ in range(250 if is_full() else 120):
        moves[random.integers(len(moves))]()
        expect()
    assert cache.stats().num_scrubbed_blocks > 0


class ScrubbedMachine(test_prefix_machine.PrefixMachine):
    """Assert that a zeroed block is never one that a sequence or the prefix cache still holds."""

    def make_cache(self, layers, **options):
        return PagedKVCache(layers, **options, scrub=True)


TestScrubbedMachine = pytest.mark.slow(drawn(ScrubbedMachine))
TestScrubbedMachine.settings = settings(max_examples=40 if is_full() else 15, stateful_step_count=40, deadline=None)
