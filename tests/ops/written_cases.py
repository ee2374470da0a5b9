"""Written caches for tests: codes and scales in any layout, their expected bytes, and hard numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagecore.arrays.dtypes.formats import FORMATS, Format, as_format
from tests.ops import formats_twin as twin
from tests.ops.cases import DTYPES

ALL = (*FORMATS, "nvfp4_4over6")
LAYOUTS = ("NHD", "HND", "blockwise", "interleaved", "padded", "reversed")
# A byte that no test writes; as a float8 code and in a scale it is NaN.
POISON = 0xFF


def kind_of(format: str) -> Format:
    return as_format(format.removesuffix("_4over6"))


def factor_of(format: str) -> float:
    """Return a given factor for formats that take one, 1 for the others."""
    return 0.37 if kind_of(format).takes_factor else 1.0


def poisoned(layout: str, shape: tuple[int, int, int, int], dtype: Any) -> npt.NDArray[Any]:
    """Return an array ``[num_blocks, block_size, heads, dim]`` of poison in one of LAYOUTS."""
    blocks, tokens, heads, dim = shape
    dtype = np.dtype(dtype)

    def filled(*sides: int) -> npt.NDArray[Any]:
        return np.full((*sides[:-1], sides[-1] * dtype.itemsize), POISON, np.uint8).view(dtype)

    if layout == "HND":
        return filled(blocks, heads, tokens, dim).transpose(0, 2, 1, 3)
    if layout == "blockwise":
        return filled(blocks, 3, tokens, heads, dim)[:, 1]
    if layout == "interleaved":
        return filled(blocks, tokens, 2, heads, dim)[:, :, 1]
    if layout == "padded":
        return filled(blocks, tokens, heads, dim + 3)[..., 1 : dim + 1]
    made = filled(*shape)
    return made[::-1, ::-1, ::-1] if layout == "reversed" else made


class Stored:
    """Poisoned codes and scales of one cache, and the expected bytes of what is written to it."""

    def __init__(
        self,
        format: str,
        layout: str,
        blocks: int,
        block_size: int,
        heads: int,
        dim: int,
        factor: float | None = None,
    ) -> None:
        self.format, self.kind, self.dim = format, kind_of(format), dim
        self.factor = factor_of(format) if factor is None else factor
        shape = blocks, block_size, heads
        self.codes = poisoned(layout, (*shape, self.kind.row_codes(dim)), self.kind.dtype.numpy)
        self.plane: npt.NDArray[Any] | None = None
        if self.kind.scale_dtype is not None:
            self.plane = poisoned(layout, (*shape, self.kind.row_scales(dim)), self.kind.scale_dtype.numpy)
        self.expected_codes, self.expected_scales = self.bytes()

    def arguments(self, name: str) -> dict[str, Any]:
        """Return the arguments of `write_kv` and `paged_attention` for a cache named "key" or "value"."""
        given: dict[str, Any] = {f"{name}_cache": self.codes}
        if self.plane is not None:
            given[f"{name}_scale"] = self.plane
        if self.kind.takes_factor:
            suffix = "scale" if self.plane is None else "global_scale"
            given[f"{name}_{suffix}"] = self.factor
        return given

    def expect(self, rows: npt.NDArray[Any], slots: Any) -> None:
        """Note that ``rows[i]``, ``[heads, dim]``, is written to ``slots[i]``."""
        codes, scales = twin.quantize_row(rows, self.format, self.factor)
        size = self.codes.shape[1]
        for i, slot in enumerate(slots):
            if slot >= 0:
                self.expected_codes[slot // size, slot % size] = codes[i]
                self.expected_scales[slot // size, slot % size] = scales[i]

    def bytes(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        codes = np.ascontiguousarray(self.codes).view(np.uint8)
        if self.plane is None:
            return codes, np.zeros((*codes.shape[:3], 0), np.uint8)
        return codes, np.ascontiguousarray(self.plane).view(np.uint8).reshape(*codes.shape[:3], -1)

    def check(self) -> None:
        codes, scales = self.bytes()
        np.testing.assert_array_equal(scales, self.expected_scales)
        np.testing.assert_array_equal(codes, self.expected_codes)

    def numbers(self) -> npt.NDArray[np.float32]:
        """Return the stored numbers, ``[num_blocks, block_size, heads, dim]``; poison is NaN or any number."""
        codes, scales = self.bytes()
        return twin.dequantize_row(codes, self.format, scales, self.factor)


def hard_numbers(count: int, dim: int, dtype: str = "float32", seed: int = 0) -> npt.NDArray[Any]:
    """Return rows with every special number, ties of all formats, limits of their scales, and a wide range."""
    assert count >= 80
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(count, dim)) * np.exp(rng.normal(size=(count, 1)) * 8)).astype(np.float32)
    x[0], x[1], x[2, ::3], x[3, dim // 2], x[4, ::2] = 0, -0.0, np.nan, np.inf, -np.inf
    x[5], x[6], x[7], x[8] = 3.4e38, 1e-42 * rng.normal(size=dim), 1e-7 * rng.normal(size=dim), np.nan
    x[9, ::2], x[9, 1::2] = np.inf, np.nan
    x[10:40] = rng.integers(-24, 25, size=(30, dim)) / 4
    x[40:60] = rng.integers(-24, 25, size=(20, dim)) / 4 * 2.0 ** rng.integers(-20, 20, size=(20, 1))
    for i, limit in enumerate((6, 448, 57344, 127)):
        x[60 + 3 * i : 63 + 3 * i] = np.float32(limit) * (1 + np.array([[-1], [0], [1]], np.float32) * 2.0**-23)
    x[72:80] = np.float32(2.0) ** rng.integers(-130, 127, size=(8, dim))
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(DTYPES[dtype])


def finite_numbers(count: int, dim: int, dtype: str = "float32", seed: int = 0) -> npt.NDArray[Any]:
    """Return rows of finite numbers and zeros of both signs; the standard deviation of each row is a power of two."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(count, dim)) * 2.0 ** rng.integers(-6, 4, size=(count, 1))).astype(np.float32)
    x[:, ::7], x[:, 3::11] = 0, -0.0
    return x.astype(DTYPES[dtype])
