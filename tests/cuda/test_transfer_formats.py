"""transfer_blocks between formats on a device: the bytes of the host, and no other byte changes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagecore import errors, transfer_blocks, write_latent
from pagecore.arrays.dtypes.formats import FORMATS
from tests.cuda.memory import calls_of
from tests.ops.test_transfer_formats import LATENT_ROWS, PAIRS, Side, latents, sides

NAMES = [*FORMATS, "float32", "bfloat16"]
# Every format as a source and as a target, twice each.
TWO_FORMATS = [(name, NAMES[(i + step) % len(NAMES)]) for i, name in enumerate(NAMES) for step in (1, 4)]


def put(cuda: Any, side: Side) -> tuple[Any, Any]:
    """Return the codes and the argument of their scales on the device."""
    codes = cuda.put(side.codes)
    if side.plane is None:
        return codes, side.scale
    plane = cuda.put(side.plane)
    return codes, (plane, side.factor) if side.name == "nvfp4" else plane


def assert_equal(cuda: Any, codes: Any, scale: Any, expected: Side) -> None:
    pairs = [(cuda.get(codes), expected.codes)]
    if expected.plane is not None:
        pairs.append((cuda.get(scale[0] if isinstance(scale, tuple) else scale), expected.plane))
    for got, wanted in pairs:
        assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(wanted).tobytes()


@pytest.mark.parametrize("names", TWO_FORMATS, ids=str)
def test_blocks_are_converted_as_by_the_twin(cuda, names):
    source, target, expected = sides(names, ("HND", "NHD"))
    codes, scale = put(cuda, source)
    to, to_scale = put(cuda, target)
    transfer_blocks(codes, to, PAIRS, source_scales=scale, target_scales=to_scale)
    assert_equal(cuda, to, to_scale, expected)


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_pairs_on_the_device(cuda, dtype, independent):
    """In order, the last pair of a target stays; a pair with a block outside of the caches is skipped."""
    source, target, expected = sides(("float32", "int4_token"), ("NHD", "NHD"))
    pairs = PAIRS[[0, 1, 4, 3]] if independent else PAIRS
    pairs = np.concatenate([pairs, [[9, 1], [1, 9], [0, 1], [-1, 4]]]).astype(dtype)
    codes, _ = put(cuda, source)
    to, to_scale = put(cuda, target)
    transfer_blocks(codes, to, cuda.put(pairs), target_scales=to_scale, independent=independent)
    assert_equal(cuda, to, to_scale, expected)


@pytest.mark.parametrize("factors", [(0.5, 0.25), ([0.5, 1, 2], 1.0), ([0.5, 1, 2], [0.5, 1, 2])])
def test_factors_of_heads(cuda, factors):
    source, target, expected = sides(("float8_e4m3fn", "float8_e4m3fn"), ("NHD", "NHD"), factors)
    codes, to = cuda.put(source.codes), cuda.put(target.codes)
    on_device = [cuda.put(np.array(each, np.float32)) if isinstance(each, list) else each for each in factors]
    transfer_blocks(codes, to, PAIRS, source_scales=on_device[0], target_scales=on_device[1])
    assert_equal(cuda, to, None, expected)


def test_a_conversion_is_a_launch_for_each_cache(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    source, target, _ = sides(("bfloat16", "mxfp8"), ("NHD", "NHD"))
    codes, _ = put(cuda, source)
    to, to_scale = put(cuda, target)
    call = lambda: transfer_blocks(codes, to, [(1, 2), (3, 4)], target_scales=to_scale)  # noqa: E731
    assert calls_of(cuda, call) == {"launches": 1}


@pytest.mark.parametrize(
    "names",
    [
        ("fp8_ds_mla", "nvfp4_ds_mla"),
        ("nvfp4_ds_mla", "float8_e4m3fn"),
        ("float8_e4m3fn", "fp8_ds_mla"),
        ("bfloat16", "nvfp4_ds_mla"),
        ("fp8_ds_mla", "float32"),
        ("float32", "float8_e4m3fn"),
        ("fp8_ds_mla", "fp8_ds_mla"),
    ],
    ids=str,
)
def test_latents(cuda, names):
    assert set(names) <= set(LATENT_ROWS)
    rows = np.random.default_rng(0).standard_normal((28, 576)).astype(np.float32)
    source, target = latents(names[0], 7), latents(names[1], 8)
    factors = [0.02 if name == "float8_e4m3fn" else None for name in names]
    write_latent(rows[:, :512], rows[:, 512:], source, None, np.arange(28), scale=factors[0])
    codes, to = cuda.put(source), cuda.put(target)
    transfer_blocks(codes, to, PAIRS, source_scales=factors[0], target_scales=factors[1])
    transfer_blocks(source, target, PAIRS, source_scales=factors[0], target_scales=factors[1])
    assert cuda.get(to).tobytes() == target.tobytes()


@pytest.mark.parametrize("on_device", [False, True])
def test_without_a_null_block_block_0_is_converted(cuda, on_device):
    source, target = np.random.default_rng(0).standard_normal((7, 5, 3, 64)).astype(np.float32), Side("int8_token", 8)
    to, to_scale = put(cuda, target)
    pairs = np.asarray([(0, 3), (2, 0)], np.int32)
    given = cuda.put(pairs) if on_device else pairs
    transfer_blocks(cuda.put(source), to, given, target_scales=to_scale, null_block=False)
    transfer_blocks(source, target.codes, pairs, target_scales=target.scale, null_block=False)
    assert_equal(cuda, to, to_scale, target)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"pairs": [(1, 8)]}, errors.InvalidBlock, "the target of pair 0 is 8"),
        ({"pairs": [(0, 1)]}, errors.InvalidBlock, "reserved null block"),
        ({"source_scales": 2.0}, errors.UnsupportedOption, "has no format"),
        ({"target_scales": 1.0}, errors.UnsupportedOption, "target_scale is not an array of stored scales"),
    ],
)
def test_refusals_write_nothing(cuda, options, error, words):
    target = Side("int8_token", 8)
    to, to_scale = put(cuda, target)
    before = cuda.get(to).tobytes(), cuda.get(to_scale).tobytes()
    arguments = {"pairs": [(1, 1)], "target_scales": to_scale} | options
    with pytest.raises(error, match=words):
        transfer_blocks(cuda.put(np.ones((7, 5, 3, 64), np.float32)), to, arguments.pop("pairs"), **arguments)
    assert (cuda.get(to).tobytes(), cuda.get(to_scale).tobytes()) == before


def test_a_plane_on_the_host_is_refused(cuda):
    target = Side("int8_token", 8)
    plain = cuda.put(np.ones((7, 5, 3, 64), ml_dtypes.bfloat16))
    with pytest.raises(errors.DeviceError, match="target_scale is on cpu"):
        transfer_blocks(plain, cuda.put(target.codes), [(1, 1)], target_scales=target.plane)
