"""Hand-overs of states: quantised checkpoints in which a sequence rests, and caches whose layers all keep states."""

from dataclasses import replace

import numpy as np
import pytest

from pagecore import PagedKVCache, Plane, ShapeError, StateSpec, UnsupportedOption
from pagecore.storage.state_shapes import mamba2_planes
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence, start_import
from tests.tiers.handover.pairs import SPECS, assert_same, content

EXACT = StateSpec(mamba2_planes(16, 1, 2, 8, 8), chunk=8, interval=16)
QUANTISED = replace(EXACT, checkpoint_format="int8")
BFLOAT16 = StateSpec(
    (Plane("temporal", (2, 4, 4), "bfloat16", per="sequence"),), chunk=8, interval=16, checkpoint_format="int8"
)
LAYERS = {
    "attention and states": [SPECS[0], QUANTISED, QUANTISED],
    "states alone": [QUANTISED, BFLOAT16],
    "a window, ping-pong": [SPECS[1], replace(QUANTISED, in_place=False)],
}


def make(layers, **options):
    has_blocks = any(not isinstance(spec, StateSpec) for spec in layers)
    given = {"block_size": 8, "max_sequences": 4, "num_states": 7, "num_blocks": 40 if has_blocks else None}
    return PagedKVCache(layers, **given | options)


def compute(cache, sequence, count, seed=0):
    """Compute a step that writes random numbers to every state, and to every key and value."""
    random = np.random.default_rng((seed, sequence.num_computed_tokens))
    batch = cache.prepare([sequence], count)
    for layer in range(cache.num_layers):
        spec = cache.spec(layer)
        if isinstance(spec, StateSpec):
            for plane in spec.planes:
                array = cache.plane(plane.name, layer).numpy()
                for slots in (batch.checkpoint_write, batch.state_write):
                    array[slots.numpy()[0]] = random.normal(size=plane.shape).astype(array.dtype)
                array[0] = 0
        else:
            rows = random.normal(size=(2, count, spec.num_kv_heads, spec.head_dim)).astype(np.float32)
            cache.write(layer, *rows, batch)
    cache.commit(batch)


def states_of(cache, slot):
    """Return the bytes of a slot of running states."""
    return [plane.numpy()[slot].tobytes() for plane in cache._parts.store.states.planes()]


def checkpoint_of(cache, sequence):
    """Return the stored bytes of a sequence's checkpoint, and its length."""
    slot, length = cache.checkpoint(sequence)
    return [plane.numpy()[slot].tobytes() for plane in cache._parts.store.checkpoints.planes()], length


def specs_of(cache):
    return [cache.spec(layer) for layer in range(cache.num_layers)]


def tokens_of(cache, sequence):
    """Return the bytes of the tokens of a sequence; its state is compared apart."""
    return {key: each for key, each in content(cache, sequence).items() if key != "state"}


def begun(cache, sequence):
    """Return the state that the next step of a sequence reads."""
    cache.append_tokens([sequence], [[5]])
    batch = cache.prepare([sequence], 1)
    found = states_of(cache, batch.state_read.numpy()[0])
    cache.abandon(batch)
    return found


@pytest.fixture(params=sorted(LAYERS))
def pair_of_caches(request):
    layers = LAYERS[request.param]
    return make(layers), make(layers, num_states=9)


def hit(cache):
    """Return a sequence that begins with a cached state of 16 tokens."""
    first = cache.add_sequence(range(20))
    compute(cache, first, 20)
    cache.remove(first)
    sequence = cache.add_sequence(range(21))
    assert sequence.num_computed_tokens == 16
    return sequence


def resting(cache):
    """Return a sequence whose only state is a quantised checkpoint of 16 tokens."""
    sequence = hit(cache)
    assert cache.state_slot(sequence) == 0
    return sequence


@pytest.mark.parametrize("block_size", [8, 4])
def test_a_sequence_that_rests_arrives_with_its_state(sockets, pair_of_caches, block_size):
    sender, receiver = pair_of_caches
    is_aligned = block_size == 8
    if not is_aligned:
        receiver = make(specs_of(receiver), block_size=block_size)
    sequence = resting(sender)
    manifest = export_sequence(sender, sequence, transport=sockets[0])
    if not is_aligned and SPECS[1] in specs_of(receiver):
        with pytest.raises(UnsupportedOption, match="has a window"):
            import_sequence(receiver, manifest, transport=sockets[1])
        return
    arrived = import_sequence(receiver, manifest, transport=sockets[1])
    assert (arrived.num_computed_tokens, arrived.num_tokens) == (16, 21)
    sender.check_invariants()
    receiver.check_invariants()
    if is_aligned:
        assert checkpoint_of(receiver, arrived) == checkpoint_of(sender, sequence)
        assert_same(tokens_of(sender, sequence), tokens_of(receiver, arrived))
    assert begun(receiver, arrived) == begun(sender, sequence)
    if is_aligned:
        assert receiver.match_length(range(21)) == 16
        later = receiver.add_sequence(range(21))
        assert begun(receiver, later) == begun(sender, sequence)


def test_a_sequence_rests_in_a_state_that_was_evicted(sockets, pair_of_caches):
    sender, receiver = pair_of_caches
    sender = make(specs_of(sender), num_checkpoints=3)
    sequence = resting(sender)
    expected, _ = checkpoint_of(sender, sequence)
    start = 100
    while sender.checkpoint(sequence) is not None:
        with sender.add_sequence(range(start, start + 20)) as other:
            compute(sender, other, 20)
        start += 100
    assert (sender.state_slot(sequence), sequence.num_computed_tokens) == (0, 16)
    arrived = import_sequence(receiver, export_sequence(sender, sequence, transport=sockets[0]), transport=sockets[1])
    assert checkpoint_of(receiver, arrived) == (expected, 16)
    assert begun(receiver, arrived) == begun(sender, sequence)
    sender.check_invariants()
    receiver.check_invariants()


def test_a_cache_without_free_checkpoints_restores_the_state_all_the_same(sockets, pair_of_caches):
    sender, receiver = pair_of_caches
    sequence = resting(sender)
    receiver = make(specs_of(receiver), num_states=9, num_checkpoints=2)
    other = receiver.add_sequence(range(100, 120))
    compute(receiver, other, 20)
    batch = receiver.prepare([other], 1)  # in flight: its checkpoint is not given up
    arrived = import_sequence(receiver, export_sequence(sender, sequence, transport=sockets[0]), transport=sockets[1])
    assert receiver.checkpoint(arrived) is None
    expected = begun(sender, sequence)
    receiver.append_tokens([arrived], [[5]])
    step = receiver.prepare([arrived], 1)
    assert states_of(receiver, step.state_read.numpy()[0]) == expected
    receiver.abandon(step)
    receiver.abandon(batch)


def test_nothing_is_pulled_for_a_state_that_the_importer_has(sockets, pair_of_caches):
    sender, receiver = pair_of_caches
    sequence = resting(sender)
    for tokens in (0, 1):
        running = start_import(receiver, export_sequence(sender, sequence, transport=sockets[0]), transport=sockets[1])
        arrived = running.result()
        assert (running.nbytes > 0) == (tokens == 0)
        assert begun(receiver, arrived) == begun(sender, sequence)
        receiver.remove(arrived)
    receiver.check_invariants()


@pytest.mark.parametrize("spec", [EXACT, QUANTISED], ids=["exact", "int8"])
def test_a_running_state_of_a_cache_without_blocks_arrives(sockets, spec):
    sender, receiver = (make([spec, spec]) for _ in range(2))
    sequence = sender.add_sequence(range(21))
    compute(sender, sequence, 21)
    running = start_import(receiver, export_sequence(sender, sequence, transport=sockets[0]), transport=sockets[1])
    arrived = running.result()
    assert running.nbytes >= 2 * spec.nbytes
    assert states_of(receiver, receiver.state_slot(arrived)) == states_of(sender, sender.state_slot(sequence))
    assert checkpoint_of(receiver, arrived) == checkpoint_of(sender, sequence)
    receiver.check_invariants()


def test_a_manifest_without_any_state_contradicts_itself(sockets, pair_of_caches):
    sender, receiver = pair_of_caches
    manifest = export_sequence(sender, resting(sender), transport=sockets[0])
    with pytest.raises(ShapeError, match="contradicts itself"):
        import_sequence(receiver, replace(manifest, checkpoint=8).encode(), transport=sockets[1])
    assert receiver.num_sequences == 0


def test_blocks_that_were_revoked_past_the_state_are_not_part_of_a_manifest(sockets):
    """The row begins with blocks of more tokens than it has computed; they are not handed over."""
    sender, receiver = (make([SPECS[0], EXACT]) for _ in range(2))
    first = sender.add_sequence(range(60))
    for count in (30, 20):
        compute(sender, first, count)
    second = sender.add_sequence([*range(44), 99])
    assert (second.num_computed_tokens, second.num_matched_tokens) == (24, 40)
    sender.revoke_prefix(range(60), valid=32)
    manifest = export_sequence(sender, second, transport=sockets[0])
    assert manifest.publishable is None
    arrived = import_sequence(receiver, manifest.encode(), transport=sockets[1])
    compute(receiver, arrived, 20)
    receiver.remove(arrived)
    assert receiver.match_length(range(44)) == 40


def test_a_manifest_of_exact_states_has_a_running_state(sockets):
    sender, receiver = (make([SPECS[0], EXACT]) for _ in range(2))
    manifest = export_sequence(sender, hit(sender), transport=sockets[0])
    assert (manifest.checkpoint, manifest.num_computed, manifest.has_state) == (16, 16, True)
    with pytest.raises(ShapeError, match="contradicts itself"):
        import_sequence(receiver, replace(manifest, has_state=False).encode(), transport=sockets[1])
    assert receiver.num_sequences == 0
