"""Latent caches on CUDA: plain rows are written as on the host."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pagecore import write_latent


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("joint", [True, False])
def test_plain_rows_are_written_as_on_the_host(cuda, dtype, joint):
    rng = np.random.default_rng(0)
    latent, rope = (rng.standard_normal((5, dim)).astype(np.float32) for dim in (48, 16))
    slots = np.array([9, -1, 4, 15, 0], np.int32)
    shapes = [(4, 4, 64)] if joint else [(4, 4, 48), (4, 4, 16)]
    host = [np.full(shape, 7, dtype) for shape in shapes]
    device = [cuda.put(plane) for plane in host]
    write_latent(latent, rope, *host, *[None] * joint, slots)
    write_latent(cuda.put(latent), cuda.put(rope), *device, *[None] * joint, cuda.put(slots))
    for expected, plane in zip(host, device, strict=True):
        assert cuda.get(plane).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dim", [3, 48])
def test_plain_rows_without_a_rotary_part_are_written_as_on_the_host(cuda, dtype, dim):
    latent = np.random.default_rng(1).standard_normal((5, dim)).astype(np.float32)
    slots = np.array([9, -1, 4, 15, 0], np.int32)
    host = np.full((4, 4, dim), 7, dtype)
    device = [cuda.put(host) for _ in range(2)]
    write_latent(latent, None, host, None, slots)
    write_latent(cuda.put(latent), None, device[0], None, cuda.put(slots))
    write_latent(cuda.put(latent), cuda.put(np.zeros((5, 0), np.float32)), device[1], None, cuda.put(slots))
    for plane in device:
        assert cuda.get(plane).tobytes() == host.tobytes()
