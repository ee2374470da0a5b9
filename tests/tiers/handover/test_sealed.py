"""Sequences with sealed blocks arrive as they are: codes and scales of these blocks, and the numbers of the tail."""

from dataclasses import replace

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    DeviceError,
    PagedKVCache,
    ShapeError,
    StateSpec,
    TensorParallel,
    UnsupportedOption,
)
from pagecore.storage.state_shapes import delta_planes
from pagecore.tiers.handover import errors
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence, start_import
from pagecore.tiers.handover.manifest import Manifest
from tests.cache.swaps import poison
from tests.tiers.handover.failing import Case
from tests.tiers.handover.pairs import advance, assert_same, computed, content, fill, make, row_of
from tests.tiers.handover.relay import Relay

SPEC = AttentionSpec(
    2, 16, 32, dtype="float16", num_query_heads=4, format="kivi2", group_size=16, block_size=16, residual=20
)
WINDOW = AttentionSpec(2, 8, dtype="float32", window=9, num_query_heads=4)
SIZES = {"block_size": 16, "num_blocks": 30}


def compute(cache, sequence, count, seed=0):
    """Compute a step of random numbers; return what its queries attended to in each layer."""
    random = np.random.default_rng((seed, sequence.num_computed_tokens, count))
    batch = cache.prepare([sequence], count)
    found = []
    for layer in range(cache.num_layers):
        spec = cache.spec(layer)
        key, value = (
            random.normal(size=(count, 2, dim)).astype(np.float16) for dim in (spec.head_dim, spec.v_head_dim)
        )
        query = random.normal(size=(count, 4, spec.head_dim)).astype(np.float32)
        cache.write(layer, key, value, batch)
        found.append(cache.attend(layer, query, batch))
    cache.commit(batch)
    return found


def handed_over(pair, sender, sequence, receiver, **options):
    manifest = export_sequence(sender, sequence, transport=pair[0])
    arrived = import_sequence(receiver, manifest.encode(), transport=pair[1], **options)
    assert pair[0].drain(10)
    for cache in (sender, receiver):
        cache.check_invariants()
    return arrived


@pytest.mark.parametrize("length", [7, 36, 52, 100])
@pytest.mark.parametrize("layout", ["layerwise", "BNHD"])
def test_codes_and_scales_arrive_and_steps_continue_bit_for_bit(sockets, length, layout):
    specs = [SPEC, WINDOW, SPEC]
    sender, receiver = make(specs, **SIZES), make(specs, **SIZES, layout=layout)
    for cache, seed in ((sender, 1), (receiver, 2)):
        fill(cache, seed)
        poison(cache, np.nan)
    sequence = sender.add_sequence(range(length))
    compute(sender, sequence, length)
    arrived = handed_over(sockets, sender, sequence, receiver)
    assert arrived.num_sealed_tokens == sequence.num_sealed_tokens == max(0, length - 20) // 16 * 16
    assert_same(content(sender, sequence), content(receiver, arrived))
    assert receiver.held_from(arrived, receiver.group_of(0)) == arrived.num_sealed_tokens
    for count in (1, 30):
        for mine, theirs in zip(compute(sender, sequence, count), compute(receiver, arrived, count), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert_same(content(sender, sequence), content(receiver, arrived))


@pytest.mark.parametrize(("cached", "expected"), [(40, 16), (60, 48), (85, 80)])
def test_blocks_that_the_importer_has_are_not_pulled(sockets, cached, expected):
    sender, receiver = (make([SPEC], **SIZES) for _ in range(2))
    sequence = sender.add_sequence(range(100))
    compute(sender, sequence, 90)  # 64 tokens are sealed
    first = receiver.add_sequence(range(cached))
    compute(receiver, first, cached, 5)
    if cached != 40:
        receiver.remove(first)  # seals all of its whole blocks
    own = content(receiver, first) if cached == 40 else None
    known = receiver.match_length(range(100))
    assert known == expected
    manifest = export_sequence(sender, sequence, transport=sockets[0])
    running = start_import(receiver, manifest, transport=sockets[1])
    arrived = running.result()
    assert arrived.num_sealed_tokens == max(known, 64)
    assert arrived.num_cached_tokens == known
    mine, theirs = content(sender, sequence), content(receiver, arrived)
    tail = range(max(known, 64) - 64, 26)
    for key in ((1, 0, "key"), (1, 0, "value")):
        np.testing.assert_array_equal(mine[key][tail], theirs[key])
    for key in ((0, 0, "sealed_key"), (0, 0, "sealed_value_scale")):
        np.testing.assert_array_equal(mine[key][known // 16 :], theirs[key][known // 16 : 4])
    if own is not None:
        assert_same(own, content(receiver, first))
    later = receiver.add_sequence(range(99))
    assert later.num_cached_tokens == later.num_sealed_tokens == max(known, 64)


@pytest.mark.parametrize(("theirs", "mine"), [(1, 2), (2, 1)])
def test_heads_may_be_split_over_other_ranks(sockets, theirs, mine):
    spec = replace(SPEC, num_kv_heads=4)
    whole = make([spec], **SIZES)
    fill(whole, 5)
    original = content(whole, computed(whole, range(70)))
    senders = [make([spec], **SIZES, parallel=TensorParallel(rank, theirs)) for rank in range(theirs)]
    manifests = []
    for rank, sender in enumerate(senders):
        sequence = computed(sender, range(70))
        heads = TensorParallel(rank, theirs).heads(4)
        part = slice(heads.start, heads.stop)
        for group, pool in enumerate(sender._parts.store.pools):
            row, their_row = row_of(sender, sequence, group), row_of(whole, next(iter(whole.sequences.values())), group)
            for plane in pool.spec.planes:
                source = whole._parts.store.pools[group].plane(plane.name).numpy()
                axis = np.index_exp[:, part] if plane.per == "block" else np.index_exp[:, :, part]
                pool.plane(plane.name).numpy()[row[row > 0]] = source[their_row[row > 0]][axis]
        manifests.append(export_sequence(sender, sequence, transport=sockets[0], readers=mine))
    for rank in range(mine):
        receiver = make([spec], **SIZES, parallel=TensorParallel(rank, mine))
        arrived = import_sequence(receiver, manifests, transport=sockets[1])
        heads = TensorParallel(rank, mine).heads(4)
        found = content(receiver, arrived)
        for key, expected in original.items():
            if key[-1] != "held":
                np.testing.assert_array_equal(expected[:, heads.start : heads.stop], found[key], err_msg=str(key))
    assert sockets[0].drain(10)


STAGES = range(2), range(2, 4)
MODEL = [WINDOW, WINDOW, SPEC, SPEC]


def exported_stages(transport, length):
    """Return the manifests of a stage without sealed blocks and of one with them, and their caches and sequences."""
    senders, manifests = [], []
    for layers in STAGES:
        sender = make(MODEL[layers.start : layers.stop], **SIZES)
        fill(sender, layers.start)
        sequence = computed(sender, range(length))
        senders.append((sender, sequence))
        manifests.append(export_sequence(sender, sequence, transport=transport, readers=2, first_layer=layers.start))
    return senders, manifests


@pytest.mark.parametrize(("length", "sealed", "token"), [(30, 0, 0), (100, 80, 64)])
def test_a_stage_without_sealed_blocks_serves_only_an_equal_stage(sockets, length, sealed, token):
    senders, manifests = exported_stages(sockets[0], length)
    receiver = make(MODEL, **SIZES)
    text = rf"layers 0 to 1 has no sealed .* token {token} in group 0; .*\({sealed} tokens are sealed\): use the same"
    for listed in (manifests, manifests[::-1]):
        with pytest.raises(UnsupportedOption, match=text):
            import_sequence(receiver, listed, transport=sockets[1])
    assert (receiver.num_sequences, receiver.stats().num_used_blocks) == (0, 0)
    receiver.check_invariants()
    for layers, (sender, sequence) in zip(STAGES, senders, strict=True):
        stage = make(MODEL[layers.start : layers.stop], **SIZES)
        arrived = import_sequence(stage, manifests, transport=sockets[1], first_layer=layers.start)
        assert_same(content(sender, sequence), content(stage, arrived))


def test_a_cache_with_sealed_blocks_serves_a_stage_without_them(sockets):
    sender, receiver = make(MODEL, **SIZES), make(MODEL[:2], **SIZES)
    fill(sender, 1)
    sequence = computed(sender, range(100))
    manifest = export_sequence(sender, sequence, transport=sockets[0])
    arrived = import_sequence(receiver, manifest, transport=sockets[1], first_layer=0)
    mine, theirs = content(sender, sequence), content(receiver, arrived)
    assert (mine[0, "held"][0], theirs[0, "held"][0]) == (64, 80)
    for name in ("key", "value"):
        np.testing.assert_array_equal(mine[0, 1, name][16:], theirs[0, 1, name])


@pytest.mark.parametrize("tail", [None, -1, 0, 5])
def test_manifests_with_sealed_tokens_that_no_group_has_are_refused(sockets, tail):
    """Layers that keep states have group -1, of which there is one here, as of sealed layers."""
    sender = make([SPEC, StateSpec(delta_planes(1, 1, 4, 4), chunk=16, interval=16)], **SIZES)
    manifest = export_sequence(sender, computed(sender, range(70)), transport=sockets[0])
    assert Manifest.decode(manifest.encode()) == manifest
    assert (manifest.sealed, [group.tail for group in manifest.geometry.groups]) == (48, [1, None])
    groups = [replace(manifest.geometry.groups[0], tail=tail), manifest.geometry.groups[1]]
    held = manifest.held if tail is not None else [manifest.held[1]] * 2  # of all tokens
    changed = replace(manifest, geometry=replace(manifest.geometry, groups=groups), held=held)
    with pytest.raises(ShapeError, match="the manifest contradicts itself"):
        Manifest.decode(changed.encode())
    if tail is None:
        unsealed = replace(changed, sealed=0)
        assert Manifest.decode(unsealed.encode()) == unsealed


def test_sealed_groups_with_one_tail_are_refused(sockets):
    sender = make([SPEC, replace(SPEC, window=40)], **SIZES)
    manifest = export_sequence(sender, computed(sender, range(70)), transport=sockets[0])
    assert [group.tail for group in manifest.geometry.groups] == [2, 3, None, None]
    groups = [replace(group, tail=group.tail and 2) for group in manifest.geometry.groups]
    with pytest.raises(ShapeError, match="the manifest contradicts itself"):
        Manifest.decode(replace(manifest, geometry=replace(manifest.geometry, groups=groups)).encode())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"residual": 21}, "key_bits 2, .* residual 20 at the exporter .* residual 21 here"),
        ({"format": "kivi4"}, "key_bits 2, .* at the exporter and sealed blocks with key_bits 4"),
        ({"value_format": "kivi4"}, "value_bits 2, .* value_bits 4"),
        ({"block_size": 32}, "block_size 16, .* block_size 32"),
        ({"group_size": 32, "block_size": 32}, "group_size 16, .* group_size 32"),
        (None, "arranged otherwise"),
        ({"dtype": "bfloat16"}, "has planes"),
    ],
)
def test_caches_with_other_rules_refuse_before_anything_is_written(sockets, change, text):
    sender = make([SPEC], **SIZES)
    sequence = computed(sender, range(70))
    spec = AttentionSpec(2, 16, 32, dtype="float16") if change is None else replace(SPEC, **change)
    receiver = make([spec], **(SIZES | {"block_size": (change or {}).get("block_size", 16)}))
    fill(receiver, 2)
    before = [bytes(buffer.numpy()) for pool in receiver._parts.store.pools for buffer in pool.buffers]
    for exporter, importer in ((sender, receiver), (receiver, sender)):
        given = sequence if exporter is sender else computed(exporter, range(70, 80))
        manifest = export_sequence(exporter, given, transport=sockets[0])
        count = importer.num_sequences
        with pytest.raises(UnsupportedOption, match=text if exporter is sender else None):
            import_sequence(importer, manifest, transport=sockets[1])
        assert importer.num_sequences == count
        importer.check_invariants()
        sockets[0].withdraw(manifest.export)
        if exporter is sender:
            after = [bytes(buffer.numpy()) for pool in receiver._parts.store.pools for buffer in pool.buffers]
            assert after == before
    assert sockets[0].drain(10)


@pytest.mark.parametrize("how", ["cut", "flip", "cancel"])
def test_a_hand_over_that_fails_leaves_both_sides_as_they_were(tcp, how):
    case = Case(tcp, specs=[SPEC], sizes=SIZES)
    sealed, mine = case.sequence.num_sealed_tokens, content(case.sender, case.sequence)
    assert sealed == 80
    if how == "cancel":
        running = case.start(case.export())
        running.cancel()
        with pytest.raises(errors.ImportCancelled):
            running.result()
    else:
        with Relay(case.exporter.address, how, 3000) as relay:
            manifest = replace(case.export(), address=relay.address)
            with pytest.raises((errors.PeerLost, errors.CorruptTransfer)):
                case.start(manifest, deadline=20).result()
            case.exporter.withdraw(manifest.export)
    case.check_unchanged(bytes_too=False)
    case.check_released()
    assert case.sequence.num_sealed_tokens == sealed
    assert_same(mine, content(case.sender, case.sequence))
    case.check_works()


def test_an_export_outlives_the_steps_and_the_removal_of_its_sequence(sockets):
    sender, receiver = (make([SPEC], **SIZES) for _ in range(2))
    sequence = computed(sender, range(70))
    expected = content(sender, sequence)
    manifest = export_sequence(sender, sequence, transport=sockets[0])
    sender.append_tokens([sequence], [range(40)])
    advance(sender, sequence, 40)
    assert sequence.num_sealed_tokens == 80
    sender.remove(sequence)
    poison(sender, np.nan)
    arrived = import_sequence(receiver, manifest, transport=sockets[1])
    assert arrived.num_sealed_tokens == 48
    assert_same(expected, content(receiver, arrived))
    assert sockets[0].drain(10)
    sender.check_invariants()
    assert sender.num_sequences == 0


def test_arrivals_of_sealed_blocks():
    cache = make([SPEC], **SIZES)
    sequence = cache.add_sequence(range(70))
    before = cache.stats()
    for count, sealed, error, text in (
        (70, 8, ShapeError, "num_sealed_tokens is 8; .* multiple of block_size, 16, up to 70"),
        (70, 80, ShapeError, "num_sealed_tokens is 80"),
        (70, -16, ShapeError, "num_sealed_tokens is -16"),
    ):
        with pytest.raises(error, match=text):
            cache.prepare_arrival(sequence, count, num_sealed_tokens=sealed)
    assert cache.stats() == before
    batch = cache.prepare_arrival(sequence, 70, num_sealed_tokens=32)
    slots = batch.group(0).slot_mapping.numpy()
    assert (slots[:32] == -1).all()
    assert (slots[32:70] > 0).all()
    cache.commit(batch)
    assert sequence.num_sealed_tokens == 32  # and not 48, which the commit of a step seals
    assert batch.sealed_blocks(0).shape == (0, 2)
    cache.check_invariants()
    with pytest.raises(UnsupportedOption, match="has 70 computed tokens, of which 32 are sealed"):
        cache.prepare_arrival(sequence, 30, num_sealed_tokens=48)
    again = cache.try_prepare_arrival(sequence, 30, num_sealed_tokens=32)
    cache.abandon(again)
    cache.commit(cache.prepare([sequence], 1))
    assert sequence.num_sealed_tokens == 48
    plain = make()
    with pytest.raises(UnsupportedOption, match="num_sealed_tokens is given, but no layer has sealed blocks"):
        plain.prepare_arrival(plain.add_sequence(range(9)), 9, num_sealed_tokens=0)
    driver = PagedKVCache(SPEC, num_blocks=9, device="none")
    with pytest.raises(DeviceError, match="stores no bytes"):
        export_sequence(driver, driver.add_sequence(range(9)), transport=None)


def test_what_follows_a_cut_inside_a_sealed_block_is_not_published(sockets):
    sender, receiver = make([SPEC], **SIZES), make([SPEC], **SIZES)
    fill(sender, 1)
    sequence = sender.add_sequence(range(150))
    compute(sender, sequence, 100)
    sender.truncate(sequence, 53)
    sender.append_tokens([sequence], [list(range(53, 150))])
    compute(sender, sequence, 60)
    arrived = handed_over(sockets, sender, sequence, receiver)
    assert (arrived.num_computed_tokens, arrived.num_sealed_tokens) == (113, 80)
    assert_same(content(sender, sequence), content(receiver, arrived))
    compute(receiver, arrived, 30)
    assert receiver.match_length(range(150)) == 48
    receiver.truncate(arrived, 48)
    receiver.append_tokens([arrived], [list(range(48, 150))])
    compute(receiver, arrived, 90)
    assert receiver.match_length(range(150)) == arrived.num_sealed_tokens == 112
