"""seal_kv, and attention over sealed blocks and the newest tokens, on every instruction set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors
from tests.ops import kivi_twin as twin
from tests.ops.cases import DTYPES, LAYOUTS, Shape, empty_cache, random_mask, snapshot
from tests.ops.instruction_sets import on_every_isa
from tests.ops.sealed_cases import BITS, empty_sealed, make_sealed_case
from tests.together import together

MIXED: dict[str, Any] = {"seq_lens": (70, 33, 1, 16, 300, 0), "query_lens": (7, 1, 1, 16, 40, 2)}
DECODE: dict[str, Any] = {"seq_lens": (96, 33, 1, 300, 0)}


@pytest.mark.slow
@together("lens", [MIXED, DECODE])
@together("bits", [(2, 2), (4, 4), (2, 4)])
@on_every_isa
def test_sealed_and_new_tokens_on_every_instruction_set(bits, lens):
    for i, dtype in enumerate(DTYPES):
        shape = Shape(dims=(64, 96), query_dtype=dtype, cache_dtype=dtype, **lens)
        make_sealed_case(shape, bits, seed=i).check()


@on_every_isa
def test_groups_block_sizes_and_dims():
    """Groups of 8 tokens end within a word of 2 bits; groups of 48 channels are whole vectors of every width."""
    shape = Shape(dims=(80, 96), block_size=48, cache_dtype="bfloat16", **MIXED)
    make_sealed_case(shape, (2, 4), (8, 48)).check()
    make_sealed_case(replace(shape, block_size=32, heads=(12, 1)), (4, 2), (32, 16)).check()
    make_sealed_case(replace(shape, block_size=8, heads=(3, 3)), (4, 2), (4, 32)).check()


CODES: dict[str, tuple[dict[str, Any], tuple[int, int], tuple[int, int]]] = {
    "words of both sizes": ({"heads": (8, 2), "dims": (128, 128), "block_size": 32}, (2, 4), (32, 32)),
    "groups of a part of a word": ({"heads": (12, 2), "dims": (64, 128), "block_size": 48}, (2, 2), (8, 16)),
    "groups over several vectors": ({"heads": (8, 1), "dims": (192, 192), "block_size": 16}, (4, 4), (16, 96)),
    "groups that end within a vector": ({"heads": (3, 3), "dims": (256, 192), "block_size": 8}, (4, 2), (8, 48)),
    "groups of half a row": ({"heads": (7, 1), "dims": (64, 64), "block_size": 24}, (4, 4), (24, 32)),
    "one group": ({"heads": (2, 1), "dims": (128, 320), "block_size": 64}, (4, 2), (64, 320)),
}
FEW = {
    "query_dtype": "bfloat16",
    "cache_dtype": "bfloat16",
    "seq_lens": (384, 200, 129, 64),
    "query_lens": (1, 1, 1, 1),
}


@together("name", CODES)
@on_every_isa
def test_few_queries_are_multiplied_with_codes(name):
    shape, bits, groups = CODES[name]
    for i, dtype in enumerate(("bfloat16", "float16")):
        each = {**FEW, **shape, "cache_dtype": dtype, "query_dtype": dtype}
        make_sealed_case(Shape(**each), bits, groups, seed=i).check()
    make_sealed_case(Shape(**{**each, "query_lens": (2, 1, 2, 1)}), bits, groups, window=150, softcap=3.0).check()


@on_every_isa
def test_scales_too_small_for_integers_are_unpacked():
    for tiny in ("key", "value"):
        case = make_sealed_case(Shape(heads=(4, 2), dims=(64, 64), block_size=32, **FEW))
        blocks = np.isnan(case.plain.key_cache.astype(np.float32)).all(axis=(1, 2, 3))
        getattr(case.sealed, f"{tiny}_scale")[...] *= np.array(2.0**-100, DTYPES["bfloat16"])
        getattr(case, f"{tiny}_numbers")[blocks] *= 2.0**-100
        case.check()


@on_every_isa
def test_sums_of_the_largest_codes_and_digits_are_exact():
    """All products have the same sign and the largest magnitude that 16 bits have room for."""
    for bits in (4, 2):
        case = make_sealed_case(Shape(heads=(8, 2), dims=(128, 128), block_size=32, **FEW), (bits, bits))
        blocks = np.isnan(case.plain.key_cache.astype(np.float32)).all(axis=(1, 2, 3))
        case.sealed.key[...] = case.sealed.value[...] = -1
        case.sealed.key_scale[...], case.sealed.value_scale[...] = [[0.5], [-1.0]], [0.5, -1.0]
        case.key_numbers[blocks] = case.value_numbers[blocks] = (2**bits - 1) * 0.5 - 1.0
        case.plain.query[...] = 0.25
        case.check()


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 20},
    "chunk": {"chunk": 32},
    "sink tokens": {"window": 24, "sink_tokens": 20},
    "not causal": {"causal": False},
    "softcap and scales": {"softcap": 5.0, "key_scale": [0.5, 2.0], "value_scale": 0.7},
    "sinks and alibi": {"sinks": [1.5, -2.0, 4.0, 0.0], "alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
}


@together("name", OPTIONS)
def test_options_count_in_positions_of_the_whole_sequence(name):
    for lens in (MIXED, DECODE):
        shape = Shape(cache_dtype="float16", index_dtype="int64", shuffle_rows=True, **lens)
        make_sealed_case(shape, **OPTIONS[name]).check()


def test_masks_and_selections():
    shape = Shape(cache_dtype="bfloat16", **MIXED)
    make_sealed_case(shape, mask=random_mask(shape)).check()
    case = make_sealed_case(Shape(**DECODE))
    tokens = np.array([[0, 3, 4, 40, 95], [1, 2, 30, 31, 32], [0, -1, -1, -1, -1], [2, 64, 65, 280, 299], [-1] * 5])
    indices = np.repeat(tokens[:, None], 2, 1).astype(np.int32)
    mask = np.zeros(sum(DECODE["seq_lens"]), bool)
    starts = np.cumsum([0, *DECODE["seq_lens"]])
    for start, listed in zip(starts, tokens, strict=False):
        mask[start + listed[listed >= 0]] = True
    np.testing.assert_allclose(case.run(indices=indices), case.run(mask=mask), rtol=1e-5, atol=1e-6)


@together("layout", LAYOUTS)
def test_layouts_of_the_sealed_planes(layout):
    case = make_sealed_case(Shape(layout=layout, **DECODE), (2, 2))
    sealed = case.sealed
    turned = sealed._replace(
        key=np.ascontiguousarray(sealed.key.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3),
        value=np.ascontiguousarray(sealed.value.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        key_scale=np.ascontiguousarray(sealed.key_scale.transpose(2, 3, 0, 1, 4)).transpose(2, 3, 0, 1, 4),
        value_scale=np.asfortranarray(sealed.value_scale),
    )
    turned = turned._replace(key_scale=np.ascontiguousarray(turned.key_scale[:, ::-1])[:, ::-1])
    case.sealed = turned
    case.check()


def test_plans_batch_invariance_and_splits():
    """A long sequence is divided into items, which begin within sealed blocks."""
    case = make_sealed_case(Shape(seq_lens=(3000, 40), heads=(8, 1)))
    for invariant in (False, True):
        lens = case.plain.seq_lens
        plan = pagecore.plan_attention(None, lens, num_query_heads=8, num_kv_heads=1, batch_invariant=invariant)
        case.check(plan=plan)
    alone = case.run(plan=plan)[1]
    one = pagecore.plan_attention(None, [40], num_query_heads=8, num_kv_heads=1, batch_invariant=True)
    query, *caches, table, _ = case.plain.arrays
    sealed = case.sealed._replace(block_table=case.sealed.block_table[1:], lens=case.sealed.lens[1:])
    np.testing.assert_array_equal(
        pagecore.paged_attention(query[1:], *caches, table[1:], [40], sealed=sealed, plan=one)[0], alone
    )


def new_blocks(dtype: str = "bfloat16", layout: str = "NHD", size: int = 32) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    caches = [empty_cache(layout, (4, size, 2, dim), DTYPES[dtype]) for dim in (64, 96)]
    for cache in caches:
        cache[...] = rng.normal(size=cache.shape)
    return caches[0], caches[1]


@together("dtype", DTYPES)
@together("bits", [(2, 2), (4, 2)])
def test_sealed_blocks_have_the_codes_of_quantize(bits, dtype):
    for layout in LAYOUTS:
        key, value = new_blocks(dtype, layout)
        sealed = empty_sealed(6, (32, 2, 64, 96), bits, (8, 32), DTYPES[dtype])
        pagecore.seal_kv(key, value, sealed, [(3, 2), (1, 5)])
        for source, target in ((3, 2), (1, 5)):
            heads = np.ascontiguousarray(key[source]).swapaxes(0, 1)
            words, scales = twin.quantize(heads, BITS[bits[0]], -2, 8)
            np.testing.assert_array_equal(sealed.key[target], words)
            np.testing.assert_array_equal(sealed.key_scale[target], scales)
            words, scales = twin.quantize(np.ascontiguousarray(value[source]), BITS[bits[1]], -1, 32)
            np.testing.assert_array_equal(sealed.value[target], words)
            np.testing.assert_array_equal(sealed.value_scale[target], scales)
        untouched = [0, 1, 3, 4]
        assert (sealed.key[untouched] == -1).all()
        assert np.isnan(sealed.value_scale[untouched].astype(np.float32)).all()


def test_scales_have_a_dtype_of_their_own():
    key, value = new_blocks("float32")
    sealed = empty_sealed(4, (32, 2, 64, 96), dtype=DTYPES["bfloat16"])
    pagecore.seal_kv(key, value, sealed, [(1, 1)])
    read = pagecore.dequantize(sealed.key[1], "kivi4", sealed.key_scale[1], axis=-2).swapaxes(0, 1)
    step = sealed.key_scale[1, :, :, 0].astype(np.float32).max()
    assert np.abs(read - key[1]).max() <= 0.52 * step + 0.02


def test_arrays_of_torch_are_sealed_and_attended():
    torch = pytest.importorskip("torch")
    case = make_sealed_case(Shape(query_dtype="bfloat16", cache_dtype="bfloat16", **DECODE))
    as_torch = [torch.from_dlpack(pagecore.as_tensor(array)) for array in (*case.plain.arrays, *case.sealed)]
    out = pagecore.paged_attention(*as_torch[:5], sealed=pagecore.SealedBlocks(*as_torch[5:]))
    np.testing.assert_array_equal(out.float().numpy(), case.run().astype(np.float32))
    key, value = new_blocks()
    sealed = empty_sealed(4, (32, 2, 64, 96), dtype=DTYPES["bfloat16"])
    pagecore.seal_kv(key, value, sealed, [(2, 1)])
    of_torch = [torch.from_dlpack(pagecore.as_tensor(array)) for array in empty_sealed(4, (32, 2, 64, 96))[:4]]
    of_torch[2:] = [scales.bfloat16() for scales in of_torch[2:]]
    pagecore.seal_kv(key, value, pagecore.SealedBlocks(*of_torch), [(2, 1)])
    for got, expected in zip(of_torch, sealed, strict=False):
        np.testing.assert_array_equal(got[1].float().numpy(), np.asarray(expected[1]).astype(np.float32))


def test_planes_without_blocks_have_no_tokens():
    """Arrays of torch without elements have the address 0, as absent ones do."""
    torch = pytest.importorskip("torch")
    case = make_sealed_case(Shape(seq_lens=(40,)))
    planes = [torch.zeros((0, *plane.shape[1:]), dtype=torch.int32) for plane in case.sealed[:2]]
    planes += [torch.zeros((0, *plane.shape[1:])) for plane in case.sealed[2:4]]
    for length, message in [(32, "planes have no blocks"), (30, "multiple of the block size"), (-32, "multiple")]:
        case.sealed = pagecore.SealedBlocks(*planes, [[7, 7]], [length])
        with pytest.raises(errors.ShapeError, match=message):
            case.run()
    plain = case.plain.block_table[0, :3]
    for cache in case.plain.arrays[1:3]:
        cache[plain] = 1.0
    case.sealed = pagecore.SealedBlocks(*planes, [[7, 7]], [0])
    np.testing.assert_array_equal(case.run(), 1.0)


@on_every_isa
def test_trees_of_drafts_after_sealed_blocks():
    parents = [-1, 0, 0, 2]
    case = make_sealed_case(Shape(seq_lens=(40,), query_lens=(4,)))
    out = case.run(tree_mask=pagecore.tree_mask(parents), positions=[36, 37, 37, 38])
    for row, path in enumerate([[0], [0, 1], [0, 2], [0, 2, 3]]):
        mask = np.zeros(40, bool)
        mask[[*range(36), *(36 + each for each in path)]] = True
        query, *caches, table, lens = case.plain.arrays
        alone = pagecore.paged_attention(query[row : row + 1], *caches, table, lens, mask=mask, sealed=case.sealed)
        np.testing.assert_allclose(out[row], alone[0], rtol=1e-4, atol=1e-5)


def test_decode_steps_that_seal_blocks_as_they_fill():
    """Every step attends to what one call over dequantised numbers would."""
    rng = np.random.default_rng(1)
    size, length = 16, 50
    key, value = (np.zeros((5, size, 2, 64), np.float32) for _ in range(2))
    sealed = empty_sealed(8, (size, 2, 64, 64), (2, 2), (16, 32))
    table, sealed_table, seen = np.arange(1, 5)[None], np.array([[6, 2, 4, 1]]), [np.zeros((0, 2, 64))] * 2
    whole = 0
    for position in range(length):
        new = rng.normal(size=(3, 1, 2, 64)).astype(np.float32)
        pagecore.write_kv(new[0], new[1], key, value, [table[0, position // size] * size + position % size])
        seen = [np.concatenate([old, added]) for old, added in zip(seen, new, strict=False)]
        blocks = sealed._replace(block_table=sealed_table, lens=[whole])
        out = pagecore.paged_attention(new[2], key, value, table, [position + 1], sealed=blocks)
        scores = np.einsum("hd,thd->ht", new[2, 0].astype(np.float64), seen[0]) / 8
        weights = np.exp(scores - scores.max(1, keepdims=True))
        expected = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), seen[1])
        np.testing.assert_allclose(out[0], expected, atol=1e-5)
        if (position + 1) % size == 0:
            pagecore.seal_kv(key, value, sealed, [(table[0, position // size], sealed_table[0, position // size])])
            at = sealed_table[0, position // size]
            seen[0][whole:] = twin.dequantize(sealed.key[at], "kivi2", sealed.key_scale[at], -2).swapaxes(0, 1)
            seen[1][whole:] = twin.dequantize(sealed.value[at], "kivi2", sealed.value_scale[at])
            key[position // size + 1] = value[position // size + 1] = np.nan
            whole = position + 1


SHAPE, DTYPE, OPTION = errors.ShapeError, errors.UnsupportedDtype, errors.UnsupportedOption


@together(
    ("change", "error", "message"),
    [
        ({"key": np.zeros((6, 2, 4, 64), np.int64)}, DTYPE, "sealed key is int64.*words of int32"),
        (
            {"key": np.zeros((6, 2, 3, 64), np.int32)},
            SHAPE,
            "axis 2 must have the words of 32 tokens.*2 for codes of 2",
        ),
        ({"key": np.zeros((6, 1, 4, 64), np.int32)}, SHAPE, "sealed key.*the heads of key_cache"),
        (
            {"value": np.zeros((5, 32, 2, 12), np.int32)},
            SHAPE,
            "axis 0 must have length 5: the blocks of the sealed value",
        ),
        ({"value": np.zeros((6, 32, 2, 5), np.int32)}, SHAPE, "axis 3 must have the words of 96 channels"),
        ({"key_scale": np.zeros((6, 2, 3, 2, 64), np.float32)}, SHAPE, "axis 2 must divide 32 into groups"),
        ({"key_scale": np.zeros((6, 2, 2, 1, 64), np.float32)}, SHAPE, "axis 3 have length 2"),
        ({"value_scale": np.zeros((6, 32, 2, 12, 2), np.float32)}, SHAPE, "groups of a multiple of 16"),
        ({"value_scale": np.zeros((6, 32, 2, 3, 2), np.int32)}, DTYPE, "sealed value_scale is int32"),
    ],
)
def test_planes_that_do_not_match_are_refused_before_anything_is_written(change, error, message):
    key, value = new_blocks()
    sealed = empty_sealed(6, (32, 2, 64, 96))._replace(**change)
    kept = snapshot(*sealed[:4])
    with pytest.raises(error, match=message):
        pagecore.seal_kv(key, value, sealed, [(1, 1)])
    assert kept()
    query = np.zeros((1, 4, 64), np.float32)
    sealed = sealed._replace(block_table=[[1]], lens=[32])
    with pytest.raises(error, match=message):
        pagecore.paged_attention(query, key, value, [[1]], [32], sealed=sealed)


@together(
    ("pairs", "error", "message"),
    [
        ([(4, 1)], errors.InvalidBlock, "source of pair 0 is 4"),
        ([(1, 6)], errors.InvalidBlock, "target of pair 0 is 6"),
        ([(0, 1)], errors.InvalidBlock, "pair 0 is 0"),
        ([(1, 2), (3, 2)], errors.InvalidBlock, "sealed block 2 twice"),
        ([1, 2], SHAPE, "pairs"),
    ],
)
def test_seal_kv_refuses_pairs(pairs, error, message):
    key, value = new_blocks()
    sealed = empty_sealed(6, (32, 2, 64, 96))
    kept = snapshot(*sealed[:4])
    with pytest.raises(error, match=message):
        pagecore.seal_kv(key, value, sealed, pairs)
    assert kept()


def test_seal_kv_refuses_memory_that_it_also_reads():
    key, value = new_blocks("float32")
    sealed = empty_sealed(6, (32, 2, 64, 96))
    part = sealed.key_scale.reshape(-1)[: sealed.value_scale.size].reshape(sealed.value_scale.shape)
    with pytest.raises(OPTION, match=r"sealed.2.*sealed.3"):
        pagecore.seal_kv(key, value, sealed._replace(value_scale=part), [(1, 1)])
    frozen = sealed.key.copy()
    frozen.flags.writeable = False
    with pytest.raises(OPTION, match="sealed key"):
        pagecore.seal_kv(key, value, sealed._replace(key=frozen), [(1, 1)])


@together(
    ("change", "error", "message"),
    [
        ({"lens": [30, 32]}, SHAPE, "lens.0. is 30; .*multiple of .*32"),
        ({"lens": [96, 32]}, SHAPE, "lens.0. is 96 .*70"),
        ({"lens": [32]}, SHAPE, "sealed lens"),
        ({"lens": None}, OPTION, "no block_table or no lens"),
        ({"block_table": [[1, 2]]}, SHAPE, "sealed block_table"),
        ({"block_table": [[1, 9], [3, 3]]}, errors.InvalidBlock, r"sealed block_table.0, 1. is 9"),
        ({"block_table": [[1], [3]]}, SHAPE, "too narrow"),
    ],
)
def test_attention_refuses(change, error, message):
    key, value = new_blocks()
    sealed = empty_sealed(6, (32, 2, 64, 96))._replace(block_table=[[1, 2], [3, 4]], lens=[64, 32])._replace(**change)
    query = np.zeros((2, 4, 64), np.float32)
    out = np.full((2, 4, 96), 7, np.float32)
    with pytest.raises(error, match=message):
        pagecore.paged_attention(query, key, value, [[1, 2, 3], [1, 2, 3]], [70, 33], sealed=sealed, out=out)
    assert (out == 7).all()


def test_attention_refuses_quantised_caches_next_to_sealed_blocks():
    key, value = new_blocks("float32")
    sealed = empty_sealed(6, (32, 2, 64, 96))._replace(block_table=[[1]], lens=[32])
    query = np.zeros((1, 4, 64), np.float32)
    codes, scale = pagecore.quantize(key, "int8_token")
    with pytest.raises(DTYPE, match="key_cache is int8"):
        pagecore.paged_attention(query, codes, value, [[1, 2]], [40], sealed=sealed, key_scale=scale)
    with pytest.raises(OPTION, match="pass a SealedBlocks"):
        pagecore.paged_attention(query, key, value, [[1, 2]], [40], sealed=tuple(sealed))
