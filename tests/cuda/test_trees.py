"""Trees of new tokens on a CUDA device: paged_attention with tree_mask, and caches that commit a path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
from pagecore.ops import move_slots, paged_attention, tree_mask
from pagecore.ops.cuda.schedule._schedule import plan_lengths, plan_shape
from tests.cache.tree_model import DIM, HEADS, KV_HEADS, check_step, key_of, query_of, value_of
from tests.cuda.attention_cases import BF16, F16, SINKS, DeviceCase, check, compare
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.ops.cases import LAYOUTS, Shape, empty_cache
from tests.ops.test_move_slots import random_moves, twin_moves
from tests.ops.trees import tree_case
from tests.reference.trees import ancestors, random_parents, random_path

TREES = Shape(seq_lens=(300, 77, 20, 5, 130), query_lens=(40, 64, 20, 1, 3), heads=(8, 2), **BF16)
SMALL = Shape(seq_lens=(150, 33, 9), query_lens=(4, 3, 1), heads=(8, 2), **BF16)  # items of decode
F32 = {"query_dtype": "float32", "cache_dtype": "float32"}
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "window": {"window": 33},
    "narrow window": {"window": 3},
    "both sides": {"causal": False, "window": (10, 2)},
    "everything": {"window": 20, "softcap": 5.0, "sinks": SINKS},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [TREES, SMALL], ids=["prompts", "decode"])
def test_every_option_keeps_the_bounds(cuda, shape, name):
    check(cuda, tree_case(shape, **OPTIONS[name]))


@pytest.mark.parametrize("name", ["alone", "narrow window"])
@pytest.mark.parametrize("shape", [TREES, SMALL], ids=["prompts", "decode"])
def test_general_kernels(cuda, shape, name):
    check(cuda, tree_case(replace(shape, dims=(36, 20), **F32), **OPTIONS[name]))


@pytest.mark.parametrize("dtype", cases([F16], [F16, BF16]), ids=lambda d: d["query_dtype"])
@pytest.mark.parametrize("dim", cases([128], [64, 128, 256]))
def test_other_dims(cuda, dim, dtype):
    check(cuda, tree_case(replace(TREES, dims=(dim, dim), **dtype), window=25))


def test_groups_of_one_query(cuda):
    """Items of one query, whose row leaves out keys."""
    check(cuda, tree_case(Shape(seq_lens=(60,), query_lens=(7,), heads=(16, 1), **BF16)))


def test_trees_of_more_than_64_tokens(cuda):
    shape = Shape(seq_lens=(300, 131), query_lens=(130, 65), heads=(4, 2), **BF16)
    check(cuda, tree_case(shape, branching=0.1))
    check(cuda, tree_case(shape, branching=0.05, window=20))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", ["alone", "narrow window"])
def test_plans(cuda, name, invariant):
    case = tree_case(replace(TREES, seq_lens=(700, 77, 20, 5, 430)), **OPTIONS[name])
    check(cuda, case, plan=True, tree=True, batch_invariant=invariant)


def test_plans_of_the_device(cuda):
    """Lengths that only the device knows are planned by a kernel, in the call or before it."""
    case = tree_case(TREES, window=7)
    there = DeviceCase(cuda, case)
    compare(case, there.run())
    lens, cu, tokens = there.arrays["seq_lens"], there.arrays["cu_query_lens"], case.query.shape[0]
    plan = cuda.empty(plan_shape(len(case.seq_lens), tokens, 8, 2), "uint8")
    heads = {"num_query_heads": 8, "num_kv_heads": 2}
    plan_lengths(plan, lens, cu, tokens, window=7, tree=True, **heads)
    compare(case, there.run(plan=plan))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_given_positions(cuda, dtype):
    case = tree_case(TREES, window=9)
    bases = np.repeat(np.subtract(TREES.seq_lens, TREES.query_lens), TREES.query_lens)
    case.options["positions"] = (bases + np.concatenate([np.arange(n) for n in TREES.query_lens])).astype(dtype)
    check(cuda, case)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("heads", [(4, 2), (40, 2)], ids=["decode", "prompts"])
def test_a_branch_does_not_see_the_values_of_another(cuda, heads, bad):
    case = tree_case(Shape(seq_lens=(70,), query_lens=(6,), heads=heads, **BF16))
    case.options["tree_mask"] = tree_mask([-1, 0, 0, 1, 1, 2])
    case.value_cache[case.block_table[0, 66 // 16], 66 % 16] = bad  # token 2, an ancestor of token 5 alone
    out, _ = DeviceCase(cuda, case).run()
    finite = np.isfinite(out.astype(np.float32)).all(axis=(1, 2))
    assert finite.tolist() == [True, True, False, True, True, False]


def test_whatever_the_bits_are_reads_stay_inside(cuda):
    case = tree_case(TREES, window=5)
    case.options["tree_mask"] = np.random.default_rng(0).integers(0, 2**63, 128).astype(np.uint64)
    case.options["positions"] = np.full(128, -(2**31), np.int32)
    DeviceCase(cuda, case).run()


def test_what_is_refused(cuda):
    case = tree_case(TREES)
    there = DeviceCase(cuda, case)
    with pytest.raises(
        UnsupportedOption, match="tree_mask and alibi_slopes are both given, which only the host serves"
    ):
        there.run(alibi_slopes=SINKS)
    with pytest.raises(ShapeError, match="without tree; call plan_attention with tree=True"):
        there.run(window=9, plan=there.plan(window=9))
    on_host = DeviceCase(cuda, case, ("seq_lens", "cu_query_lens"))
    with pytest.raises(ShapeError, match="sequence 0 has 80 new tokens and tree_mask 1 words"):
        on_host.run(cu_query_lens=np.array([0, 80, 104, 124, 125, 128]))


# -- caches -----------------------------------------------------------------------------------------------------


def spec(**options: Any) -> AttentionSpec:
    return AttentionSpec(KV_HEADS, DIM, dtype="float32", num_query_heads=HEADS, **options)


def compute(cuda: Kit, cache: PagedKVCache, specs: list[AttentionSpec], batch: Any, ids: Any) -> list[Any]:
    positions = np.asarray(batch.host.positions)[: batch.num_tokens]
    outputs = []
    for layer in range(len(specs)):
        key, value = (cuda.put(each(ids, positions, layer)) for each in (key_of, value_of))
        cache.write(layer, key, value, batch)
        outputs.append(cuda.get(cache.attend(layer, cuda.put(query_of(ids, positions, layer)), batch)))
    return outputs


@pytest.mark.parametrize("reuses_batch", [True, False])
@pytest.mark.parametrize("windows", [(None, 6), (None,)], ids=str)
def test_a_cache_verifies_trees_and_commits_paths(cuda, windows, reuses_batch):
    rng = np.random.default_rng(3)
    specs = [spec(window=window) for window in windows]
    cache = PagedKVCache(specs, block_size=4, num_blocks=100, device=cuda.device)
    batch = cache.make_batch(2, 40, max_tree_tokens=20) if reuses_batch else None
    sequences = [cache.add_sequence(rng.integers(0, 50, size).tolist()) for size in (9, 3)]
    with cache.prepare(sequences, [9, 3]) as step:
        compute(cuda, cache, specs, step, np.concatenate([each.tokens for each in sequences]))
        cache.commit(step)
    for _ in range(3):
        trees = [random_parents(rng, int(rng.integers(1, 12))) for _ in sequences]
        drafts = [rng.integers(0, 50, len(tree)).tolist() for tree in trees]
        texts = [each.tokens.tolist() for each in sequences]
        cache.append_tokens(sequences, drafts)
        with cache.prepare(sequences, [len(tree) for tree in trees], batch, parents=trees) as step:
            bits = cuda.get(step.tree_mask)[: step.num_tokens]
            assert bits.tolist() == np.asarray(step.host.tree_mask)[: step.num_tokens].tolist()
            outputs = compute(cuda, cache, specs, step, np.concatenate(drafts).astype(int))
            check_step(specs, outputs, drafts, trees, texts)
            paths = [random_path(rng, tree) for tree in trees]
            cache.commit(step, accepted_path=paths)
        for sequence, text, listed, path in zip(sequences, texts, drafts, paths, strict=True):
            assert sequence.tokens.tolist() == text + [listed[at] for at in path]
    cache.check_invariants()


def test_a_graph_serves_other_trees(cuda):
    """The bits are at a fixed address; prepare and commit are outside of the graph."""
    specs = [spec()]
    cache = PagedKVCache(specs, block_size=4, num_blocks=100, device=cuda.device)
    batch = cache.make_batch(1, 8, max_tree_tokens=8)
    sequence = cache.add_sequence([1, 2, 3])
    with cache.prepare([sequence], 3) as step:
        compute(cuda, cache, specs, step, [1, 2, 3])
        cache.commit(step)
    query, key, value = (cuda.empty((8, heads, DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = cuda.empty((8, HEADS, DIM))

    def work(stream: int) -> None:
        cache.write(0, key, value, batch, stream=stream)
        cache.attend(0, query, batch, out=out, stream=stream)

    rng, replay = np.random.default_rng(5), None
    for _ in range(3):
        tree, drafts, text = random_parents(rng, 8), rng.integers(0, 50, 8).tolist(), sequence.tokens.tolist()
        cache.append_tokens([sequence], [drafts])
        cache.prepare([sequence], 8, batch, parents=[tree], stream=0)
        positions = np.asarray(batch.host.positions)
        for tensor, make in ((query, query_of), (key, key_of), (value, value_of)):
            numbers = make(drafts, positions, 0)
            cuda.runtime.copy(tensor.pointer, numbers.ctypes.data, numbers.nbytes, 0)
            cuda.runtime.synchronize(0)
        if replay is None:
            work(0)  # loads the kernels
            replay = cuda.capture(work)
        replay()
        check_step(specs, [cuda.get(out)], [drafts], [tree], [text])
        path = ancestors(tree, 7)
        cache.commit(batch, accepted_path=[path])
        assert sequence.tokens.tolist() == text + [drafts[at] for at in path]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_slots_move_in_order(cuda, dtype):
    rng = np.random.default_rng(1)
    plane = rng.integers(-99, 99, (6, 4, 3, 5)).astype(dtype if dtype != "bfloat16" else "float16")
    source, target = random_moves(rng, 24, 15)
    there = cuda.put(plane)
    move_slots([there], source, target)
    np.testing.assert_array_equal(cuda.get(there), twin_moves(plane, source, target))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_move_in_every_layout(cuda, layout):
    rng = np.random.default_rng(2)
    plane = empty_cache(layout, (5, 3, 2, 4), np.dtype(np.float32))
    plane[...] = rng.standard_normal(plane.shape)
    source, target = random_moves(rng, 15, 12)
    there = cuda.put(plane)
    move_slots(there, source, target)
    np.testing.assert_array_equal(cuda.get(there), twin_moves(plane, source, target))


def test_slots_on_the_device_are_refused(cuda):
    with pytest.raises(DeviceError):
        move_slots(cuda.put(np.zeros((2, 4, 1), np.float32)), cuda.put(np.array([0])), cuda.put(np.array([1])))


def test_paged_attention_takes_the_batch_of_a_cache(cuda):
    specs = [spec()]
    cache = PagedKVCache(specs, block_size=4, num_blocks=100, device=cuda.device)
    batch = cache.prepare([cache.add_sequence([1])], 6, parents=[[-1, 0, 0, 1, 1, 2]])
    (own,) = compute(cuda, cache, specs, batch, range(6))
    query = cuda.put(query_of(range(6), np.asarray(batch.host.positions), 0))
    group = batch.group(0)
    out = paged_attention(
        query, cache.key(0), cache.value(0), group.block_table, batch.seq_lens, rows=batch.rows,
        cu_query_lens=batch.cu_query_lens, tree_mask=batch.tree_mask, positions=batch.positions,
    )  # fmt: skip
    np.testing.assert_array_equal(cuda.get(out), own)
