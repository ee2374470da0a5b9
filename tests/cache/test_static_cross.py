"""Cross attention of StaticKVCache: an encoder's output is stored once, whole, in arrays of its own."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore import (
    Alias,
    AttentionSpec,
    CrossSpec,
    StaticCacheConfig,
    StaticKVCache,
    TensorParallel,
    as_dtype,
    make_cache,
    paged_attention,
)
from pagecore.arrays.dtypes.formats import FORMATS
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.models import specs_from_config
from tests.cache.caches import SPEC, normal
from tests.cache.cross_caches import attention
from tests.ops import formats_twin as twin
from tests.reference.static_cache import CrossTwin, StaticTwin
from tests.together import together

CROSS = CrossSpec(2, 8, dtype="float32", num_query_heads=4, max_tokens=10)
LAYERS = [SPEC, SPEC, CROSS, CROSS]


def make(layers=LAYERS, **options):
    return StaticKVCache(layers, **{"max_batch_size": 3, "max_length": 6} | options)


def arrays_of(cache):
    return [cache.key_array, cache.value_array, cache.cross_key_array, cache.cross_value_array]


def poisoned(cache):
    for array in arrays_of(cache):
        array[:] = np.nan
    return cache


def contents(cache):
    return [array.numpy().copy() for array in arrays_of(cache)]


def expect_equal(arrays, expected):
    """Compare exactly; float32, in which NaNs of bfloat16 compare equal too, has all values of the smaller floats."""
    for found, each in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(each, np.float32))


def encoded(batch, count, heads=2, dim=8, seed=0):
    return normal(batch, heads, count, dim, seed=seed), normal(batch, heads, count, dim, seed=seed + 100)


FLOATS = st.sampled_from(["float32", "float16", "bfloat16"])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_a_static_cache_with_cross_attention_holds_what_its_twins_hold(data, seed):
    def sizes(least, most):
        return data.draw(st.integers(least, most))

    batch, length, most, heads, cross_heads = (sizes(1, 5) for _ in range(5))
    dims, cross_dims = [sizes(1, 6), sizes(1, 6)], [sizes(1, 6), sizes(1, 6)]
    dtype, cross_dtype = data.draw(FLOATS), data.draw(FLOATS)
    kinds = data.draw(st.permutations([False] * sizes(1, 3) + [True] * sizes(1, 3)))
    own = AttentionSpec(heads, *dims, dtype=dtype)
    cross = CrossSpec(cross_heads, *cross_dims, dtype=cross_dtype, max_tokens=most)
    cache = poisoned(StaticKVCache([cross if kind else own for kind in kinds], None, batch, length))
    order = {kind: [layer for layer, other in enumerate(kinds) if other is kind] for kind in (False, True)}
    own_twin = StaticTwin(len(order[False]), batch, heads, length, dims, as_dtype(dtype).numpy)
    twin = CrossTwin(len(order[True]), batch, cross_heads, most, cross_dims, as_dtype(cross_dtype).numpy)
    for plane in own_twin.planes + twin.planes:
        plane[...] = np.nan
    random = np.random.default_rng(seed)
    for _ in range(sizes(1, 6)):
        layer = sizes(0, len(kinds) - 1)
        rows = sizes(int(kinds[layer]), batch)
        index = order[kinds[layer]].index(layer)
        if kinds[layer]:
            new = [random.normal(size=(rows, cross_heads, sizes(1, most), dim)).astype("f4") for dim in cross_dims]
            new[1] = random.normal(size=(*new[0].shape[:3], cross_dims[1])).astype("f4")
            expected = twin.update(index, *new)
            views = cache.update(layer, *new, 0)
        else:
            count = sizes(0, length)
            new = [random.normal(size=(rows, heads, count, dim)).astype("f4") for dim in dims]
            position = sizes(0, length - count)
            expected = own_twin.update(index, *new, position)
            views = cache.update(layer, *new, position)
        expect_equal(views, expected)
        expect_equal(contents(cache), own_twin.planes + twin.planes)
        for kind, lengths in ((False, own_twin.lengths), (True, twin.lengths)):
            assert [cache.length(layer) for layer in order[kind]] == lengths
    cache.reset()
    twin.reset()
    assert [cache.length(layer) for layer in range(len(kinds))] == [0] * len(kinds)
    expect_equal(contents(cache)[2:], twin.planes)


def test_a_decoder_attends_to_the_output_of_its_encoder_in_every_step():
    cache = poisoned(make())
    outputs = {layer: encoded(3, 7, seed=layer) for layer in (2, 3)}
    own = {layer: encoded(3, 5, seed=20 + layer) for layer in (0, 1)}
    table = np.arange(3)[:, None]
    for step in range(5):
        new = slice(step, step + 1)
        for layer in (0, 1):
            cache.update(layer, *(each[:, :, new] for each in own[layer]), step)
        for layer in (2, 3):
            if step == 0:
                cache.update(layer, *outputs[layer], 0)
            query = normal(3, 4, 8, seed=step)
            planes = [plane.transpose(0, 2, 1, 3) for plane in (cache.key(layer), cache.value(layer))]
            lengths = [cache.length(layer)] * 3
            found = paged_attention(query, *planes, block_table=table, seq_lens=lengths, causal=False)
            for row in range(3):
                keys, values = (each[row].swapaxes(0, 1) for each in outputs[layer])
                expected = attention(query[row : row + 1], keys, values)
                np.testing.assert_allclose(found[row : row + 1], expected, rtol=0, atol=2e-6)
    for layer in (0, 1):
        np.testing.assert_array_equal(cache.key(layer).numpy()[:, :, :5], own[layer][0])


def test_views_share_memory_and_later_steps_read_the_output_by_its_length():
    cache = make()
    assert cache.length(2) == 0
    views = cache.update(2, *encoded(2, 7), np.array([0]))
    assert [view.shape for view in views] == [(2, 2, 7, 8)] * 2
    assert [view.pointer for view in views] == [cache.key(2).pointer, cache.value(2).pointer]
    assert cache.key(2).shape == (3, 2, 10, 8)
    assert cache.length(2) == 7
    assert cache.length(3) == 0
    later = cache.key(2)[:2, :, : cache.length(2)]
    assert later.pointer == views[0].pointer
    np.testing.assert_array_equal(later.numpy(), encoded(2, 7)[0])


def test_a_second_write_replaces_the_output_of_the_sequences_that_it_passes():
    cache = poisoned(make())
    first, second = encoded(3, 9, seed=1), encoded(2, 4, seed=2)
    cache.update(2, *first, 0)
    views = cache.update(2, *second, 0)
    assert cache.length(2) == 4
    for view, written, before, plane in zip(views, second, first, (cache.key(2), cache.value(2)), strict=True):
        np.testing.assert_array_equal(view.numpy(), written)
        np.testing.assert_array_equal(plane.numpy()[2, :, :9], before[2])
        assert np.isnan(plane.numpy()[:, :, 9:]).all()
    assert np.isnan(cache.key(3).numpy()).all()
    assert np.isnan(cache.key_array.numpy()).all()


def test_decoding_again_from_position_0_keeps_the_output_and_reset_forgets_it():
    cache = make()
    output = encoded(3, 10)
    cache.update(2, *output, 0)
    for _ in range(2):
        for position in range(6):
            cache.update(0, *encoded(3, 1, seed=position), position)
        np.testing.assert_array_equal(cache.key(2).numpy(), output[0])
    cache.reset()
    assert [cache.length(layer) for layer in range(4)] == [0] * 4
    assert not any(array.any() for array in contents(cache))


@together("laying", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 0, 1, 2)])
@together("dtype", ["float32", "float16", "bfloat16"])
def test_outputs_of_any_strides_and_floats_are_rounded_to_nearest_even(laying, dtype):
    cache = poisoned(make([SPEC, replace(CROSS, dtype=dtype)]))
    key, value = (np.ascontiguousarray(each.transpose(laying)).transpose(np.argsort(laying)) for each in encoded(3, 10))
    for view, written in zip(cache.update(1, key, value, 0), (key, value), strict=True):
        np.testing.assert_array_equal(view.numpy(), written.astype(as_dtype(dtype).numpy))


@pytest.mark.parametrize("format", FORMATS)
def test_formats_store_encoder_tokens_and_the_decoders_own_layers_may_have_none(format):
    own = AttentionSpec(2, 32, dtype="float32")
    cross = CrossSpec(2, 32, dtype="float32", format=format, max_tokens=10)
    cache = make([own, cross])
    output, new = encoded(3, 7, dim=32), encoded(3, 1, dim=32)
    views = cache.update(1, *output, 0)
    for view, written in zip(cache.update(0, *new, 5), new, strict=True):
        np.testing.assert_array_equal(view.numpy()[:, :, 5:], written)
    for name, view, written in zip(("key", "value"), views, output, strict=True):
        codes, scales = twin.quantize_row(written, format, 1.0)
        np.testing.assert_array_equal(np.ascontiguousarray(view.numpy()).view(np.uint8), codes)
        if FORMATS[format].scale_dtype is not None:
            stored = np.ascontiguousarray(cache.plane(f"{name}_scale", 1).numpy()[:, :, :7])
            np.testing.assert_array_equal(stored.view(np.uint8), scales)
    assert cache.nbytes == 3 * (6 * sum(p.nbytes for p in own.planes) + 10 * sum(p.nbytes for p in cross.planes))
    cache.reset()
    assert not any(cache.plane(plane.name, 1).numpy().view(np.uint8).any() for plane in cross.planes)


def test_factors_of_a_format_belong_to_their_layer():
    crosses = [CrossSpec(2, 8, format="float8_e5m2", key_scale=scale, max_tokens=4) for scale in (1.0, [0.5, 4.0])]
    cache = make([AttentionSpec(2, 8), crosses[1], crosses[0]])
    ones = np.ones((1, 2, 4, 8), np.float32)
    for layer, expected in ((1, [2.0, 0.25]), (2, [1.0, 1.0])):
        key, value = cache.update(layer, ones, ones, 0)
        assert key.numpy()[0, :, 0, 0].astype(np.float32).tolist() == expected
        assert value.numpy()[0, :, 0, 0].astype(np.float32).tolist() == [1.0, 1.0]


def test_layers_of_both_kinds_may_come_in_any_order_and_be_shared():
    cache = make([SPEC, CROSS, SPEC, Alias(1), CROSS, Alias(0)])
    assert (cache.key_array.shape, cache.cross_key_array.shape) == ((2, 3, 2, 6, 8), (2, 3, 2, 10, 8))
    for layer in range(6):
        cache.update(layer, *[np.full((1, 2, 3, 8), layer + 1, np.float32)] * 2, 0)
    assert [cache.key(layer).numpy()[0, 0, 0, 0] for layer in range(6)] == [6, 4, 3, 4, 5, 6]
    assert cache.key(3).pointer == cache.key(1).pointer
    assert isinstance(cache.spec(3), CrossSpec)


@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_of_a_model_hold_its_heads(size):
    layers = [AttentionSpec(4, 8, dtype="float32"), CrossSpec(4, 8, dtype="float32", max_tokens=5)]
    key, value = normal(2, 4, 5, 8), normal(2, 4, 5, 8, seed=1)
    nbytes = 0
    for rank in range(size):
        parallel = TensorParallel(rank, size)
        cache = make(layers, parallel=parallel)
        heads = parallel.heads(4)
        held = slice(heads.start, heads.stop)
        views = cache.update(1, key[:, held], value[:, held], 0)
        for view, written in zip(views, (key, value), strict=True):
            np.testing.assert_array_equal(view.numpy(), written[:, held])
        with pytest.raises(ShapeError, match=rf"{4 // size} heads"):
            cache.update(1, key, value, 0)
        nbytes += cache.nbytes
    assert nbytes == make(layers).nbytes


def test_make_cache_makes_the_cache_of_a_whisper():
    config = {
        "model_type": "whisper",
        "d_model": 384,
        "decoder_layers": 4,
        "decoder_attention_heads": 6,
        "encoder_layers": 4,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    }
    layers = specs_from_config(config)
    cache = make_cache(StaticCacheConfig(2, dtype="float16"), layers, model_max_length=448)
    assert (cache.max_length, cache.max_cross_tokens, cache.num_layers) == (448, 1500, 8)
    assert cache.cross_key_array.shape == (4, 2, 6, 1500, 64)
    assert cache.nbytes == 2 * 2 * 4 * 2 * 6 * 64 * (448 + 1500)
    assert cache.cross_key_array.dtype == "float16"
    assert "1500 encoder tokens" in repr(cache)
    small = make_cache(StaticCacheConfig(1, 8), LAYERS, model_max_length=448)
    assert (small.max_length, small.max_cross_tokens) == (8, 10)


def test_a_cache_without_cross_attention_has_no_arrays_for_it():
    cache = StaticKVCache(SPEC, max_length=6)
    assert (cache.max_cross_tokens, cache.cross_key_array, cache.cross_value_array) == (0, None, None)
    assert "encoder" not in repr(cache)


# -- refusals ---------------------------------------------------------------------------------------------------------

OUTPUT = np.ones((3, 2, 10, 8), np.float32)


@together(
    ("key", "value", "position", "error", "says"),
    [
        (OUTPUT, OUTPUT, 1, ShapeError, r"position is 1, but layer 2 is a CrossSpec.*pass 0"),
        (OUTPUT, OUTPUT, -1, ShapeError, "pass 0"),
        (OUTPUT, OUTPUT, 2**70, ShapeError, "pass 0"),
        (OUTPUT, OUTPUT, None, ShapeError, "position is None"),
        (OUTPUT, OUTPUT, False, ShapeError, "position is False"),
        (np.ones((3, 2, 11, 8), "f4"), np.ones((3, 2, 11, 8), "f4"), 0, ShapeError, "11 encoder tokens; .* 1 to 10"),
        (OUTPUT[:, :, :0], OUTPUT[:, :, :0], 0, ShapeError, "0 encoder tokens; .* 1 to 10"),
        (OUTPUT[:0], OUTPUT[:0], 0, ShapeError, "0 sequences"),
        (OUTPUT, OUTPUT[:, :, :9], 0, ShapeError, "batch and tokens must be the same"),
        (OUTPUT, OUTPUT[:2], 0, ShapeError, "batch and tokens must be the same"),
        (OUTPUT[:, :1], OUTPUT, 0, ShapeError, "2 heads of 8"),
        (OUTPUT, OUTPUT[..., :4], 0, ShapeError, "2 heads of 8"),
        (OUTPUT[0], OUTPUT[0], 0, ShapeError, "4 axes"),
        (OUTPUT[[0] * 4], OUTPUT[[0] * 4], 0, ShapeError, "raise max_batch_size"),
        (OUTPUT.astype(np.float64), OUTPUT, 0, UnsupportedDtype, "key is float64"),
        (OUTPUT, OUTPUT.astype(np.int32), 0, UnsupportedDtype, "value is int32"),
        (None, OUTPUT, 0, UnsupportedDtype, "key: a NoneType"),
        (OUTPUT, [1.0], 0, UnsupportedDtype, "value: a list"),
    ],
)
def test_an_output_that_does_not_fit_is_refused_and_nothing_is_written(key, value, position, error, says):
    cache = poisoned(make())
    cache.update(2, *encoded(3, 5), 0)
    before = contents(cache)
    with pytest.raises(error, match=says):
        cache.update(2, key, value, position)
    expect_equal(contents(cache), before)
    assert cache.length(2) == 5


def test_a_stream_is_refused_on_the_host_and_nothing_is_forgotten():
    cache = make()
    cache.update(2, OUTPUT, OUTPUT, 0)
    before = contents(cache)
    for call in (lambda: cache.reset(stream=0), lambda: cache.update(2, OUTPUT * 2, OUTPUT, 0, stream=0)):
        with pytest.raises(UnsupportedOption, match="no streams"):
            call()
    expect_equal(contents(cache), before)
    assert cache.length(2) == 10


@pytest.mark.parametrize(
    ("layers", "error", "says"),
    [
        ([SPEC, replace(CROSS, max_tokens=None)], ShapeError, "max_tokens of a CrossSpec is None.*set it"),
        ([SPEC, CROSS, replace(CROSS, max_tokens=11)], UnsupportedOption, "max_tokens is 10 in some .* 11 in others"),
        ([SPEC, CROSS, replace(CROSS, max_tokens=None)], ShapeError, "max_tokens of a CrossSpec is None"),
        ([SPEC, CROSS, replace(CROSS, dtype="float16")], UnsupportedOption, "float32 in some layers and .*float16"),
        ([SPEC, CROSS, replace(CROSS, head_dim=16)], UnsupportedOption, "one array"),
        ([SPEC, CROSS, replace(CROSS, format="int8_token")], UnsupportedOption, "one array"),
        ([CROSS, CROSS], UnsupportedOption, "every layer that attends is a CrossSpec"),
        ([Alias(0), CROSS], ShapeError, "layer 0"),
    ],
)
def test_layers_that_a_static_cache_cannot_hold_are_refused(layers, error, says):
    with pytest.raises(error, match=says):
        make(layers)


def test_the_name_of_a_plane_that_a_layer_does_not_store_is_refused():
    cache = make([SPEC, replace(CROSS, format="int8_token")])
    assert cache.plane("key_scale", 1).shape == (3, 2, 10, 1)
    for name, layer in (("key_scale", 0), ("latent", 1)):
        with pytest.raises(UnsupportedOption, match="the layer has key, value"):
            cache.plane(name, layer)
