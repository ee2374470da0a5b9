"""Encoder outputs are handed over with the sequences that attend to them."""

import pytest

from pagecore import AttentionSpec, CrossSpec, InvalidSequence, TensorParallel
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence, start_import
from tests.tiers.handover.pairs import SPECS, advance, assert_same, computed, content, fill
from tests.tiers.handover.pairs import make as make_cache
from tests.tiers.handover.test_content import STATE, write_heads

CROSS = CrossSpec(4, 8, dtype="float32")
MIXED = [SPECS[0], CROSS, SPECS[1], CROSS]
DIGEST = {"cross_digest": b"clip"}


def make(specs=MIXED, seed=1, **options):
    cache = make_cache(specs, **options)
    fill(cache, seed)
    return cache


def hand_over(pair, sender, receiver, sequence, **options):
    exporter, importer = pair
    manifest = export_sequence(sender, sequence, transport=exporter)
    arrived = import_sequence(receiver, manifest.encode(), transport=importer, **options)
    assert exporter.drain(10)
    sender.check_invariants()
    receiver.check_invariants()
    return arrived


@pytest.mark.parametrize("length", [1, 8, 45])
def test_encoder_outputs_arrive_with_every_transport(pair, length):
    sender, receiver = make(), make(seed=2)
    sequence = computed(sender, list(range(33)), cross_tokens=length, **DIGEST)
    arrived = hand_over(pair, sender, receiver, sequence, **DIGEST)
    assert (arrived.num_cross_tokens, arrived.is_cross_written) == (length, True)
    assert_same(content(sender, sequence), content(receiver, arrived))
    receiver.append_tokens([arrived], [[7]])
    with receiver.prepare([arrived], 1) as batch:
        assert batch.cross.num_tokens == 0
        receiver.commit(batch)


@pytest.mark.parametrize(
    ("specs", "mine"),
    [
        (MIXED, {"layout": "blockwise"}),
        (MIXED, {"layout": "LCBNHD"}),
        ([SPECS[0], CROSS], {"block_size": 12}),
        ([SPECS[0], CrossSpec(2, 32, format="int8_token"), CrossSpec(2, 8, dtype="bfloat16")], {"layout": "BNHD"}),
        ([SPECS[0], STATE, CROSS], {}),
    ],
)
def test_layouts_block_sizes_formats_and_states(sockets, specs, mine):
    sender, receiver = make(specs), make(specs, 2, **mine)
    sequence = computed(sender, list(range(45)), cross_tokens=29)
    arrived = hand_over(sockets, sender, receiver, sequence)
    assert_same(content(sender, sequence), content(receiver, arrived))


@pytest.mark.parametrize(("theirs", "mine"), [(2, 1), (1, 2), (4, 2)])
def test_heads_of_encoder_outputs_may_be_split_over_other_ranks(sockets, theirs, mine):
    exporter, importer = sockets
    specs, tokens = [AttentionSpec(4, 8, dtype="float32"), CROSS], list(range(20))
    whole = make(specs, 5)
    sequence = computed(whole, tokens, cross_tokens=13)
    original = content(whole, sequence)
    manifests = []
    for rank in range(theirs):
        sender = make(specs, parallel=TensorParallel(rank, theirs))
        sequence = computed(sender, tokens, cross_tokens=13)
        write_heads(sender, sequence, original, TensorParallel(rank, theirs).heads(4))
        manifests.append(export_sequence(sender, sequence, transport=exporter, readers=mine))
    for rank in range(mine):
        receiver = make(specs, 2, parallel=TensorParallel(rank, mine))
        arrived = import_sequence(receiver, manifests, transport=importer)
        heads = TensorParallel(rank, mine).heads(4)
        assert_same(original, content(receiver, arrived), slice(heads.start, heads.stop))
    assert exporter.drain(10)


def test_an_output_that_the_importer_has_is_not_pulled_again(sockets):
    exporter, importer = sockets
    sender, receiver = make(), make(seed=2)
    one, two = (computed(sender, list(range(start, start + 40)), cross_tokens=29, **DIGEST) for start in (0, 500))
    first = hand_over(sockets, sender, receiver, one, **DIGEST)
    running = start_import(receiver, export_sequence(sender, two, transport=exporter), transport=importer, **DIGEST)
    second = running.result()
    tokens = sum(group.bytes_per_block(8) * 5 for group in receiver._parts.token_groups)
    assert running.nbytes <= tokens
    assert second.cross_row == first.cross_row
    assert_same(content(sender, two), content(receiver, second))
    receiver.check_invariants()


@pytest.mark.parametrize("known", [40, 41])
@pytest.mark.parametrize(("specs", "cached"), [(MIXED[:2], 32), (MIXED, 0)], ids=["full", "window"])
def test_an_output_arrives_where_the_decoder_s_prefix_is_cached(sockets, specs, cached, known):
    """The prefix of the decoder outlives its encoder output."""
    sender, receiver = make(specs), make(specs, 2)
    sequence = sender.add_sequence(list(range(known)), cross_tokens=29, **DIGEST)
    advance(sender, sequence, 40)
    receiver.remove(hand_over(sockets, sender, receiver, sequence, **DIGEST))
    arrived = hand_over(sockets, sender, receiver, sequence, **DIGEST)
    assert arrived.num_cached_tokens == cached
    assert arrived.is_cross_written
    assert_same(content(sender, sequence), content(receiver, arrived))


def test_a_sequence_before_its_first_step_arrives_without_its_output(sockets):
    sender, receiver = make(), make(seed=2)
    arrived = hand_over(sockets, sender, receiver, sender.add_sequence([1, 2, 3], cross_tokens=29, **DIGEST), **DIGEST)
    assert (arrived.num_computed_tokens, arrived.num_cross_tokens, arrived.is_cross_written) == (0, 29, False)
    with receiver.prepare([arrived], 3) as batch:
        assert batch.cross.num_tokens == 29
        receiver.commit(batch)


def test_digests_must_match(sockets):
    exporter, importer = sockets
    sender, receiver = make(), make(seed=2)
    sequence = computed(sender, list(range(33)), cross_tokens=29, **DIGEST)
    manifest = export_sequence(sender, sequence, transport=exporter)
    for digest in (None, b"another clip", 5):
        with pytest.raises(InvalidSequence, match="pass the same namespace and cross_digest"):
            import_sequence(receiver, manifest, transport=importer, cross_digest=digest)
    assert receiver.num_sequences == 0
    receiver.check_invariants()
    late = sender.add_sequence(list(range(9)))
    sender.set_cross_tokens(late, 11)
    advance(sender, late, 9)
    arrived = hand_over_now(sockets, sender, receiver, late)
    assert_same(content(sender, late), content(receiver, arrived))


def test_a_sequence_without_an_encoder_input_arrives_and_reuses_a_prefix(sockets):
    sender, receiver = make(), make(seed=2)
    for cached in (0, 32):
        sequence = computed(sender, list(range(33)), cross_tokens=0)
        arrived = hand_over(sockets, sender, receiver, sequence)
        assert (arrived.num_cross_tokens, arrived.num_cached_tokens, arrived.num_computed_tokens) == (0, cached, 33)
        assert_same(content(sender, sequence), content(receiver, arrived))
        receiver.append_tokens([arrived], [[7]])
        receiver.commit(receiver.prepare([arrived], 1))


@pytest.mark.parametrize("count", [0, None])
def test_no_encoder_input_and_one_that_is_not_known_yet_differ_before_the_first_step(sockets, count):
    sender, receiver = make(), make(seed=2)
    arrived = hand_over(sockets, sender, receiver, sender.add_sequence([1, 2, 3], cross_tokens=count))
    assert arrived.num_cross_tokens == count


def hand_over_now(pair, sender, receiver, sequence):
    return import_sequence(receiver, export_sequence(sender, sequence, transport=pair[0]), transport=pair[1])
