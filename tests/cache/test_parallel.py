"""Caches of one rank among several: together they equal the cache of the whole model."""

import numpy as np
import pytest

from pagecore import Alias, AttentionSpec, NotEnoughMemory, PagedKVCache, paged_attention
from pagecore.cache import StaticKVCache
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage import KVPool, Plane, TensorParallel
from tests.cache.caches import advance, normal


def ranks_of(size):
    return [TensorParallel(rank, size) for rank in range(size)]


# Query heads, key heads, ranks: several per rank, one per rank, replicated on two, three, four ranks and on all.
SPLITS = [(8, 4, 2), (8, 4, 4), (4, 4, 2), (8, 4, 8), (12, 2, 6), (8, 2, 8), (6, 1, 3)]


def model(query_heads, kv_heads):
    """Return specs: full, windowed with another scale, with sinks and softcap, and an alias of the first."""
    common = {"num_kv_heads": kv_heads, "head_dim": 8, "dtype": "float32", "num_query_heads": query_heads}
    sinks = np.linspace(-1.0, 2.0, query_heads)
    return [
        AttentionSpec(**common),
        AttentionSpec(**common, window=5, scale=0.2),
        AttentionSpec(**common, v_head_dim=16, sinks=sinks, softcap=4.0),
        Alias(0),
    ]


def run(specs, parallel, keys, values, queries, counts):
    """Prefill in chunks with a rank's slices of the model's heads; return the attention of every step and layer."""
    cache = PagedKVCache(specs, block_size=4, num_blocks=40, max_sequences=2, parallel=parallel)
    sequences = [cache.add_sequence(range(11)), cache.add_sequence(range(11))]
    heads = parallel.heads(keys[0].shape[1])
    own = parallel.query_heads(queries.shape[2])
    done, outputs = 0, []
    for count in counts:
        batch = cache.prepare(sequences, count)
        new = slice(done, done + 2 * count)
        for layer in range(cache.num_layers):
            if layer < len(keys):
                key, value = (array[layer][new, heads.start : heads.stop] for array in (keys, values))
                cache.write(layer, key, value, batch)
            outputs.append(cache.attend(layer, queries[layer, new, own.start : own.stop], batch))
        cache.commit(batch)
        done += 2 * count
    return outputs


@pytest.mark.parametrize(("query_heads", "kv_heads", "size"), SPLITS)
def test_attention_of_all_ranks_concatenated_is_that_of_the_whole_model(query_heads, kv_heads, size):
    specs = model(query_heads, kv_heads)
    keys = [normal(22, kv_heads, 8, seed=layer) for layer in range(3)]
    values = [normal(22, kv_heads, dim, seed=9 + layer) for layer, dim in enumerate((8, 8, 16))]
    queries = normal(4, 22, query_heads, 8, seed=5)
    counts = (6, 3, 1, 1)
    whole = run(specs, TensorParallel(), keys, values, queries, counts)
    parts = [run(specs, parallel, keys, values, queries, counts) for parallel in ranks_of(size)]
    assert len(whole) == 16
    for expected, *found in zip(whole, *parts, strict=True):
        np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=1e-6)


@pytest.mark.parametrize(("query_heads", "kv_heads", "size"), SPLITS)
def test_static_caches_of_all_ranks_attend_like_that_of_the_whole_model(query_heads, kv_heads, size):
    spec = AttentionSpec(kv_heads, 8, dtype="float32", num_query_heads=query_heads)
    key, value = normal(2, kv_heads, 9, 8), normal(2, kv_heads, 9, 8, seed=1)
    query = normal(2, query_heads, 8, seed=2)

    def attend(parallel):
        cache = StaticKVCache(spec, 2, 3, 12, parallel=parallel)
        heads, own = parallel.heads(kv_heads), parallel.query_heads(query_heads)
        held = slice(heads.start, heads.stop)
        cache.update(1, key[:, held, :7], value[:, held, :7], 0)
        views = cache.update(1, key[:, held, 7:], value[:, held, 7:], 7)
        for view, written in zip(views, (key, value), strict=True):
            np.testing.assert_array_equal(view.numpy(), written[:, held])
        blocks = [view.transpose(0, 2, 1, 3) for view in views]
        return paged_attention(query[:, own.start : own.stop], *blocks, block_table=[[0], [1]], seq_lens=[9, 9])

    found = np.concatenate([attend(parallel) for parallel in ranks_of(size)], axis=1)
    np.testing.assert_allclose(found, attend(TensorParallel()), atol=1e-6)


def test_worked_example_9_static_tensor_parallel():
    spec = AttentionSpec(32, 128, dtype="bfloat16")
    for parallel in ranks_of(4):
        cache = StaticKVCache(spec, 32, max_batch_size=8, max_length=2048, parallel=parallel)
        assert len(parallel.heads(32)) == 8
        assert cache.key_array.shape == (32, 8, 8, 2048, 128)
        assert cache.nbytes == 2_147_483_648
    new = normal(8, 8, 16, 128)
    key, value = cache.update(31, new, new, 0)
    assert key.shape == value.shape == (8, 8, 16, 128)
    with pytest.raises(ShapeError, match="8 heads"):
        cache.update(31, normal(8, 32, 1, 128), normal(8, 32, 1, 128), 16)
    with pytest.raises(ShapeError, match="num_kv_heads is 32, which 3 ranks"):
        StaticKVCache(spec, 32, 8, 2048, parallel=TensorParallel(0, 3))


def test_worked_example_10_paged_budget_over_ranks():
    spec = AttentionSpec(32, 128, dtype="bfloat16")
    for size, blocks in ((1, 1_280), (4, 5_120), (32, 40_960), (64, 40_960)):
        cache = PagedKVCache(
            spec, num_layers=32, memory="10GiB", parallel=TensorParallel(size - 1, size), device="none"
        )
        assert cache.num_blocks == (blocks,)
    with pytest.raises(NotEnoughMemory, match="4194304"):
        PagedKVCache(spec, num_layers=32, memory=4_194_303, parallel=TensorParallel(0, 4), device="none")


@pytest.mark.parametrize(("size", "held"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_pools_hold_and_count_the_ranks_heads_only(size, held):
    specs = [AttentionSpec(4, 8, dtype="float32", window=window) for window in (None, 6, None)]
    cache = PagedKVCache([*specs, Alias(1)], num_blocks=9, block_size=4, parallel=TensorParallel(size - 1, size))
    assert cache.parallel == TensorParallel(size - 1, size)
    assert cache.nbytes == 3 * 2 * 9 * 4 * held * 8 * 4
    assert cache.stats().nbytes == cache.nbytes
    assert [cache.key(layer).shape for layer in range(4)] == [(9, 4, held, 8)] * 4
    assert [cache.spec(layer).num_kv_heads for layer in range(4)] == [held] * 4
    assert [cache.spec(layer).window for layer in range(4)] == [None, 6, None, 6]
    assert cache.num_groups == 2
    assert cache.key(3).pointer == cache.key(1).pointer


def test_layers_with_equal_parts_on_a_rank_form_one_group():
    specs = [AttentionSpec(heads, 8, dtype="float32") for heads in (1, 2)]
    assert PagedKVCache(specs, num_blocks=9).num_groups == 2
    assert PagedKVCache(specs, num_blocks=9, parallel=TensorParallel(1, 2)).num_groups == 1


def test_one_rank_alone_is_the_cache_without_parallel():
    spec = AttentionSpec(4, 8, dtype="float32", num_query_heads=8)
    plain, alone = (PagedKVCache(spec, num_blocks=9, parallel=parallel) for parallel in (None, TensorParallel()))
    assert plain.parallel == alone.parallel == TensorParallel(0, 1)
    assert plain.nbytes == alone.nbytes == KVPool(spec, 1, 9).nbytes
    assert alone.spec(0) is spec


def test_copy_on_write_and_forks_work_on_a_rank():
    cache = PagedKVCache(
        AttentionSpec(4, 8, dtype="float32"), num_blocks=9, block_size=4, parallel=TensorParallel(1, 2)
    )
    parent = cache.add_sequence(range(6))
    batch = cache.prepare([parent], 6)
    key = normal(6, 2, 8)
    cache.write(0, key, key, batch)
    cache.commit(batch)
    child = cache.fork(parent)
    advance(cache, [child], 1)
    assert cache.stats().num_copied_blocks == 1
    np.testing.assert_array_equal(cache.key(0).numpy()[3, :2], key[4:])
    cache.check_invariants()


class Unshared:
    """A user-defined spec without a method shard."""

    window = None
    planes = (Plane("key", (1, 16), "float32"), Plane("value", (1, 16), "float32"))


def paged(layers, parallel):
    return PagedKVCache(layers, num_blocks=9, parallel=parallel)


def static(layers, parallel):
    return StaticKVCache(layers, max_length=8, parallel=parallel)


@pytest.mark.parametrize("make", [paged, static])
def test_heads_that_ranks_cannot_split_are_refused_before_anything_is_made(make):
    two = TensorParallel(0, 2)
    assert make(Unshared(), TensorParallel()).num_layers == 1
    for layers, parallel, error, says in (
        (Unshared(), two, UnsupportedOption, "Unshared"),
        (AttentionSpec(32, 8), TensorParallel(0, 3), ShapeError, "32, which 3 ranks"),
        ([AttentionSpec(4, 8), AttentionSpec(3, 8)], two, ShapeError, "3, which 2 ranks"),
        (AttentionSpec(2, 8, num_query_heads=2), TensorParallel(0, 4), ShapeError, "num_query_heads is 2"),
        (AttentionSpec(4, 8), (0, 2), UnsupportedOption, r"parallel is \(0, 2\)"),
        (AttentionSpec(4, 8), 2, UnsupportedOption, "parallel is 2"),
        (AttentionSpec(4, 8), TensorParallel, UnsupportedOption, "parallel is"),
    ):
        with pytest.raises(error, match=says):
            make(layers, parallel)
