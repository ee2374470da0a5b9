"""Attention cases over quantised caches: the cache of a plain case, quantised by the plain twin."""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pagecore import ops
from pagecore.arrays.dtypes.formats import FORMATS
from tests.ops import formats_twin as twin
from tests.ops.cases import Array, Case, Shape, assert_lse_close, assert_output_close, empty_cache, make_case
from tests.reference import attention as reference

# Dims that every format can store.
DIMS = (64, 96)
# Steps of a batch: prompts and decode rows, or decode rows alone.
MIXED: dict[str, Any] = {"seq_lens": (70, 33, 1, 16, 300, 0), "query_lens": (7, 1, 1, 16, 40, 2)}
DECODE: dict[str, Any] = {"seq_lens": (70, 33, 1, 300, 0)}
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)


@dataclass
class StoredPlanes:
    """Keys or values as the kernel and as the oracle read them.

    Slots that no query attends to have codes of 127 and NaN scales, and are NaN for the oracle.
    """

    codes: Array
    scale: Any  # a given factor, or the plane of the scales
    global_scale: float
    numbers: Array


# Results of the twin, which takes longer than most calls: the cases of many tests have the same cache.
_known: OrderedDict[bytes, tuple[Array, Array, Array]] = OrderedDict()


def quantized(rows: Array, format: str, by_head: Array) -> tuple[Array, Array, Array]:
    """Return codes and scales as bytes, and their numbers, of rows ``[..., heads, dim]``."""
    key = hashlib.sha256(f"{format} {rows.shape}".encode() + by_head.tobytes() + rows.tobytes()).digest()
    if key not in _known:
        parts = [twin.quantize_row(rows[:, :, head], format, float(each)) for head, each in enumerate(by_head)]
        code_bytes, scale_bytes = (np.stack(part, 2) for part in zip(*parts, strict=True))
        numbers = [
            twin.dequantize_row(codes, format, scales, float(each))
            for (codes, scales), each in zip(parts, by_head, strict=True)
        ]
        _known[key] = code_bytes, scale_bytes, np.stack(numbers, 2)
        if len(_known) > 100:
            _known.popitem(last=False)
    return _known[key]


def store(cache: Array, format: str | None, layout: str, factor: float | Array = 1.0) -> StoredPlanes:
    """Quantise a plain cache into codes and scales of a layout; None leaves it plain."""
    if format is None:
        return StoredPlanes(cache, None, 1.0, cache)
    kind = FORMATS[format]
    rows = np.ascontiguousarray(cache).astype(np.float32)
    by_head = np.broadcast_to(np.asarray(factor, np.float32), (rows.shape[2],))
    code_bytes, scale_bytes, numbers = quantized(rows, format, by_head)
    numbers = numbers.copy()
    unused = np.isnan(rows).any(-1)
    codes = empty_cache(layout, (*rows.shape[:3], kind.row_codes(rows.shape[3])), kind.dtype.numpy)
    codes[~unused] = code_bytes.view(kind.dtype.numpy)[~unused]
    numbers[unused] = np.nan
    if kind.scale_dtype is None:
        return StoredPlanes(codes, factor, 1.0, numbers)
    scales = np.ascontiguousarray(scale_bytes).view(kind.scale_dtype.numpy)
    plane = empty_cache(layout, scales.shape, kind.scale_dtype.numpy)
    plane[...] = 255 if kind.scale_dtype.numpy == np.uint8 else np.nan
    plane[~unused] = scales[~unused]
    return StoredPlanes(codes, plane, float(by_head[0]) if format == "nvfp4" else 1.0, numbers)


@dataclass
class FormatCase:
    """A call over a quantised cache, and the plain call that it must agree with."""

    plain: Case
    key: StoredPlanes
    value: StoredPlanes
    known: tuple[Array, Array, Array | None] | None = None  # `expect()` of arrays that do not change

    def run(self, **more: Any) -> Any:
        query, _, _, table, lens = self.plain.arrays
        scales = {"key_scale": self.key.scale, "value_scale": self.value.scale}
        scales |= {"key_global_scale": self.key.global_scale, "value_global_scale": self.value.global_scale}
        return ops.paged_attention(
            query, self.key.codes, self.value.codes, table, lens, **self.plain.options, **scales, **more
        )

    def check(self, **more: Any) -> None:
        """Run with a poisoned output, and compare output and lse with float64 over the dequantised cache."""
        query = self.plain.query
        out = np.full((*query.shape[:2], self.value.numbers.shape[3]), np.nan, query.dtype)
        result, lse = self.run(out=out, return_lse=True, **more)
        assert result is out
        expected, expected_lse, magnitude = self.known or self.expect()
        assert_output_close(out, expected, magnitude)
        assert_lse_close(lse, expected_lse, str(query.dtype))

    def expect(self) -> tuple[Array, Array, Array | None]:
        """Return the output, the lse, and the magnitude of the output if it has narrow heads."""
        query, _, _, table, lens = self.plain.arrays
        arrays = (query, self.key.numbers, self.value.numbers, table, lens)
        expected = reference.paged_attention(*arrays, **self.plain.options)
        if self.value.numbers.shape[3] >= 16:
            return *expected, None
        size = reference.paged_attention(*arrays[:2], np.abs(arrays[2]), *arrays[3:], **self.plain.options)
        return *expected, size[0]


def make_format_case(
    key_format: str | None,
    value_format: str | None = "same",
    shape: Shape | None = None,
    *,
    seed: int = 0,
    factors: tuple[Any, Any] = (1.0, 1.0),
    **options: Any,
) -> FormatCase:
    """Return a case whose keys and values are stored in formats; None for plain, "same" for that of the keys."""
    shape = shape or Shape(dims=DIMS)
    value_format = key_format if value_format == "same" else value_format
    plain = make_case(replace(shape, layout="NHD"), seed=seed, **options)
    key = store(plain.key_cache, key_format, shape.layout, factors[0])
    value = store(plain.value_cache, value_format, shape.layout, factors[1])
    return FormatCase(plain, key, value)


def check_format_case(*arguments: Any, **options: Any) -> None:
    """Check a case; the case and the results of its oracle are those of the last calls with equal arguments.

    A test that runs on every instruction set makes it once.
    """
    _shared(pickle.dumps((arguments, options))).check()


@functools.lru_cache(8)
def _shared(call: bytes) -> FormatCase:
    arguments, options = pickle.loads(call)
    case = make_format_case(*arguments, **options)
    stored = [array for planes in (case.key, case.value) for array in (planes.codes, planes.scale, planes.numbers)]
    for array in (*case.plain.arrays, *stored):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    case.known = case.expect()
    return case
