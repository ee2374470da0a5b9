"""A hand-over that fails ends in a typed error, with the importing cache as before and no rows held for ever."""

import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    DeviceError,
    InvalidSequence,
    LatentSpec,
    OutOfBlocks,
    OutOfRows,
    PagedKVCache,
    ShapeError,
    SwapSpace,
    UnsupportedOption,
)
from pagecore.tiers.handover import errors
from pagecore.tiers.handover.codec import pack
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence
from pagecore.tiers.handover.manifest import MAGIC, VERSION, Manifest
from tests.tiers.handover.failing import TOKENS, Case, state_of
from tests.tiers.handover.pairs import SPECS, assert_same, computed, content, make
from tests.tiers.handover.relay import Relay

# Manifests.


def summed(packed):
    """Return the bytes of a manifest that holds `packed`."""
    return struct.pack("<4sHI", MAGIC, VERSION, zlib.crc32(packed)) + packed


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (lambda m: b"", UnsupportedOption, "0 bytes that begin with b'' are not a manifest"),
        (lambda m: b"hello world", UnsupportedOption, "are not a manifest"),
        (lambda m: m[:4] + b"\x06\x00" + m[6:], UnsupportedOption, "version 6; this library reads 7"),
        (lambda m: m[: len(m) // 2], ShapeError, "cannot be read"),
        (lambda m: m[:-1], ShapeError, "cannot be read"),
        (lambda m: m[:6], ShapeError, "cannot be read"),
        (lambda m: m[:6] + b"\xc1" * 20, ShapeError, "cannot be read"),
        (lambda m: summed(b"\xa2\xe1\xe1"), ShapeError, "cannot be read"),
        (
            lambda m: summed(pack(Manifest.decode(m)).replace(b"\xa6format\xc0", b"\xa6format" + b"\x91" * 5000)),
            ShapeError,
            "cannot be read",
        ),
        (lambda m: "text", UnsupportedOption, "expected bytes"),
        (lambda m: None, UnsupportedOption, "expected bytes"),
        (lambda m: [], ShapeError, "the list of manifests is empty"),
    ],
)
def test_manifests_that_cannot_be_read_are_refused(sockets, damage, error, text):
    case = Case(sockets)
    manifest = case.export().encode()
    with pytest.raises(error, match=text):
        case.start(damage(manifest))
    case.check_unchanged()
    case.check_works()


def test_any_changed_byte_of_a_manifest_is_refused(sockets):
    case = Case(sockets)
    manifest = case.export().encode()
    rng = np.random.default_rng(3)
    for place in rng.permutation(len(manifest))[:200]:
        changed = bytearray(manifest)
        changed[place] ^= 1 << int(rng.integers(0, 8))
        with pytest.raises((UnsupportedOption, ShapeError)):
            Manifest.decode(changed)
    case.check_works()


def test_a_manifest_made_with_any_other_byte_is_refused_or_harmless(sockets):
    case = Case(sockets)
    manifest = case.export(readers=1000).encode()
    expected = content(case.sender, case.sequence)
    rng = np.random.default_rng(3)
    for place in rng.integers(10, len(manifest), 60):
        changed = bytearray(manifest)
        changed[place] ^= 1 << int(rng.integers(0, 8))
        try:
            arrived = case.start(summed(changed[10:]), deadline=2).result()
        except (errors.HandoverError, UnsupportedOption, ShapeError, InvalidSequence, OutOfBlocks):
            case.check_unchanged(bytes_too=False)
            continue
        if arrived.num_computed_tokens == len(TOKENS) and arrived.tokens.tolist() == TOKENS:
            assert_same(expected, content(case.receiver, arrived))
        case.receiver.remove(arrived)
        case.receiver.clear_prefix_cache()
        case.before = state_of(case.receiver)
    case.receiver.check_invariants()


@pytest.mark.parametrize(
    ("specs", "options", "text"),
    [
        (SPECS[:1], {}, "arranged otherwise"),
        ([SPECS[0], AttentionSpec(4, 8, dtype="float32", window=32)], {}, "window, chunk, lookahead"),
        ([AttentionSpec(4, 8, dtype="float16"), SPECS[1]], {}, "group 0 has planes key"),
        ([AttentionSpec(4, 16, dtype="float32"), SPECS[1]], {}, "group 0 has planes key"),
        ([AttentionSpec(2, 8, dtype="float32"), SPECS[1]], {}, "use caches of the same model"),
        ([AttentionSpec(4, 8, format="int8_token"), SPECS[1]], {}, "of format None at the exporter"),
        ([AttentionSpec(4, 8, dtype="float32", value_format="int8_token"), SPECS[1]], {}, "group 0 has planes key"),
        (SPECS, {"block_size": 16}, "has a window and blocks of 8"),
    ],
)
def test_caches_of_another_geometry_refuse(sockets, specs, options, text):
    case = Case(sockets)
    receiver = make(specs, **options)
    with pytest.raises(UnsupportedOption, match=text):
        import_sequence(receiver, case.export(), transport=case.importer)
    assert receiver.num_sequences == 0
    receiver.check_invariants()


def float8(key_scale, value_scale=1.0):
    return AttentionSpec(2, 8, format="float8_e4m3fn", key_scale=key_scale, value_scale=value_scale)


def latent(key_scale):
    return LatentSpec(scale=0.1, format="float8_e4m3fn", key_scale=key_scale)


def rotated(name):
    return AttentionSpec(2, 32, format="int4_token", **{name: "hadamard"})


def labelled(*channels):
    return AttentionSpec(2, 8, label_channels=channels)


@pytest.mark.parametrize(
    ("theirs", "mine", "text"),
    [
        ([float8(0.5)], [float8(0.25)], r"key_scale of layer 0 is 0\.5 at the exporter and 0\.25 here"),
        (
            [float8(0.5), float8(2)],
            [float8(0.5), float8(4)],
            r"key_scale of layer 1 is 2\.0 at the exporter and 4\.0 here",
        ),
        (
            [float8(1, 2), float8(1, 2)],
            [float8(1, 2), float8(1, [2, 3])],
            r"value_scale of layer 1 is 2\.0 .* \[2\.0, 3\.0\]",
        ),
        (
            [latent(0.5), latent(2)],
            [latent(0.5), latent(4)],
            r"key_scale of layer 1 is 2\.0 at the exporter and 4\.0 here",
        ),
        (
            [labelled([0], [1])] * 2,
            [labelled([0], [1]), labelled([0], [2])],
            r"label_channels of layer 1 is \[\[0\], \[1\]\]",
        ),
        (
            [rotated("key_rotation"), rotated("key_rotation")],
            [rotated("key_rotation"), rotated("value_rotation")],
            "key_rotation of layer 1 is hadamard at the exporter and None here",
        ),
    ],
    ids=["one layer", "second layer", "heads", "latents", "labels", "rotations"],
)
def test_given_scales_and_labels_must_be_equal_in_every_layer(sockets, theirs, mine, text):
    exporter, importer = sockets
    sender, receiver = make(theirs), make(mine)
    manifest = export_sequence(sender, computed(sender, TOKENS[:9]), transport=exporter)
    with pytest.raises(UnsupportedOption, match=text):
        import_sequence(receiver, manifest, transport=importer)
    assert receiver.num_sequences == 0
    assert import_sequence(make(theirs), manifest, transport=importer).num_computed_tokens == 9


def quantised(*formats):
    return [AttentionSpec(2, 32, format="float8_e4m3fn", value_format=each) for each in formats]


def test_formats_of_values_must_be_equal(sockets):
    exporter, importer = sockets
    sender = make(quantised("nvfp4", "nvfp4_4over6"))
    manifest = export_sequence(sender, computed(sender, TOKENS[:9]), transport=exporter)
    text = "of formats float8_e4m3fn and nvfp4 at the exporter and .* of formats float8_e4m3fn and fp4_block16 here"
    with pytest.raises(UnsupportedOption, match=text):
        import_sequence(make(quantised("fp4_block16", "fp4_block16")), manifest, transport=importer)


def test_nvfp4_may_have_been_written_with_other_scales(sockets):
    exporter, importer = sockets
    specs = [AttentionSpec(2, 32, format=each) for each in ("nvfp4", "nvfp4_4over6")]
    sender, receiver = make(specs), make(specs[::-1])
    manifest = export_sequence(sender, computed(sender, TOKENS[:9]), transport=exporter)
    assert import_sequence(receiver, manifest, transport=importer).num_computed_tokens == 9


def test_models_namespaces_spans_and_transports_must_match(sockets):
    exporter, importer = sockets
    sender, receiver = make(), make()
    sequence = computed(sender, TOKENS, namespace=("tenant", 7), spans=[(3, 9, b"picture")])
    manifest = export_sequence(sender, sequence, transport=exporter, model="llama@1", readers=2)
    good = {"namespace": ("tenant", 7), "spans": [(3, 9, b"picture")], "transport": importer}
    cases = [
        ({"model": "qwen"}, UnsupportedOption, "of model 'llama@1'"),
        ({"namespace": None}, InvalidSequence, "namespace is None, which is not that of the exported sequence"),
        ({"namespace": ("tenant", 7.0)}, InvalidSequence, "pass the same namespace"),
        ({"spans": None}, InvalidSequence, "pass the same spans"),
        ({"spans": [(3, 9, b"other")]}, InvalidSequence, "pass the same spans"),
    ]
    for options, error, text in cases:
        with pytest.raises(error, match=text):
            import_sequence(receiver, manifest, **good | options)
        assert receiver.num_sequences == 0
    with pytest.raises(UnsupportedOption, match="is of transport 'nixl'"):
        import_sequence(receiver, replace(manifest, transport="nixl"), **good)
    import_sequence(receiver, manifest, **good, model="llama@1")
    receiver.check_invariants()


# Caches and sequences that cannot be handed over.


def test_exports_that_are_not_served_hold_nothing(sockets):
    exporter, importer = sockets
    cache = make()
    none = PagedKVCache(SPECS[0], num_blocks=9, device="none")
    with pytest.raises(DeviceError, match="device='none'"):
        export_sequence(none, none.add_sequence([1]), transport=exporter)
    sequence = computed(cache, TOKENS[:20])
    with pytest.raises(UnsupportedOption, match="has no address"):
        export_sequence(cache, sequence, transport=importer)
    for lease in (0, -1, float("nan"), 1e9):
        with pytest.raises(ShapeError, match="lease is"):
            export_sequence(cache, sequence, transport=exporter, lease=lease)
    with pytest.raises(ShapeError, match="readers is 0"):
        export_sequence(cache, sequence, transport=exporter, readers=0)
    with pytest.raises(InvalidSequence, match="expected a Sequence"):
        export_sequence(cache, "x", transport=exporter)
    with cache.prepare([sequence], 1) as batch, pytest.raises(InvalidSequence, match="step in flight"):
        export_sequence(cache, sequence, transport=exporter)
    cache.commit(batch)
    cache.swap_out(sequence, SwapSpace(cache, num_blocks=9))
    with pytest.raises(InvalidSequence, match="swapped out"):
        export_sequence(cache, sequence, transport=exporter)
    assert cache.num_sequences == 1
    assert exporter.num_offers == 0
    full = make(SPECS, max_sequences=1)
    with pytest.raises(OutOfRows):
        export_sequence(full, computed(full, [1, 2]), transport=exporter)
    compacted = make(SPECS[:1])
    held = computed(compacted, TOKENS[:20])
    compacted.compact(held, range(10))
    with pytest.raises(UnsupportedOption, match="was compacted"):
        export_sequence(compacted, held, transport=exporter)
    exporter.close()
    with pytest.raises(UnsupportedOption, match="is closed"):
        export_sequence(compacted, computed(compacted, [5]), transport=exporter)
    assert compacted.num_sequences == 2


def test_windows_that_released_more_than_the_importer_needs_are_refused(sockets):
    exporter, importer = sockets
    sender, receiver = make([SPECS[1]]), make([SPECS[1]])
    manifest = export_sequence(sender, computed(sender, TOKENS), transport=exporter)
    released = replace(manifest, held=[np.zeros(len(manifest.held[0]), np.uint8).tobytes()])
    with pytest.raises(UnsupportedOption, match="the exporter has released the block of token"):
        import_sequence(receiver, released, transport=importer)
    assert receiver.num_sequences == 0
    receiver.check_invariants()


def test_an_importer_without_room_says_so_and_holds_nothing(sockets):
    exporter, importer = sockets
    sender = make()
    manifest = export_sequence(sender, computed(sender, TOKENS), transport=exporter)
    small = make(num_blocks=6, max_tokens_per_sequence=200)
    with pytest.raises(OutOfBlocks):
        import_sequence(small, manifest, transport=importer)
    assert small.num_sequences == 0
    with pytest.raises(ShapeError, match="a sequence has room for 50"):
        import_sequence(make(max_tokens_per_sequence=50), manifest, transport=importer)
    one = make(max_sequences=1)
    one.add_sequence([1])
    with pytest.raises(OutOfRows):
        import_sequence(one, manifest, transport=importer)
    named = make()
    named.add_sequence([1], id="a")
    with pytest.raises(InvalidSequence, match="already in the cache"):
        import_sequence(named, manifest, transport=importer, id="a")
    assert named.num_sequences == 1


# Leases.


def test_an_expired_lease_gives_the_rows_back_and_refuses_readers(sockets):
    case = Case(sockets)
    manifest = case.export(lease=0.05)
    assert case.sender.num_sequences == 2
    case.check_released()
    with pytest.raises(errors.LeaseExpired, match="its lease ran out"):
        case.start(manifest).result()
    case.check_unchanged()
    case.check_works()


def test_a_lease_that_ends_during_a_read_cuts_the_reader(tcp):
    case = Case(tcp)
    with Relay(case.exporter.address, "hang", 5000) as relay:
        manifest = replace(case.export(lease=0.3), address=relay.address)
        running = case.start(manifest, deadline=20)
        assert relay.reached.wait(5)
        with pytest.raises((errors.LeaseExpired, errors.PeerLost)):
            running.result()
    case.check_unchanged(bytes_too=False)
    case.check_released()
    case.check_works()


def test_memory_is_not_released_while_an_export_is_open(sockets):
    exporter, importer = sockets
    cache = make(memory_saver=True)
    sequence = computed(cache, TOKENS)
    manifest = export_sequence(cache, sequence, transport=exporter)
    cache.remove(sequence)
    before = cache.match_length(TOKENS)
    with pytest.raises(UnsupportedOption, match=f"export {manifest.export.hex()} at unix://.* is open"):
        cache.release_memory()
    assert cache.match_length(TOKENS) == before > 0
    import_sequence(make(), manifest, transport=importer)
    assert exporter.drain(10)
    assert cache.release_memory() > 0
    running = export_sequence(cache, cache.add_sequence(TOKENS), transport=exporter)  # no token is computed
    exporter.withdraw(running.export)
    assert exporter.drain(10)
    with pytest.raises(DeviceError, match="resume_memory"):
        import_sequence(cache, manifest, transport=importer)
    assert cache.num_sequences == 1
    cache.resume_memory()
    computed(cache, TOKENS)


def test_an_export_whose_rows_the_owner_removed_serves_nothing(sockets):
    case = Case(sockets)
    manifest = case.export()
    case.sender.remove(case.sequence)
    case.sender.remove(case.exporter._server._offers[manifest.export].held)
    case.sender.clear_prefix_cache()
    computed(case.sender, list(range(500, 600)))  # the blocks have other tokens
    with pytest.raises(errors.PeerLost):
        case.start(manifest).result()
    case.check_unchanged()
    case.exporter.withdraw(manifest.export)
    assert case.exporter.drain(10)
    case.sender.check_invariants()


def test_rows_wait_for_all_readers(sockets):
    case = Case(sockets)
    manifest = case.export(readers=2)
    first = case.start(manifest).result()
    assert case.sender.num_sequences == 2
    second = case.start(manifest).result()
    case.check_released()
    with pytest.raises(errors.LeaseExpired):
        case.start(manifest).result()
    assert_same(content(case.receiver, first), content(case.receiver, second))


def test_an_export_can_be_withdrawn(sockets):
    case = Case(sockets)
    manifest = case.export()
    case.exporter.withdraw(manifest.export)
    case.check_released()
    with pytest.raises(errors.LeaseExpired, match="it was withdrawn"):
        case.start(manifest).result()
    case.check_unchanged()
