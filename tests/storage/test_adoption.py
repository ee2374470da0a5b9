"""Adopted memory as the buffers of a pool: lists, mappings, checks, and overlapping arrays."""

import array

import ml_dtypes
import numpy as np
import pytest

from pagecore import AttentionSpec, KVLayout, KVPool, Plane, as_tensor, empty
from pagecore.errors import DeviceError, PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption
from tests.capabilities import require
from tests.together import together

LAYERS, BLOCKS, SIZE = 3, 5, 4
EQUAL, UNEQUAL = AttentionSpec(2, 8, dtype="float32"), AttentionSpec(2, 8, 12, dtype="float16")
WITHOUT_LAYERS = ["BNHD", "BHND", "NBHD", "CBNHD", "BCNHD", "BNCHD", "BNHCD"]
WITH_LAYERS = ["layerwise", "blockwise", KVLayout("blockwise", "NHD"), "LBNHD", "LBCHND", "BLHND"]


def order_of(layout):
    return layout if isinstance(layout, KVLayout) else KVLayout(layout)


def bound(layout, spec=EQUAL, layers=LAYERS):
    return order_of(layout).bind(spec, layers, BLOCKS, SIZE)


def memory_for(layout, spec=EQUAL, layers=LAYERS):
    """Return an array of zero bytes for each buffer of a layout."""
    place = bound(layout, spec, layers)
    return [np.zeros(place.buffer_nbytes(i), np.uint8) for i in range(place.num_buffers)]


def pool(buffers, layout, spec=EQUAL, layers=LAYERS, **options):
    return KVPool(spec, layers, BLOCKS, SIZE, layout=layout, buffers=buffers, **options)


@pytest.mark.parametrize("axes", WITHOUT_LAYERS)
def test_axes_without_layers_give_each_layer_a_buffer(axes):
    layout = bound(axes)
    per_layer = 1 if "C" in axes else 2
    assert layout.axes == axes
    assert layout.num_buffers == LAYERS * per_layer
    extents = {"B": BLOCKS, "N": SIZE, "H": 2, "D": 8, "C": 2}
    model = np.zeros([extents[axis] for axis in axes], np.float32)
    assert (layout.shape, layout.strides) == (model.shape, model.strides)
    assert [layout.buffer_nbytes(i) for i in range(layout.num_buffers)] == [model.nbytes] * layout.num_buffers
    places = [layout.plane_layout(plane, layer).buffer for layer in range(LAYERS) for plane in range(2)]
    assert places == (list(range(LAYERS * 2)) if per_layer == 2 else [0, 0, 1, 1, 2, 2])
    assert layout.block_offset(3, 2) == layout.block_offset(3, 0) == 3 * layout.block_stride
    with pytest.raises(ShapeError, match="each has a buffer of its own"):
        _ = layout.layer_stride


def test_one_plane_without_a_layer_axis_has_one_buffer_per_layer():
    class Latent:
        window, planes = None, (Plane("latent", (6,), "int8"),)

    layout = KVLayout("BCNHD", planes=Latent(), num_layers=4, num_blocks=3, block_size=2)
    assert (layout.axes, layout.shape, layout.num_buffers) == ("BNHD", (3, 2, 1, 6), 4)


def test_a_layout_without_layers_needs_their_number_to_count_buffers():
    with pytest.raises(ShapeError, match="num_layers"):
        _ = KVLayout("BNHD", planes=EQUAL).num_buffers
    assert KVLayout("LBNHD", planes=EQUAL).num_buffers == 2


@pytest.mark.parametrize("layout", [*WITHOUT_LAYERS, *WITH_LAYERS])
@pytest.mark.parametrize("spec", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_adopted_planes_have_the_positions_of_an_allocating_pool(layout, spec):
    try:
        own = pool(None, layout, spec)
    except UnsupportedOption:
        pytest.skip("the layout cannot hold planes of unequal dims")
    buffers = memory_for(layout, spec)
    adopted = pool(buffers, layout, spec)
    random = np.random.default_rng(0)
    for view, other in zip(adopted.planes(), own.planes(), strict=True):
        assert (view.shape, view.strides, view.dtype) == (other.shape, other.strides, other.dtype)
        view.numpy()[...] = other.numpy()[...] = random.normal(size=view.shape)
    for given, kept, allocated in zip(buffers, adopted.buffers, own.buffers, strict=True):
        assert kept.pointer == given.ctypes.data
        np.testing.assert_array_equal(given, allocated.numpy())


@pytest.mark.parametrize("layout", ["BNHD", "BHND", "NBHD"])
def test_buffers_of_planes_and_layers_may_be_given_in_four_forms(layout):
    flat = memory_for(layout, UNEQUAL)
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    forms = [
        flat,
        pairs,
        [{"value": value, "key": key} for key, value in pairs],
        {"value": tuple(flat[1::2]), "key": flat[::2]},
    ]
    expected = [view.pointer for view in pool(flat, layout, UNEQUAL).planes()]
    for form in forms:
        assert [view.pointer for view in pool(form, layout, UNEQUAL).planes()] == expected


def test_one_layer_may_leave_its_list_out():
    key, value = (np.zeros((BLOCKS, SIZE, 2, 8), np.float32) for _ in range(2))
    for form in ({"key": key, "value": value}, {"key": [key], "value": [value]}, [key, value], [[key, value]]):
        assert pool(form, "BNHD", layers=1).value(0).pointer == value.ctypes.data


@together(
    ("buffers", "layout"),
    [
        (lambda: memory_for("BNHD")[:-1], "BNHD"),
        (lambda: [*memory_for("BNHD"), np.zeros(10_000, np.uint8)], "BNHD"),
        (lambda: memory_for("CBNHD"), "BNHD"),
        (lambda: {"key": memory_for("CBNHD"), "value": memory_for("CBNHD")[:2]}, "BNHD"),
        (lambda: {"key": np.zeros(10_000, np.uint8), "value": memory_for("CBNHD")}, "BNHD"),
        (lambda: {"key": memory_for("CBNHD")}, "BNHD"),
        (lambda: {"key": memory_for("CBNHD"), "value": memory_for("CBNHD"), "scale": []}, "BNHD"),
        (lambda: {"key": memory_for("CBNHD"), 5: memory_for("CBNHD")}, "BNHD"),
        (lambda: {"key": memory_for("CBNHD"), "value": memory_for("CBNHD")}, "CBNHD"),
        (lambda: {"key": memory_for("layerwise")[0]}, "layerwise"),
        (lambda: [memory_for("layerwise")], "layerwise"),
        (lambda: [memory_for("BNHD")[:2], memory_for("BNHD")[:2]], "BNHD"),
        (lambda: [memory_for("BNHD")[:2]] * 2 + [np.zeros(10_000, np.uint8)], "BNHD"),
        (lambda: [memory_for("BNHD")] * 3, "BNHD"),
        (lambda: [memory_for("BNHD")[:3], memory_for("BNHD")[:1], memory_for("BNHD")[:2]], "BNHD"),
        (lambda: [], "layerwise"),
        (lambda: [], "BNHD"),
        (lambda: {}, "BNHD"),
    ],
)
def test_a_wrong_number_of_buffers_is_refused(buffers, layout):
    with pytest.raises(ShapeError, match="buffers"):
        pool(buffers(), layout)


# -- arrays that share memory ------------------------------------------------------------------------------------------


def test_planes_that_share_an_array_are_refused_by_both_names():
    memory = np.zeros(10_000, np.uint8)
    with pytest.raises(UnsupportedOption, match=r"buffer of 'key' and the buffer of 'value' share 10000 bytes"):
        pool({"key": memory, "value": memory}, "LBNHD")


@pytest.mark.parametrize("layout", ["LBNHD", "BNHD", "CBNHD", "BCNHD"])
@pytest.mark.parametrize("shift", [-4, 4, "start", "end", "inside"])
def test_any_overlap_of_two_buffers_is_refused_by_both_names(layout, shift):
    place = bound(layout)
    size, count = place.buffer_nbytes(0), place.num_buffers
    random = np.random.default_rng(count)
    for _ in range(10):
        first, second = random.choice(count, 2, replace=False).tolist()
        base = np.zeros(size * (3 * count + 4), np.uint8)
        starts = [size * (3 * i + 2) for i in range(count)]
        ends = [start + size for start in starts]
        starts[second] = starts[first] + {"start": 0, "end": size - 4, "inside": -4}.get(shift, shift)
        ends[second] = starts[second] + size + (8 if shift == "inside" else 0)
        views = [base[start:end] for start, end in zip(starts, ends, strict=True)]
        with pytest.raises(UnsupportedOption, match=r"share \d+ bytes of memory") as refused:
            pool(views, layout)
        assert all(place.buffer_name(i) in str(refused.value) for i in (first, second))


def test_unused_memory_of_buffers_must_not_overlap_either():
    base = np.zeros(40_000, np.uint8)
    needed = bound("LBNHD").buffer_nbytes(0)
    with pytest.raises(UnsupportedOption, match="share"):
        pool({"key": base, "value": base[2 * needed :]}, "LBNHD")


def test_neighbours_in_one_array_are_adopted():
    base = np.zeros((LAYERS, 2, BLOCKS, SIZE, 2, 8), np.float32)
    adopted = pool(list(base), "CBNHD")
    assert [view.pointer for view in adopted.planes()[:LAYERS]] == [base[i, 0].ctypes.data for i in range(LAYERS)]
    pool([array for layer in base for array in layer], "BNHD")


def test_a_buffer_whose_elements_share_memory_is_refused():
    number = np.zeros(1, np.float32)
    repeated = np.lib.stride_tricks.as_strided(number, (LAYERS, BLOCKS, SIZE, 2, 8), (0,) * 5)
    halves = np.lib.stride_tricks.as_strided(np.zeros(10_000, np.uint8), (2, 5000), (0, 1))
    for buffer in (repeated, halves):
        with pytest.raises(UnsupportedOption, match=r"'key' has strides .*: its elements share memory"):
            pool({"key": buffer, "value": np.zeros(10_000, np.uint8)}, "LBNHD")
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(10_000, np.uint8), 100, writeable=True)
    with pytest.raises(ShapeError, match="contiguous"):
        pool({"key": windows, "value": np.zeros(10_000, np.uint8)}, "LBNHD")


# -- each array --------------------------------------------------------------------------------------------------------

NEEDED = bound("LBNHD").buffer_nbytes(0)
SHAPE = (LAYERS, BLOCKS, SIZE, 2, 8)


@together(
    ("value", "error", "says"),
    [
        (np.zeros(NEEDED - 1, np.uint8), ShapeError, f"has {NEEDED - 1} bytes; {NEEDED} are needed"),
        (np.zeros(0, np.uint8), ShapeError, "needed"),
        (np.zeros(NEEDED + 1, np.uint8)[1:], ShapeError, "address that is not a multiple of 4"),
        (np.zeros(SHAPE, np.float16), UnsupportedDtype, "is float16; expected float32, or its bytes as uint8"),
        (np.zeros(SHAPE, np.int32), UnsupportedDtype, "is int32"),
        (np.zeros(SHAPE, np.float64), UnsupportedDtype, "float64"),
        (np.zeros((LAYERS, BLOCKS, 2, SIZE, 8), np.float32), ShapeError, r"needs \(3, 5, 4, 2, 8\)"),
        (np.zeros((LAYERS - 1, 2 * BLOCKS, SIZE, 2, 8), np.float32), ShapeError, "in the order of its axes LBNHD"),
        (np.zeros((LAYERS, BLOCKS, 2, SIZE, 8), np.float32).swapaxes(2, 3), ShapeError, "axes in memory order"),
        (np.zeros((2 * LAYERS, BLOCKS, SIZE, 2, 8), np.float32)[::2], ShapeError, "contiguous"),
        (np.zeros(SHAPE, np.float32)[::-1], ShapeError, "contiguous"),
        (np.asfortranarray(np.zeros(SHAPE, np.float32)), ShapeError, "contiguous"),
        (np.frombuffer(bytes(NEEDED), np.uint8), UnsupportedOption, "read-only"),
        (None, UnsupportedDtype, "buffer of 'value': a NoneType"),
        (5, UnsupportedDtype, "buffer of 'value'"),
        ("zeros", UnsupportedDtype, "buffer of 'value'"),
        ([0.0] * NEEDED, UnsupportedDtype, "buffer of 'value'"),
        (bytes(NEEDED), UnsupportedOption, "read-only"),
        (np.ma.zeros(NEEDED, np.uint8), PagecoreError, "buffer of 'value'"),
    ],
)
def test_an_invalid_array_is_refused_by_the_name_of_its_plane(value, error, says):
    with pytest.raises(error, match=says) as refused:
        pool({"key": np.zeros(NEEDED, np.uint8), "value": value}, "LBNHD")
    assert "'value'" in str(refused.value)


def test_memory_of_another_device_is_refused():
    with pytest.raises(DeviceError, match="on cpu; the pool is on cuda:0"):
        pool(memory_for("layerwise"), "layerwise", device="cuda")


def test_planes_of_different_dtypes_share_bytes_only():
    class Mixed:
        window = None
        planes = (Plane("key", (2, 8), "float32"), Plane("value", (2, 8), "float16"))

    size = bound("layerwise", Mixed()).buffer_nbytes()
    assert pool(np.zeros(size, np.uint8), "layerwise", Mixed()).value(0).dtype == "float16"
    with pytest.raises(UnsupportedDtype, match="expected bytes as uint8"):
        pool(np.zeros(size // 4, np.float32), "layerwise", Mixed())


def test_the_outermost_axis_may_be_longer_and_others_may_be_merged():
    for shape in ((LAYERS + 2, *SHAPE[1:]), (LAYERS, BLOCKS * SIZE, 2, 8), (NEEDED // 4,), (NEEDED // 4 + 100,)):
        arrays = {name: np.zeros(shape, np.float32) for name in ("key", "value")}
        assert pool(arrays, "LBNHD").key(0).pointer == arrays["key"].ctypes.data


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("layerwise", (2, BLOCKS, SIZE, 2, 8)),  # heads come before tokens there
        ("LBNHD", (BLOCKS, 2, SIZE, 8)),
        ("BHND", (BLOCKS, 2, 2, SIZE, 4)),  # dims in parts, as in vLLM's first kernels
        ("CBNHD", (BLOCKS, 2, SIZE * 2 * 8)),
    ],
)
def test_an_array_whose_axes_are_not_merged_axes_of_the_layout_is_refused(layout, shape):
    arrays = [np.zeros(shape, np.float32) for _ in range(bound(layout, layers=1).num_buffers)]
    with pytest.raises(ShapeError, match=r"needs .* in the order of its axes [A-Z]*: pass such an array"):
        pool(arrays, layout, layers=1)


@pytest.mark.parametrize("kind", ["tensor", "bytearray", "memoryview", "array", "capsule", "bfloat16"])
def test_any_writable_memory_is_adopted(kind):
    spec = AttentionSpec(2, 8, dtype="bfloat16") if kind == "bfloat16" else EQUAL
    size = bound("CBNHD", spec).buffer_nbytes()
    make = {
        "tensor": lambda: empty((size // 4,), "float32"),
        "bytearray": lambda: bytearray(size),
        "memoryview": lambda: memoryview(bytearray(size)),
        "array": lambda: array.array("f", bytes(size)),
        "capsule": lambda: as_tensor(np.zeros(size, np.uint8)).__dlpack__(max_version=(1, 0)),
        "bfloat16": lambda: np.zeros((2, BLOCKS, SIZE, 2, 8), ml_dtypes.bfloat16),
    }[kind]
    adopted = pool([make() for _ in range(LAYERS)], "CBNHD", spec)
    for number, view in enumerate(adopted.planes()):
        view.numpy()[...] = number
    assert [np.unique(view.numpy().astype(np.float32)).tolist() for view in adopted.planes()] == [
        [float(number)] for number in range(2 * LAYERS)
    ]


def test_one_torch_tensor_per_layer_is_adopted():
    torch = require("torch")
    owned = [torch.zeros(2, BLOCKS, SIZE, 2, 8) for _ in range(LAYERS)]
    adopted = pool(owned, "CBNHD")
    adopted.value(1)[2] = 3.0
    assert owned[1][1, 2].eq(3).all()
    assert sum(int(tensor.count_nonzero()) for tensor in owned) == SIZE * 2 * 8
