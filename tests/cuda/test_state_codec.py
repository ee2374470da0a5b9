"""int8 checkpoints of states on CUDA: the bytes of the host, in the order of a stream, also in a captured graph."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import CheckpointPool, Plane, StatePool, StateSpec, dequantize_state, quantize_state
from pagecore.errors import DeviceError, InvalidBlock, UnsupportedDtype, UnsupportedOption
from tests.cuda.kit import Kit
from tests.ops.cases import DTYPES

# Matrices of a lane, of a stretch and of several; rows that fit in registers, and more of them.
SHAPES = [(1, 1), (5, 3), (2, 3, 8, 16), (130, 128), (40, 261), (700, 16), (0, 4), (4, 0), (0, 2, 4), (2, 9, 1000)]


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Return numbers of all magnitudes, with a column of zeros, one of tiny numbers, and some that are not finite."""
    rng = np.random.default_rng([seed, *shape])
    state = rng.standard_normal(shape) * np.exp(rng.uniform(-30, 30, shape))
    if state.size and shape[-1] > 4:
        state[..., 0] = 0
        state[..., 1] = 1e-45
        for key, bad in zip((2, 3, 4), (np.nan, np.inf, -np.inf), strict=True):
            state[..., rng.integers(shape[-2]), key] = bad
    return state.astype(DTYPES[dtype])


def assert_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Assert equal bits; a NaN is any NaN."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if expected.dtype == np.int8:
        np.testing.assert_array_equal(found, expected)
        return
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(found[found == 0]), np.signbit(expected[expected == 0]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_states_have_the_bits_of_the_host(cuda: Kit, shape, dtype):
    state = numbers(shape, dtype)
    expected = quantize_state(state)
    codes, scales = quantize_state(cuda.put(state))
    assert_bits(cuda.get(codes), expected[0])
    assert_bits(cuda.get(scales), expected[1])
    with np.errstate(invalid="ignore"):
        read = dequantize_state(*expected)
    assert_bits(cuda.get(dequantize_state(codes, scales)), read)
    out = cuda.empty(shape, dtype)
    assert dequantize_state(cuda.put(expected[0]), cuda.put(expected[1]), out=out) is out
    assert_bits(cuda.get(out), read)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_addresses_that_are_not_multiples_of_a_vector(cuda: Kit, dtype, offset):
    held = numbers((1, offset + 12 * 16), dtype)[0]
    state = held[offset:].reshape(12, 16)
    expected = quantize_state(state)
    codes, _ = quantize_state(cuda.put(state))
    assert_bits(cuda.get(codes), expected[0])
    shifted = [np.empty(array.size + offset, array.dtype) for array in expected]
    for array, values in zip(shifted, expected, strict=True):
        array[offset:] = values.ravel()
    views = [array[offset:].reshape(values.shape) for array, values in zip(shifted, expected, strict=True)]
    read = dequantize_state(*(cuda.put(view) for view in views))
    assert_bits(cuda.get(read), dequantize_state(*expected))


def test_arrays_of_two_devices_are_refused_before_anything_is_written(cuda: Kit):
    codes, scales = quantize_state(np.ones((2, 3), np.float32))
    out = cuda.put(np.full((2, 3), 7, np.float32))
    with pytest.raises(DeviceError, match="scales is on cpu"):
        dequantize_state(cuda.put(codes), scales)
    with pytest.raises(DeviceError, match="out is on cuda"):
        dequantize_state(codes, scales, out=out)
    with pytest.raises(UnsupportedDtype, match="state is float16"):
        quantize_state(cuda.put(np.ones((2, 3), np.float16)))
    held = cuda.put(np.zeros((2, 2, 3), np.float32))
    with pytest.raises(UnsupportedOption, match="stream"):
        quantize_state(np.ones((2, 3), np.float32), stream=cuda.stream())
    with pytest.raises(UnsupportedOption, match=r"overlap|share"):
        dequantize_state(cuda.put(codes), held[0][0], out=held[0])
    assert (cuda.get(out) == 7).all()
    assert not cuda.get(held).any()


# ---- pools

PLANES = (Plane("conv", (5,), "bfloat16", per="sequence"), Plane("temporal", (3, 8, 9), "float32", per="sequence"))
LAYERS = [StateSpec(PLANES), StateSpec((PLANES[0], Plane("temporal", (2, 16, 8), "bfloat16", per="sequence")))]


class Pools:
    """Random states and their checkpoints on the device, and twins on the host; every checkpoint has been written."""

    def __init__(self, cuda: Kit, layers: list[StateSpec], num_slots: int = 9, num_checkpoints: int = 7, **slotwise):
        self.cuda = cuda
        on_device = cuda.put(slotwise["flat"]) if slotwise else None
        options = {"buffers": on_device, "slot_bytes": slotwise["step"]} if slotwise else {}
        self.own = StatePool(layers, num_slots, device="cuda", **options)
        self.twin = StatePool(layers, num_slots)
        self.kept = CheckpointPool(self.own, num_checkpoints)
        self.kept_twin = CheckpointPool(self.twin, num_checkpoints)
        rng = np.random.default_rng(0)
        for view, other in zip(self.own.planes(), self.twin.planes(), strict=True):
            values = rng.standard_normal(view.shape).astype(view.dtype.numpy)
            other.numpy()[:] = values
            for slot in range(num_slots):
                entry = np.ascontiguousarray(values[slot])
                cuda.runtime.copy(view[slot].pointer, entry.ctypes.data, entry.nbytes, 0)
        cuda.runtime.synchronize(0)
        slots = np.arange(1, num_checkpoints)
        self.both("save", slots % (num_slots - 1) + 1, slots)
        cuda.runtime.synchronize(0)

    def both(self, name: str, first, second) -> None:
        getattr(self.kept, name)(first, second)
        getattr(self.kept_twin, name)(first, second)

    def check(self) -> None:
        for pool, twin in ((self.own, self.twin), (self.kept.pool, self.kept_twin.pool)):
            for view, other in zip(pool.planes(), twin.planes(), strict=True):
                for slot in range(1, view.shape[0]):
                    assert_bits(self.cuda.get(view[slot]), other.numpy()[slot])


def test_a_pool_on_the_device_saves_and_restores_as_on_the_host(cuda: Kit):
    pools = Pools(cuda, LAYERS)
    pools.check()
    pools.both("save", [8, 8, 1], [2, 6, 4])
    pools.both("load", [6, 4, 6], [3, 8, 1])
    pools.both("load", [], [])
    pools.check()
    assert pools.kept.plane("temporal").device == cuda.device


@pytest.mark.parametrize(("num_layers", "num_checkpoints"), [(100, 3), (1, 150)])
def test_layers_and_pairs_of_more_than_one_launch(cuda: Kit, num_layers, num_checkpoints):
    plane = Plane("temporal", (2, 3), "float32", per="sequence")
    Pools(cuda, [StateSpec((plane,))] * num_layers, num_slots=3, num_checkpoints=num_checkpoints).check()


def test_states_that_are_stored_slot_by_slot(cuda: Kit):
    step = 4096
    pools = Pools(cuda, LAYERS, flat=np.full(9 * step, 255, np.uint8), step=step)
    pools.check()
    pools.both("load", [5, 2], [1, 4])
    pools.check()


def test_saves_and_loads_follow_the_order_of_their_stream(cuda: Kit):
    pools, stream = Pools(cuda, LAYERS), cuda.stream()
    pools.kept.save([1], [2], stream=stream)
    pools.own.zero([1], stream=stream)
    pools.kept.load([2], [3], stream=stream)
    pools.kept.save([1], [2], stream=stream)
    cuda.runtime.synchronize(stream)
    pools.kept_twin.save([1], [2])
    pools.twin.zero([1])
    pools.kept_twin.load([2], [3])
    pools.kept_twin.save([1], [2])
    pools.check()


def test_a_captured_graph_saves_and_loads_what_is_there_at_each_replay(cuda: Kit):
    pools = Pools(cuda, LAYERS)
    pools.both("load", [1], [1])  # loads the kernels before the capture

    def work(stream: int) -> None:
        pools.kept.save([1], [2], stream=stream)
        pools.kept.load([2], [4], stream=stream)

    replay = cuda.capture(work)
    for source in (5, 6):
        pools.own.copy([source], [1])
        pools.twin.copy([source], [1])
        cuda.runtime.synchronize(0)
        replay()
        pools.kept_twin.save([1], [2])
        pools.kept_twin.load([2], [4])
        pools.check()


def test_bad_slots_are_refused_before_anything_is_launched(cuda: Kit):
    pools = Pools(cuda, LAYERS)
    for call in (
        lambda: pools.kept.save([1], [0]),
        lambda: pools.kept.save([9], [1]),
        lambda: pools.kept.load([7], [1]),
        lambda: pools.kept.load([1], [0]),
    ):
        with pytest.raises(InvalidBlock):
            call()
    with pytest.raises(UnsupportedOption):
        pools.kept.load([1, 2], [3, 3])
    pools.check()
