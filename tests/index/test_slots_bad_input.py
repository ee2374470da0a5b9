"""Bad input to SlotAllocator: a typed error, with nothing changed in the pool."""

import numpy as np
import pytest

from pagecore.errors import (
    DoubleFree,
    InvalidBlock,
    OutOfBlocks,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.index import BlockPool, SlotAllocator
from tests.index.slots import make as make_allocator
from tests.index.slots import snapshot
from tests.together import together


@pytest.fixture
def allocator():
    return make_allocator()


@together(
    ("call", "error"),
    [
        (lambda a, **out: a.allocate(-1, **out), ShapeError),
        (lambda a, **out: a.allocate(-(2**80), **out), ShapeError),
        (lambda a, **out: a.allocate(1.0, **out), UnsupportedDtype),
        (lambda a, **out: a.allocate(None, **out), UnsupportedDtype),
        (lambda a, **out: a.allocate([1], **out), UnsupportedDtype),
        (lambda a, **out: a.extend([6], [5], [9], **out), ShapeError),
        (lambda a, **out: a.extend([-1], [5], [9], **out), ShapeError),
        (lambda a, **out: a.extend([6], [-(2**31)], [9], **out), ShapeError),
        (lambda a, **out: a.extend([6], [2**31], [9], **out), ShapeError),
        (lambda a, **out: a.extend([6], np.array([2**31]), [9], **out), ShapeError),
        (lambda a, **out: a.extend([6], np.array([-(2**31) - 1]), [9], **out), ShapeError),
        (lambda a, **out: a.extend([6], [7], [8], **out), ShapeError),  # not where 6 tokens end
        (lambda a, **out: a.extend([6], [7], [10], **out), ShapeError),
        (lambda a, **out: a.extend([8], [9], [9], **out), ShapeError),
        (lambda a, **out: a.extend([6], [7], [1], **out), InvalidBlock),  # the null block
        (lambda a, **out: a.extend([6], [7], [-1], **out), InvalidBlock),
        (lambda a, **out: a.extend([6], [7], [41], **out), InvalidBlock),  # outside
        (lambda a, **out: a.extend([5], [6], [40], **out), InvalidBlock),
        (lambda a, **out: a.decode([1025], [1023], **out), InvalidBlock),
        (lambda a, **out: a.extend([6], [7], [2**63 - 1], **out), InvalidBlock),
        (lambda a, **out: a.extend([6], [7], [2**80], **out), InvalidBlock),
        (lambda a, **out: a.extend([6], [7], 2**80, **out), InvalidBlock),
        (lambda a, **out: a.extend([6], [7], np.array([2**64 - 7], np.uint64), **out), InvalidBlock),
        (lambda a, **out: a.extend([6], [7], [21], **out), DoubleFree),  # block 5 is free
        (lambda a, **out: a.extend([6], [7], [17], **out), DoubleFree),  # block 4 is retired
        (lambda a, **out: a.extend([0, 6], [8, 7], [-1, 21], **out), DoubleFree),
        (lambda a, **out: a.extend([6, 3], [7], [9], **out), ShapeError),
        (lambda a, **out: a.extend([6], [7, 8], [9], **out), ShapeError),
        (lambda a, **out: a.extend([6], [7], [9, 14], **out), ShapeError),
        (lambda a, **out: a.extend([[6]], [7], [9], **out), ShapeError),
        (lambda a, **out: a.extend([6.0], [7], [9], **out), UnsupportedDtype),
        (lambda a, **out: a.extend([6], ["7"], [9], **out), UnsupportedDtype),
        (lambda a, **out: a.extend([6], [7], None, **out), UnsupportedDtype),
        (lambda a, **out: a.extend([6], [True], [9], **out), UnsupportedDtype),
        (lambda a, **out: a.extend([6], [7], np.array(9.0), **out), UnsupportedDtype),
        (lambda a, **out: a.decode([0], [9], **out), ShapeError),
        (lambda a, **out: a.decode([-(2**31)], [9], **out), ShapeError),
        (lambda a, **out: a.decode([6], [9], **out), ShapeError),
        (lambda a, **out: a.decode([7, 4], [9], **out), ShapeError),
        (lambda a, **out: a.decode([7, 4], [9, 22], **out), DoubleFree),
        (lambda a, **out: a.decode([7, 4], [9, -5], **out), InvalidBlock),
        (lambda a, **out: a.allocate(21, **out), OutOfBlocks),
        (lambda a, **out: a.extend([6, 3], [17, 17], [9, 14], **out), OutOfBlocks),
        (lambda a, **out: a.decode([1] * 6, -1, **out), OutOfBlocks),
    ],
)
def test_a_refused_call_takes_and_writes_nothing(allocator, call, error):
    before = snapshot(allocator)
    out = np.full(64, -7)
    with pytest.raises(error):
        call(allocator, out=out)
    with pytest.raises(error):
        call(allocator)
    assert (out == -7).all()
    assert snapshot(allocator) == before
    assert allocator.decode([7], [9]).tolist() == [10]  # and the plan is forgotten


@pytest.mark.parametrize(
    ("call", "needed"),
    [
        (lambda a: a.allocate(21), 6),
        (lambda a: a.allocate(2**63 - 1), 2**61),
        (lambda a: a.extend([6, 3], [17, 17], [9, 14]), 7),
        (lambda a: a.extend([0] * 4096, [2**31 - 1] * 4096, -1), 4096 * 2**29),
        (lambda a: a.decode([1] * 6, [-1] * 6), 6),
    ],
)
def test_exhaustion_raises_an_error_with_figures(allocator, call, needed):
    with pytest.raises(OutOfBlocks) as short:
        call(allocator)
    assert (short.value.requested, short.value.available) == (needed, 5)


@pytest.mark.parametrize(
    "call",
    [
        lambda a: a.try_allocate(21),
        lambda a: a.try_allocate(2**80),
        lambda a: a.try_extend([6, 3], [17, 17], [9, 14]),
        lambda a: a.try_extend([0], [2**31 - 1], [-1]),
        lambda a: a.try_decode([1] * 6, [-1] * 6),
    ],
)
def test_exhaustion_returns_none_from_the_try_methods(allocator, call):
    before = snapshot(allocator)
    assert call(allocator) is None
    assert snapshot(allocator) == before


@pytest.mark.parametrize(
    ("slots", "error"),
    [
        ([5], InvalidBlock),  # within a block
        ([8, 9, 13], InvalidBlock),
        ([4, 6], InvalidBlock),
        ([4, 5, 5], InvalidBlock),
        ([5, 4], InvalidBlock),
        ([7, 8], InvalidBlock),
        ([11, 12], InvalidBlock),  # the slot before belongs to another block
        ([0], InvalidBlock),
        ([1], InvalidBlock),
        ([-1], InvalidBlock),
        ([4, 5, -1], InvalidBlock),
        ([40], InvalidBlock),
        ([36, 37, 38, 39, 40], InvalidBlock),
        ([2**62], InvalidBlock),
        ([-(2**63)], InvalidBlock),
        (2**80, InvalidBlock),
        ([2**80], InvalidBlock),
        ([20], DoubleFree),
        ([16], DoubleFree),  # retired
        ([4, 8, 4], DoubleFree),
        ([12, 13, 14, 20], DoubleFree),
        ([[4]], ShapeError),
        ([4.0], UnsupportedDtype),
        (None, UnsupportedDtype),
        ("4", UnsupportedDtype),
        (True, UnsupportedDtype),
    ],
)
def test_slots_that_may_not_be_freed_are_refused_and_nothing_changes(allocator, slots, error):
    before = snapshot(allocator)
    with pytest.raises(error):
        allocator.free(slots)
    with allocator.free_group(), pytest.raises(error):
        allocator.free(slots)
    assert snapshot(allocator) == before


@together(
    "out",
    [
        np.zeros(2, np.int64),
        np.zeros((3, 1), np.int64),
        np.zeros(6, np.int64)[::2],
        np.broadcast_to(np.int64(0), 3),
        np.frombuffer(bytes(24), np.int64),
        np.zeros(3, np.float64),
        np.zeros(3, np.uint64),
        np.zeros(3, ">i8"),
        np.zeros(3, object),
        np.frombuffer(bytearray(25), np.uint8)[1:].view(np.int64),
        np.array(0),
        [0, 0, 0],
        7,
        "out",
    ],
)
@together(
    "call",
    [
        lambda a, out: a.allocate(3, out),
        lambda a, out: a.try_allocate(3, out=out),
        lambda a, out: a.extend([6], [9], [9], out),
        lambda a, out: a.try_decode([7, 4, 1], [9, 14, -1], out=out),
    ],
)
def test_an_unsuitable_out_is_refused(allocator, out, call):
    before = snapshot(allocator)
    with pytest.raises((ShapeError, UnsupportedDtype)):
        call(allocator, out)
    assert snapshot(allocator) == before


@together("dtype", ["int16", "uint32", "float32", "", None, 7, "int", object(), ["int32"]])
def test_an_unknown_dtype_is_refused_by_name(dtype):
    with pytest.raises(UnsupportedOption, match="int64 or int32"):
        SlotAllocator(BlockPool(4), 4, index_dtype=dtype)


@together(
    ("pool", "block_size", "error"),
    [
        (7, 4, UnsupportedOption),
        (None, 4, UnsupportedOption),
        ([BlockPool(4)], 4, UnsupportedOption),
        (BlockPool(4), 0, ShapeError),
        (BlockPool(4), -4, ShapeError),
        (BlockPool(4), 2**31, ShapeError),
        (BlockPool(4), 2**80, ShapeError),
        (BlockPool(4), 1.5, UnsupportedDtype),
        (BlockPool(4), None, UnsupportedDtype),
    ],
)
def test_an_impossible_allocator_is_refused(pool, block_size, error):
    with pytest.raises(error):
        SlotAllocator(pool, block_size)


def test_a_decode_of_length_0_explains_that_lengths_include_the_new_token(allocator):
    with pytest.raises(ShapeError, match="count the new one"):
        allocator.decode([7, 0], [9, -1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tensors_that_numpy_cannot_read_are_refused_as_any_dtype_is(allocator, torch, dtype):
    tensor = torch.ones(1, dtype=getattr(torch, dtype), requires_grad=True)
    before = snapshot(allocator)
    for call in (lambda: allocator.extend([6], tensor, [9]), lambda: allocator.free(tensor)):
        with pytest.raises(UnsupportedDtype, match="give integers"):
            call()
    assert snapshot(allocator) == before
