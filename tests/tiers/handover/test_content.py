"""Sequences arrive with every byte of every plane, whatever the layouts, block sizes and splits of heads are."""

from dataclasses import replace

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    LatentSpec,
    Plane,
    ShapeError,
    StateSpec,
    SwapSpace,
    TensorParallel,
    UnsupportedOption,
)
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence, start_import
from pagecore.tiers.handover.manifest import Manifest
from tests.tiers.handover.pairs import SPECS, advance, assert_same, computed, content, fill, make, row_of

LAYOUTS = ["layerwise", "blockwise", "LCBNHD", "BNHD", "CBNHD", "BLHCND", "LBNHD"]
STATE = StateSpec(
    (Plane("conv", (6, 3), "bfloat16", per="sequence"), Plane("temporal", (2, 4, 4), "float32", per="sequence")),
    chunk=16,
    interval=32,
)


def hand_over(pair, sender, receiver, sequence, **options):
    exporter, importer = pair
    manifest = export_sequence(sender, sequence, transport=exporter)
    sender.check_invariants()
    arrived = import_sequence(receiver, manifest.encode(), transport=importer, **options)
    assert exporter.drain(10)
    sender.check_invariants()
    receiver.check_invariants()
    return arrived


def both(length=50, known=None, specs=SPECS, theirs=None, mine=None):
    sender, receiver = make(specs, **theirs or {}), make(specs, **mine or {})
    fill(sender, 1)
    fill(receiver, 2)
    sequence = computed(sender, list(range(100, 100 + (length if known is None else known))), length)
    return sender, receiver, sequence


@pytest.mark.parametrize("length", [1, 7, 8, 9, 24, 25, 33, 100])
def test_every_transport_delivers_every_byte(pair, length):
    sender, receiver, sequence = both(length, length + 1)
    arrived = hand_over(pair, sender, receiver, sequence)
    assert (arrived.num_tokens, arrived.num_computed_tokens) == (length + 1, length)
    np.testing.assert_array_equal(arrived.tokens, sequence.tokens)
    assert_same(content(sender, sequence), content(receiver, arrived))
    assert sender.num_sequences == receiver.num_sequences == 1


def test_states_arrive_with_every_transport(pair):
    sender, receiver, sequence = both(70, specs=[SPECS[0], STATE, SPECS[1]], theirs={}, mine={})
    expected = content(sender, sequence)
    arrived = hand_over(pair, sender, receiver, sequence)
    assert_same(expected, content(receiver, arrived))


@pytest.mark.parametrize("mine", LAYOUTS)
@pytest.mark.parametrize("theirs", LAYOUTS)
def test_layouts_may_differ(sockets, theirs, mine):
    sender, receiver, sequence = both(45, theirs={"layout": theirs}, mine={"layout": mine})
    arrived = hand_over(sockets, sender, receiver, sequence)
    assert_same(content(sender, sequence), content(receiver, arrived))


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(2, 32, dtype="bfloat16"),
        *(
            AttentionSpec(2, 32, format=name)
            for name in ("int8_token", "int4_token", "float8_token", "nvfp4", "mxfp8", "fp4_block16")
        ),
        AttentionSpec(2, 32, format="float8_e4m3fn", value_format="nvfp4", key_scale=[0.5, 2.0]),
        AttentionSpec(2, 32, format="int4_token", key_rotation="hadamard", value_rotation="hadamard"),
        AttentionSpec(2, 32, dtype="float16", key_bounds=True, label_channels=((0, 3), (1, 5))),
        LatentSpec(512, 64, scale=0.1, dtype="bfloat16"),
        LatentSpec(512, 64, scale=0.1, format="fp8_ds_mla"),
    ],
    ids=lambda spec: f"{type(spec).__name__}-{getattr(spec, 'format', None)}-{len(spec.planes)}",
)
@pytest.mark.parametrize("mine", ["layerwise", "BNHD"])
def test_quantised_latent_and_extra_planes_arrive_as_they_are(sockets, spec, mine):
    specs = [spec, spec]
    sender, receiver, sequence = both(45, specs=specs, mine={"layout": mine})
    arrived = hand_over(sockets, sender, receiver, sequence)
    assert_same(content(sender, sequence), content(receiver, arrived))


@pytest.mark.parametrize(("theirs", "mine"), [(8, 16), (16, 8), (8, 12), (5, 7), (32, 4)])
def test_blocks_of_another_size_are_cut_at_tokens(sockets, theirs, mine):
    specs = SPECS[:1]
    sender, receiver, sequence = both(45, specs=specs, theirs={"block_size": theirs}, mine={"block_size": mine})
    arrived = hand_over(sockets, sender, receiver, sequence)
    one, other = content(sender, sequence), content(receiver, arrived)
    assert_same(one, other)
    assert receiver.match_length(sequence.tokens) == (45 - 1) // mine * mine


@pytest.mark.parametrize("spec", [SPECS[1], AttentionSpec(2, 8, dtype="float32", key_bounds=True)])
def test_windows_and_planes_per_block_need_equal_blocks(sockets, spec):
    sender, receiver, sequence = both(45, specs=[spec], mine={"block_size": 16})
    with pytest.raises(UnsupportedOption, match="use the same block_size"):
        hand_over(sockets, sender, receiver, sequence)
    assert receiver.num_sequences == 0


@pytest.mark.parametrize("layout", ["layerwise", "LCBNHD", "blockwise"])
@pytest.mark.parametrize(("theirs", "mine"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1), (2, 2), (8, 4), (4, 8)])
def test_heads_may_be_split_over_other_ranks(sockets, theirs, mine, layout):
    exporter, importer = sockets
    tokens = list(range(45))
    senders = [make(parallel=TensorParallel(rank, theirs)) for rank in range(theirs)]
    whole = make()
    fill(whole, 5)
    original = content(whole, computed(whole, tokens))
    manifests = []
    for rank, sender in enumerate(senders):
        fill(sender, 1)
        sequence = computed(sender, tokens)
        heads = TensorParallel(rank, theirs).heads(4)
        write_heads(sender, sequence, original, heads)
        manifests.append(export_sequence(sender, sequence, transport=exporter, readers=mine))
    for rank in range(mine):
        receiver = make(parallel=TensorParallel(rank, mine), layout=layout)
        fill(receiver, 2)
        arrived = import_sequence(receiver, manifests, transport=importer, num_kv_heads=4)
        heads = TensorParallel(rank, mine).heads(4)
        assert_same(original, content(receiver, arrived), slice(heads.start, heads.stop))
        receiver.check_invariants()
    assert exporter.drain(10)
    for sender in senders:
        assert sender.num_sequences == 1
        sender.check_invariants()


@pytest.mark.parametrize(("theirs", "mine"), [(1, 2), (2, 1), (2, 4)])
def test_factors_that_all_heads_of_a_rank_share_are_those_of_the_whole_layer(sockets, theirs, mine):
    exporter, importer = sockets
    specs = [AttentionSpec(4, 8, format="float8_e4m3fn", key_scale=[0.5, 0.5, 2.0, 2.0], value_scale=[0.25] * 4)]
    tokens, manifests = list(range(20)), []
    whole = make(specs)
    fill(whole, 5)
    original = content(whole, computed(whole, tokens))
    for rank in range(theirs):
        sender = make(specs, parallel=TensorParallel(rank, theirs))
        sequence = computed(sender, tokens)
        write_heads(sender, sequence, original, TensorParallel(rank, theirs).heads(4))
        manifests.append(export_sequence(sender, sequence, transport=exporter, readers=mine))
    for rank in range(mine):
        receiver = make(specs, parallel=TensorParallel(rank, mine))
        arrived = import_sequence(receiver, manifests, transport=importer)
        heads = TensorParallel(rank, mine).heads(4)
        assert_same(original, content(receiver, arrived), slice(heads.start, heads.stop))


@pytest.mark.parametrize("ranks", [((1, 4), (0, 1)), ((0, 1), (1, 4)), ((2, 4), (0, 2), (0, 1))])
def test_exporters_may_be_split_over_other_ranks_among_themselves(sockets, ranks):
    exporter, importer = sockets
    specs, tokens, manifests = [AttentionSpec(8, 8, dtype="float32")], list(range(20)), []
    whole, receiver = make(specs), make(specs)
    original = content(whole, computed(whole, tokens))
    for rank in ranks:
        sender = make(specs, parallel=TensorParallel(*rank))
        sequence = computed(sender, tokens)
        write_heads(sender, sequence, original, TensorParallel(*rank).heads(8))
        manifests.append(export_sequence(sender, sequence, transport=exporter))
    assert_same(original, content(receiver, import_sequence(receiver, manifests, transport=importer)))


def write_heads(cache, sequence, original, heads):
    """Write some heads of another cache's content to the tokens of a sequence."""
    parts = cache._parts
    for group, pool in enumerate(parts.store.pools):
        row = row_of(cache, sequence, group)
        tokens = original[group, "held"]
        for layer in range(pool.num_layers):
            for plane in pool.spec.planes:
                array = pool.plane(plane.name, layer).numpy().view(np.uint8)
                part = original[group, layer, plane.name][:, heads.start : heads.stop]
                array[row[tokens // cache.block_size], tokens % cache.block_size] = part


def test_replicated_heads_on_both_sides_need_their_number(sockets):
    exporter, importer = sockets
    sender, receiver = make(parallel=TensorParallel(0, 4)), make(parallel=TensorParallel(0, 8))
    manifest = export_sequence(sender, computed(sender, list(range(20))), transport=exporter)
    with pytest.raises(UnsupportedOption, match="pass num_kv_heads"):
        import_sequence(receiver, manifest, transport=importer)
    with pytest.raises(UnsupportedOption, match="its num_kv_heads"):
        import_sequence(receiver, manifest, transport=importer, num_kv_heads=3)
    assert receiver.num_sequences == 0


def test_a_missing_rank_is_named(sockets):
    exporter, importer = sockets
    sender = make(parallel=TensorParallel(0, 2))
    manifest = export_sequence(sender, computed(sender, list(range(20))), transport=exporter)
    receiver = make()
    with pytest.raises(UnsupportedOption, match=r"heads \[2, 3\] of group 0 are not at rank 0 of 2"):
        import_sequence(receiver, manifest, transport=importer)
    assert receiver.num_sequences == 0


def test_the_importer_pulls_only_what_its_prefix_cache_lacks(sockets):
    exporter, importer = sockets
    sender, receiver, sequence = both(100)
    whole = hand_over(sockets, sender, receiver, sequence)
    everything = content(receiver, whole)
    receiver.remove(whole)
    advance(sender, sequence, 30)
    sender.append_tokens([sequence], [list(range(200, 230))])
    running = start_import(receiver, export_sequence(sender, sequence, transport=exporter), transport=importer)
    arrived = running.result()
    assert arrived.num_cached_tokens == 96
    block = sum(group.bytes_per_block(8) for group in receiver._parts.token_groups)
    assert 0 < running.nbytes <= 5 * block
    assert_same(content(sender, sequence), content(receiver, arrived))
    assert everything.keys() == content(receiver, arrived).keys()
    again = start_import(receiver, export_sequence(sender, sequence, transport=exporter), transport=importer)
    assert again.result().num_cached_tokens == 128
    assert again.nbytes < block
    receiver.check_invariants()


def test_a_sequence_that_the_cache_has_is_not_pulled_at_all(sockets):
    sender, receiver, sequence = both(24, 25)
    first = hand_over(sockets, sender, receiver, sequence)
    second = hand_over(sockets, sender, receiver, sequence)
    assert second.num_cached_tokens == 24
    assert_same(content(receiver, first), content(receiver, second))


def test_later_sequences_reuse_what_arrived(sockets):
    sender, receiver, sequence = both(96)
    hand_over(sockets, sender, receiver, sequence)
    third = receiver.add_sequence([*sequence.tokens.tolist(), 7])
    assert third.num_cached_tokens == 96
    assert_same(content(sender, sequence), content(receiver, third))


@pytest.mark.parametrize("in_place", [True, False])
def test_the_checkpoint_of_a_state_arrives_and_serves_later_sequences(sockets, in_place):
    specs = [SPECS[0], replace(STATE, in_place=in_place)]
    sender, receiver, sequence = both(70, specs=specs)
    slot, length = sender.checkpoint(sequence)
    assert length == 64
    planes = sender._parts.store.states.planes()
    expected = [plane.numpy()[slot].copy() for plane in planes]
    arrived = hand_over(sockets, sender, receiver, sequence)
    found, tokens = receiver.checkpoint(arrived)
    assert tokens == 64
    for plane, one in zip(receiver._parts.store.states.planes(), expected, strict=True):
        np.testing.assert_array_equal(plane.numpy()[found].view(np.uint8), one.view(np.uint8))
    assert_same(content(sender, sequence), content(receiver, arrived))
    later = receiver.add_sequence([*sequence.tokens.tolist(), 1])
    assert later.num_cached_tokens == 64
    advance(receiver, arrived, 3)
    receiver.check_invariants()


def test_a_cache_without_free_slots_goes_without_the_checkpoint(sockets):
    specs = [SPECS[0], STATE]
    sender, receiver, sequence = both(70, specs=specs, mine={"num_states": 2})
    arrived = hand_over(sockets, sender, receiver, sequence)
    assert receiver.checkpoint(arrived) is None
    assert_same(content(sender, sequence), content(receiver, arrived))


def test_the_exported_sequence_may_grow_and_go_while_it_is_held(sockets):
    exporter, importer = sockets
    sender, receiver, sequence = both(45)
    expected = content(sender, sequence)
    manifest = export_sequence(sender, sequence, transport=exporter)
    advance(sender, sequence, 20)
    sender.remove(sequence)
    other = computed(sender, list(range(500, 600)))
    sender.check_invariants()
    arrived = import_sequence(receiver, Manifest.decode(manifest.encode()), transport=importer)
    assert_same(expected, content(receiver, arrived))
    sender.remove(other)
    assert exporter.drain(10)
    assert sender.num_sequences == 0


def test_only_the_tokens_of_the_sequence_leave_a_partial_block(sockets):
    sender, receiver, sequence = both(41, specs=SPECS[:1])
    fill(receiver, 9)
    before = [buffer.numpy().copy() for buffer in receiver._parts.store.pools[0].buffers]
    arrived = hand_over(sockets, sender, receiver, sequence)
    block = receiver._parts.tables.blocks(arrived.row, 0)[5]
    pool = receiver._parts.store.pools[0]
    untouched = [plane.numpy()[block, 1:].copy() for plane in pool.planes()]
    for buffer, old in zip(pool.buffers, before, strict=True):
        buffer.numpy()[:] = old
    for plane, after in zip(pool.planes(), untouched, strict=True):
        np.testing.assert_array_equal(plane.numpy()[block, 1:].view(np.uint8), after.view(np.uint8))


def test_revoked_blocks_are_not_published_elsewhere(sockets):
    specs = [AttentionSpec(4, 8, dtype="float32")]
    sender, receiver, sequence = both(50, specs=specs)
    assert sender.revoke_prefix(range(100, 150), valid=20) == {sequence: 16}
    arrived = hand_over(sockets, sender, receiver, sequence)
    advance(receiver, arrived, 8)
    assert receiver.match_length(range(100, 158)) == 16
    receiver.truncate(arrived, 16)
    receiver.append_tokens([arrived], [list(range(116, 158))])
    advance(receiver, arrived, 40)
    assert receiver.match_length(range(100, 158)) == 56


@pytest.mark.parametrize("number", [-16, 51, 2**40])
def test_manifests_that_publish_more_than_their_tokens_are_refused(sockets, number):
    sender, _, sequence = both(50, specs=[AttentionSpec(4, 8, dtype="float32")])
    manifest = export_sequence(sender, sequence, transport=sockets[0])
    for publishable in (None, 0, 16, 50):
        Manifest.decode(replace(manifest, publishable=publishable).encode())
    with pytest.raises(ShapeError, match="the manifest contradicts itself"):
        Manifest.decode(replace(manifest, publishable=number).encode())


def test_blocks_that_a_swap_space_rounded_are_not_published_elsewhere(sockets):
    specs = [AttentionSpec(4, 8, dtype="float32")]
    sender, receiver, sequence = both(50, specs=specs)
    sender.swap_out([sequence], SwapSpace(sender, num_blocks=9, dtype="float16"))
    sender.swap_in([sequence])
    arrived = hand_over(sockets, sender, receiver, sequence)
    advance(receiver, arrived, 8)
    assert receiver.match_length(range(100, 158)) == 0
