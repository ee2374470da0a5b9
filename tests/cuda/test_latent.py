"""Latent caches on CUDA: plain rows are written; what runs on the host only is refused by name."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pagecore import errors, gather_latent, index_scores, write_index, write_latent


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


def test_the_rest_is_refused_by_name(cuda):
    rows = cuda.put(np.zeros((2, 4, 576), np.float32))
    packed = cuda.put(np.zeros((2, 4, 656), np.uint8))
    latent, rope = cuda.put(np.zeros((1, 512), np.float32)), cuda.put(np.zeros((1, 64), np.float32))
    query = cuda.put(np.zeros((1, 2, 512), np.float32))
    for words, call in {
        "writes of fp8_ds_mla": lambda: write_latent(latent, rope, packed, None, [0]),
        "gather_latent": lambda: gather_latent(rows, None, [[1]], [1]),
        "the indexer": lambda: index_scores(query, np.zeros((1, 2), np.float32), rows, None, [[1]], [1]),
        "key is on CUDA": lambda: write_index(latent, packed, packed, [0]),
    }.items():
        with pytest.raises(errors.UnsupportedOption) as raised:
            call()
        assert words in str(raised.value)
    assert not cuda.get(packed).any()
