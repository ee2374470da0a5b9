"""Trees of drafts in a paged cache: prepare with parents, attend, and commit of an accepted path."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore import (
    AttentionSpec,
    InvalidSequence,
    LatentSpec,
    PagedKVCache,
    ShapeError,
    UnsupportedOption,
)
from tests.cache.tree_model import (
    DIM,
    HEADS,
    KV_HEADS,
    check_step,
    check_stored,
    compute,
    key_of,
    query_of,
    value_of,
)
from tests.faults import is_full
from tests.reference.trees import ancestors, bits_of, depths_of, random_parents, random_path
from tests.thinning import in_turn
from tests.together import together

F2 = [-1, 0, 0, 1, 1, 2]


def spec(**options):
    return AttentionSpec(KV_HEADS, DIM, dtype="float32", num_query_heads=HEADS, **options)


def prefilled(cache, specs, ids):
    sequence = cache.add_sequence(ids)
    count = len(ids) - sequence.num_computed_tokens
    with cache.prepare([sequence], count) as batch:
        compute(cache, specs, batch, ids[-count:])
        cache.commit(batch)
    return sequence


def test_worked_example_f2():
    """Slots 13, 14, 15, 20, 21, 22; accepted [0, 2, 5]: 15 -> 14, then 22 -> 15, and 20 to 22 stay capacity."""
    cache = PagedKVCache(spec(), block_size=4, num_blocks=16, device="none", prefix_cache=False)
    first, tree, third = (cache.add_sequence([9]) for _ in range(3))
    for sequence, count in ((first, 8), (tree, 1), (third, 4)):
        cache.commit(cache.prepare([sequence], count))
    cache.append_tokens([tree], [[10, 11, 12, 13, 14, 15]])
    batch = cache.prepare([tree], 6, parents=[F2])
    assert np.asarray(batch.tree_mask).tolist() == [1, 3, 5, 11, 19, 37]
    assert np.asarray(batch.positions).tolist() == [1, 2, 2, 3, 3, 3]
    assert np.asarray(batch.group(0).slot_mapping).tolist() == [13, 14, 15, 20, 21, 22]
    cache.commit(batch, accepted_path=[[0, 2, 5]])
    assert batch.moved_slots(0).tolist() == [[15, 14], [22, 15]]
    assert tree.tokens.tolist() == [9, 10, 12, 15]
    assert tree.num_computed_tokens == 4
    assert tree.capacity == 8
    again = cache.prepare([tree], 3)
    assert again.tree_mask is None
    assert np.asarray(again.group(0).slot_mapping).tolist() == [20, 21, 22]
    cache.commit(again)
    assert again.moved_slots(0).tolist() == []
    cache.check_invariants()


def test_a_prepare_that_lacks_blocks_keeps_the_list_of_the_last_moves():
    cache = PagedKVCache(spec(), block_size=4, num_blocks=4, max_tokens_per_sequence=40, device="none")
    sequence, batch = cache.add_sequence([9]), cache.make_batch(1, 20, max_tree_tokens=4)
    cache.commit(cache.prepare([sequence], 3, out=batch, parents=[[-1, -1, 1]]), accepted_path=[[1, 2]])
    assert batch.moved_slots(0).tolist() == [[5, 4], [6, 5]]
    assert cache.try_prepare([sequence], 20, out=batch) is None
    assert batch.moved_slots(0).tolist() == [[5, 4], [6, 5]]
    cache.commit(cache.prepare([sequence], 1, out=batch))
    assert batch.moved_slots(0).tolist() == []


LAYERS = {
    "plain": [{}],
    "window": [{}, {"window": 5}],
    "lookahead": [{"window": 6, "lookahead": 4}],
    "chunk": [{"chunk": 4}, {}],
}


@pytest.mark.parametrize(("name", "block_size", "prefix_cache"), in_turn(LAYERS, [1, 4, 16], over=[[True, False]]))
def test_outputs_and_keys_equal_those_of_the_path_alone(name, prefix_cache, block_size):
    rng = np.random.default_rng(block_size)
    specs = [spec(**options) for options in LAYERS[name]]
    cache = PagedKVCache(specs, block_size=block_size, num_blocks=600, prefix_cache=prefix_cache)
    sequences = [prefilled(cache, specs, rng.integers(0, 50, size).tolist()) for size in (3, 21)]
    sequences.append(cache.fork(sequences[0]))
    for _ in range(6):
        run_step(rng, cache, specs, sequences)
    cache.check_invariants()


def run_step(rng, cache, specs, sequences, batch=None, known=None):
    """Verify one random tree for each sequence, and commit a random path of each."""
    trees = [random_parents(rng, int(rng.integers(0, 12))) for _ in sequences]
    drafts = [rng.integers(0, 50, len(tree)).tolist() for tree in trees]
    texts = [sequence.tokens[: sequence.num_computed_tokens].tolist() for sequence in sequences]
    known = rng.random() < 0.7 if known is None else known
    if known:
        cache.append_tokens(sequences, drafts)
    counts = [len(tree) for tree in trees]
    with cache.prepare(sequences, counts, batch, parents=trees) as step:
        bases = [len(text) for text in texts]
        assert np.asarray(step.host.positions)[: sum(counts)].tolist() == [
            base + depth for base, tree in zip(bases, trees, strict=True) for depth in depths_of(tree)
        ]
        bits = np.asarray(step.host.tree_mask)[: sum(counts)]
        if bits.ndim == 1:
            assert bits.view(np.uint64).tolist() == [row for tree in trees for row in bits_of(tree)]
        outputs = compute(cache, specs, step, [each for listed in drafts for each in listed])
        check_step(specs, outputs, drafts, trees, texts)
        paths = [random_path(rng, tree) for tree in trees]
        cache.commit(step, accepted_path=paths)
    for sequence, text, listed, path in zip(sequences, texts, drafts, paths, strict=True):
        accepted = [listed[at] for at in path]
        if not known:
            cache.append_tokens([sequence], [accepted])
        assert sequence.tokens.tolist() == text + accepted
        assert sequence.num_computed_tokens == len(text) + len(accepted)
        check_stored(cache, specs, sequence)


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), block_size=st.sampled_from([1, 3, 8]), name=st.sampled_from(sorted(LAYERS)))
@settings(max_examples=25 if is_full() else 15, deadline=None)
def test_random_trees(seed, block_size, name):
    rng = np.random.default_rng(seed)
    specs = [spec(**options) for options in LAYERS[name]]
    cache = PagedKVCache(specs, block_size=block_size, num_blocks=400)
    batch = cache.make_batch(4, 64, max_tree_tokens=12)
    sequences = [prefilled(cache, specs, rng.integers(0, 3, 1 + int(rng.integers(12))).tolist()) for _ in range(3)]
    for _ in range(4):
        action = rng.random()
        if action < 0.2 and len(sequences) < 4:
            sequences.append(cache.fork(sequences[int(rng.integers(len(sequences)))]))
        elif action < 0.3:
            sequence = sequences[int(rng.integers(len(sequences)))]
            cache.truncate(sequence, sequence.num_computed_tokens)
        run_step(rng, cache, specs, sequences, batch)
        cache.check_invariants()
        again = cache.add_sequence([*sequences[0].tokens.tolist(), 1])
        check_stored(cache, specs, again)  # what is found again is the accepted text
        cache.remove(again)


def test_a_rejected_branch_is_not_found_in_the_prefix_cache():
    specs = [spec()]
    cache = PagedKVCache(specs, block_size=2, num_blocks=50)
    sequence = prefilled(cache, specs, [1, 2, 3])
    cache.append_tokens([sequence], [[4, 5, 6, 7]])
    batch = cache.prepare([sequence], 4, parents=[[-1, -1, 0, 1]])
    compute(cache, specs, batch, [4, 5, 6, 7])
    cache.commit(batch, accepted_path=[[1, 3]])
    assert sequence.tokens.tolist() == [1, 2, 3, 5, 7]
    assert cache.match_length([1, 2, 3, 5, 7, 0]) == 4
    assert cache.match_length([1, 2, 3, 4, 6, 0]) == 2


def test_late_ids_and_ids_after_the_step():
    specs = [spec()]
    cache = PagedKVCache(specs, block_size=4, num_blocks=50)
    sequence = prefilled(cache, specs, [1, 2])
    cache.append_tokens([sequence], [[3, 4]])  # of four new tokens, two are known
    batch = cache.prepare([sequence], 4, parents=[[-1, 0, 0, 1]])
    cache.commit(batch, accepted_path=[[0, 1, 3]])
    assert sequence.tokens.tolist() == [1, 2, 3, 4]
    assert sequence.num_computed_tokens == 5
    cache.append_tokens([sequence], [[6, 7, 8]])
    batch = cache.prepare([sequence], 2, parents=[None])
    cache.commit(batch, accepted_path=[None])  # a chain that is accepted whole keeps the ids after it
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 6, 7, 8]
    batch = cache.prepare([sequence], 1)
    cache.commit(batch, accepted_path=[[0]])  # a path without parents is one of a chain
    assert sequence.num_computed_tokens == 8


@pytest.mark.parametrize("options", [{"format": "int8_token"}, {"format": "nvfp4"}, {"key_bounds": True}], ids=str)
def test_moved_planes_equal_those_of_the_path_alone(options):
    """Codes, scales and bounds of keys."""
    ids, drafts, tree = [5, 6, 7], [1, 2, 3, 4, 5, 6, 7], [-1, 0, 0, 1, 2, 4, 5]
    path = ancestors(tree, 6)
    caches = []
    for accepted in (path, None):
        cache = PagedKVCache([spec(**options)] * 2, block_size=4, num_blocks=8, prefix_cache=False)
        sequence = prefilled(cache, [spec()] * 2, ids)
        new = drafts if accepted else [drafts[at] for at in path]
        batch = cache.prepare([sequence], len(new), parents=[tree] if accepted else None)
        positions = np.asarray(batch.positions)
        for layer in range(2):
            cache.write(layer, key_of(new, positions, layer), value_of(new, positions, layer), batch)
        if accepted:
            cache.commit(batch, accepted_path=[accepted])
        else:
            cache.commit(batch)
        caches.append((cache, sequence))
    (moved, one), (plain, other) = caches
    blocks = [np.asarray(cache.block_table(0))[each.row] for cache, each in caches]
    length = one.num_computed_tokens
    assert length == other.num_computed_tokens == 3 + len(path)
    for plane in spec(**options).planes:
        for layer in range(2):
            got, want = (np.asarray(cache.plane(plane.name, layer)) for cache in (moved, plain))
            used = np.arange(-(-length // 4))
            got, want = got[blocks[0][used]], want[blocks[1][used]]
            if plane.per == "token":
                got, want = (each.reshape(-1, *each.shape[2:])[:length] for each in (got, want))
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def test_latents_move_but_their_attention_refuses_trees():
    latent = LatentSpec(latent_dim=32, rope_dim=8, num_query_heads=4, scale=0.2, dtype="float32")
    cache = PagedKVCache(latent, block_size=4, num_blocks=16)
    sequence = cache.add_sequence([1, 2])
    rng = np.random.default_rng(0)
    latents, ropes = rng.normal(size=(8, 32)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)
    batch = cache.prepare([sequence], 2)
    cache.write(0, latents[:2], ropes[:2], batch)
    cache.commit(batch)
    batch = cache.prepare([sequence], 6, parents=[F2])
    cache.write(0, latents[2:], ropes[2:], batch)
    query = (rng.normal(size=(6, 4, 32)).astype(np.float32), rng.normal(size=(6, 4, 8)).astype(np.float32))
    with pytest.raises(UnsupportedOption, match="the step has trees, which the attention of layer 0 does not serve"):
        cache.attend(0, query, batch)
    cache.commit(batch, accepted_path=[[0, 2, 5]])
    stored = np.asarray(cache.plane("latent", 0))
    table = np.asarray(cache.block_table(0))[sequence.row]
    rows = stored[table[:2]].reshape(8, -1)[:5]
    expected = np.concatenate([latents, ropes], axis=1)[[0, 1, 2, 4, 7]]
    np.testing.assert_array_equal(rows.reshape(5, -1), expected)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([F2, None], "parents has 2 entries; give one for each of the 1 sequences"),
        ([[-1] * 5], r"parents\[0\] has 5 entries; the sequence has 6 new tokens"),
        ([[-1, 0, 0, 1, 1, 5]], r"parents\[0\]\[5\] is 5; a parent is an earlier token of the step"),
        ([[-2, 0, 0, 1, 1, 2]], r"parents\[0\]\[0\] is -2"),
        (F2, "parents holds a number; give one list of parents for each sequence"),
        (7, "parents is a int; give a list with one entry for each sequence"),
    ],
)
def test_parents_that_are_refused(parents, message):
    cache = PagedKVCache(spec(), block_size=4, num_blocks=16, device="none")
    sequence = cache.add_sequence([1])
    free = cache.stats().num_free_blocks
    with pytest.raises(ShapeError, match=message):
        cache.prepare([sequence], 6, parents=parents)
    assert cache.stats().num_free_blocks == free
    with pytest.raises(ShapeError, match="room for trees of 0; make it with max_tree_tokens=6"):
        cache.prepare([sequence], 6, cache.make_batch(1, 8), parents=[F2])
    cache.commit(cache.prepare([sequence], 6, parents=[F2]), accepted_path=[[]])
    assert sequence.num_computed_tokens == 0


@together(
    ("arguments", "message"),
    [
        ({}, "the step has trees; pass accepted_path"),
        ({"accepted": 1}, "the step has trees; pass accepted_path"),
        ({"accepted": 1, "accepted_path": [[0]]}, "accepted and accepted_path are both given"),
        ({"accepted_path": [[0], [0]]}, "accepted_path has 2 paths"),
        ({"accepted_path": [None]}, r"accepted_path\[0\] is None and the sequence has a tree"),
        ({"accepted_path": [[0, 2, 2]]}, r"accepted_path\[0\] has 2 twice"),
        ({"accepted_path": [[0, 6]]}, r"accepted_path\[0\]\[1\] is 6; the step brought 6 tokens"),
        ({"accepted_path": [[-1]]}, r"accepted_path\[0\]\[0\] is -1"),
        ({"accepted_path": [[2]]}, r"accepted_path\[0\]\[0\] is 2, which is a child of token 0; begin with"),
        ({"accepted_path": [[0, 1, 5]]}, r"is 5, which is a child of token 2; follow 1 with one of its children"),
        ({"accepted_path": [[0, 0]]}, r"has 0 twice"),
        ({"accepted_path": [0]}, "accepted_path holds a number"),
        ({"accepted_path": 3}, "accepted_path is a int"),
    ],
)
def test_paths_that_are_refused_change_nothing(arguments, message):
    cache = PagedKVCache(spec(), block_size=4, num_blocks=16, device="none")
    sequence = cache.add_sequence([1, 2, 3, 4, 5, 6, 7, 8])
    batch = cache.prepare([sequence], 6, parents=[F2])
    with pytest.raises(ShapeError, match=message):
        cache.commit(batch, **arguments)
    assert batch.in_flight
    assert sequence.num_computed_tokens == 0
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    cache.commit(batch, accepted_path=[[0, 2, 5]])
    assert sequence.tokens.tolist() == [1, 3, 6]


def test_planes_that_cannot_be_renewed_are_refused_by_name():
    cache = PagedKVCache(spec(format="int8_token", key_bounds=True), block_size=4, num_blocks=16)
    sequence = cache.add_sequence([1])
    batch = cache.prepare([sequence], 6, parents=[F2])
    with pytest.raises(UnsupportedOption, match="tokens cannot move, because the planes key_min, key_max per block"):
        cache.commit(batch, accepted_path=[[0, 2]])
    assert batch.in_flight
    cache.commit(batch, accepted_path=[[0, 1]])  # tokens that stay in place need no move
    assert sequence.num_computed_tokens == 2


def test_a_removed_sequence_keeps_its_place_in_the_paths():
    cache = PagedKVCache(spec(), block_size=4, num_blocks=16, device="none")
    first, second = cache.add_sequence([1]), cache.add_sequence([2])
    batch = cache.prepare([first, second], 6, parents=[F2, F2])
    cache.remove(first)
    cache.commit(batch, accepted_path=[[0, 2, 5], [0, 2]])
    assert second.num_computed_tokens == 2
    assert len(batch.moved_slots(0)) == 1
    cache.check_invariants()


def test_abandon_and_arrivals():
    cache = PagedKVCache(spec(), block_size=4, num_blocks=16, device="none")
    sequence = cache.add_sequence([1, 2])
    batch = cache.prepare([sequence], 6, parents=[F2])
    cache.abandon(batch)
    with pytest.raises(InvalidSequence):
        cache.commit(batch, accepted_path=[[0]])
    batch = cache.prepare_arrival(sequence, 2)
    with pytest.raises(ShapeError, match="an arrival is committed whole; leave accepted_path out"):
        cache.commit(batch, accepted_path=[[0]])
    cache.commit(batch)
    assert sequence.num_computed_tokens == 2


def test_trees_of_more_than_64_tokens():
    specs = [spec()]
    cache = PagedKVCache(specs, block_size=16, num_blocks=40)
    sequence = prefilled(cache, specs, [1, 2, 3])
    rng = np.random.default_rng(0)
    tree = random_parents(rng, 130, branching=0.2)
    drafts = rng.integers(0, 50, 130).tolist()
    batch = cache.prepare([sequence], 130, parents=[tree])
    assert tuple(batch.tree_mask.shape) == (130, 3)
    check_step(specs, compute(cache, specs, batch, drafts), [drafts], [tree], [[1, 2, 3]])
    path = ancestors(tree, 129)
    cache.commit(batch, accepted_path=[path])
    cache.append_tokens([sequence], [[drafts[at] for at in path]])
    check_stored(cache, specs, sequence)


def test_masks_of_the_caller_are_refused_in_a_step_with_trees():
    specs = [spec()]
    cache = PagedKVCache(specs, block_size=4, num_blocks=16)
    batch = cache.prepare([cache.add_sequence([1])], 6, parents=[F2])
    query = query_of([1] * 6, range(6), 0)
    cache.write(0, query[:, :2], query[:, :2], batch)
    with pytest.raises(UnsupportedOption, match="mask and tree_mask are both given"):
        cache.attend(0, query, batch, mask=np.ones(36, bool))


def test_layers_with_sink_tokens_refuse_trees_in_attention():
    cache = PagedKVCache(AttentionSpec(1, 8, window=8, sink_tokens=4), block_size=4, num_blocks=9)
    sequence = cache.add_sequence(range(3))
    batch = cache.prepare([sequence], 3, parents=[[-1, 0, 0]])
    key = np.ones((3, 1, 8), np.float32)
    cache.write(0, key, key, batch)
    with pytest.raises(UnsupportedOption, match="the attention of layer 0 does not serve"):
        cache.attend(0, key, batch)
    cache.abandon(batch)
