"""Invalid positions, arrays, layers, sizes and specs of a static cache are refused."""

import numpy as np
import pytest

from pagecore import AttentionSpec, Plane, as_tensor
from pagecore.errors import DeviceError, NotEnoughMemory, ShapeError, UnsupportedDtype, UnsupportedOption
from tests.cache.caches import SPEC, Planes, make_static, normal, stored
from tests.together import together


class Liar:
    def __index__(self):
        raise RuntimeError("no")

    def __repr__(self):
        raise RuntimeError("no")


NO_INTEGERS = [
    None,
    "3",
    1.0,
    np.float32(3),
    np.array([3.0]),
    float("nan"),
    3 + 0j,
    np.datetime64(3, "s"),
    np.array(["3"]),
]
NO_NUMBERS = [[], [1, 2], [[1], [2, 3]], np.array([1, 2]), np.array([], int), {3}, {"at": 3}, object(), Liar()]
NO_PLACES = [-1, 15, 16, -(2**70), 2**70, np.uint64(2**64 - 1), np.iinfo(np.int64).max, np.iinfo(np.int64).min]
BOOLS = [True, np.bool_(True), np.array([True])]
BAD_POSITIONS = [
    *NO_INTEGERS,
    *NO_NUMBERS,
    *NO_PLACES,
    *BOOLS,
    10**5000,
    as_tensor(np.float32([3])),
    np.ma.masked_array([3]),
]


@together("position", BAD_POSITIONS)
def test_an_invalid_position_is_refused_and_nothing_is_written(position):
    cache = make_static()
    with pytest.raises(ShapeError, match="position is"):
        cache.update(0, normal(1, 2, 2, 8), normal(1, 2, 2, 8), position)
    assert not cache.key_array.numpy().any()
    assert cache.length(0) == 0


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@together(
    ("key", "value", "error", "says"),
    [
        (zeros(5, 2, 1, 8), zeros(5, 2, 1, 8), ShapeError, "raise max_batch_size"),
        (zeros(4, 3, 1, 8), zeros(4, 3, 1, 8), ShapeError, "2 heads of 8"),
        (zeros(4, 2, 1, 4), zeros(4, 2, 1, 8), ShapeError, "key"),
        (zeros(4, 2, 1, 8), zeros(4, 2, 1, 4), ShapeError, "value"),
        (zeros(4, 2, 2, 8), zeros(4, 2, 1, 8), ShapeError, "tokens"),
        (zeros(3, 2, 1, 8), zeros(4, 2, 1, 8), ShapeError, "batch"),
        (zeros(4, 2, 8), zeros(4, 2, 1, 8), ShapeError, "4 axes"),
        (zeros(), zeros(), ShapeError, "4 axes"),
        (zeros(4, 2, 17, 8), zeros(4, 2, 17, 8), ShapeError, "larger max_length"),
        (zeros(4, 2, 1, 8, dtype=np.int32), zeros(4, 2, 1, 8), UnsupportedDtype, "key is int32"),
        (zeros(4, 2, 1, 8), zeros(4, 2, 1, 8, dtype=np.float64), UnsupportedDtype, "value: .*float64"),
        (None, zeros(4, 2, 1, 8), UnsupportedDtype, "key: a NoneType"),
        (zeros(4, 2, 1, 8), [[[[0.0]]]], UnsupportedDtype, "value: a list"),
    ],
)
def test_key_and_value_that_do_not_fit_are_refused_and_nothing_is_written(key, value, error, says):
    cache = make_static()
    for array in (cache.key_array, cache.value_array):
        array[:] = 5.0
    with pytest.raises(error, match=says):
        cache.update(0, key, value, 0)
    assert all((array == 5.0).all() for array in stored(cache))
    assert cache.length(0) == 0


@pytest.mark.parametrize("layer", [-1, 3, 2**70, "0", None, 0.0])
def test_an_unknown_layer_is_refused(layer):
    cache = make_static()
    new = normal(1, 2, 1, 8)
    for use in (cache.key, cache.value, cache.length, cache.spec, lambda n: cache.update(n, new, new, 0)):
        with pytest.raises(ShapeError, match=r"layer is .*; the cache has layers 0 to 2"):
            use(layer)
        use(np.int64(1))


KEY, VALUE = Plane("key", (2, 8), "float32"), Plane("value", (2, 8), "float32")


@together(
    ("options", "error"),
    [
        ({"max_length": None}, ShapeError),
        ({"max_length": 0}, ShapeError),
        ({"max_length": 2.5}, ShapeError),
        ({"max_length": 2**62}, ShapeError),
        ({"max_length": 2**45}, NotEnoughMemory),
        ({"max_batch_size": 0}, ShapeError),
        ({"num_layers": 0}, ShapeError),
        ({"num_layers": 2**40}, ShapeError),
        ({"device": "none"}, DeviceError),
        ({"device": "cuda:9999"}, DeviceError),
        ({"parallel": 2}, UnsupportedOption),
        ({"spec": None}, UnsupportedOption),
        ({"spec": "llama", "num_layers": None}, UnsupportedOption),
        ({"spec": []}, ShapeError),
        ({"spec": [SPEC, SPEC]}, ShapeError),
        ({"spec": [SPEC, SPEC, AttentionSpec(2, 16, dtype="float32")]}, UnsupportedOption),
        ({"spec": [SPEC, SPEC, AttentionSpec(2, 8, dtype="float16")]}, UnsupportedOption),
        ({"spec": Planes(KEY)}, UnsupportedOption),
        ({"spec": Planes(KEY, VALUE, Plane("scale", (2,), "float32"))}, UnsupportedOption),
        ({"spec": Planes(KEY, Plane("value", (2, 8), "int8"))}, UnsupportedDtype),
        ({"spec": Planes(KEY, Plane("value", (4, 8), "float32"))}, ShapeError),
        ({"spec": Planes(KEY, Plane("value", (8,), "float32"))}, UnsupportedOption),
        ({"spec": Planes(KEY, Plane("value", (2, 8), "float32", per="block"))}, UnsupportedOption),
    ],
)
def test_invalid_options_of_a_static_cache_are_refused(options, error):
    with pytest.raises(error):
        make_static(**options)
