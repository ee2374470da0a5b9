"""Stores that are attached to a host that has prefixes already: they receive what is used from then on, whole."""

import numpy as np
import pytest

from pagecore.tiers.guard import Deadline, Guard
from pagecore.tiers.host.methods.records import Backup
from pagecore.tiers.manager.hits.inherited import InheritedPrefixes
from pagecore.tiers.manager.tiers import Tiers
from tests.tiers.manager.served import BLOCK, LAYERS, WINDOWED, Served
from tests.tiers.memory_store import MemoryStore

PROMPT = np.arange(1000, 1000 + 6 * BLOCK + 1, dtype=np.int32)
LONGER = np.append(PROMPT[:-1], np.arange(2 * BLOCK + 1, dtype=np.int32))


def attach(served, store, **options):
    served.tiers.close(keep_host=True)
    guard = Guard(store, deadline=Deadline(20.0))
    served.tiers = Tiers(
        served.cache, served.tiers.host, [guard], fingerprint=served.fingerprint, min_tokens=1, **options
    )


def found_by_another_process(store, prompt, layers, namespace=None):
    """Return the tokens that a new process loads from a store, every byte compared."""
    with Served([MemoryStore(data=store.data)], layers=layers, num_blocks=60, host_blocks=60) as other:
        request = other.serve(prompt, namespace=namespace)
        assert other.reused == request.num_tokens
        return request.num_tokens


@pytest.mark.parametrize("layers", [LAYERS, WINDOWED], ids=["full", "window"])
@pytest.mark.parametrize("namespace", [None, "tenant"])
@pytest.mark.parametrize("prompt", [PROMPT, LONGER], ids=["again", "continued"])
def test_a_prefix_of_the_host_reaches_the_store_when_it_is_used(layers, namespace, prompt):
    store = MemoryStore()
    with Served(layers=layers, num_blocks=60, host_blocks=60) as served:
        served.compute(PROMPT, namespace)
        attach(served, store)
        served.tiers.drain()
        assert not store.data
        served.compute(prompt, namespace)
        served.tiers.drain()
        assert found_by_another_process(store, prompt, layers, namespace) == len(prompt) - 1
        stored = store.counts["store"]
        served.compute(prompt, namespace)
        served.tiers.drain()
        assert store.counts["store"] == stored


def test_a_sequence_that_ran_while_the_store_was_attached_is_stored_from_its_beginning():
    store = MemoryStore()
    with Served(num_blocks=60, host_blocks=60) as served:
        served.compute(PROMPT)
        sequence = served.cache.add_sequence(LONGER)
        served.cache.commit(served.cache.prepare([sequence], 1))
        attach(served, store)
        served.cache.commit(served.cache.prepare([sequence], len(LONGER) - sequence.num_computed_tokens))
        served.tiers.drain()
        assert len(store.data) == len(LONGER) // BLOCK
        served.cache.remove(sequence)


def test_with_explicit_writes_nothing_is_stored_by_use():
    store = MemoryStore()
    with Served(num_blocks=60, host_blocks=60) as served:
        served.compute(PROMPT)
        attach(served, store, write="explicit")
        served.compute(PROMPT)
        served.tiers.drain()
        assert not store.data


def test_a_prefix_is_offered_once():
    inherited = InheritedPrefixes(BLOCK, 20)
    tokens = LONGER[: 8 * BLOCK]

    def starts(start, stop, namespace=None):
        return inherited.whole(Backup(tokens, namespace, None, start, stop)).start // BLOCK

    assert starts(2 * BLOCK, 4 * BLOCK) == 0
    assert starts(4 * BLOCK, 4 * BLOCK) == 4
    assert starts(5 * BLOCK, 8 * BLOCK) == 4
    assert starts(8 * BLOCK, 8 * BLOCK, "tenant") == 0
    assert starts(0, 8 * BLOCK) == 0
