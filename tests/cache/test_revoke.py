"""Revocation of cached blocks whose content is wrong, while sequences use them."""

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    CrossSpec,
    InvalidBlock,
    PagedKVCache,
    ShapeError,
    StateSpec,
    SwapSpace,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.storage.state_shapes import delta_planes
from pagecore.tiers.events import Mirror
from pagecore.tiers.events.sources import sources_of
from pagecore.tiers.events.wire import Batch
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers
from tests.cache.test_evict_prefix import CHAT, OTHER, SPEC, SYSTEM, cached, make

DEEP = [*CHAT, *range(50, 60)]


def running(cache, tokens, **options):
    """Add a sequence and compute all its tokens."""
    sequence = cache.add_sequence(tokens, **options)
    cache.commit(cache.prepare([sequence], len(tokens) - sequence.num_computed_tokens))
    return sequence


def table_of(cache):
    return np.asarray(cache.block_table())


@pytest.mark.parametrize("valid", [0, 3, 4, 9, 12, 23])
def test_a_block_in_use_and_what_continues_it_are_not_found(valid):
    cache = cached(make(), OTHER)
    first, second = running(cache, CHAT), running(cache, DEEP)
    kept = table_of(cache)[[first.row, second.row]].copy()
    left = valid // 4 * 4
    assert cache.revoke_prefix(CHAT, valid=valid) == {first: left, second: left}
    assert cache.match_length([*DEEP, 0]) == left
    assert cache.match_length([*OTHER, 0]) == (16 if left >= 8 else left)
    assert np.array_equal(table_of(cache)[[first.row, second.row]], kept)
    cache.check_invariants()
    for sequence in (first, second):
        cache.remove(sequence)
    assert cache.stats().num_used_blocks == 0
    assert cache.match_length([*DEEP, 0]) == left
    cache.check_invariants()


def test_what_a_sequence_computes_after_a_revoked_block_is_not_published():
    cache = make()
    sequence = running(cache, CHAT)
    cache.revoke_prefix(CHAT, valid=8)
    cache.append_tokens(sequence, [90, 91, 92, 93])
    cache.commit(cache.prepare([sequence], 4))
    assert cache.match_length([*CHAT, 90, 91, 92, 93]) == 8
    child = cache.fork(sequence)
    cache.remove(sequence)
    cache.append_tokens(child, [94] * 8)
    cache.commit(cache.prepare([child], 8))
    assert cache.match_length([*CHAT, 90, 91, 92, 93]) == 8
    assert cache.stats().num_cached_blocks == 2
    cache.check_invariants()


def test_what_is_computed_again_after_truncate_is_published():
    cache = make()
    sequence = running(cache, CHAT)
    ((_, valid),) = cache.revoke_prefix(CHAT, valid=10).items()
    cache.truncate(sequence, 9)
    cache.append_tokens(sequence, CHAT[9:])
    cache.commit(cache.prepare([sequence], len(CHAT) - 9))
    assert cache.match_length([*CHAT, 0]) == 8  # the block of the first wrong token was kept in part
    cache.truncate(sequence, valid)
    cache.append_tokens(sequence, CHAT[valid:])
    cache.commit(cache.prepare([sequence], len(CHAT) - valid))
    assert cache.match_length([*CHAT, 0]) == 24
    cache.check_invariants()


def test_a_new_sequence_publishes_the_tokens_again():
    cache = make()
    old = running(cache, CHAT)
    cache.revoke_prefix(CHAT)
    new = running(cache, CHAT)
    assert (new.num_cached_tokens, cache.match_length([*CHAT, 0])) == (0, 24)
    cache.remove(old)
    cache.check_invariants()
    assert cache.revoke_prefix(CHAT) == {new: 0}


def test_equal_tokens_of_other_names_stay():
    cache = make()
    names = [{"namespace": "tenant"}, {"spans": [(3, 5, b"image")]}, {"spans": [(3, 6, b"image")]}]
    held = [running(cache, CHAT, **name) for name in names]
    assert cache.revoke_prefix(CHAT) == {}
    assert cache.revoke_prefix(CHAT, namespace="else") == {}
    for sequence, name in zip(held, names, strict=True):
        assert cache.match_length([*CHAT, 0], **name) == 24
        assert cache.revoke_prefix(CHAT, **name) == {sequence: 0}
    assert cache.stats().num_cached_blocks == 0
    cache.check_invariants()


def test_a_step_in_flight_goes_on_and_publishes_nothing():
    cache = cached(make(), CHAT)
    sequence = cache.add_sequence(DEEP)
    waiting = cache.add_sequence([*SYSTEM, 77, 78])
    with cache.prepare([sequence, waiting], [10, 4]) as batch:
        assert cache.revoke_prefix(CHAT, valid=8) == {sequence: 8}
        cache.commit(batch)
    assert (sequence.num_computed_tokens, cache.match_length([*DEEP, 0])) == (34, 8)
    assert cache.match_length([*SYSTEM, 77, 78, 0]) == 12
    cache.check_invariants()


def test_a_swapped_sequence_comes_back_unpublished():
    cache = make()
    space = SwapSpace(cache, num_blocks=33)
    sequence = running(cache, CHAT)
    cache.swap_out(sequence, space)
    assert cache.revoke_prefix(CHAT, valid=8) == {sequence: 8}
    cache.swap_in(sequence)
    cache.append_tokens(sequence, [90] * 4)
    cache.commit(cache.prepare([sequence], 4))
    assert cache.match_length([*CHAT, 0]) == 8
    cache.truncate(sequence, 8)
    cache.append_tokens(sequence, CHAT[8:])
    cache.commit(cache.prepare([sequence], len(CHAT) - 8))
    assert cache.match_length([*CHAT, 0]) == 24
    cache.check_invariants()


def test_a_block_inside_which_a_sequence_was_truncated():
    cache = make()
    sequence = running(cache, CHAT)
    cache.truncate(sequence, 10)
    assert cache.revoke_prefix(CHAT, valid=8) == {sequence: 8}
    assert cache.match_length([*CHAT, 0]) == 8
    cache.append_tokens(sequence, CHAT[10:])
    cache.commit(cache.prepare([sequence], len(CHAT) - 10))
    assert cache.match_length([*CHAT, 0]) == 8
    cache.check_invariants()


def test_a_block_inside_which_a_sequence_was_truncated_before_it_got_other_tokens():
    cache = make()
    editor, reader = running(cache, CHAT), running(cache, CHAT)
    cache.truncate(editor, 10)
    cache.append_tokens(editor, [90, 91])
    assert cache.revoke_prefix(CHAT, valid=9) == {editor: 8, reader: 8}
    cache.commit(cache.prepare([editor], 2))
    assert cache.match_length([*CHAT[:10], 90, 91, 0]) == 8
    cache.check_invariants()


def test_the_cached_block_of_a_sequence_that_got_other_tokens():
    cache = make()
    editor, reader = running(cache, CHAT), running(cache, CHAT)
    cache.truncate(editor, 10)
    cache.append_tokens(editor, [90, 91])
    assert cache.revoke_prefix([*CHAT[:10], 90, 91], valid=9) == {editor: 8, reader: 8}
    assert cache.match_length([*CHAT, 0]) == 8
    cache.check_invariants()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_copy_of_the_beginning_of_a_block(leaves):
    cache, tokens = make(), [*CHAT, 90, 91, 92, 93]
    parent = running(cache, tokens[:26])
    child = cache.fork(parent)
    space = SwapSpace(cache, num_blocks=33)
    if leaves:
        cache.swap_out(child, space)
    cache.append_tokens(parent, tokens[26:])
    cache.commit(cache.prepare([parent], len(tokens) - 26))
    assert cache.revoke_prefix(tokens, valid=25) == {parent: 24, child: 24}
    cache.check_invariants()


def test_duplicates_are_treated_alike():
    cache = make()
    first, second = cache.add_sequence(CHAT), cache.add_sequence(CHAT)
    cache.commit(cache.prepare([first, second], [27, 27]))
    assert cache.revoke_prefix(CHAT, valid=4) == {first: 4, second: 4}
    assert cache.stats().num_cached_blocks == 1
    cache.check_invariants()
    cache.remove(first)
    cache.remove(second)
    assert cache.clear_prefix_cache() == 1


def test_windows_and_states_go_with_their_blocks():
    window = AttentionSpec(1, 8, dtype="float32", window=6)
    state = StateSpec(delta_planes(1, 1, 4, 4), chunk=4, interval=8)
    cache = cached(make([SPEC, window, state], num_states=9, num_blocks=[33, 33]), CHAT)
    before = cache.stats()
    reader = cache.add_sequence(DEEP)
    assert before.num_cached_states == 1
    assert cache.revoke_prefix(CHAT, valid=4) == {reader: 4}
    after = cache.stats()
    assert (after.num_cached_blocks, after.num_cached_states) == (2, 0)  # one of each group
    cache.check_invariants()
    cache.commit(cache.prepare([reader], len(DEEP) - reader.num_computed_tokens))
    cache.check_invariants()
    cache.truncate(reader, 0)
    cache.append_tokens(reader, DEEP)
    cache.commit(cache.prepare([reader], len(DEEP)))
    assert cache.match_length([*DEEP, 0]) > 0
    cache.check_invariants()


def test_events_report_what_went():
    cache = make(device="none")
    (source,) = sources_of(cache._parts, None, "GPU")
    source.tree.start_journal()
    mirror = Mirror()
    cached(cache, OTHER)
    sequence = running(cache, CHAT)
    cache.revoke_prefix(CHAT, valid=8)
    cache.append_tokens(sequence, [90] * 4)
    cache.commit(cache.prepare([sequence], 4))
    cache.remove(sequence)
    mirror.apply(0, Batch(1.0, source.events_of(source.tree.take_changes().to_list()), 0))
    assert (mirror.match(CHAT), mirror.match(OTHER)) == (8, 16)


def test_blocks_are_revoked_by_their_ids():
    cache = cached(make(), OTHER)
    first, second = running(cache, CHAT), running(cache, DEEP)
    table = table_of(cache)
    blocks = table[first.row, [4, 2]]
    assert cache.revoke_blocks(blocks) == {first: 8, second: 8}
    assert (cache.match_length([*DEEP, 0]), cache.match_length([*OTHER, 0])) == (8, 16)
    cache.remove(first)
    shared = table[second.row, 0]
    cache.remove(second)
    assert cache.revoke_blocks([shared]) == {}
    assert cache.stats().num_cached_blocks == 0
    assert cache.revoke_blocks([shared]) == {}
    cache.check_invariants()


def test_a_block_that_is_not_published_yet_never_is():
    cache = make()
    sequence = running(cache, CHAT)
    cache.append_tokens(sequence, [90] * 3)
    cache.commit(cache.prepare([sequence], 2))
    block = table_of(cache)[sequence.row, 7]
    assert cache.revoke_blocks([block]) == {sequence: 28}
    cache.append_tokens(sequence, [91] * 4)
    cache.commit(cache.prepare([sequence], 5))
    assert cache.match_length([*CHAT, 90, 90, 90, 91, 91, 91, 91]) == 28
    cache.check_invariants()


@pytest.mark.parametrize("ends", ["commit", "abandon"])
@pytest.mark.parametrize("kind", ["prepare", "prepare_arrival"])
def test_a_block_of_a_step_in_flight_keeps_the_tokens_of_the_step_before_it(kind, ends):
    cache = make()
    sequence = cache.add_sequence(CHAT)
    cache.commit(cache.prepare([sequence], 6))
    batch = cache.prepare([sequence], 18) if kind == "prepare" else cache.prepare_arrival(sequence, 18)
    blocks = table_of(cache)[sequence.row, [4, 3]]
    assert cache.revoke_blocks(blocks) == {sequence: 12}
    getattr(cache, ends)(batch)
    left = 12 if ends == "commit" else 4
    assert cache.match_length([*CHAT, 0]) == left
    cache.truncate(sequence, 12)
    assert sequence.num_computed_tokens == (12 if ends == "commit" else 6)
    cache.append_tokens(sequence, CHAT[12:])
    cache.commit(cache.prepare([sequence], len(CHAT) - sequence.num_computed_tokens))
    assert cache.match_length([*CHAT, 0]) == 24
    cache.check_invariants()


@pytest.mark.parametrize("ends", ["abandon", "reject"])
@pytest.mark.parametrize(("computed", "is_free"), [(4, True), (8, True), (10, False)])
def test_a_sequence_whose_revoked_blocks_have_gone_with_its_step_is_published(ends, computed, is_free):
    cache = make()
    sequence = cache.add_sequence(CHAT)
    cache.commit(cache.prepare([sequence], computed))
    batch = cache.prepare([sequence], len(CHAT) - computed)
    assert cache.revoke_prefix(CHAT, valid=8) == {sequence: 8}
    if ends == "abandon":
        cache.abandon(batch)
    else:
        cache.commit(batch, accepted=0)
        cache.append_tokens(sequence, CHAT[computed:])
    cache.commit(cache.prepare([sequence], len(CHAT) - computed))
    assert cache.match_length([*CHAT, 0]) == (24 if is_free else 8)
    cache.check_invariants()


@pytest.mark.parametrize("computed", [0, 4, 10])
@pytest.mark.parametrize("kind", ["prepare", "prepare_arrival"])
def test_a_prefix_that_a_step_in_flight_computes_is_not_published_after_its_end(kind, computed):
    cache = make()
    sequence = cache.add_sequence(CHAT)
    if computed:
        cache.commit(cache.prepare([sequence], computed))
    left = len(CHAT) - computed
    batch = cache.prepare([sequence], left) if kind == "prepare" else cache.prepare_arrival(sequence, left)
    assert cache.revoke_prefix(CHAT, valid=9) == {sequence: 8}
    cache.commit(batch)
    assert cache.match_length([*CHAT, 0]) == 8
    cache.check_invariants()


def test_sequences_that_compute_the_same_tokens_in_one_step_are_revoked_together():
    cache = make()
    first, second = cache.add_sequence(CHAT), cache.add_sequence(CHAT)
    batch = cache.prepare([first, second], [24, 12])
    assert cache.revoke_blocks(table_of(cache)[first.row, [1]]) == {first: 4, second: 4}
    cache.commit(batch)
    assert cache.match_length([*CHAT, 0]) == 4
    cache.check_invariants()


def test_a_duplicate_revoked_by_its_id_takes_the_cached_block_along():
    cache = make()
    first, second = cache.add_sequence(CHAT), cache.add_sequence(CHAT)
    cache.commit(cache.prepare([first, second], [27, 27]))
    own = table_of(cache)[:, 3]
    assert own[first.row] != own[second.row]
    assert cache.revoke_blocks([own[second.row]]) == {first: 12, second: 12}
    assert cache.match_length([*CHAT, 0]) == 12
    cache.check_invariants()


def test_copies_in_a_host_tier_go_by_the_tiers():
    cache = make()
    with Tiers(cache, HostTier(cache, num_blocks=65), min_tokens=4) as tiers:
        sequence = running(cache, CHAT)
        tiers.drain()
        cache.clear_prefix_cache()
        request = tiers.request([*CHAT, 0])  # pins the prefix in the host
        assert tiers.revoke_prefix(CHAT, valid=8) == {sequence: 8}
        cache.append_tokens(sequence, [90] * 4)
        cache.commit(cache.prepare([sequence], 4))
        cache.remove(sequence)
        tiers.drain()
        assert tiers.match_length([*CHAT, 0]) == 8
        tiers.check_invariants()
        request.release()
        assert tiers.evict_prefix(CHAT) == 4  # of the device and the host
        assert [pool.num_free for pool in tiers.host.block_pools] == [64]
        tiers.check_invariants()
    with pytest.raises(UnsupportedOption, match="closed"):
        tiers.revoke_prefix(CHAT)


def test_a_cache_without_prefixes_has_nothing_to_revoke():
    cache = make(prefix_cache=False)
    sequence = running(cache, CHAT)
    assert cache.revoke_prefix(CHAT) == {}
    assert cache.revoke_blocks([table_of(cache)[sequence.row, 0]]) == {}


@pytest.mark.parametrize(
    ("tokens", "options", "error"),
    [
        (CHAT, {"valid": -1}, ShapeError),
        (CHAT, {"valid": 1.5}, ShapeError),
        ([[1]], {}, ShapeError),
        (["a"], {}, UnsupportedDtype),
        (CHAT, {"namespace": []}, UnsupportedDtype),
        (CHAT, {"spans": [(5, 3, b"x")]}, ShapeError),
        (CHAT, {"cross_digest": True}, UnsupportedDtype),
    ],
)
def test_foreign_arguments_change_nothing(tokens, options, error):
    cache = cached(make(), CHAT)
    with pytest.raises(error):
        cache.revoke_prefix(tokens, **options)
    assert cache.match_length([*CHAT, 0]) == 24


@pytest.mark.parametrize(
    ("blocks", "group", "error"),
    [
        ([0], 0, InvalidBlock),
        ([1, 33], 0, InvalidBlock),
        ([1, -1], 0, InvalidBlock),
        ([1, 1.5], 0, InvalidBlock),
        (1, 0, ShapeError),
        ([1], 1, ShapeError),
    ],
)
def test_foreign_blocks_change_nothing(blocks, group, error):
    cache = cached(make(), CHAT)
    with pytest.raises(error):
        cache.revoke_blocks(blocks, group=group)
    assert cache.match_length([*CHAT, 0]) == 24


def test_blocks_of_cross_attention_are_refused():
    cache = PagedKVCache([SPEC, CrossSpec(1, 8, dtype="float32")], num_blocks=[9, 9], block_size=4)
    with pytest.raises(UnsupportedOption, match="cross-attention"):
        cache.revoke_blocks([1], group=1)
