"""StatePool on the host: views, zeros, copies, adopted memory, budgets."""

import gc

import numpy as np
import pytest

from pagecore import Plane, StatePool, StateSpec, as_tensor
from pagecore.errors import (
    DeviceError,
    InvalidBlock,
    NotEnoughMemory,
    PagecoreError,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.ops.cpu import num_threads, set_num_threads
from pagecore.storage import state_budget
from pagecore.storage.state_shapes import delta_planes, short_conv_planes
from tests.together import together

SPEC = StateSpec(delta_planes(2, 4, 8, 8))
MIXED = [SPEC, StateSpec(short_conv_planes(16)), StateSpec((Plane("flags", (5,), "uint8", per="sequence"),))]


def bits(pool):
    """Return the bytes of each plane, [num_slots, n]."""
    return [as_bytes(view).numpy().reshape(pool.num_slots, -1) for view in pool.planes()]


def as_bytes(view):
    from pagecore.arrays import strided

    return strided(view, (view.nbytes,), (1,), 0, "uint8")


def poisoned(pool, seed=0):
    """Fill every slot with random bytes; return copies of them."""
    random = np.random.default_rng(seed)
    for plane in bits(pool):
        plane[...] = random.integers(0, 256, plane.shape, np.uint8)
    return [plane.copy() for plane in bits(pool)]


def test_planes_are_views_of_one_array_a_layer():
    pool = StatePool(SPEC, num_slots=5, num_layers=3)
    assert (pool.num_layers, pool.num_slots, pool.device) == (3, 5, "cpu")
    assert pool.plane("conv", 2).shape == (5, 64, 3)
    assert str(pool.plane("conv", 2).dtype) == "bfloat16"
    assert pool.plane("temporal", 1).shape == (5, 4, 8, 8)
    assert pool.bytes_per_slot == 3 * SPEC.nbytes
    assert pool.nbytes == sum(view.nbytes for view in pool.planes()) == 15 * SPEC.nbytes
    assert len({view.pointer for view in pool.planes()}) == 6
    assert not any(plane[0].any() for plane in bits(pool))
    view = pool.plane("temporal")
    del pool
    gc.collect()
    view.numpy()[...] = 1


def test_worked_example_d7_freed_slots_are_zeroed_and_copies_leave_the_source():
    pool = StatePool(MIXED, num_slots=4)
    before = poisoned(pool)
    pool.zero(2)
    pool.copy(1, 3)
    for plane, old in zip(bits(pool), before, strict=True):
        assert not plane[2].any()
        np.testing.assert_array_equal(plane[[0, 1, 3]], old[[0, 1, 1]])


@pytest.mark.parametrize("seed", range(6))
def test_zeros_and_copies_change_only_their_targets(seed):
    random = np.random.default_rng(seed)
    pool = StatePool(MIXED, num_slots=12)
    before = poisoned(pool, seed)
    slots = random.permutation(np.arange(1, 12))
    n = int(random.integers(0, 5))
    source, target, zeroed = random.choice(slots[:3], n), slots[3 : 3 + n], slots[3 + n : 3 + 2 * n]
    pool.zero(zeroed)
    pool.copy(source.tolist(), target.astype(np.int32))
    for plane, old in zip(bits(pool), before, strict=True):
        old[zeroed] = 0
        old[target] = old[source]
        np.testing.assert_array_equal(plane, old)


@pytest.mark.parametrize("threads", [1, 2])
def test_copies_larger_than_the_caches_are_exact(threads):
    """Streaming stores copy them, by parts of each slot; no shape is a multiple of a line."""
    planes = (
        Plane("conv", (1023, 3), "bfloat16", per="sequence"),
        Plane("temporal", (7, 65, 129), "float32", "sequence"),
    )
    pool = StatePool(StateSpec(planes), num_slots=9, num_layers=8)
    before = poisoned(pool)
    used = num_threads()
    set_num_threads(threads)
    try:
        pool.copy_pairs([[1, 5], [2, 6], [1, 7], [0, 0], [4, 8]])
        pool.zero([3])
    finally:
        set_num_threads(used)
    for plane, old in zip(bits(pool), before, strict=True):
        old[[5, 6, 7, 8]] = old[[1, 2, 1, 4]]
        old[3] = 0
        np.testing.assert_array_equal(plane, old)


@together(
    ("call", "error", "match"),
    [
        (lambda p: p.copy([1], [9]), InvalidBlock, "9"),
        (lambda p: p.copy([-1], [2]), InvalidBlock, "-1"),
        (lambda p: p.copy([1], [0]), InvalidBlock, "null slot"),
        (lambda p: p.copy([1, 2], [3]), ShapeError, "2 slots and target 1"),
        (lambda p: p.copy([1, 2], [3, 3]), UnsupportedOption, "slot 3 is in target twice"),
        (lambda p: p.copy([1, 2], [2, 3]), UnsupportedOption, "slot 2 is both a source and a target"),
        (lambda p: p.copy([1.5], [2]), UnsupportedDtype, "float64"),
        (lambda p: p.copy([[1]], [[2]]), ShapeError, "one axis"),
        (lambda p: p.copy_pairs([[1, 9]]), InvalidBlock, "9"),
        (lambda p: p.copy([1], [2], stream=0), UnsupportedOption, "stream"),
        (lambda p: p.zero([0]), InvalidBlock, "null"),
        (lambda p: p.zero([5]), InvalidBlock, "5"),
        (lambda p: p.zero([1, 1]), UnsupportedOption, "slot 1 is in slots twice"),
        (lambda p: p.zero([True]), UnsupportedDtype, "bool"),
        (lambda p: p.plane("key"), UnsupportedOption, "conv, temporal"),
        (lambda p: p.plane("conv", 3), ShapeError, "layer"),
    ],
)
def test_bad_calls_are_refused_and_change_nothing(call, error, match):
    pool = StatePool(MIXED, num_slots=5)
    before = poisoned(pool)
    with pytest.raises(error, match=match) as raised:
        call(pool)
    assert isinstance(raised.value, PagecoreError)
    for plane, old in zip(bits(pool), before, strict=True):
        np.testing.assert_array_equal(plane, old)


def test_the_memory_of_the_caller_is_used_in_place():
    owned = [np.full((4, *plane.shape), 7, plane.dtype.numpy) for plane in SPEC.planes for _ in range(1)]
    pool = StatePool(SPEC, num_slots=4, buffers=owned)
    assert all((np.asarray(array) == 7).all() for array in owned)
    pool.zero([2])
    assert not np.asarray(owned[1][2]).any()
    assert (np.asarray(owned[1][3]) == 7).all()
    assert pool.plane("temporal").pointer == owned[1].ctypes.data


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda a: a[:1], ShapeError),
        (lambda a: [a[0], a[1][:3]], ShapeError),
        (lambda a: [a[0], a[1][..., ::-1]], ShapeError),
        (lambda a: [a[0], a[1].astype(np.float16)], UnsupportedDtype),
        (lambda a: [a[0], read_only(a[1])], UnsupportedOption),
        (lambda a: [a[0], a[1].transpose(0, 1, 3, 2)], ShapeError),
        (lambda a: 7, ShapeError),
    ],
)
def test_unsuitable_memory_is_refused(change, error):
    owned = [np.full((4, *plane.shape), 7, plane.dtype.numpy) for plane in SPEC.planes]
    with pytest.raises(error):
        StatePool(SPEC, num_slots=4, buffers=change(owned))


def test_buffers_that_share_memory_are_refused():
    planes = (Plane("a", (4,), "float32", per="sequence"), Plane("b", (4,), "float32", per="sequence"))
    one = np.zeros((4, 4), np.float32)
    with pytest.raises(UnsupportedOption, match="share"):
        StatePool(StateSpec(planes), num_slots=4, buffers=[one, one])


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def test_worked_example_d10_slots_of_a_budget():
    layers = StateSpec(delta_planes(16, 32, 128, 128))
    states = state_budget("40GiB", 0.9)
    assert states == 20_344_581_928
    assert StatePool.slots_for(states, layers, 36) - 1 == 262
    assert state_budget(100, 1.0) == 50


@pytest.mark.parametrize("ratio", [0, -1, float("nan"), float("inf"), "0.9", None])
def test_a_ratio_must_be_a_positive_number(ratio):
    with pytest.raises(ShapeError):
        state_budget("1GiB", ratio)


def test_a_budget_of_less_than_two_slots_is_refused_in_slots():
    with pytest.raises(NotEnoughMemory, match=f"at least two state slots of {SPEC.nbytes} bytes are needed"):
        StatePool.slots_for(SPEC.nbytes, SPEC)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: StatePool(SPEC, 1), ShapeError),
        (lambda: StatePool([], 4), ShapeError),
        (lambda: StatePool([SPEC, None], 4), UnsupportedOption),
        (lambda: StatePool([SPEC], 4, num_layers=2), ShapeError),
        (lambda: StatePool(7, 4), ShapeError),
        (lambda: StatePool(SPEC, 4, device="tpu"), DeviceError),
        (lambda: StatePool.slots_for(SPEC.nbytes, SPEC), NotEnoughMemory),
    ],
)
def test_bad_options_are_refused(call, error):
    with pytest.raises(error):
        call()


def test_the_dlpack_views_are_those_of_the_pool():
    pool = StatePool(SPEC, 4)
    as_tensor(pool.plane("temporal")).numpy()[1] = 3
    pool.copy(1, 2)
    assert (np.from_dlpack(pool.plane("temporal"))[2] == 3).all()
