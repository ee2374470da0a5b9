"""Mirrors by token ids: publishers whose hashes are not pagecore's."""

import itertools
import random

import numpy as np
import pytest

from pagecore.errors import UnsupportedOption
from pagecore.index import chain_hashes
from tests.capabilities import require
from tests.faults import is_full
from tests.tiers.events.following import BLOCK, MODELS, compute, ids, make

require("msgspec")
require("zmq")

from pagecore.tiers.events import EventPublisher, Mirror  # noqa: E402
from pagecore.tiers.events.wire import Batch, EventFormatError, decode_batch  # noqa: E402


def stored(hashes, parent, tokens, **fields):
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return event | {"block_size": BLOCK} | fields


def mirror_of(*events):
    mirror = Mirror(by_tokens=True)
    mirror.apply(0, Batch(1.0, list(events)))
    return mirror


def after(mirror, *events):
    mirror.apply(mirror.sequence + 1, Batch(1.0, list(events)))
    return mirror


def removed(*hashes, **fields):
    return {"type": "BlockRemoved", "block_hashes": list(hashes)} | fields


def renamed(event, names, drawn):
    """Return an event of pagecore with other hashes, as another engine would send it."""

    def name(block):
        return names.setdefault(block, drawn.randbytes(32))

    event = event | {"block_hashes": [name(block) for block in event.get("block_hashes", [])]}
    if event.get("parent_block_hash") is not None:
        event["parent_block_hash"] = name(event["parent_block_hash"])
    return event


def forget(event):
    """Return a BlockStored as engines with an offload connector send it: nothing but hashes."""
    return event | {"token_ids": [], "block_size": 0, "parent_block_hash": None}


@pytest.mark.parametrize("model", sorted(set(MODELS) - {"states alone"}))
def test_matches_are_those_of_a_mirror_by_hashes(model):
    cache, drawn, names = make(model), random.Random(model), {}
    prompts = [[drawn.randrange(2) for _ in range(drawn.randrange(40))] for _ in range(30 if is_full() else 18)]
    own, other = Mirror(), Mirror(by_tokens=True)
    with EventPublisher(cache, endpoint=f"inproc://paths-{model}", interval=None) as publisher:
        for prompt in prompts:
            compute(cache, prompt, namespace=drawn.choice([None, "adapter"]))
            publisher.publish()
            for number, payload in publisher._batches:
                if number > own.sequence:
                    batch = decode_batch(payload)
                    own.apply(number, batch)
                    other.apply(number, Batch(batch.timestamp, [renamed(each, names, drawn) for each in batch.events]))
            for namespace in (None, "adapter"):
                for asked in prompts:
                    assert other.match(asked, namespace=namespace) == own.match(asked, namespace=namespace)
        cache.clear_prefix_cache()
        other.apply(other.sequence + 1, Batch(9e9, [renamed({"type": "AllBlocksCleared"}, names, drawn)]))
    assert len(other._paths) == 0


def test_what_is_removed_everywhere_is_forgotten():
    mirror = mirror_of(stored([1, 2], None, ids(8)), stored([3], 2, ids(4, 1)), stored([1], None, ids(4), medium="CPU"))
    after(mirror, removed(1, 2))
    assert mirror.match(ids(8)) == 0
    assert mirror.match(ids(8), media=("GPU", "CPU")) == 4
    assert len(mirror._paths) == 3  # of what is before block 3
    after(mirror, removed(3), removed(3))
    assert len(mirror._paths) == 1
    after(mirror, removed(1, medium="CPU"))
    assert len(mirror._paths) == 0
    assert not mirror._paths._blocks


@pytest.mark.parametrize("by_tokens", [False, True])
def test_a_block_announced_again_after_lost_batches_is_one_copy(by_tokens):
    mirror = Mirror(by_tokens=by_tokens)
    first, second = chain_hashes(ids(8), BLOCK).tolist()
    mirror.apply(0, Batch(1.0, [stored([first, second], None, ids(8)), stored([first], None, ids(4))]))
    mirror.skip(4)  # batches 1 to 4, which removed both copies of the first block, are lost
    mirror.skip(2)
    assert mirror.sequence == 4
    after(mirror, stored([first], None, ids(4)))
    assert mirror.match(ids(8)) == 8
    after(mirror, removed(first))
    assert (mirror.match(ids(8)), set(mirror.blocks())) == (0, {second})
    after(mirror, stored([first], None, ids(4)), stored([first], None, ids(4)), removed(first))
    assert mirror.match(ids(8)) == 8
    after(mirror, removed(first, second))
    assert (mirror.blocks(), mirror._doubtful, len(mirror._copies)) == ({}, set(), 0)


@pytest.mark.parametrize("by_tokens", [True, False])
def test_a_block_with_two_copies_is_there_until_both_are_removed(by_tokens):
    mirror, hashes = Mirror(by_tokens=by_tokens), chain_hashes(ids(8), BLOCK).tolist()
    mirror.apply(0, Batch(1.0, [stored(hashes, None, ids(8)), stored(hashes, None, ids(8)), removed(*hashes)]))
    assert mirror.match(ids(8)) == 8
    after(mirror, removed(hashes[1]))
    assert (mirror.match(ids(8)), mirror.blocks()) == (4, {hashes[0]: None})
    after(mirror, removed(*hashes))
    assert (mirror.match(ids(8)), mirror.blocks(), len(mirror._copies)) == (0, {}, 0)


@pytest.mark.parametrize("by_tokens", [True, False])
def test_a_removal_that_counts_the_copies_that_are_left_is_believed(by_tokens):
    mirror, (first, second) = Mirror(by_tokens=by_tokens), chain_hashes(ids(8), BLOCK).tolist()
    mirror.apply(0, Batch(1.0, [stored([first, second], None, ids(8))] * 4))
    after(mirror, removed(first, second, remaining_copy_counts=[1, 0]))
    assert (mirror.match(ids(8)), mirror.blocks(), len(mirror._copies)) == (4, {first: None}, 0)
    after(mirror, *[stored([second], first, ids(8)[BLOCK:])] * 2)
    after(mirror, removed(second, remaining_copy_counts=[3]), removed(second), removed(second))
    assert mirror.match(ids(8)) == 8
    after(mirror, removed(second), removed(first, remaining_copy_counts=None))
    assert (mirror.blocks(), len(mirror._copies)) == ({}, 0)
    after(mirror, removed(first, remaining_copy_counts=[1]))  # its BlockStored was lost
    assert (mirror.blocks(), len(mirror._copies)) == ({}, 0)


def test_media_that_list_hashes_alone_are_found_by_the_ids_of_others():
    first = stored([b"a", b"b"], None, ids(8))
    windowed = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64}
    mirror = mirror_of(first | windowed, forget(first) | {"medium": "CPU"})
    assert (mirror.block_size, mirror.kind(0)) == (BLOCK, ("sliding_window", 64))
    after(mirror, removed(b"b"))
    assert (mirror.match(ids(8)), mirror.match(ids(8), media=["GPU", "CPU"])) == (4, 8)
    assert mirror.blocks("CPU") == {b"a": None, b"b": None}


def test_adapters_and_extra_keys_tell_blocks_apart():
    salted = stored([3], None, ids(4), extra_keys=[["salt"]])
    seen = stored([4, 5], None, ids(8), lora_name="adapter", extra_keys=[["adapter"], ["adapter", ["image", 3]]])
    mirror = mirror_of(stored([1], None, ids(4)), stored([2], None, ids(4), lora_name="other"), salted, seen)
    after(mirror, removed(1))
    assert mirror.match(ids(4)) == 0
    assert mirror.match(ids(4), namespace="other") == 4
    assert mirror.match(ids(4), extra_keys=[["salt"]]) == 4
    assert mirror.match(ids(8), namespace="adapter") == 4
    assert mirror.match(ids(8), namespace="adapter", extra_keys=[None, [["image", 3]]]) == 8


def test_a_snapshot_replaces_the_blocks():
    mirror = mirror_of(stored([1], None, ids(4)))
    mirror.load(7, [Batch(2.0, [stored([2], None, ids(4, 1))])])
    assert (mirror.match(ids(4)), mirror.match(ids(4, 1)), len(mirror._paths)) == (0, 4, 1)


def test_arguments_of_the_other_kind_are_refused():
    by_hash, by_tokens = Mirror(), mirror_of(stored([1], None, ids(4)))
    with pytest.raises(UnsupportedOption, match="by_tokens=True"):
        by_hash.match(ids(4), extra_keys=[None])
    with pytest.raises(UnsupportedOption, match="give the publisher's extra_keys"):
        by_tokens.match(ids(4), spans=[(0, 2, b"cat")])
    for mirror in (by_tokens, Mirror(by_tokens=True)):
        with pytest.raises(UnsupportedOption, match="names of adapters"):
            mirror.match(ids(4), namespace=("tenant", 7))
        for wrong in (5, "salt", ["salt"], {0: None}):
            with pytest.raises(UnsupportedOption, match=r"extra_keys is.*expected a list"):
                mirror.match(ids(4), extra_keys=wrong)
        for wrong in (5, ["GPU", 5]):
            with pytest.raises(UnsupportedOption, match=r"media is.*expected a string"):
                mirror.match(ids(4), media=wrong)
    with pytest.raises(UnsupportedOption, match="by_tokens is 'no'; use True or False"):
        Mirror(by_tokens="no")


def test_the_salt_of_sglang_is_a_key_of_the_first_block():
    plain, salted = stored([1, 2], None, ids(8)), stored([3, 4], None, ids(8), cache_salt="tenant")
    mirror = mirror_of(salted, stored([5], 4, ids(4, 1), cache_salt="tenant"))
    assert mirror.match(ids(8)) == 0
    assert mirror.match([*ids(8), *ids(4, 1)], extra_keys=[["tenant"]]) == 12
    after(mirror, plain, removed(3, 4, 5))
    assert (mirror.match(ids(8)), mirror.match(ids(8), extra_keys=[["tenant"]])) == (8, 0)
    with_image = stored([6], None, ids(4), cache_salt="tenant", extra_keys=[["image"]])
    assert mirror_of(with_image).match(ids(4), extra_keys=[["image", "tenant"]]) == 4


@pytest.mark.parametrize("first_to_go", [[1, 2], [5, 6]])
def test_equal_tokens_with_several_hashes_are_found_until_the_last_is_removed(first_to_go):
    """As SGLang sends them for requests with another `extra_key`, which its events do not list."""
    mirror = mirror_of(stored([1, 2], None, ids(8)), stored([5, 6], None, ids(8)), stored([7], 6, ids(4, 1)))
    assert mirror.match([*ids(8), *ids(4, 1)]) == 12
    after(mirror, removed(*reversed(first_to_go)))
    assert mirror.match(ids(8)) == 8
    after(mirror, removed(7, 6, 5, 2, 1))
    assert (mirror.match(ids(8)), len(mirror._paths), mirror._paths._blocks) == (0, 0, {})


def test_a_prefix_follows_every_hash_of_its_tokens():
    mirror = mirror_of(stored([1, 2], None, ids(8)), stored([5], None, ids(4)), stored([6], 5, ids(4, 1)))
    assert (mirror.match(ids(8)), mirror.match([*ids(4), *ids(4, 1)])) == (8, 8)
    large = sized(8, [2], None, ids(8), 1), sized(8, [6], None, [*ids(4), *ids(4, 1)], 1)
    after(mirror, *large)
    assert (mirror.match(ids(8)), mirror.match([*ids(4), *ids(4, 1)])) == (8, 8)
    after(mirror, removed(2, group_idx=1))
    assert (mirror.match(ids(8)), mirror.match([*ids(4), *ids(4, 1)])) == (0, 8)


def pairs(tokens):
    return [list(pair) for pair in itertools.pairwise(tokens)]


def test_blocks_of_pairs_need_the_token_after_them():
    tokens = ids(13)
    mirror = mirror_of(stored([1, 2], None, pairs(tokens)[:8]), stored([3], 2, pairs(tokens)[8:]))
    assert [mirror.match(tokens[:n]) for n in (0, 1, 4, 5, 8, 9, 12, 13)] == [0, 0, 0, 4, 4, 8, 8, 12]
    assert mirror.match([*tokens[:8], 99]) == 4
    after(mirror, removed(1, 2, 3))
    assert (mirror.match(tokens), len(mirror._paths)) == (0, 0)
    after(mirror, {"type": "AllBlocksCleared"}, stored([1], None, ids(4)))
    assert mirror.match(ids(4)) == 4
    for wrong in ([[1, 2]] * 3 + [[1, 2, 3]], [[1, 2]] * 3 + [4], [[1, "b"]] * 4):
        with pytest.raises(EventFormatError, match="wrong token_ids"):
            after(mirror, stored([9], None, wrong))


def sized(size, hashes, parent, tokens, group, **fields):
    return stored(hashes, parent, tokens, group_idx=group, block_size=size, **fields)


@pytest.mark.parametrize("kind", ["full_attention", "mamba"])
def test_groups_may_have_blocks_of_several_sizes(kind):
    """As in vLLM: a block has the hash of the last of the smaller blocks that it spans."""
    large = sized(8, [2, 4], None, ids(16), 1, kv_cache_spec_kind=kind)
    mirror = mirror_of(sized(4, [1, 2, 3, 4], None, ids(16), 0), large)
    assert mirror.block_size == 4
    assert [mirror.match(ids(n)) for n in (4, 8, 12, 15, 16)] == [0, 8, 8, 8, 16]
    assert mirror_of(large, sized(4, [1, 2, 3, 4], None, ids(16), 0)).match(ids(16)) == 16
    after(mirror, removed(2, group_idx=1))
    assert mirror.match(ids(16)) == (16 if kind == "mamba" else 0)
    after(mirror, removed(4, group_idx=1), removed(4, 3, 2, 1, group_idx=0))
    assert (mirror.match(ids(16)), len(mirror._paths)) == (0, 0)


def test_larger_blocks_of_another_medium_continue_a_prefix():
    """As offload connectors of vLLM store them: with the hash of their last block, and with or without token ids."""
    device = stored([1, 2, 3, 4], None, ids(16), extra_keys=[["salt"], None, None, None])
    for offloaded in ({"token_ids": [], "extra_keys": None}, {"extra_keys": [["salt"], None]}):
        chunks = stored([2, 4], None, ids(16), block_size=8, medium="CPU") | offloaded
        mirror = after(mirror_of(device, chunks), removed(4))
        extra = {"extra_keys": [["salt"]]}
        assert (mirror.block_size, mirror.match(ids(16), **extra)) == (4, 12)
        assert mirror.match(ids(16), media="CPU", **extra) == 16
        assert mirror.match(ids(14), media=("GPU", "CPU"), **extra) == 12
        after(mirror, removed(3, 2, 1), removed(2, medium="CPU"))
        assert mirror.match(ids(16), media=("GPU", "CPU"), **extra) == 0
    # Ids in the chunks alone: what the device held is forgotten.
    mirror = mirror_of(stored([4], None, ids(8, 1), block_size=8, medium="CPU"))
    assert (mirror.block_size, mirror.match(ids(8, 1), media="CPU")) == (8, 8)


@pytest.mark.parametrize("end", [1, 3, 4, 6])
@pytest.mark.parametrize("comes_first", [False, True])
def test_an_end_of_a_prompt_with_fewer_tokens_leaves_the_other_blocks_as_they_are(end, comes_first):
    """As LMCache stores the end of a prompt with `save_unfull_chunk`."""
    chunk = sized(8, [11], None, ids(8), 0, medium="CPU")
    rest = sized(end, [12], 11, ids(8 + end)[8:], 0, medium="CPU")
    events = [stored([1, 2, 3], None, ids(12)), chunk, rest]
    mirror = mirror_of(*(reversed(events) if comes_first else events))
    assert mirror.block_size == BLOCK
    assert [mirror.match(ids(12), media=media) for media in ("GPU", "CPU")] == [12, 8]
    after(mirror, removed(12, medium="CPU"), removed(11, medium="CPU"), removed(3, 2, 1))
    assert (mirror.match(ids(12), media=("GPU", "CPU")), len(mirror._paths)) == (0, 0)


def test_a_publisher_that_was_started_again_may_have_other_groups_and_sizes():
    mirror = mirror_of(stored([1], None, ids(4)), sized(4, [1], None, ids(4), 1))
    mirror.reset()
    assert (mirror.block_size, mirror.match(ids(8))) == (None, 0)
    mirror.apply(0, Batch(1.0, [stored([7], None, ids(8), block_size=8)]))
    assert (mirror.block_size, mirror.match(ids(8))) == (8, 8)


def test_extra_keys_may_be_arrays():
    mirror = mirror_of(stored([1], None, ids(4), lora_name="adapter", extra_keys=[["adapter", "salt"]]))
    assert mirror.match(ids(4), namespace="adapter", extra_keys=[[np.zeros(2)]]) == 0
    assert mirror.match(ids(4), namespace="adapter", extra_keys=(("salt",),)) == 4


def test_a_batch_with_wrong_token_ids_changes_nothing():
    mirror = mirror_of(stored([1], None, ids(4)))
    wrong = [removed(1), stored([2], None, [1, 2, 3, "four"])]
    with pytest.raises(EventFormatError, match="wrong token_ids"):
        after(mirror, *wrong)
    with pytest.raises(EventFormatError, match="wrong token_ids"):
        mirror.load(9, [Batch(2.0, wrong)])
    assert (mirror.sequence, mirror.match(ids(4))) == (0, 4)
