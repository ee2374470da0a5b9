"""unseal_kv on the host: the numbers of sealed blocks in plain caches, against the plain twin, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagecore import errors, seal_kv, transfer_blocks, unseal_kv
from tests.ops import kivi_twin as twin
from tests.ops.cases import DTYPES, LAYOUTS, empty_cache
from tests.ops.sealed_cases import BITS, empty_sealed
from tests.thinning import in_turn

HEADS, SIZE, DIMS = 3, 32, (64, 96)
PAIRS = [(2, 3), (5, 1)]


def sealed_blocks(bits: tuple[int, int], dtype: str) -> Any:
    """Return sealed blocks, two of which have numbers."""
    numbers = [np.random.default_rng(dim).normal(size=(5, SIZE, HEADS, dim)).astype(DTYPES[dtype]) for dim in DIMS]
    sealed = empty_sealed(7, (SIZE, HEADS, *DIMS), bits, (16, 32), DTYPES[dtype])
    seal_kv(*numbers, sealed, [(3, 2), (1, 5)])
    return sealed


@pytest.mark.parametrize(("layout", "bits", "dtype"), in_turn(LAYOUTS, over=[[(2, 4), (4, 2)], DTYPES]))
def test_whole_blocks_have_the_numbers_of_the_twin(layout, bits, dtype):
    sealed, wanted = sealed_blocks(bits, dtype), DTYPES[dtype]
    key, value = (empty_cache(layout, (5, SIZE, HEADS, dim), wanted) for dim in DIMS)
    before = [key.copy(), value.copy()]
    unseal_kv(sealed, key, value, PAIRS)
    for source, target in PAIRS:
        keys = twin.dequantize(sealed.key[source], BITS[bits[0]], sealed.key_scale[source], -2)
        values = twin.dequantize(sealed.value[source], BITS[bits[1]], sealed.value_scale[source])
        np.testing.assert_array_equal(key[target], keys.swapaxes(0, 1).astype(wanted))
        np.testing.assert_array_equal(value[target], values.astype(wanted))
    for cache, old in zip((key, value), before, strict=True):
        assert cache[[0, 2, 4]].tobytes() == old[[0, 2, 4]].tobytes()


def test_sealed_blocks_become_another_format_by_way_of_plain_blocks():
    sealed = sealed_blocks((4, 4), "float32")
    key, value = (np.zeros((5, SIZE, HEADS, dim), np.float32) for dim in DIMS)
    unseal_kv(sealed, key, value, PAIRS)
    codes, scales = np.zeros((4, SIZE, HEADS, 64), np.int8), np.zeros((4, SIZE, HEADS, 1), np.float32)
    transfer_blocks(key, codes, [(3, 1)], target_scales=scales)
    assert np.abs(codes[1] * scales[1] - key[3]).max() <= scales[1].max() / 2 * 1.001


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(7, 1)], "source of pair 1 is 7"),
        ([(2, 5)], "target of pair 1 is 5"),
        ([(0, 1)], "null block"),
        ([(2, 0)], "null block"),
        ([(2, 1), (5, 1)], "plain block 1 twice; write each block once"),
    ],
)
def test_pairs_are_checked_before_anything_is_written(pairs, message):
    sealed = sealed_blocks((2, 2), "float16")
    key, value = (np.zeros((5, SIZE, HEADS, dim), np.float16) for dim in DIMS)
    with pytest.raises(errors.InvalidBlock, match=message):
        unseal_kv(sealed, key, value, [(2, 3), *pairs])
    assert not key.any()
    unseal_kv(sealed, key, value, [(0, 0)], null_block=False)


def test_refusals():
    sealed = sealed_blocks((4, 4), "float32")
    key, value = (np.zeros((5, SIZE, HEADS, dim), np.float32) for dim in DIMS)
    with pytest.raises(errors.UnsupportedOption, match="sealed is None; pass a SealedBlocks"):
        unseal_kv(None, key, value, PAIRS)
    key.flags.writeable = False
    with pytest.raises(errors.UnsupportedOption, match="key_cache is read-only"):
        unseal_kv(sealed, key, value, PAIRS)
    frozen = sealed._replace(key=np.frombuffer(sealed.key.tobytes(), np.int32).reshape(sealed.key.shape))
    unseal_kv(frozen, key.copy(), value, PAIRS)
    with pytest.raises(errors.ShapeError, match="sealed value has shape"):
        unseal_kv(sealed, key.copy(), np.zeros((5, SIZE, HEADS, 32), np.float32), PAIRS)
