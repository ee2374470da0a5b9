"""Sealed blocks in JAX: words, scales and attention have the bits of pagecore's own functions, and caches feed them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, SealedBlocks, seal_kv, unseal_kv
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from tests.interop.jax.on_jax import laid_out, same
from tests.ops.cases import Shape
from tests.ops.sealed_cases import empty_sealed, make_sealed_case

SHAPE = Shape((70, 33), (3, 1), heads=(4, 2), dims=(16, 32), cache_dtype="bfloat16")
PAIRS = np.array([(3, 2), (1, 5)], np.int32)
LAYOUTS = pytest.mark.parametrize("layout", ["NHD", "HND"])


def caches(layout: str = "NHD") -> tuple[list[Any], SealedBlocks]:
    """Return plain caches of 4 blocks of 16 tokens, and poisoned sealed blocks."""
    arrays = [np.random.default_rng(dim).normal(size=(4, 16, 2, dim)).astype(np.float32) for dim in (16, 32)]
    return [laid_out(each, layout) for each in arrays], empty_sealed(6, (16, 2, 16, 32), (2, 4), (16, 16))


def on_jax(jax: Any, sealed: SealedBlocks) -> SealedBlocks:
    return SealedBlocks(*(None if each is None else jax.numpy.array(each, copy=True) for each in sealed))


@LAYOUTS
def test_attention_has_the_bits_of_pagecore(jax, interop, layout):
    case = make_sealed_case(SHAPE, (2, 4), (16, 16))
    planes = [laid_out(each, layout) for each in (case.plain.key_cache, case.plain.value_cache)]
    call = jax.jit(lambda query, key, value, *more, **options: interop.paged_attention(
        query, key, value, *more, **options, layout=layout, return_lse=True
    ))  # fmt: skip
    where = case.plain.block_table, case.plain.seq_lens
    sealed = on_jax(jax, case.sealed)
    found = call(case.plain.query, *map(jax.numpy.asarray, planes), *where, **case.plain.options, sealed=sealed)
    assert same(found, case.run(return_lse=True))


@LAYOUTS
def test_sealed_bytes_are_those_of_pagecore_and_are_written_in_place(jax, interop, layout):
    arrays, poisoned = caches(layout)

    @interop.jit(caches="sealed")
    def call(sealed: Any, key: Any, value: Any) -> Any:
        return interop.seal_kv(key, value, sealed, PAIRS, layout=layout)

    sealed = on_jax(jax, poisoned)
    places = [plane.unsafe_buffer_pointer() for plane in sealed[:4]]
    made = call(sealed, *arrays)
    assert [plane.unsafe_buffer_pointer() for plane in made[:4]] == places
    seal_kv(*(laid_out(each, layout) for each in arrays), poisoned, PAIRS)  # HND again: back to NHD
    assert same(made[:4], poisoned[:4])
    assert made.block_table is None


@LAYOUTS
def test_restored_numbers_are_those_of_pagecore_and_are_written_in_place(jax, interop, layout):
    arrays, sealed = caches()
    seal_kv(*arrays, sealed, PAIRS)
    back = [(5, 2), (2, 3)]

    @interop.jit(caches=("key", "value"))
    def call(key: Any, value: Any, planes: Any) -> Any:
        return interop.unseal_kv(planes, key, value, back, layout=layout)

    given = [jax.numpy.array(laid_out(np.full_like(each, np.nan), layout), copy=True) for each in arrays]
    places = [each.unsafe_buffer_pointer() for each in given]
    made = call(*given, on_jax(jax, sealed))
    assert [each.unsafe_buffer_pointer() for each in made] == places
    expected = [np.full_like(each, np.nan) for each in arrays]
    unseal_kv(sealed, *expected, back)
    assert same(made, [laid_out(each, layout) for each in expected])
    assert np.isfinite(expected[0][2:]).all()


def test_a_layer_of_stacked_arrays(jax, interop):
    arrays, poisoned = caches()
    stacks = [jax.numpy.stack([each, each + 1]) for each in arrays]
    sealed = SealedBlocks(*(jax.numpy.stack([jax.numpy.asarray(each)] * 2) for each in poisoned[:4]))
    table, lens = np.array([[0, 0, 0], [5, 2, 0]], np.int32), np.array([0, 32], np.int32)

    @interop.jit(caches="sealed")
    def call(sealed: Any, layer: Any) -> Any:
        made = interop.seal_kv(*stacks, sealed, PAIRS, layer=layer)
        read = made._replace(block_table=table, lens=lens)
        query = jax.numpy.ones((2, 4, 16))
        out = interop.paged_attention(query, *stacks, np.ones((2, 3), np.int32), np.array([5, 40]), sealed=read,
                                      layer=layer)  # fmt: skip
        return made, out, interop.unseal_kv(made, *stacks, PAIRS[:, ::-1], layer=layer, copy=None)

    made, out, restored = call(sealed, 1)
    seal_kv(*(each + 1 for each in arrays), poisoned, PAIRS)
    for plane, expected in zip(made[:4], poisoned[:4], strict=True):
        assert np.asarray(plane[1]).tobytes() == expected.tobytes()
        assert not np.isfinite(np.asarray(plane[0], np.float32)).any() or (np.asarray(plane[0]) == -1).all()
    expected = [np.array(each + 1) for each in arrays]
    unseal_kv(poisoned, *expected, PAIRS[:, ::-1])
    assert all((np.asarray(side[0]) == each).all() for side, each in zip(restored, arrays, strict=True))
    assert same([side[1] for side in restored], expected)
    alone = interop.paged_attention(
        np.ones((2, 4, 16), np.float32), *(jax.numpy.asarray(each + 1) for each in arrays), np.ones((2, 3), np.int32),
        np.array([5, 40]), sealed=on_jax(jax, poisoned)._replace(block_table=table, lens=lens),
    )  # fmt: skip
    assert same([out], [np.asarray(alone)])


def test_a_cache_without_bytes_drives_arrays_of_jax(jax, interop):
    """JAX owns the planes; the cache decides what is sealed, and lists it."""
    spec = AttentionSpec(2, 32, dtype="float32", num_query_heads=4, format="kivi4", residual=20)
    sizes = {"num_blocks": 9, "max_sequences": 2, "index_dtype": "int32"}
    driver, twin = PagedKVCache(spec, device="none", **sizes), PagedKVCache(spec, **sizes)
    key, value = (jax.numpy.zeros((9, 32, 2, 32)) for _ in range(2))
    sealed = on_jax(jax, empty_sealed(9, (32, 2, 32, 32), (4, 4), (32, 32)))
    sequences = [cache.add_sequence(range(100)) for cache in (driver, twin)]
    for step, count in enumerate((60, 20, 1)):
        rows = [np.random.default_rng((step, i)).normal(size=(count, n, 32)).astype(np.float32)
                for i, n in enumerate((2, 2, 4))]  # fmt: skip
        batches = [cache.prepare([one], count) for cache, one in zip((driver, twin), sequences, strict=True)]
        arrays = interop.step_arrays(batches[0])
        key, value = interop.write_kv(*rows[:2], key, value, arrays.slot_mapping, copy=None)
        read = sealed._replace(block_table=arrays.sealed_block_table, lens=arrays.sealed_lens)
        where = {"cu_query_lens": arrays.cu_query_lens, "sealed": read}
        out = interop.paged_attention(rows[2], key, value, arrays.block_table, arrays.seq_lens, **where)
        twin.write(0, *rows[:2], batches[1])
        assert same([out], [twin.attend(0, rows[2], batches[1])])
        driver.commit(batches[0])
        twin.commit(batches[1])
        pairs = batches[0].sealed_blocks(0)
        if len(pairs):
            sealed = interop.seal_kv(key, value, sealed, pairs, copy=None)
    assert sequences[0].num_sealed_tokens == sequences[1].num_sealed_tokens == 32


def test_refusals(jax, interop):
    arrays, poisoned = caches()
    key, value = map(jax.numpy.asarray, arrays)
    sealed, word = on_jax(jax, poisoned), jax.numpy.zeros(1, np.int32)
    halves = jax.numpy.zeros((6, 16, 2, 3, 2))
    for change, error, message in (
        ({"key": np.zeros(3)}, UnsupportedDtype, "sealed key is a ndarray, which JAX would copy"),
        ({"key": sealed.key_scale}, UnsupportedDtype, "sealed key is float32; .* words of int32"),
        ({"value_scale": sealed.value}, UnsupportedDtype, "sealed value_scale is int32; scales are"),
        ({"value": word}, ShapeError, "sealed value has shape .*num_blocks, block_size, Hkv"),
        ({"key": jax.numpy.zeros((6, 2, 3, 16), np.int32)}, ShapeError, "sealed key has 3 words for 16 tokens"),
        ({"value_scale": halves}, ShapeError, "sealed value_scale has 3 groups; they must divide 32"),
        ({"value": sealed.value[:5]}, ShapeError, "sealed value has shape .*must end in .6, 16, 2, 4"),
    ):
        with pytest.raises(error, match=message):
            interop.seal_kv(key, value, sealed._replace(**change), PAIRS, copy=None)
    with pytest.raises(UnsupportedOption, match="sealed is 0; pass a SealedBlocks"):
        interop.seal_kv(key, value, 0, PAIRS, copy=None)
    with pytest.raises(UnsupportedOption, match="copy is True"):
        interop.seal_kv(key, value, sealed, PAIRS, copy=True)
    with pytest.raises(UnsupportedOption, match="donate it"):
        interop.seal_kv(key, value, sealed, PAIRS)
    with pytest.raises(ShapeError, match="pairs has shape"):
        interop.seal_kv(key, value, sealed, PAIRS[:, :1], copy=None)
    for pairs in ([(0, 1)], [(1, 6)], [(1, 2), (3, 2)]):
        with pytest.raises(jax.errors.JaxRuntimeError, match="InvalidBlock"):
            jax.block_until_ready(interop.seal_kv(key, value, sealed, pairs, copy=None))
    for pairs in ([(0, 1)], [(1, 4)], [(1, 2), (3, 2)]):
        with pytest.raises(jax.errors.JaxRuntimeError, match="InvalidBlock"):
            jax.block_until_ready(interop.unseal_kv(sealed, key, value, pairs, copy=None))
    with pytest.raises(ShapeError, match=r"pairs has shape .*sealed block, block of the plain caches"):
        interop.unseal_kv(sealed, key, value, PAIRS[:, :1], copy=None)
    with pytest.raises(UnsupportedOption, match=r"key_cache is not an argument .* donate it"):
        interop.unseal_kv(sealed, key, value, PAIRS)
    with pytest.raises(UnsupportedOption, match=r"copy is True; .* copy the caches"):
        interop.unseal_kv(sealed, key, value, PAIRS, copy=True)
    with pytest.raises(UnsupportedOption, match="no block_table or no lens"):
        interop.paged_attention(np.ones((1, 4, 16), np.float32), key, value, [[1]], [5], sealed=sealed)
    whole = sealed._replace(block_table=[[1]], lens=[8])
    with pytest.raises(jax.errors.JaxRuntimeError, match="ShapeError: sealed lens"):
        jax.block_until_ready(
            interop.paged_attention(np.ones((1, 4, 16), np.float32), key, value, [[1, 2]], [30], sealed=whole)
        )
    with pytest.raises(UnsupportedDtype, match="key_cache is float8_e4m3fn; next to sealed"):
        interop.seal_kv(jax.numpy.zeros((4, 16, 2, 16), "float8_e4m3fn"), value, sealed, PAIRS, copy=None)
