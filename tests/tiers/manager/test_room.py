"""Prefixes that compete for room with their own beginning, with running sequences, with loads and between stores."""

import numpy as np
import pytest

from pagecore.tiers.keys import content_chain, lane_keys
from tests.tiers.manager.served import BLOCK, Served
from tests.tiers.memory_store import MemoryStore


def blocks(*numbers):
    """Return the tokens of whole blocks."""
    return [number * 100 + place for number in numbers for place in range(BLOCK)]


def matched(served, *numbers):
    return served.tiers.host.match([*blocks(*numbers), 1]) // BLOCK


def test_the_beginning_of_a_prefix_makes_no_room_for_its_end():
    with Served(num_blocks=20, host_blocks=5) as served:
        served.compute([*blocks(1), 9])
        served.compute([*blocks(2), 9])
        served.compute([*blocks(1), 8])  # 2 is now the least recently used
        served.compute([*blocks(2, 3, 4, 5), 9])
        assert matched(served, 2, 3, 4, 5) == 4
        assert matched(served, 1) == 0


def test_a_host_without_room_saves_nothing_until_it_has_some():
    with Served(num_blocks=20, host_blocks=5, write="explicit") as served:
        lease = served.tiers.host.reserve([np.arange(4)])
        with served.tiers.add_sequence([*blocks(1, 2), 9]) as sequence:
            served.cache.commit(served.cache.prepare([sequence], 9))
            assert served.tiers.save(sequence) == 0
            served.tiers.check_invariants()
            lease.release()
            assert served.tiers.save(sequence) == 2
        assert matched(served, 1, 2) == 2


def test_a_device_full_of_running_sequences_takes_no_promotion():
    with Served(num_blocks=5, host_blocks=25) as served:
        prompt = [*blocks(1, 2, 3), 9]
        served.compute(prompt)
        served.cache.clear_prefix_cache()
        with served.tiers.add_sequence([*blocks(7, 8, 9), 9]) as sequence:
            served.cache.commit(served.cache.prepare([sequence], 13))
            assert served.tiers.host.promote(prompt) == 0
            assert matched(served, 1, 2, 3) == 3
            served.tiers.check_invariants()
        assert served.tiers.host.promote(prompt) == 3 * BLOCK
        assert served.compute(prompt) == 3 * BLOCK


@pytest.mark.parametrize("gone", range(7))
def test_a_block_that_one_of_several_stores_loses_ends_the_prefix(gone):
    data, numbers = {}, range(1, 8)
    prompt = [*blocks(*numbers), 9]
    with Served([MemoryStore(data=data)], num_blocks=20) as writer:
        writer.compute(prompt)
        writer.flush()
    kept = [{}, {}, {}]
    stores = [
        MemoryStore(data=each, medium=medium) for each, medium in zip(kept, ("DISK", *["EXTERNAL"] * 2), strict=True)
    ]
    with Served(stores, num_blocks=20) as reader:
        keys = [key.tobytes() for key in lane_keys(content_chain(reader.fingerprint, blocks(*numbers)), 0)]
        for place, key in enumerate(keys):
            kept[(place > 2) + (place > 4)][key] = data[key]
        request = reader.tiers.request(prompt)  # looks up
        for each in kept:
            each.pop(keys[gone], None)
        reader.tiers.wait(request, 20.0)
        assert (request.state, request.num_tokens) == ("ready", gone * BLOCK)
        reader.flush()
        reader.tiers.check_invariants()
        assert reader.compute(prompt) == gone * BLOCK
        request.release()
        assert [store.stats().num_held for store in stores] == [0, 0, 0]  # also of what was found after the gap


def test_clearing_host_and_device_during_a_load_takes_nothing_from_it():
    data, prompt = {}, [*blocks(1, 2, 3), 9]
    with Served([MemoryStore(data=data)], num_blocks=20) as writer:
        writer.compute(prompt)
        writer.flush()
    store = MemoryStore(data=data)
    with Served([store], num_blocks=20) as reader:
        store.inject("load", "hang")
        request = reader.tiers.request(prompt)
        while not store.hanging:
            reader.tiers.poll()
        assert request.state == "loading"
        reader.tiers.host.clear()
        reader.cache.clear_prefix_cache()
        reader.tiers.check_invariants()
        store.release()
        reader.tiers.wait(request, 20.0)
        assert request.num_tokens == 3 * BLOCK
        assert reader.compute(prompt) == 3 * BLOCK
        request.release()
