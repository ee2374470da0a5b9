"""transfer_blocks between formats: bytes of the twin in every layout, and no other byte changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    KVPool,
    dequantize,
    errors,
    gather_latent,
    quantize,
    set_num_threads,
    transfer_blocks,
    write_latent,
)
from pagecore.arrays.dtypes.formats import FORMATS
from tests.ops import formats_twin as twin
from tests.ops.cases import DTYPES
from tests.ops.instruction_sets import on_every_isa
from tests.reference import latent as reference
from tests.together import together

PAIRS = np.array([(3, 1), (4, 2), (1, 6), (5, 3), (2, 6)], np.int32)  # block 6 is written twice
SHAPE = (5, 3, 64)  # tokens, heads, dim
LAYOUTS = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}
FACTORS = {"float8_e4m3fn": 0.5, "float8_e5m2": 0.25, "nvfp4": 0.01}


def array(num_blocks: int, dim: int, dtype: Any, layout: str) -> Any:
    """Return an array of 0xA5 bytes with 3 more elements after each row."""
    order = LAYOUTS[layout]
    shape = (num_blocks, *SHAPE[:2], dim + 3)
    base = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype)
    return base.reshape([shape[i] for i in order]).transpose(np.argsort(order))[..., :dim]


class Side:
    """A cache of a format, or of plain numbers if `name` is a dtype."""

    def __init__(self, name: str, num_blocks: int, layout: str = "NHD", factor: Any = None) -> None:
        self.name, self.format = name, FORMATS.get(name)
        self.plane = None
        self.factor = FACTORS.get(name, 1.0) if factor is None else factor
        if self.format is None:
            self.codes = array(num_blocks, SHAPE[2], DTYPES[name], layout)
            return
        self.codes = array(num_blocks, self.format.row_codes(SHAPE[2]), self.format.dtype.numpy, layout)
        if self.format.scale_dtype is not None:
            groups = self.format.row_scales(SHAPE[2])
            self.plane = array(num_blocks, groups, self.format.scale_dtype.numpy, layout)

    @property
    def scale(self) -> Any:
        if self.format is None:
            return None
        if self.plane is None:
            return self.factor
        return (self.plane, self.factor) if self.name == "nvfp4" else self.plane

    def factor_of(self, head: int) -> float:
        return float(np.broadcast_to(self.factor, SHAPE[1])[head])

    def put(self, block: int, numbers: Any) -> None:
        """Store the numbers of a block by the twin."""
        if self.format is None:
            self.codes[block] = numbers.astype(self.codes.dtype)
            return
        for head in range(SHAPE[1]):
            codes, scales = twin.quantize_row(numbers[:, head], self.name, self.factor_of(head))
            self.codes[block, :, head] = codes.view(self.codes.dtype)
            if self.plane is not None:
                self.plane[block, :, head] = scales.view(self.plane.dtype)

    def read(self, block: int) -> Any:
        if self.format is None:
            return self.codes[block].astype(np.float32)
        heads = []
        for head in range(SHAPE[1]):
            scales = None if self.plane is None else self.plane[block, :, head]
            codes = np.ascontiguousarray(self.codes[block, :, head])
            heads.append(twin.dequantize_row(codes, self.name, scales, self.factor_of(head)))
        return np.stack(heads, 1)

    def memory(self) -> list[bytes]:
        arrays = [self.codes] + ([] if self.plane is None else [self.plane])
        return [np.asarray(each.base if each.base is not None else each).tobytes() for each in arrays]


def numbers(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    blocks = rng.standard_normal((7, *SHAPE)) * np.exp2(rng.integers(-5, 6, (7, *SHAPE[:2], 1)))
    blocks[2, 1] = 0
    return blocks.astype(np.float32)


def sides(names: tuple[str, str], layouts: tuple[str, str], factors: tuple[Any, Any] = (None, None)) -> list[Side]:
    """Return a filled source, a target, and the target that the twin expects."""
    source = Side(names[0], 7, layouts[0], factors[0])
    for block, values in enumerate(numbers()):
        source.put(block, values)
    target, expected = (Side(names[1], 8, layouts[1], factors[1]) for _ in range(2))
    is_equal = names[0] == names[1] and np.array_equal(source.factor, target.factor)
    for a, b in PAIRS:
        if is_equal:
            expected.codes[b] = source.codes[a]
            if source.plane is not None:
                expected.plane[b] = source.plane[a]
        else:
            expected.put(b, source.read(a))
    return [source, target, expected]


NAMES = [*FORMATS, "float32", "bfloat16", "float16"]
DIFFERENT = [(a, b) for a in NAMES for b in NAMES if a in FORMATS or b in FORMATS]


def test_without_a_null_block_block_0_is_converted_as_any_other():
    plain, codes, scales = numbers(), np.zeros((7, *SHAPE), np.int8), np.zeros((7, *SHAPE[:2], 1), np.float32)
    transfer_blocks(plain, codes, [(0, 3), (2, 0)], target_scales=scales, null_block=False)
    expected = quantize(plain[[0, 2]], "int8_token")
    assert codes[[3, 0]].tobytes() == expected[0].tobytes()
    assert scales[[3, 0]].tobytes() == expected[1].tobytes()
    assert not codes[[1, 2, 4, 5, 6]].any()
    with pytest.raises(errors.InvalidBlock, match="the source of pair 0 is -1"):
        transfer_blocks(plain, codes, [(-1, 3)], target_scales=scales, null_block=False)


@pytest.mark.slow
@together("names", DIFFERENT)
def test_blocks_are_converted_as_by_the_twin(names):
    source, target, expected = sides(names, ("HND", "NHD"))
    unchanged = source.memory()
    transfer_blocks(source.codes, target.codes, PAIRS, source_scales=source.scale, target_scales=target.scale)
    assert target.memory() == expected.memory()
    assert source.memory() == unchanged


@together("layouts", [("NHD", "NHD"), ("HND", "HND"), ("HND", "NHD")])
@together("names", [("float16", "int8_token"), ("nvfp4", "mxfp8"), ("int4_token", "int4_token")])
def test_rows_that_follow_each_other(names, layouts):
    source, target, expected = sides(names, layouts)
    transfer_blocks(source.codes, target.codes, PAIRS, source_scales=source.scale, target_scales=target.scale)
    assert target.memory() == expected.memory()


@together("names", [("bfloat16", "int8_token"), ("nvfp4", "float32"), ("mxfp8", "int4_token")])
@on_every_isa
def test_every_instruction_set(names):
    source, target, expected = sides(names, ("NHD", "HND"))
    transfer_blocks(source.codes, target.codes, PAIRS, source_scales=source.scale, target_scales=target.scale)
    assert target.memory() == expected.memory()


@together("factors", [(0.5, 0.25), ([0.5, 1, 2], 1.0), ([0.5, 1, 2], [0.5, 1, 2])])
def test_factors_of_heads(factors):
    source, target, expected = sides(("float8_e4m3fn", "float8_e4m3fn"), ("NHD", "NHD"), factors)
    transfer_blocks(source.codes, target.codes, PAIRS, source_scales=factors[0], target_scales=factors[1])
    assert target.memory() == expected.memory()


def test_many_caches_of_which_some_are_converted():
    source, target, expected = sides(("float32", "int8_token"), ("NHD", "NHD"))
    plain, other = numbers(1), np.full((8, *SHAPE), np.nan, ml_dtypes.bfloat16)
    transfer_blocks([source.codes, plain], [target.codes, other], PAIRS.tolist(), target_scales=[target.scale, None])
    assert target.memory() == expected.memory()
    for a, b in PAIRS:
        assert (other[b] == plain[2 if b == 6 else a].astype(other.dtype)).all()
    assert np.isnan(other[[0, 4, 5, 7]].astype(np.float32)).all()


@together("layout", ["layerwise", "LBNCHD", "LBCNHD", "blockwise"])
def test_pools_of_two_formats(layout):
    specs = [AttentionSpec(2, 32, format=name, num_query_heads=2) for name in ("mxfp8", "int4_token")]
    pools = [KVPool(spec, 2, 6, 4, layout=order) for spec, order in zip(specs, (layout, "layerwise"), strict=True)]
    rows = np.random.default_rng(0).standard_normal((6, 4, 2, 32)).astype(np.float32)
    codes, scales = twin.quantize_row(rows, "mxfp8")
    for layer in range(2):
        for name in ("key", "value"):
            pools[0].plane(name, layer).numpy()[...] = codes.view(ml_dtypes.float8_e4m3fn)
            pools[0].plane(f"{name}_scale", layer).numpy()[...] = scales
            pools[1].plane(name, layer).numpy()[...] = 0
    arguments = [
        [pool.plane(name + suffix, layer) for layer in range(2) for name in ("key", "value")]
        for suffix in ("", "_scale")
        for pool in pools
    ]
    transfer_blocks(*arguments[:2], [(2, 5), (3, 1)], source_scales=arguments[2], target_scales=arguments[3])
    wanted, wanted_scales = twin.quantize_row(twin.dequantize_row(codes, "mxfp8", scales), "int4_token")
    for layer in range(2):
        for name in ("key", "value"):
            for a, b in ((2, 5), (3, 1)):
                assert (pools[1].plane(name, layer).numpy()[b] == wanted[a]).all()
                stored = np.ascontiguousarray(pools[1].plane(f"{name}_scale", layer).numpy()[b])
                assert stored.tobytes() == wanted_scales[a].tobytes()
            assert not pools[1].plane(name, layer).numpy()[[0, 2, 3, 4]].any()


@pytest.fixture
def threads() -> Iterator[None]:
    set_num_threads(4)
    yield
    set_num_threads(None)


@pytest.mark.usefixtures("threads")
@together("names", [("float32", "int8_token"), ("int8_token", "mxfp8"), ("mxfp8", "bfloat16")])
def test_shared_work_is_complete(names):
    """Blocks that four threads share, one target being written by many pairs."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((300, 16, 4, 64)).astype(np.float32)
    pairs = np.stack([rng.permutation(np.arange(1, 300)), rng.permutation(np.arange(1, 300))], 1)
    pairs[::7, 1] = 5
    codes, scales = (numbers, None) if names[0] == "float32" else quantize(numbers, names[0])
    if names[1] in DTYPES:
        target, stored = np.full(numbers.shape, np.nan, DTYPES[names[1]]), None
    else:
        target, stored = (np.full_like(each, 0x7F) for each in quantize(numbers, names[1]))
    transfer_blocks(codes, target, pairs, source_scales=scales, target_scales=stored)
    read = numbers if scales is None else dequantize(codes, names[0], scales)
    expected = read.astype(target.dtype) if stored is None else quantize(read, names[1])[0]
    last = {int(b): int(a) for a, b in pairs}
    assert target[list(last)].tobytes() == expected[list(last.values())].tobytes()
    others = np.setdiff1d(np.arange(300), list(last))
    untouched = target[others].astype(np.float32)
    assert (
        np.isnan(untouched) if stored is None else untouched == np.full(1, 0x7F, target.dtype).astype(np.float32)
    ).all()


# ---- latents


LATENT_ROWS = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352, "float8_e4m3fn": 576, "float32": 576, "bfloat16": 576}


def latents(name: str, num_blocks: int) -> Any:
    if name in DTYPES:
        return np.full((num_blocks, 4, 576), np.nan, DTYPES[name])
    dtype = ml_dtypes.float8_e4m3fn if name == "float8_e4m3fn" else np.uint8
    return np.full((num_blocks, 4, LATENT_ROWS[name]), 0x7F, np.uint8).view(dtype)


@together("names", [(a, b) for a in LATENT_ROWS for b in LATENT_ROWS if a != b and not {a, b} <= set(DTYPES)])
@on_every_isa
def test_latents_are_converted_as_by_the_twin(names):
    rows = np.random.default_rng(0).standard_normal((28, 576)).astype(np.float32)
    source, target, expected = latents(names[0], 7), latents(names[1], 8), latents(names[1], 8)
    factors = [0.02 if name == "float8_e4m3fn" else None for name in names]
    write_latent(rows[:, :512], rows[:, 512:], source, None, np.arange(28), scale=factors[0])
    held = source if names[0] in DTYPES else source.copy()
    for a, b in PAIRS:
        one = np.concatenate([held[:1], held[a : a + 1]])  # the null block reads as zeros
        read = gather_latent(one, None, [[1]], [4], latent_scale=factors[0])
        write_latent(read[:, :512], read[:, 512:], expected, None, np.arange(4 * b, 4 * b + 4), scale=factors[1])
    transfer_blocks(source, target, PAIRS, source_scales=factors[0], target_scales=factors[1])
    assert target.tobytes() == expected.tobytes()


def test_latents_of_bytes_equal_the_twin():
    rows = np.random.default_rng(1).standard_normal((8, 576)).astype(ml_dtypes.bfloat16)
    source, target = rows.reshape(2, 4, 576), np.zeros((2, 4, 656), np.uint8)
    transfer_blocks(source, target, [(1, 1)])
    for got, row in zip(target[1], source[1], strict=True):
        assert got.tobytes() == reference.fp8_ds_mla(row.astype(np.float32))


# ---- errors


def planes(name: str, heads: int = 3) -> tuple[Any, Any]:
    side = Side(name, 8)
    return side.codes[:, :, :heads], side.scale


INT8, INT8_SCALES = planes("int8_token")


@together(
    ("target", "options", "error", "words"),
    [
        (
            INT8,
            {},
            errors.UnsupportedDtype,
            "between caches of different formats, with source_scales= and target_scales=",
        ),
        (INT8, {"target_scales": 1.0}, errors.UnsupportedOption, "target_scale is not an array of stored scales"),
        (INT8[:, :, :2], {"target_scales": INT8_SCALES[:, :, :2]}, errors.ShapeError, "kv heads must be equal"),
        (INT8[..., :32], {"target_scales": INT8_SCALES}, errors.ShapeError, "the head_dim must be equal"),
        (INT8, {"target_scales": INT8_SCALES, "source_scales": 2.0}, errors.UnsupportedOption, "has no format"),
        (INT8, {"target_scales": (INT8_SCALES, 0.5)}, errors.UnsupportedOption, "is not nvfp4"),
        (INT8, {"target_scales": INT8_SCALES, "pairs": [(1, 8)]}, errors.InvalidBlock, "the target of pair 0 is 8"),
        (INT8, {"target_scales": INT8_SCALES, "pairs": [(0, 1)]}, errors.InvalidBlock, "reserved null block"),
        (
            INT8,
            {"target_scales": INT8_SCALES, "pairs": [(1, 2), (2, 2)], "independent": True},
            errors.UnsupportedOption,
            "both write block 2",
        ),
    ],
)
def test_refusals(target, options, error, words):
    before = INT8.base.tobytes(), INT8_SCALES.base.tobytes()
    arguments = {"pairs": [(1, 1)]} | options
    with pytest.raises(error) as raised:
        transfer_blocks(np.ones((7, *SHAPE), np.float32), target, arguments.pop("pairs"), **arguments)
    assert words in str(raised.value)
    assert (INT8.base.tobytes(), INT8_SCALES.base.tobytes()) == before


def test_written_scales_are_apart():
    source, target = Side("int8_token", 7), Side("float8_token", 7)
    with pytest.raises(errors.UnsupportedOption, match=r"target_scales.*shares memory with source_scales"):
        transfer_blocks(source.codes, target.codes, PAIRS, source_scales=source.plane, target_scales=source.plane)


@together(
    ("target", "scales", "words"),
    [
        (INT8[..., :8], INT8_SCALES, "source_cache has rows of"),
        (INT8, np.float32(3), "target_scale is not an array of stored scales"),
        (INT8, INT8_SCALES[:, :1], "target_scale has shape"),
    ],
)
def test_errors_of_a_conversion_name_its_pair_of_caches(target, scales, words):
    plain = np.ones((7, *SHAPE), np.float32)
    with pytest.raises(errors.PagecoreError, match=rf"source_caches\[1\] and target_caches\[1\]: .*{words}"):
        transfer_blocks([plain, plain], [plain.copy(), target], [(1, 1)], target_scales=[None, scales])
    rows, narrow = np.zeros((7, SHAPE[0], 656), np.uint8), np.zeros((7, SHAPE[0], 570), np.float32)
    with pytest.raises(errors.ShapeError, match=r"source_caches\[1\] and target_caches\[1\]: source: latent_cache"):
        transfer_blocks([plain, narrow], [plain.copy(), rows], [(1, 1)])


def test_rows_of_latents_of_other_lengths_are_refused():
    with pytest.raises(errors.ShapeError, match="576"):
        transfer_blocks(np.zeros((2, 4, 570), np.float32), np.zeros((2, 4, 656), np.uint8), [(1, 1)])
