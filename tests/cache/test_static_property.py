"""StaticKVCache compared with plain twins: any order of updates, any strides, any floats, and formats."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore import AttentionSpec, as_dtype
from pagecore.cache import StaticKVCache
from tests.faults import is_full
from tests.reference.static_cache import StaticTwin

FLOATS = st.sampled_from(["float32", "float16", "bfloat16"])
ORDERS = st.permutations(range(4))


def laid_out(random, shape, order, dtype, gaps):
    """Return random numbers in an array with any axis order, gaps and negative strides."""
    sizes = [shape[axis] + gaps[axis] for axis in order]
    memory = random.normal(size=sizes).astype(np.float32).astype(as_dtype(dtype).numpy)
    array = memory.transpose(np.argsort(order))
    return array[tuple(slice(0, n) for n in shape)][tuple(slice(None, None, 1 - 2 * (gap == 2)) for gap in gaps)]


@st.composite
def updates(draw, layers, batch, length):
    count = draw(st.integers(0, length))
    return {
        "layer": draw(st.integers(0, layers - 1)),
        "batch": draw(st.integers(0, batch)),
        "count": count,
        "position": draw(st.integers(0, length - count)),
        "orders": [draw(ORDERS), draw(ORDERS)],
        "dtypes": [draw(FLOATS), draw(FLOATS)],
        "gaps": [draw(st.lists(st.integers(0, 2), min_size=4, max_size=4)) for _ in range(2)],
        "reset": draw(st.integers(0, 9)) == 0,
    }


@pytest.mark.slow
@settings(max_examples=150 if is_full() else 80, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_a_static_cache_holds_what_its_twin_holds(data, seed):
    layers, batch, heads = (data.draw(st.integers(1, 3)) for _ in range(3))
    length, *dims = (data.draw(st.integers(1, 9)) for _ in range(3))
    dtype = data.draw(FLOATS)
    cache = StaticKVCache(AttentionSpec(heads, *dims, dtype=dtype), layers, batch, length)
    twin = StaticTwin(layers, batch, heads, length, dims, as_dtype(dtype).numpy)
    random = np.random.default_rng(seed)
    for step in data.draw(st.lists(updates(layers, batch, length), max_size=6)):
        if step["reset"]:
            cache.reset()
            twin.reset()
        new = [
            laid_out(random, (step["batch"], heads, step["count"], dim), order, given_dtype, gaps)
            for dim, order, given_dtype, gaps in zip(dims, step["orders"], step["dtypes"], step["gaps"], strict=True)
        ]
        views = cache.update(step["layer"], *new, step["position"])
        for view, expected in zip(views, twin.update(step["layer"], *new, step["position"]), strict=True):
            np.testing.assert_array_equal(view.numpy(), expected)
        for array, plane in zip((cache.key_array, cache.value_array), twin.planes, strict=True):
            np.testing.assert_array_equal(array.numpy(), plane)
        assert [cache.length(layer) for layer in range(layers)] == twin.lengths


@pytest.mark.slow
@settings(max_examples=100 if is_full() else 40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_arrays_of_any_strides_have_the_codes_of_their_sequences_alone(data, seed):
    batch, heads, length = (data.draw(st.integers(1, 3)) for _ in range(3))
    format = data.draw(st.sampled_from(["float8_e4m3fn", "float8_token", "int8_token", "int4_token", "nvfp4", "mxfp8"]))
    factors = [0.5, 0.25, 2.0][:heads] if format == "float8_e4m3fn" else 1.0
    spec = AttentionSpec(heads, 32, dtype="float32", format=format, key_scale=factors)
    cache, twins = StaticKVCache(spec, 2, batch, length), [StaticKVCache(spec, 2, 1, length) for _ in range(batch)]
    random = np.random.default_rng(seed)
    for step in data.draw(st.lists(updates(2, batch, length), max_size=4)):
        shape = step["batch"], heads, step["count"], 32
        layouts = zip(step["orders"], step["dtypes"], step["gaps"], strict=True)
        new = [laid_out(random, shape, order, dtype, gaps) for order, dtype, gaps in layouts]
        cache.update(step["layer"], *new, step["position"])
        for i in range(step["batch"]):
            twins[i].update(step["layer"], *(np.ascontiguousarray(side[i : i + 1]) for side in new), step["position"])
        for name in cache._own.named:
            for layer in range(2):
                alone = np.concatenate([twin.plane(name, layer).numpy() for twin in twins])
                assert cache.plane(name, layer).numpy().tobytes() == alone.tobytes()
        if step["reset"]:
            for each in (cache, *twins):
                each.reset()
            assert not any(array.numpy().view(np.uint8).any() for array in cache._own.named.values())
