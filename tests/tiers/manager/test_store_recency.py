"""The order of eviction on disk: uses on the device and the host count, and a prefix is evicted from its end."""

import numpy as np
import pytest

from pagecore import ShapeError
from pagecore.tiers.disk import DiskStore
from pagecore.tiers.keys import content_chain, lane_keys
from tests.tiers.manager.served import BLOCK, LAYERS, WINDOWED, Served, vectors

PROMPT = np.arange(100, 100 + 8 * BLOCK + 1, dtype=np.int32)


def disk_of(folder, slots):
    def make(fingerprint):
        store = DiskStore(folder, fingerprint=fingerprint, max_bytes=3 * 4096 + slots * 4096)
        assert store.num_slots == (slots,)
        return store

    return make


def on_disk(served, tokens):
    """Return the blocks of a prompt that the disk has, as 0 and 1."""
    chain = content_chain(served.fingerprint, np.asarray(tokens, np.int32)[: len(tokens) // BLOCK * BLOCK])
    return served.tiers.stores[0].has(lane_keys(chain, 0)).astype(int).tolist()


def test_what_the_device_serves_again_and_again_stays_on_the_disk(tmp_path):
    shared = PROMPT[: 2 * BLOCK]
    with Served([disk_of(tmp_path, 6)]) as served:
        for chat in range(12):
            served.compute(np.concatenate([shared, np.arange(2 * BLOCK + 1, dtype=np.int32) + 1000 * (chat + 1)]))
            served.flush()
        assert served.reused >= 11 * 2 * BLOCK
        assert on_disk(served, shared) == [1, 1]


def test_a_prefix_that_grew_is_evicted_from_its_end(tmp_path):
    with Served([disk_of(tmp_path, 10)]) as served:
        for length in (3, 5, 7):  # turns of a chat
            served.compute(PROMPT[: length * BLOCK + 1])
            served.flush()
        served.compute(np.arange(5 * BLOCK + 1, dtype=np.int32))
        served.flush()
        assert on_disk(served, PROMPT) == [1] * 5 + [0] * 3


def test_a_chat_that_comes_back_evicts_others_and_not_its_own_beginning(tmp_path):
    other = np.arange(5 * BLOCK + 1, dtype=np.int32)
    with Served([disk_of(tmp_path, 10)]) as served:
        served.compute(PROMPT[: 5 * BLOCK + 1])
        served.flush()
        served.compute(other)
        served.flush()
        assert served.compute(PROMPT) == 5 * BLOCK
        served.flush()
        assert on_disk(served, PROMPT) == [1] * 8
        assert on_disk(served, other) == [1] * 2 + [0] * 3


@pytest.mark.parametrize("write", ["explicit", "through"])
def test_a_prefix_that_was_written_in_several_batches_is_evicted_from_its_end(tmp_path, write):
    with Served([disk_of(tmp_path, 10)], write=write) as served:
        served.tiers._stores._writer._chunk_bytes = 2 * served.tiers.host.payload_bytes[0]
        sequence = served.cache.add_sequence(PROMPT)
        served.cache.commit(served.cache.prepare([sequence], len(PROMPT)))
        served.tiers.save(sequence)
        served.flush()
        other = served.cache.add_sequence(range(4 * BLOCK + 1))
        served.cache.remove(sequence)
        served.flush()
        served.cache.commit(served.cache.prepare([other], 4 * BLOCK + 1))
        served.tiers.save(other)
        served.flush()
        assert on_disk(served, PROMPT) == [1] * 6 + [0] * 2
        served.cache.remove(other)


def test_save_takes_a_longest_prefix(tmp_path):
    with Served([disk_of(tmp_path, 10)], write="explicit") as served:
        sequence = served.cache.add_sequence(PROMPT)
        served.cache.commit(served.cache.prepare([sequence], len(PROMPT)))
        assert served.tiers.save(sequence, max_tokens=3 * BLOCK + 2) == 3
        served.flush()
        assert on_disk(served, PROMPT) == [1] * 3 + [0] * 5
        assert served.tiers.host.match(PROMPT) == 3 * BLOCK
        assert served.tiers.save(sequence, max_tokens=0) == 0
        assert served.tiers.save(sequence) == 5
        served.flush()
        assert on_disk(served, PROMPT) == [1] * 8
        with pytest.raises(ShapeError, match="max_tokens"):
            served.tiers.save(sequence, max_tokens=-1)
        served.cache.remove(sequence)


def grow(served, sequence, ids):
    """Append tokens to a sequence and compute them."""
    served.cache.append_tokens([sequence], np.asarray([ids], np.int32))
    begin = sequence.num_computed_tokens
    batch = served.cache.prepare([sequence], len(sequence.tokens) - begin)
    for layer in range(len(served.layers)):
        new = vectors(sequence.tokens, None, layer)[begin:]
        served.cache.write(layer, new, -new, batch)
    served.cache.commit(batch)


@pytest.mark.parametrize("layers", [LAYERS, WINDOWED], ids=["full", "window"])
@pytest.mark.parametrize("seed", range(6))
def test_the_disk_never_has_a_hole_in_a_prefix(tmp_path, seed, layers):
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, 1000, int(draw.integers(3, 14)) * BLOCK + 1).astype(np.int32) for _ in range(3)]
    lanes = 1 if layers is LAYERS else 2
    for _ in range(2):  # the second process finds what the first one left
        with Served(
            [lambda fingerprint: DiskStore(tmp_path, fingerprint=fingerprint, max_bytes=lanes * 11 * 4096)],
            layers=layers,
            num_blocks=129,
            host_blocks=65,
            write=draw.choice(["through", "second_hit", "on_release"]),
        ) as served:
            assert served.tiers.stores[0].store.num_slots == (8,) * lanes
            running = []
            for _ in range(25):
                prompt = prompts[draw.integers(3)]
                action = draw.random()
                if action < 0.5 or not running:
                    if len(running) < 2 and draw.random() < 0.5:
                        running.append(served.tiers.add_sequence(prompt))
                        grow(served, running[-1], draw.integers(0, 1000, 2))
                    else:
                        served.compute(prompt[: draw.integers(1, len(prompt) // BLOCK + 1) * BLOCK + 1])
                elif action < 0.8:
                    grow(served, running[-1], draw.integers(0, 1000, draw.integers(1, 3 * BLOCK)))
                else:
                    served.cache.remove(running.pop(0))
                served.flush()
                for tokens in [*prompts, *(sequence.tokens for sequence in running)]:
                    there = on_disk(served, tokens)
                    assert there == sorted(there, reverse=True), there
            for sequence in running:
                served.cache.remove(sequence)
