"""int8 checkpoints of states: exact bytes, slots, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import CheckpointPool, Plane, StatePool, StateSpec, dequantize_state, quantize_state
from pagecore.errors import InvalidBlock, NotEnoughMemory, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage.state_shapes import delta_planes
from tests.ops.cases import DTYPES
from tests.together import together

BF16 = DTYPES["bfloat16"]
STATE = [[1, -0.5, 100], [-2, 0.25, 50], [0.5, 0.125, -25.4], [0, 0, 0]]


def twin(state):
    """Return codes and scales by their definition."""
    dtype = state.dtype
    numbers = state.astype(np.float32)
    scales = (np.abs(numbers).max(axis=-2) / np.float32(127)).astype(dtype)
    factors = scales.astype(np.float32)[..., None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(factors == 0, 0, np.rint(numbers / factors))
    return np.clip(codes, -127, 127).astype(np.int8), scales


def test_worked_example_d8_float32():
    codes, scales = quantize_state(np.array(STATE, np.float32))
    assert codes.tolist() == [[64, -127, 127], [-127, 64, 64], [32, 32, -32], [0, 0, 0]]
    np.testing.assert_array_equal(scales, np.array([0.0157480314, 0.00393700786, 0.787401557], np.float32))


def test_worked_example_d8_bfloat16():
    codes, scales = quantize_state(np.array(STATE, np.float32).astype(BF16))
    assert codes.tolist() == [[64, -127, 127], [-127, 64, 63], [32, 32, -32], [0, 0, 0]]
    np.testing.assert_array_equal(
        scales.astype(np.float32), np.array([0.0157470703, 0.0039367676, 0.7890625], np.float32)
    )


@together("dtype", ["float32", "bfloat16"])
@together("shape", [(1, 1), (5, 3), (2, 8, 16), (3, 2, 128, 257), (0, 4), (4, 0), (2, 4, 1000)])
def test_codes_and_scales_are_those_of_the_twin(shape, dtype):
    rng = np.random.default_rng(sum(shape))
    state = (rng.standard_normal(shape) * np.exp(rng.uniform(-30, 30, shape))).astype(DTYPES[dtype])
    if state.size == 0:
        codes, scales = quantize_state(state)
        assert codes.shape == shape
        assert scales.shape == (*shape[:-2], shape[-1])
        return
    codes, scales = quantize_state(state)
    expected = twin(state)
    np.testing.assert_array_equal(codes, expected[0])
    np.testing.assert_array_equal(scales.view(np.uint8), expected[1].view(np.uint8))
    out = np.full(shape, np.nan, DTYPES[dtype])
    assert dequantize_state(codes, scales, out=out) is out
    factors = scales.astype(np.float32)[..., None, :]
    numbers = (codes.astype(np.float32) * factors).astype(DTYPES[dtype])
    np.testing.assert_array_equal(out.astype(np.float32), numbers.astype(np.float32))
    error = np.abs(out.astype(np.float32) - state.astype(np.float32))
    assert (error <= factors * (0.51 if dtype == "float32" else 1.1)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_key_with_a_number_that_is_not_finite_reads_back_as_nan(bad):
    state = np.array([[1, 2], [bad, 3]], np.float32)
    read = dequantize_state(*quantize_state(state))
    assert np.isnan(read[:, 0]).any()
    np.testing.assert_allclose(read[:, 1], [2, 3], rtol=0.01)


SPEC = StateSpec(delta_planes(2, 4, 8, 8))


def filled(num_slots=5, num_layers=2, seed=0):
    pool = StatePool(SPEC, num_slots=num_slots, num_layers=num_layers)
    rng = np.random.default_rng(seed)
    for view in pool.planes():
        array = view.numpy()
        array[:] = rng.standard_normal(view.shape).astype(array.dtype)
    return pool


def numbers(pool, name, layer):
    return pool.plane(name, layer).numpy().copy()


def test_a_checkpoint_is_saved_and_loaded():
    pool, before = filled(), filled()
    checkpoints = CheckpointPool(pool, num_slots=4)
    checkpoints.save([1, 3], [2, 1])
    pool.zero([1, 2, 3, 4])
    checkpoints.load([2, 1, 2], [3, 1, 4])
    for layer in range(2):
        read, given = numbers(pool, "temporal", layer), numbers(before, "temporal", layer)
        for source, target in ((1, 3), (3, 1), (1, 4)):
            codes, scales = twin(given[source])
            np.testing.assert_array_equal(read[target], codes.astype(np.float32) * scales[..., None, :])
            np.testing.assert_array_equal(numbers(pool, "conv", layer)[target], numbers(before, "conv", layer)[source])
        assert (read[2] == 0).all()
        np.testing.assert_array_equal(checkpoints.plane("temporal", layer).numpy()[2], twin(given[1])[0])
        np.testing.assert_array_equal(checkpoints.plane("temporal_scale", layer).numpy()[1], twin(given[3])[1])


def test_states_that_are_stored_slot_by_slot():
    step = 2 * SPEC.nbytes + 64
    flat = np.full(5 * step, 255, np.uint8)
    pool, before = StatePool(SPEC, 5, num_layers=2, buffers=flat, slot_bytes=step), filled()
    for view, other in zip(pool.planes(), before.planes(), strict=True):
        view.numpy()[:] = other.numpy()
    checkpoints = CheckpointPool(pool, num_slots=4)
    checkpoints.save([3], [2])
    checkpoints.load([2], [1])
    for layer in range(2):
        given, read = numbers(before, "temporal", layer), numbers(pool, "temporal", layer)
        codes, scales = twin(given[3])
        np.testing.assert_array_equal(checkpoints.plane("temporal", layer).numpy()[2], codes)
        np.testing.assert_array_equal(read[1], codes.astype(np.float32) * scales[..., None, :])
        np.testing.assert_array_equal(read[2:], given[2:])
    assert (flat.reshape(5, step)[:, 2 * SPEC.nbytes :] == 255).all()


def test_the_bytes_of_a_checkpoint():
    """Qwen3-Next: 2,097,152 bytes of float32 become 524,288 codes and 16,384 bytes of scales."""
    spec = StateSpec(delta_planes(16, 32, 128, 128))
    pool = StatePool(spec, num_slots=2)
    checkpoints = CheckpointPool(pool, num_slots=3)
    assert checkpoints.bytes_per_slot == 49_152 + 524_288 + 16_384
    assert checkpoints.nbytes == 3 * checkpoints.bytes_per_slot
    stored = [checkpoints.plane(name).nbytes for name in ("conv", "temporal", "temporal_scale")]
    assert sum(stored) == checkpoints.nbytes
    assert "3 slots" in repr(checkpoints)


def test_slots_for_counts_the_null_slot():
    assert CheckpointPool.slots_for(10 * 589_824, StateSpec(delta_planes(16, 32, 128, 128))) == 10
    with pytest.raises(NotEnoughMemory):
        CheckpointPool.slots_for(589_824, StateSpec(delta_planes(16, 32, 128, 128)))


@together(
    ("act", "error", "message"),
    [
        (lambda c: c.save([1], [0]), InvalidBlock, "checkpoints has slot 0, the null slot"),
        (lambda c: c.save([5], [1]), InvalidBlock, "slots has 5; the pool has slots 0 to 4"),
        (lambda c: c.save([-1], [1]), InvalidBlock, "slots has -1"),
        (lambda c: c.save([1], [4]), InvalidBlock, "checkpoints has 4; the pool has slots 0 to 3"),
        (lambda c: c.save([1, 2], [1]), ShapeError, "slots has 2 slots and checkpoints 1"),
        (lambda c: c.save([1, 2], [1, 1]), UnsupportedOption, "a slot is in checkpoints twice"),
        (lambda c: c.load([1, 2], [3, 3]), UnsupportedOption, "a slot is in slots twice"),
        (lambda c: c.load([1], [0]), InvalidBlock, "slots has slot 0, the null slot"),
        (lambda c: c.load([1.5], [1]), UnsupportedDtype, "checkpoints is float64"),
        (lambda c: c.plane("codes"), UnsupportedOption, "layer 0 has conv, temporal, temporal_scale"),
        (lambda c: c.plane("conv", 7), ShapeError, "layer"),
    ],
)
def test_what_is_refused_changes_nothing(act, error, message):
    pool = filled()
    checkpoints = CheckpointPool(pool, num_slots=4)
    checkpoints.save([1, 2, 3], [1, 2, 3])
    before = [view.numpy().copy() for view in (*pool.planes(), *checkpoints.pool.planes())]
    with pytest.raises(error, match=message):
        act(checkpoints)
    for view, array in zip((*pool.planes(), *checkpoints.pool.planes()), before, strict=True):
        np.testing.assert_array_equal(view.numpy(), array)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CheckpointPool(filled(), 1), ShapeError, "num_slots is 1"),
        (lambda: CheckpointPool(filled(), 4, format="int4"), UnsupportedOption, "format is .int4.; use .int8."),
        (lambda: CheckpointPool(filled(), 4, planes=["ssm"]), UnsupportedOption, "the layers have conv, temporal"),
        (lambda: CheckpointPool("states", 4), UnsupportedOption, "expected a StatePool"),
        (
            lambda: CheckpointPool(StatePool(StateSpec((Plane("temporal", (4,), "float32", per="sequence"),)), 3), 3),
            ShapeError,
            "it needs two axes",
        ),
        (
            lambda: CheckpointPool(StatePool(StateSpec((Plane("temporal", (4, 4), "float16", per="sequence"),)), 3), 3),
            UnsupportedDtype,
            "plane 'temporal' is float16",
        ),
    ],
)
def test_pools_that_cannot_be_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: quantize_state(np.zeros(3, np.float32)), ShapeError, r"state has shape \(3,\)"),
        (lambda: quantize_state(np.zeros((3, 4))), UnsupportedDtype, "float64"),
        (lambda: quantize_state(np.zeros((3, 4), np.float16)), UnsupportedDtype, "state is float16"),
        (lambda: quantize_state(np.zeros((3, 4), np.float32).T), ShapeError, "pass a C-contiguous array"),
        (
            lambda: dequantize_state(np.zeros((3, 4), np.uint8), np.zeros(4, np.float32)),
            UnsupportedDtype,
            "codes is uint8; it must be int8",
        ),
        (
            lambda: dequantize_state(np.zeros((3, 4), np.int8), np.zeros(3, np.float32)),
            ShapeError,
            r"scales has shape \(3,\); codes \(3, 4\) need \(4,\)",
        ),
        (
            lambda: dequantize_state(
                np.zeros((3, 4), np.int8), np.zeros(4, np.float32), out=np.zeros((3, 4), np.float16)
            ),
            UnsupportedDtype,
            "out is float16",
        ),
    ],
)
def test_invalid_arrays_are_refused(act, error, message):
    with pytest.raises(error, match=message):
        act()
