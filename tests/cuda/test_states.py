"""StatePool on CUDA: zeros and copies in the order of a stream, also in a captured graph."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import Plane, StatePool, StateSpec
from pagecore.arrays import Tensor, strided
from pagecore.errors import DeviceError, InvalidBlock, UnsupportedOption
from tests.cuda.kit import Kit

PLANES = (Plane("conv", (24, 3), "bfloat16", per="sequence"), Plane("temporal", (3, 8, 9), "float32", per="sequence"))
LAYERS = [StateSpec(PLANES), StateSpec(PLANES), StateSpec((Plane("conv", (10, 2), "bfloat16", per="sequence"),))]


def as_bytes(view: Tensor) -> Tensor:
    return strided(view, (view.nbytes,), (1,), 0, "uint8")


def filled(cuda: Kit, num_slots: int = 9) -> tuple[StatePool, list[np.ndarray]]:
    """Return a pool on the device whose slots hold random bytes, and copies of its planes as [num_slots, n]."""
    random = np.random.default_rng(0)
    owned, held = [], []
    for spec in LAYERS:
        for plane in spec.planes:
            values = random.integers(0, 255, (num_slots, *plane.shape)).astype(plane.dtype.numpy)
            owned.append(cuda.put(values))
            held.append(values.reshape(num_slots, -1).view(np.uint8).copy())
    return StatePool(LAYERS, num_slots, device="cuda", buffers=owned), held


def same(cuda: Kit, pool: StatePool, expected: list[np.ndarray]) -> None:
    for view, held in zip(pool.planes(), expected, strict=True):
        np.testing.assert_array_equal(cuda.get(as_bytes(view)).reshape(held.shape), held)


def test_a_pool_on_the_device_begins_as_zeros(cuda: Kit):
    pool = StatePool(LAYERS, 4, device="cuda")
    assert (pool.device, pool.plane("temporal", 1).device) == ("cuda:0", "cuda:0")
    same(cuda, pool, [np.zeros((4, view.nbytes // 4), np.uint8) for view in pool.planes()])


def test_zeros_and_copies_change_only_their_targets(cuda: Kit):
    pool, held = filled(cuda)
    pool.zero([2, 7])
    pool.copy([1, 1, 2], [3, 4, 5])
    for plane in held:
        plane[[2, 7]] = 0
        plane[[3, 4, 5]] = plane[[1, 1, 2]]
    same(cuda, pool, held)


def test_work_follows_the_order_of_its_stream(cuda: Kit):
    pool, held = filled(cuda)
    stream = cuda.stream()
    pool.zero([2], stream=stream)
    pool.copy([1], [2], stream=stream)
    pool.copy([2], [3], stream=stream)
    pool.zero([1], stream=stream)
    cuda.runtime.synchronize(stream)
    for plane in held:
        plane[[2, 3]] = plane[1]
        plane[1] = 0
    same(cuda, pool, held)


def test_a_captured_graph_copies_the_pairs_of_each_replay(cuda: Kit):
    pool, held = filled(cuda)
    pairs = cuda.put(np.zeros((3, 2), np.int32))
    pool.copy_pairs(pairs)  # loads the kernel before the capture

    def work(stream: int) -> None:
        pool.copy_pairs(pairs, stream=stream)

    replay = cuda.capture(work)
    for listed in ([[1, 4], [0, 0], [0, 0]], [[4, 8], [2, 5], [1, 6]]):
        values = np.asarray(listed, np.int32)
        cuda.runtime.copy(pairs.pointer, values.ctypes.data, values.nbytes, 0)
        cuda.runtime.synchronize(0)
        replay()
        for plane in held:
            for source, target in listed:
                plane[target] = plane[source]
        same(cuda, pool, held)


def test_a_captured_graph_zeroes_and_copies_in_order(cuda: Kit):
    pool, held = filled(cuda)
    pool.zero([8])  # loads the kernels before the capture
    pool.copy([8], [7])

    def work(stream: int) -> None:
        pool.zero([2], stream=stream)
        pool.copy([2, 1], [3, 4], stream=stream)
        pool.copy([5], [2], stream=stream)

    replay = cuda.capture(work)
    for _ in range(2):
        replay()
    for plane in held:
        plane[[7, 8, 3]] = 0
        plane[[4, 2]] = plane[[1, 5]]
    same(cuda, pool, held)


def test_bad_slots_are_refused_before_anything_is_launched(cuda: Kit):
    pool, held = filled(cuda)
    for call in (lambda: pool.zero([0]), lambda: pool.copy([1], [9]), lambda: pool.copy([9], [1])):
        with pytest.raises(InvalidBlock):
            call()
    with pytest.raises(UnsupportedOption):
        pool.copy([1, 2], [2, 3])
    same(cuda, pool, held)


def test_memory_of_another_device_is_not_adopted(cuda: Kit):
    on_host = [np.zeros((4, *plane.shape), plane.dtype.numpy) for plane in LAYERS[0].planes]
    with pytest.raises(DeviceError, match="cpu; the pool is on cuda:0"):
        StatePool(LAYERS[0], 4, device="cuda", buffers=on_host)
