"""Zero-copy views of pagecore tensors in JAX, and batches as arguments of jitted steps."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import pagecore
from pagecore import AttentionSpec, KVLayout, PagedKVCache
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from tests.ops.cases import DTYPES


def filled_cache(dtype="float32", **options):
    """Return a cache with sequences of 20 and 5 tokens in two layers of random numbers, and their batch."""
    cache = PagedKVCache(AttentionSpec(2, 64, dtype=dtype, num_query_heads=4), num_layers=2, num_blocks=8, **options)
    batch = cache.prepare([cache.add_sequence(range(20)), cache.add_sequence(range(50, 55))], [20, 5])
    rng = np.random.default_rng(0)
    for layer in range(2):
        cache.write(layer, *rng.standard_normal((2, 25, 2, 64)).astype(DTYPES[dtype]), batch)
    return cache, batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", ["HND", "NHD"])
def test_attention_reads_a_cache_in_place(jax, interop, dtype, heads):
    cache, batch = filled_cache(dtype, layout=KVLayout(heads=heads))
    planes = [interop.as_jax(plane, layout=heads) for plane in (cache.key(1), cache.value(1))]
    assert [plane.unsafe_buffer_pointer() for plane in planes] == [cache.key(1).pointer, cache.value(1).pointer]
    query = np.random.default_rng(1).standard_normal((25, 4, 64)).astype(DTYPES[dtype])
    group = batch.group(1)
    arrays = [np.array(array) for array in (group.block_table, batch.seq_lens, batch.rows, batch.cu_query_lens)]

    @jax.jit
    def attend(query, keys, values, table, lens, rows, cu):
        where = jax.ffi.ffi_call("pagecore_addresses", jax.ShapeDtypeStruct((4,), np.uint32))
        out = interop.paged_attention(query, keys, values, table, lens, rows=rows, cu_query_lens=cu, layout=heads)
        return out, where(keys, values, given=np.int64(0))

    out, where = attend(query, *planes, *arrays)
    assert np.asarray(where).view(np.uint64).tolist() == [cache.key(1).pointer, cache.value(1).pointer]
    assert np.allclose(out.astype(np.float32), cache.attend(1, query, batch).astype(np.float32), atol=1e-2)


def test_a_view_sees_later_writes_and_outlives_the_cache(jax, interop):
    cache, _ = filled_cache()
    view = interop.as_jax(cache.key(0), layout="HND")
    cache.key(0)[1, 2, 1, :3] = [7, 8, 9]
    assert np.asarray(view)[1, 1, 2, :3].tolist() == [7, 8, 9]
    del cache
    gc.collect()
    assert np.asarray(view)[1, 1, 2, :3].tolist() == [7, 8, 9]


def test_a_write_in_jax_makes_a_copy(jax, interop):
    tensors = [pagecore.zeros((4, 4, 2, 8)) for _ in range(2)]
    step = jax.jit(interop.write_kv, donate_argnums=(2, 3))
    rows = np.ones((1, 2, 8), np.float32)
    after = step(rows, rows, *map(interop.as_jax, tensors), np.asarray([5]))
    assert not tensors[0].numpy().any()
    assert np.asarray(after[0])[1, 1].all()


def test_tensors_that_jax_would_copy_raise(interop):
    cache, _ = filled_cache()
    with pytest.raises(UnsupportedOption, match=r"in layout 'NHD', so jax\.jit would copy it in every call; pass the"):
        interop.as_jax(cache.key(0))
    blockwise, _ = filled_cache(layout="blockwise")
    for layout in ("NHD", "HND"):
        with pytest.raises(UnsupportedOption, match="use a layerwise pool"):
            interop.as_jax(blockwise.key(0), layout=layout)
    with pytest.raises(UnsupportedOption, match="only at a multiple of 64"):
        interop.as_jax(pagecore.zeros((100,))[1:])
    with pytest.raises(UnsupportedOption, match="read-only and JAX has no read-only arrays"):
        interop.as_jax(cache.block_table())
    with pytest.raises(UnsupportedDtype, match="jax_enable_x64"):
        interop.as_jax(pagecore.zeros((4,), "int64"))


def test_other_types_ranks_and_layouts_raise(interop):
    with pytest.raises(UnsupportedDtype, match=r"tensor is a ndarray; it must be a pagecore\.Tensor"):
        interop.as_jax(np.zeros(3))
    with pytest.raises(ShapeError, match="layout='HND' needs the 4 axes of a cache's plane"):
        interop.as_jax(pagecore.zeros((4, 4)), layout="HND")
    with pytest.raises(UnsupportedOption, match="layout is 'DNH'; it must be 'NHD' or 'HND'"):
        interop.as_jax(pagecore.zeros((4, 4)), layout="DNH")


def test_any_contiguous_tensor_can_be_viewed(interop):
    for shape in ((), (0, 3), (1, 5), (3, 1, 2)):
        tensor = pagecore.zeros(shape)
        view = interop.as_jax(tensor)
        assert view.shape == shape
        assert tensor.size == 0 or view.unsafe_buffer_pointer() == tensor.pointer


# ---- batches


def without_bytes(**options):
    spec = AttentionSpec(2, 16, dtype="float32", num_query_heads=4)
    options = {"device": "none", "index_dtype": "int32", "num_blocks": 16, "block_size": 4} | options
    return PagedKVCache(spec, **options)


def test_a_batch_becomes_arrays_of_fixed_shape(interop):
    cache = without_bytes(max_tokens_per_sequence=40)
    batch = cache.make_batch(max_sequences=4, max_tokens=16)
    sequences = [cache.add_sequence(range(6)), cache.add_sequence(range(30, 33))]
    cache.prepare(sequences, [6, 3], out=batch)
    step = interop.step_arrays(batch)
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2] + [0] * 7
    assert step.slot_mapping.tolist() == batch.group(0).slot_mapping.tolist()
    assert step.slot_mapping.dtype == np.int32
    assert step.seq_lens.tolist() == [6, 3, 0, 0]
    assert step.cu_query_lens.tolist() == [0, 6, 9, 9, 9]
    assert step.block_table.shape == (4, 10)
    assert step.block_table[:2, :2].tolist() == [[1, 2], [3, 0]]
    assert interop.step_arrays(batch, max_blocks=2).block_table.tolist() == [[1, 2], [3, 0], [0, 0], [0, 0]]


def test_step_arrays_are_copies_of_the_batch(jax, interop):
    cache = without_bytes()
    batch = cache.make_batch(2, 8)
    sequence = cache.add_sequence(range(6))
    first = interop.step_arrays(cache.prepare([sequence], [6], out=batch))
    assert len(jax.tree.leaves(first)) == 5
    before = [array.tolist() for array in jax.tree.leaves(first)]
    cache.commit(batch)
    cache.append_tokens([sequence], [7])
    second = interop.step_arrays(cache.prepare([sequence], [1], out=batch))
    assert [array.tolist() for array in jax.tree.leaves(first)] == before
    assert second.seq_lens.tolist() == [7, 0]


def test_a_block_table_that_is_too_narrow_raises(interop):
    cache = without_bytes()
    batch = cache.prepare([cache.add_sequence(range(9))], [9])
    assert interop.step_arrays(batch, max_blocks=3).block_table.shape[1] == 3
    with pytest.raises(ShapeError, match="max_blocks is 2, but a sequence holds 3 blocks"):
        interop.step_arrays(batch, max_blocks=2)
    for width, says in ((0, "at least 1"), (99, "at most 15, the capacity"), ("a", "an integer"), (2.0, "an integer")):
        with pytest.raises(ShapeError, match=f"max_blocks is {width!r}; .*{says}"):
            interop.step_arrays(batch, max_blocks=width)


def test_int64_slots_raise_without_x64(jax, interop):
    cache = without_bytes(index_dtype="int64")
    batch = cache.prepare([cache.add_sequence(range(9))], [9])
    with pytest.raises(UnsupportedOption, match="make the cache with index_dtype='int32', or set jax_enable_x64"):
        interop.step_arrays(batch)
    with jax.enable_x64(True):
        assert interop.step_arrays(batch).slot_mapping.dtype == np.int64


def test_copied_blocks_of_a_fork_are_applied_to_caches_of_jax(jax, interop):
    """Copy-on-write if JAX owns the caches: the batch lists the blocks, and a jitted function copies them in place."""
    import jax.numpy as jnp

    cache = without_bytes()

    @interop.jit(caches="keys")
    def copy(keys, pairs):
        return keys.at[pairs[:, 1]].set(keys[pairs[:, 0]])

    @interop.jit(caches=("keys", "values"))
    def write(keys, values, rows, slots):
        return interop.write_kv(rows, rows, keys, values, slots)

    keys, values = jnp.zeros((2, 16, 4, 2, 16))
    parent = cache.add_sequence(range(6))
    batch = cache.prepare([parent], [6])
    assert batch.copied_blocks(0).shape == (0, 2)
    rows = np.arange(6, dtype=np.float32)[:, None, None] + np.ones((2, 16), np.float32)
    keys, values = write(keys, values, rows, batch.group(0).slot_mapping.numpy().copy())
    cache.commit(batch)
    child = cache.fork(parent)
    cache.append_tokens([child], [50])
    batch = cache.prepare([child], [1])
    assert batch.copied_blocks(0).tolist() == [[2, 3]]
    keys = copy(keys, batch.copied_blocks(0))
    keys, values = write(keys, values, rows[:1] * 50, batch.group(0).slot_mapping.numpy().copy())
    assert np.asarray(keys)[2, :, 0, 0].tolist() == [5, 6, 0, 0]
    assert np.asarray(keys)[3, :, 0, 0].tolist() == [5, 6, 50, 0]
