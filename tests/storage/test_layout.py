"""KVLayout: strides and offsets of each plane of a pool."""

import numpy as np
import pytest

from pagecore.errors import InvalidBlock, ShapeError, UnsupportedOption
from pagecore.storage import AttentionSpec, KVLayout, KVPool, Plane
from tests.together import together

KEY = Plane("key", (2, 8), "float16")
VALUE = Plane("value", (2, 8), "float16")
SIZES = {"num_layers": 2, "num_blocks": 3, "block_size": 4}


def test_worked_example_11_strides_with_the_plane_axis():
    layerwise = KVLayout("layerwise", "NHD", planes=(KEY, VALUE), **SIZES)
    assert layerwise.shape == (2, 2, 3, 4, 2, 8)
    assert (layerwise.block_stride, layerwise.layer_stride) == (128, 768)
    blockwise = KVLayout("blockwise", "NHD", planes=(KEY, VALUE), **SIZES)
    assert blockwise.shape == (3, 2, 2, 4, 2, 8)
    assert (blockwise.block_stride, blockwise.layer_stride) == (512, 256)


def test_worked_example_11_strides_without_the_plane_axis():
    layerwise = KVLayout("layerwise", "NHD", planes=(KEY,), **SIZES)
    assert layerwise.shape == (2, 3, 4, 2, 8)
    assert (layerwise.block_stride, layerwise.layer_stride) == (128, 384)
    blockwise = KVLayout("blockwise", "NHD", planes=(KEY,), **SIZES)
    assert blockwise.shape == (3, 2, 4, 2, 8)
    assert (blockwise.block_stride, blockwise.layer_stride) == (256, 128)


def test_worked_example_11_offset_of_a_far_block():
    layout = KVLayout("blockwise", "NHD", planes=(KEY, VALUE), num_layers=2, num_blocks=200, block_size=4)
    assert layout.block_offset(100) == 51_200
    assert layout.block_offset(100, layer=1) == 51_456
    with pytest.raises(InvalidBlock, match="200"):
        layout.block_offset(200)
    with pytest.raises(InvalidBlock, match="layer is 2"):
        layout.block_offset(0, layer=2)


@together("axes", ["LCBNHD", "LCBHND", "BLCNHD", "BNCHD", "BCNHD", "LBNHD", "BHND", "NBLHCD", "BNHCD"])
def test_strides_are_those_of_a_numpy_array_with_the_axes_in_that_order(axes):
    layout = KVLayout(axes, planes=(KEY, VALUE), **SIZES)
    extents = {"L": 2, "B": 3, "N": 4, "H": 2, "D": 8, "C": 2}
    model = np.zeros([extents[axis] for axis in layout.axes], np.float16)
    assert layout.shape == model.shape
    assert layout.strides == model.strides


@together("order", ["layerwise", "blockwise", "BNCHD", "LBNHD", "LBCHND", "BHNCD"])
@together("v_head_dim", [8, 12])
def test_elements_of_different_planes_do_not_overlap(order, v_head_dim):
    spec = AttentionSpec(2, 8, v_head_dim, "float32")
    pool = KVPool(spec, num_layers=3, num_blocks=5, block_size=4, layout=order)
    views = [view.numpy() for view in pool.planes()]
    sizes = [view.size for view in views]
    for number, view in enumerate(views):
        view[...] = number
    assert [np.unique(view).tolist() for view in views] == [[number] for number in range(6)]
    assert sum(sizes) * 4 == pool.nbytes


def test_unequal_planes_share_one_contiguous_block():
    spec = AttentionSpec(2, 8, 16, "float16")
    pool = KVPool(spec, num_layers=2, num_blocks=3, block_size=4, layout="blockwise")
    assert pool.layout.num_buffers == 1
    assert pool.layout.block_stride == pool.bytes_per_block == 2 * 4 * 2 * (8 + 16) * 2
    with pytest.raises(ShapeError, match="planes differ"):
        _ = pool.layout.shape


@pytest.mark.parametrize("order", ["rowwise", "BNH", "BNHDD", "DBNH", "", "bnhd"])
def test_an_invalid_order_is_refused_by_name(order):
    with pytest.raises(UnsupportedOption):
        KVLayout(order)


def test_heads_are_refused_with_spelled_axes():
    with pytest.raises(UnsupportedOption, match="leave heads out"):
        KVLayout("BNHD", "NHD")
    with pytest.raises(UnsupportedOption, match="DHN"):
        KVLayout("layerwise", "DHN")


def test_planes_that_differ_below_the_plane_axis_are_refused():
    layout = KVLayout("LBNHCD", planes=(KEY, Plane("value", (4, 8), "float16")), **SIZES)
    with pytest.raises(UnsupportedOption, match="outside C"):
        _ = layout.layer_stride


def test_a_layout_without_sizes_names_the_missing_ones():
    with pytest.raises(ShapeError, match="num_blocks"):
        _ = KVLayout("layerwise").block_stride


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int32, np.uint64, np.int64, np.array])
def test_ids_may_be_numpys_of_any_width_and_never_wrap(kind):
    layout = KVLayout("blockwise", planes=(KEY, VALUE), num_layers=64, num_blocks=2000, block_size=1 << 14)
    for block, layer in ((100, 0), (127, 63)):
        expected = block * layout.block_stride + layer * layout.layer_stride
        assert expected > 2**31
        assert layout.block_offset(kind(block), kind(layer)) == expected
        assert type(layout.block_offset(kind(block), kind(layer))) is int


def test_every_int32_id_has_its_offset():
    layout = KVLayout("blockwise", planes=(KEY, VALUE), num_layers=32, num_blocks=1600, block_size=1 << 10)
    ids = np.random.default_rng(0).permutation(1600).astype(np.int32)
    assert [layout.block_offset(block) for block in ids] == [layout.block_stride * block for block in ids.tolist()]


NO_NUMBERS = [1.5, 1.0, "1", None, [1], np.array([1, 2]), np.float32(1), object(), float("nan"), b"1"]
TOO_LARGE = [-1, 200, 2**63, -(10**400), 10**5000, np.int64(-1)]


@together("number", [*NO_NUMBERS, *TOO_LARGE])
def test_an_unknown_block_or_layer_is_refused_by_name(number):
    layout = KVLayout("blockwise", planes=(KEY, VALUE), num_layers=2, num_blocks=200, block_size=4)
    with pytest.raises(InvalidBlock, match=r"block is .*; the layout has blocks 0 to 199"):
        layout.block_offset(number)
    with pytest.raises(InvalidBlock, match=r"layer is .*; the layout has layers 0 to 1"):
        layout.block_offset(0, number)
    with pytest.raises(ShapeError, match=r"buffer is .*; the layout has buffers 0 to 0"):
        layout.buffer_nbytes(number)
    with pytest.raises(ShapeError, match=r"plane is .*; the layout has planes 0 to 1"):
        layout.plane_layout(number)


@pytest.mark.parametrize("planes", [5, None, "key", 1.5, [1], [None], KEY, {"key": (2, 8)}])
def test_objects_that_are_not_planes_are_refused(planes):
    with pytest.raises((ShapeError, UnsupportedOption), match="planes"):
        KVLayout(planes=planes)
    with pytest.raises((ShapeError, UnsupportedOption), match="planes"):
        KVLayout().bind(planes, 1, 3, 4)


@together(
    ("arguments", "error"),
    [
        ({"shape": 5}, ShapeError),
        ({"shape": None}, ShapeError),
        ({"shape": "28"}, ShapeError),
        ({"shape": (2, 8.0)}, ShapeError),
        ({"shape": (0,)}, ShapeError),
        ({"shape": (2, -(10**5000))}, ShapeError),
        ({"name": None}, UnsupportedOption),
        ({"name": ["key"]}, UnsupportedOption),
        ({"per": "page"}, UnsupportedOption),
        ({"per": np.array(["token", "block"])}, UnsupportedOption),
        ({"per": 10**5000}, UnsupportedOption),
    ],
)
def test_an_invalid_plane_is_refused(arguments, error):
    with pytest.raises(error):
        Plane(**{"name": "key", "shape": (2, 8), "dtype": "float32"} | arguments)


@pytest.mark.parametrize("heads", ["DHN", 5, pytest.param(10**5000, id="huge"), np.array(["NHD", "HND"]), ["NHD"]])
def test_invalid_heads_are_refused(heads):
    with pytest.raises(UnsupportedOption, match="heads is"):
        KVLayout("layerwise", heads)
