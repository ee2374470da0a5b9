"""transfer_blocks: whole blocks between caches of different layouts, dtypes and numbers of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore import KVPool, errors, ops
from pagecore.arrays.dtypes.dtype import as_dtype
from pagecore.storage import AttentionSpec
from tests.ops.block_cases import ANY_DTYPE, RANKS, random_bytes, random_cache, random_numbers, shuffled_axes, twin_of
from tests.ops.cases import DTYPES, LAYOUTS, snapshot
from tests.reference import blocks as reference
from tests.together import together

PAIRS = np.asarray([(3, 1), (4, 2), (5, 3), (1, 6), (9, 5)], np.int32)


def check_transfer(source: Any, target: Any, pairs: Any) -> None:
    """Check that the target blocks are equal to the source blocks, and that no other byte changes."""
    memory, expected_memory, expected = twin_of(target)
    reference.transfer(source, expected, pairs)
    unchanged = snapshot(source)
    ops.transfer_blocks(source, target, pairs)
    assert memory.tobytes() == expected_memory
    assert unchanged()


@together("source_layout", LAYOUTS)
@together("target_layout", LAYOUTS)
@together("dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("float16", "float32")])
def test_blocks_arrive_in_every_layout_and_dtype(source_layout, target_layout, dtypes):
    source = random_cache(source_layout, (10, 4, 3, 8), dtypes[0])
    target = random_cache(target_layout, (7, 4, 3, 8), dtypes[1], seed=1)
    check_transfer(source, target, PAIRS)


@together("dtype", ANY_DTYPE)
@together("rest", RANKS)
def test_blocks_of_any_dtype_and_rank_arrive_bit_for_bit(dtype, rest):
    check_transfer(random_bytes((10, 3, *rest), dtype), random_bytes((7, 3, *rest), dtype, 1), PAIRS)


@pytest.mark.slow
@together("layouts", [("NHD", "NHD"), ("NHD", "HND"), ("HND", "NHD"), ("padded", "HND")])
@together("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_large_transfers_are_complete(layouts, dtypes):
    source = random_cache(layouts[0], (200, 16, 8, 128), dtypes[0])
    target = random_cache(layouts[1], (230, 16, 8, 128), dtypes[1], seed=1)
    rng = np.random.default_rng(0)
    pairs = np.stack([rng.permutation(np.arange(1, 200)), rng.permutation(np.arange(1, 230))[:199]], axis=1)
    expected = target.copy()
    expected[pairs[:, 1]] = reference.cast(source[pairs[:, 0]], target.dtype)
    ops.transfer_blocks(source, target, pairs)
    assert target.tobytes() == expected.tobytes()


def test_of_pairs_with_one_target_the_later_one_stays():
    source, target = np.arange(6, dtype=np.int32).reshape(6, 1), np.zeros((4, 1), np.int32)
    ops.transfer_blocks(source, target, [(1, 2), (2, 3), (5, 2), (4, 3), (3, 3)])
    assert target[:, 0].tolist() == [0, 0, 5, 3]


@together("layout", ["NHD", "HND"])
def test_without_a_null_block_block_0_moves_as_any_other(layout):
    """As in a pool by layers and one by pages: [layers, tokens, heads, dim] and [pages, layers, size, heads, dim]."""
    tokens = random_numbers((3, 7 * 4, 2, 8), "float16")
    pages = np.zeros((7, 3, 4, 2, 8), np.float16)
    sources = [layer.reshape(7, 4, 2, 8) for layer in tokens]
    targets = list(pages.swapaxes(0, 1))
    if layout == "HND":
        targets = list(np.zeros((7, 2, 4, 3, 8), np.float16).transpose(3, 0, 2, 1, 4))
    pairs = np.asarray([(0, 6), (5, 0), (1, 2)])
    ops.transfer_blocks(sources, targets, pairs, null_block=False)
    for source, target in zip(sources, targets, strict=True):
        np.testing.assert_array_equal(target[pairs[:, 1]], source[pairs[:, 0]])
        assert not target[[1, 3, 4, 5]].any()


@together("pair", [(-1, 1), (1, -1), (7, 1), (1, 7)])
def test_without_a_null_block_blocks_outside_are_refused(pair):
    source, target = np.ones((7, 4, 2), np.float32), np.zeros((7, 4, 2), np.float32)
    with pytest.raises(errors.InvalidBlock, match=r"of pair 1 is -?[17] .* expected 0 to 6$"):
        ops.transfer_blocks(source, target, [(0, 0), pair], null_block=False)
    assert not target.any()


@together("pairs", [[], (), np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32)])
def test_no_pairs_move_nothing(pairs):
    target = np.ones((3, 2), np.float32)
    ops.transfer_blocks(np.zeros((3, 2), np.float32), target, pairs)
    ops.transfer_blocks([], [], pairs)
    assert (target == 1).all()


def test_each_plane_of_a_list_moves_to_its_target():
    sources = [
        random_cache("HND", (9, 4, 2, 8), "float32"),
        random_bytes((11, 4), "int8"),
        random_bytes((9, 4, 3), "int64"),
    ]
    targets = [
        random_cache("NHD", (7, 4, 2, 8), "bfloat16", 1),
        random_bytes((6, 4), "int8", 1),
        random_bytes((6, 4, 3), "int64", 1),
    ]
    expected = [target.copy() for target in targets]
    pairs = [(8, 5), (1, 1), (2, 2)]
    for source, target in zip(sources, expected, strict=True):
        reference.transfer(source, target, pairs)
    ops.transfer_blocks(tuple(sources), targets, pairs)
    for target, want in zip(targets, expected, strict=True):
        assert target.tobytes() == want.tobytes()


@together("layouts", [("layerwise", "blockwise"), ("BNCLHD", "LBCHND")])
def test_pools_of_different_layouts_exchange_blocks(layouts):
    spec = AttentionSpec(num_kv_heads=2, head_dim=8, dtype="float32")
    here, there = KVPool(spec, 3, 6, 4, layouts[0], "cpu"), KVPool(spec, 3, 9, 4, layouts[1], "cpu")
    planes = [[pool.plane(name, layer) for layer in range(3) for name in ("key", "value")] for pool in (here, there)]
    for i, (ours, theirs) in enumerate(zip(*planes, strict=True)):
        ours.numpy()[...] = np.random.default_rng(i).standard_normal((6, 4, 2, 8))
        theirs.numpy()[...] = 0
    ops.transfer_blocks(*planes, [(5, 8), (1, 2)])
    for ours, theirs in zip(*planes, strict=True):
        np.testing.assert_array_equal(theirs.numpy()[[8, 2]], ours.numpy()[[5, 1]])
        assert not theirs.numpy()[[0, 1, 3, 4, 5, 6, 7]].any()


@together("layout", ["blockwise", "layerwise", "BNCLHD", "LBHCND"])
def test_interleaved_planes_of_one_pool_are_known_to_be_apart(layout):
    """The planes span the same bytes and share none."""
    pool = KVPool(AttentionSpec(num_kv_heads=8, head_dim=128, dtype="bfloat16"), 4, 300, 16, layout, "cpu")
    sources = [pool.plane(name, layer) for layer in (0, 1) for name in ("key", "value")]
    targets = [pool.plane(name, layer) for layer in (3, 2) for name in ("key", "value")]
    for i, plane in enumerate(sources):
        plane.numpy()[...] = np.random.default_rng(i).standard_normal((1, 1, 8, 128)).astype(DTYPES["bfloat16"])
    ops.transfer_blocks(sources, targets, [(299, 1), (7, 7)])
    for source, target in zip(sources, targets, strict=True):
        assert (target.numpy()[[1, 7]] == source.numpy()[[299, 7]]).all()
    ops.scatter_blocks(sources[0].numpy()[3].copy(), targets[1], [[5]], [16])
    with pytest.raises(errors.UnsupportedOption, match=r"target_caches\[2\] shares memory with source_caches\[1\]"):
        ops.transfer_blocks([*sources[:3]], [*targets[:2], sources[1]], [(1, 2)])


@together("shift", [0, 1, 5])
def test_targets_that_share_memory_with_a_source_are_refused(shift):
    memory = np.arange(40, dtype=np.float32)
    source, target = memory[:32].reshape(4, 8), memory[shift : shift + 32].reshape(4, 8)
    unchanged = snapshot(memory)
    with pytest.raises(errors.UnsupportedOption, match="target_caches shares memory with source_caches"):
        ops.transfer_blocks(source, target, [(1, 2)])
    with pytest.raises(errors.UnsupportedOption, match="cache shares memory with values"):
        ops.scatter_blocks(memory[shift : shift + 3], memory.reshape(4, 10), [[2]], [3])
    with pytest.raises(errors.UnsupportedOption, match="out shares memory with cache"):
        ops.gather_blocks(memory.reshape(4, 10), [[2]], [3], out=memory[shift : shift + 3])
    assert unchanged()


@together("pair", [(0, 1), (1, 0), (-1, 2), (2, -1), (10, 2), (2, 7), (1, 2**40), (2**31 - 1, 1)])
def test_one_bad_pair_leaves_every_target_as_it_was(pair):
    sources = [random_bytes((12, 3), "int8"), random_bytes((10, 3), "int8")]
    targets = [random_bytes((7, 3), "int8", 1), random_bytes((8, 3), "int8", 1)]
    unchanged = snapshot(*sources, *targets)
    with pytest.raises(errors.InvalidBlock, match="of pair 1 is "):
        ops.transfer_blocks(sources, targets, [(3, 4), pair])
    assert unchanged()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_blocks_with_any_strides_equal_copies_by_numpy(data):
    draw = data.draw
    rest = tuple(draw(st.lists(st.integers(0, 4), max_size=5)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([*DTYPES, "uint8", "int32"]))
    other = draw(st.sampled_from([dtype, *DTYPES])) if dtype in DTYPES else dtype
    block_size, blocks = draw(st.integers(1, 4)), (draw(st.integers(2, 6)), draw(st.integers(2, 6)))
    source = shuffled_axes((blocks[0], block_size, *rest), as_dtype(dtype).numpy, draw, rng)
    target = shuffled_axes((blocks[1], block_size, *rest), as_dtype(other).numpy, draw, rng)
    pairs = np.stack([rng.integers(1, count, 6) for count in blocks], axis=1)
    check_transfer(source, target, pairs)
