"""Rotations of keys and values as options of specs."""

from __future__ import annotations

import pytest

from pagecore import AttentionSpec, CrossSpec, TensorParallel
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.ops.codecs._codecs import rotation_block
from pagecore.storage.specs.rotation import LEAST_BLOCK

BOTH = {"key_rotation": "hadamard", "value_rotation": "hadamard"}


def test_rotations_change_no_plane_and_stay_with_the_layer():
    spec = AttentionSpec(2, 96, 80, **BOTH)
    assert spec.planes == AttentionSpec(2, 96, 80).planes
    assert spec != AttentionSpec(2, 96, 80, key_rotation="hadamard")
    assert spec.with_format("int4_token").key_rotation == "hadamard"
    assert spec.with_dtype("float16").value_rotation == "hadamard"
    assert spec.shard(TensorParallel(0, 2)).value_rotation == "hadamard"
    sealed = AttentionSpec(2, 64, format="kivi4", **BOTH)
    assert sealed.tail is not None
    assert sealed.planes == AttentionSpec(2, 64, format="kivi4").planes
    assert CrossSpec(2, 64, **BOTH).key_rotation == "hadamard"
    assert rotation_block(LEAST_BLOCK) == LEAST_BLOCK
    assert not any(rotation_block(dim) for dim in range(-8, LEAST_BLOCK))


def test_rotations_that_cannot_be_are_refused_by_name():
    with pytest.raises(UnsupportedOption, match="key_rotation is 'fourier'; use 'hadamard'"):
        AttentionSpec(2, 64, key_rotation="fourier")
    with pytest.raises(UnsupportedOption, match="value_rotation is True"):
        AttentionSpec(2, 64, value_rotation=True)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="head_dim is 36, but key_rotation 'hadamard' needs a multiple of 8"):
        AttentionSpec(2, 36, 64, key_rotation="hadamard")
    with pytest.raises(ShapeError, match="v_head_dim is 36"):
        AttentionSpec(2, 64, 36, value_rotation="hadamard")
    with pytest.raises(UnsupportedOption, match="key_bounds and key_rotation"):
        AttentionSpec(2, 64, key_rotation="hadamard", key_bounds=True)
    with pytest.raises(UnsupportedOption, match="label_channels and key_rotation"):
        AttentionSpec(1, 64, key_rotation="hadamard", label_channels=[[1, 2]])
    assert AttentionSpec(1, 64, value_rotation="hadamard", key_bounds=True, label_channels=[[1, 2]])
