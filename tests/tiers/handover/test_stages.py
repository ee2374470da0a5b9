"""Sequences pass between other pipeline stages: every layer arrives from the stages that hold it."""

from itertools import pairwise, product

import numpy as np
import pytest

from pagecore import (
    Alias,
    AttentionSpec,
    CrossSpec,
    LatentSpec,
    ShapeError,
    StateSpec,
    TensorParallel,
    UnsupportedOption,
)
from pagecore.cache.parts import parts_of
from pagecore.storage.state_shapes import delta_planes
from pagecore.tiers.handover.errors import LeaseExpired
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence, start_import
from tests.tiers.handover.pairs import as_bytes, computed, fill, make, row_of

FULL, WINDOW = AttentionSpec(4, 8, dtype="float32"), AttentionSpec(4, 8, dtype="float32", window=24)
MODEL = [FULL, WINDOW, WINDOW, FULL, WINDOW, FULL, FULL]
TOKENS = list(range(100, 145))


def stages(*cuts):
    return [range(start, stop) for start, stop in pairwise((0, *cuts, len(MODEL)))]


def stage(layers, model=MODEL, **options):
    return make(model[layers.start : layers.stop], **options)


def planes_of(cache, sequence, layer):
    """Return the bytes of a layer's held tokens, by plane, and the tokens."""
    place = parts_of(cache).layers[layer]
    pool, row = parts_of(cache).store.pools[place.group], row_of(cache, sequence, place.group)
    is_cross = parts_of(cache).groups[place.group].is_cross
    tokens = np.arange(sequence.num_cross_tokens if is_cross else sequence.num_computed_tokens)
    tokens = tokens[row[tokens // cache.block_size] != 0]
    blocks = row[tokens // cache.block_size]
    planes = {plane.name: as_bytes(pool.plane(plane.name, place.index)) for plane in pool.spec.planes}
    return tokens, {name: array[blocks, tokens % cache.block_size] for name, array in planes.items()}


def assert_same_layers(sender, sequence, theirs, receiver, arrived, mine):
    """Compare the planes of the layers that both stages have; `theirs` and `mine` number the layers."""
    for number in set(mine) & set(theirs):
        tokens, expected = planes_of(sender, sequence, number - theirs.start)
        same, found = planes_of(receiver, arrived, number - mine.start)
        np.testing.assert_array_equal(tokens, same)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=f"{number} {name}")


def exported(transport, layers, model=MODEL, *, readers=1, seed=0, **options):
    """Return a stage, its sequence with random bytes, and the manifest."""
    cache = stage(layers, model, **options)
    sequence = computed(cache, TOKENS)
    fill(cache, seed + layers.start)  # of which no other stage has the same
    manifest = export_sequence(cache, sequence, transport=transport, readers=readers, first_layer=layers.start)
    return cache, sequence, manifest


@pytest.mark.parametrize(
    ("theirs", "mine"), [((), (3,)), ((4,), ()), ((3,), (3,)), ((1, 2, 5), (2, 6)), ((4,), (1, 4))]
)
def test_layers_arrive_from_the_stages_that_hold_them(sockets, theirs, mine):
    exporter, importer = sockets
    senders = [(layers, *exported(exporter, layers, readers=len(stages(*mine)))) for layers in stages(*theirs)]
    for layers in stages(*mine):
        receiver = stage(layers, layout="blockwise")
        fill(receiver, 50)
        manifests = [manifest.encode() for *_, manifest in senders]
        arrived = import_sequence(receiver, manifests, transport=importer, first_layer=layers.start)
        assert arrived.tokens.tolist() == TOKENS
        assert arrived.num_computed_tokens == len(TOKENS)
        receiver.check_invariants()
        for held, sender, sequence, _ in senders:
            assert_same_layers(sender, sequence, held, receiver, arrived, layers)
    assert exporter.drain(10)
    for _, sender, *_ in senders:
        sender.check_invariants()
        assert sender.num_sequences == 1


def test_stages_and_ranks_may_both_differ(sockets):
    exporter, importer = sockets
    senders = [
        (layers, rank, *exported(exporter, layers, seed=10 * rank, parallel=TensorParallel(rank, 2)))
        for layers, rank in product(stages(3), range(2))
    ]
    receiver = stage(range(len(MODEL)))
    arrived = import_sequence(receiver, [manifest for *_, manifest in senders], transport=importer)
    for layers, rank, sender, sequence, _ in senders:
        heads = TensorParallel(rank, 2).heads(4)
        for number in layers:
            _, expected = planes_of(sender, sequence, number - layers.start)
            _, found = planes_of(receiver, arrived, number)
            for name, array in expected.items():
                np.testing.assert_array_equal(found[name][:, heads.start : heads.stop], array)
    receiver.check_invariants()


def test_the_first_of_several_stages_delivers_a_layer(sockets):
    exporter, importer = sockets
    senders = [(layers, *exported(exporter, layers)) for layers in (range(2, 7), range(5))]
    receiver = stage(range(len(MODEL)))
    arrived = import_sequence(receiver, [manifest for *_, manifest in senders], transport=importer)
    for number in range(len(MODEL)):
        layers, sender, sequence, _ = senders[0 if number >= 2 else 1]
        _, expected = planes_of(sender, sequence, number - layers.start)
        _, found = planes_of(receiver, arrived, number)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=f"{number} {name}")


def test_latents_of_other_block_sizes_and_layers_that_share(sockets):
    exporter, importer = sockets
    latent = LatentSpec(16, 8, scale=0.1, dtype="bfloat16")
    model = [latent, FULL, Alias(1), latent]
    senders = [exported(exporter, layers, model) for layers in (range(3), range(3, 4))]
    receiver = make(model, block_size=16)
    manifests = [manifest for *_, manifest in senders]
    arrived = import_sequence(receiver, manifests, transport=importer)
    for (sender, sequence, manifest), number in zip([senders[0], senders[0], senders[1]], (0, 1, 3), strict=True):
        _, expected = planes_of(sender, sequence, number - manifest.geometry.first_layer)
        _, found = planes_of(receiver, arrived, number)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)


def test_a_prefix_of_the_importer_is_not_pulled(sockets):
    exporter, importer = sockets
    manifests = [exported(exporter, layers)[2] for layers in stages(3)]
    receiver = stage(range(len(MODEL)))
    receiver.remove(computed(receiver, TOKENS[:32]))
    running = start_import(receiver, manifests, transport=importer)
    assert running.nbytes == 13 * 2 * 4 * 8 * 4 * len(MODEL)
    assert running.result().num_computed_tokens == len(TOKENS)


@pytest.mark.parametrize(
    ("theirs", "mine", "first", "text"),
    [
        ([range(3)], range(7), None, r"layers \[3, 5, 6\] of the model are at no exporter"),
        ([range(3, 7)], range(3), 0, r"layers \[0\] of the model are at no exporter"),
        ([range(3, 7)], range(5), None, "a stage has the layers up to 6, and the other side 5 layers in all"),
        ([range(3)], range(1, 4), 0, "arranged otherwise"),
    ],
)
def test_missing_and_other_layers_are_refused(sockets, theirs, mine, first, text):
    exporter, importer = sockets
    manifests = [exported(exporter, layers)[2] for layers in theirs]
    receiver = stage(mine)
    with pytest.raises(UnsupportedOption, match=text):
        import_sequence(receiver, manifests, transport=importer, first_layer=first)
    assert receiver.num_sequences == 0
    receiver.check_invariants()


def test_states_need_equal_stages(sockets):
    exporter, importer = sockets
    state = StateSpec(delta_planes(1, 1, 4, 4), chunk=8, interval=16)
    model = [FULL, state, FULL, state]
    manifests = [exported(exporter, layers, model, readers=2)[2] for layers in (range(2), range(2, 4))]
    with pytest.raises(UnsupportedOption, match="states are not split or joined: use equal stages"):
        import_sequence(make(model), manifests, transport=importer)
    receiver = stage(range(2, 4), model)
    arrived = import_sequence(receiver, manifests[1], transport=importer, first_layer=2)
    assert arrived.num_computed_tokens == len(TOKENS)


def test_encoder_outputs_arrive_from_every_stage(sockets):
    exporter, importer = sockets
    model = [FULL, CrossSpec(4, 8, max_tokens=20, dtype="float32")] * 2
    manifests = []
    for layers in (range(2), range(2, 4)):
        cache = stage(layers, model)
        fill(cache, layers.start)
        sequence = computed(cache, TOKENS, cross_tokens=11)
        manifests.append(export_sequence(cache, sequence, transport=exporter, first_layer=layers.start))
    receiver = make(model)
    arrived = import_sequence(receiver, manifests, transport=importer)
    assert arrived.num_cross_tokens == 11
    assert arrived.is_cross_written
    receiver.check_invariants()


CROSSED = [FULL, FULL, FULL, CrossSpec(4, 8, dtype="float32")]
HALVES = range(2), range(2, 4)


@pytest.mark.parametrize("digest", [None, b"clip"])
@pytest.mark.parametrize("mine", [(range(4),), HALVES])
def test_stages_with_and_without_cross_attention_arrive_together(sockets, mine, digest):
    """A stage without it has the digest of the encoder's input in its namespace."""
    exporter, importer = sockets

    def options(layers):
        own = {"namespace": "tenant"} if digest is None else {"namespace": ("tenant", digest)}
        return {"namespace": "tenant", "cross_digest": digest} if 3 in layers else own

    senders, manifests = [], []
    for layers in HALVES:
        cache = stage(layers, CROSSED)
        sequence = computed(cache, TOKENS, 40, **options(layers), **({"cross_tokens": 11} if 3 in layers else {}))
        fill(cache, layers.start)
        senders.append((layers, cache, sequence))
        manifests.append(export_sequence(cache, sequence, transport=exporter, readers=8, first_layer=layers.start))
    for layers, order in product(mine, (1, -1)):
        receiver = stage(layers, CROSSED)
        options_of = {"transport": importer, "first_layer": layers.start, **options(layers)}
        arrived = import_sequence(receiver, manifests[::order], **options_of)
        assert arrived.num_computed_tokens == 40
        assert (arrived.num_cross_tokens, arrived.is_cross_written) == ((11, True) if 3 in layers else (None, False))
        for held, sender, sequence in senders:
            assert_same_layers(sender, sequence, held, receiver, arrived, layers)
        receiver.remove(arrived)
        again = import_sequence(receiver, manifests[::order], **options_of)
        reused = 32 if digest else 0  # the last token arrives with the encoder output, which was removed
        assert again.num_cached_tokens == (reused if 3 in layers else 40)
        receiver.check_invariants()


def test_a_digest_for_a_stage_without_cross_attention_is_named(sockets):
    exporter, importer = sockets
    cache = stage(range(2), CROSSED)
    sequence = computed(cache, TOKENS, 40, namespace=("tenant", b"clip"))
    manifest = export_sequence(cache, sequence, transport=exporter, first_layer=0)
    options = {"transport": importer, "first_layer": 0, "namespace": "tenant", "cross_digest": b"clip"}
    with pytest.raises(UnsupportedOption, match=r"no cross-attention layers.* namespace=\(namespace, cross_digest\)"):
        import_sequence(stage(range(2), CROSSED), manifest, **options)


def test_cross_attention_on_one_side_only_is_named(sockets):
    exporter, importer = sockets
    manifest = exported(exporter, range(2, 4), [FULL] * 4)[2]
    with pytest.raises(UnsupportedOption, match="group 1 is of cross attention here, and not at the exporter"):
        import_sequence(stage(range(2, 4), CROSSED), manifest, transport=importer, first_layer=2)


@pytest.mark.parametrize("count", [12, None])
def test_stages_with_other_encoder_tokens_are_of_different_sequences(sockets, count):
    exporter, importer = sockets
    model, manifests = [FULL, CROSSED[3]] * 2, []
    for layers, tokens in zip(HALVES, (11, count), strict=True):
        cache = stage(layers, model)
        sequence = cache.add_sequence(TOKENS, cross_tokens=tokens)
        manifests.append(export_sequence(cache, sequence, transport=exporter, first_layer=layers.start))
    with pytest.raises(UnsupportedOption, match="different sequences"):
        import_sequence(make(model), manifests, transport=importer)


@pytest.mark.parametrize("first", [-1, 1 << 40])
def test_the_first_layer_is_checked(sockets, first):
    exporter, importer = sockets
    sender, sequence, manifest = exported(exporter, range(3))
    with pytest.raises(ShapeError, match="first_layer"):
        export_sequence(sender, sequence, transport=exporter, first_layer=first)
    with pytest.raises(ShapeError, match="first_layer"):
        import_sequence(stage(range(3)), manifest, transport=importer, first_layer=first)


def test_readers_without_common_layers_count(sockets):
    exporter, importer = sockets
    manifests = [exported(exporter, layers, readers=2)[2] for layers in stages(3)]
    for layers in stages(3):
        import_sequence(stage(layers), manifests, transport=importer, first_layer=layers.start)
    with pytest.raises(LeaseExpired):
        import_sequence(stage(range(3)), manifests, transport=importer, first_layer=0)
