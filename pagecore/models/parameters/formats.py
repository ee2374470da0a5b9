"""Bytes of weights: the format of a checkpoint's matrices, from its `quantization_config` or by name.

Sources: the quantisation configs of transformers (fine-grained FP8, GPTQ, AWQ, bitsandbytes, MXFP4), of
compressed-tensors and of ModelOpt.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config import has_encoder, text_model
from pagecore.models.dtypes import stored_dtype
from pagecore.models.fields import Fields, shown
from pagecore.models.opening import open_config
from pagecore.models.parameters.tally import QUANTISED_KINDS, Kind, Matrix, Parameters
from pagecore.models.parameters.unquantised import names_module, unquantised_modules
from pagecore.models.quantization import quantization_of
from pagecore.storage.checks import ceil_div

__all__ = ["WEIGHT_FORMATS", "WeightFormat", "weight_format"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Bits of a parameter.

    Attributes
    ----------
    name : str
    bits : Fraction
        Mean bits of an element of a layer's matrix, its share of the scales included; matrices whose sides are not
        multiples of `group` have more.
    other_bits : int
        Bits of a parameter that is not quantised: of embeddings, norms, biases, routers and vision towers.
    is_experts_only : bool
        Matrices outside of experts are not quantised.
    element_bits : int
        Bits of an element alone; 0 if `bits` are exact.
    group : (int, int)
        Outputs and inputs that share a scale; 0 is all of them.
    scale_bits : int
        Bits of a scale, and of a zero point if there is one.
    matrix_bits, input_bits : int
        Bits of each matrix, such as a global scale, and of each of its inputs, such as the order of GPTQ's columns.
    unquantised : tuple of str
        Patterns of the modules that the checkpoint does not quantise: names, globs, and regular expressions after
        "re:".
    is_read : bool
        True if the format is that of a `quantization_config`, not a name that the caller gave.
    """

    name: str
    bits: Fraction
    other_bits: int = 16
    is_experts_only: bool = False
    element_bits: int = 0
    group: tuple[int, int] = (0, 0)
    scale_bits: int = 0
    matrix_bits: int = 0
    input_bits: int = 0
    unquantised: tuple[str, ...] = ()
    is_read: bool = False

    @property
    def is_quantised(self) -> bool:
        """True if matrices have scales; a checkpoint may leave some of its matrices unquantised."""
        return self.name not in _DTYPES

    def nbytes(self, parameters: Parameters, ranks: int = 1, data_parallel: int = 1) -> int:
        """Return the bytes of the weights on one rank, scales included."""
        total = Fraction(0)
        for kind, count in parameters.on_rank(ranks, data_parallel).items():
            if kind not in QUANTISED_KINDS or not self.is_quantised:
                total += count * self.other_bits
        if self.is_quantised:
            shares = parameters.shares(ranks, data_parallel)
            for matrix, copies in parameters.matrices.items():
                total += Fraction(copies * self._matrix(matrix), shares[matrix.split])
        return math.ceil(total / 8)

    def count_unquantised(self, parameters: Parameters) -> int:
        """Return the parameters of layers' matrices that the checkpoint leaves unquantised."""
        return sum(m.inputs * m.outputs * n for m, n in parameters.matrices.items() if not self._stores(m))

    def _stores(self, matrix: Matrix) -> bool:
        if self.is_experts_only and matrix.kind is not Kind.EXPERT:
            return False
        return not any(names_module(pattern, matrix.name) for pattern in self.unquantised)

    def _matrix(self, matrix: Matrix) -> int | Fraction:
        """Return the bits of a matrix."""
        elements = matrix.inputs * matrix.outputs
        if not self._stores(matrix):
            return elements * self.other_bits
        if not self.element_bits:
            return elements * self.bits
        outputs, inputs = self.group
        groups = ceil_div(matrix.outputs, outputs or matrix.outputs) * ceil_div(matrix.inputs, inputs or matrix.inputs)
        codes = elements * self.element_bits + groups * self.scale_bits
        return codes + self.matrix_bits + matrix.inputs * self.input_bits


_DTYPES = {"float32": 32, "bfloat16": 16, "float16": 16}
# Group sizes are those that checkpoints use: int4 128 with a scale and a zero point, nvfp4 16, mxfp4 32.
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    **{name: WeightFormat(name, Fraction(bits), bits) for name, bits in _DTYPES.items()},
    "fp8": WeightFormat("fp8", Fraction(8)),
    "int8": WeightFormat("int8", Fraction(8)),
    "int4": WeightFormat("int4", 4 + Fraction(20, 128)),
    "nvfp4": WeightFormat("nvfp4", 4 + Fraction(8, 16)),
    "mxfp4": WeightFormat("mxfp4", 4 + Fraction(8, 32)),
}
_ALGORITHMS = {"FP8": "fp8", "NVFP4": "nvfp4", "W4A16_AWQ": "int4", "W4A8_AWQ": "int4", "INT8_SQ": "int8"}


def weight_format(config: str | os.PathLike[str] | Mapping[str, Any], weights: str = "auto") -> WeightFormat:
    """Return the format of a model's weights.

    Parameters
    ----------
    config : str, path or dict
        As for `specs_from_config`.
    weights : str
        "auto" reads `quantization_config` and the dtype of the config; a name of `WEIGHT_FORMATS` overrides it.

    Raises
    ------
    ConfigError
        `quantization_config` is not an object.
    UnsupportedOption
        An unknown name, or a quantisation that is not known; the message names the field.
    """
    whole = open_config(config)
    text = whole if has_encoder(str(whole.given("model_type"))) else text_model(whole)[1]
    if weights in WEIGHT_FORMATS:
        found = WEIGHT_FORMATS[weights]
        return found if weights in _DTYPES else replace(found, other_bits=_dtype_bits(whole, text))
    if weights != "auto":
        raise UnsupportedOption(
            f"weights is {shown(weights)}; use 'auto', bytes, or one of {', '.join(WEIGHT_FORMATS)}"
        )
    fields = quantization_of(whole, text)
    if fields is not None:
        return replace(_quantised(fields), other_bits=_dtype_bits(whole, text))
    return WEIGHT_FORMATS[str(stored_dtype(whole, text, "auto"))]


def _dtype_bits(whole: Fields, text: Fields) -> int:
    return _DTYPES[str(stored_dtype(whole, text, "auto"))]


def _quantised(fields: Fields) -> WeightFormat:
    found = _method(fields)
    return replace(found, unquantised=unquantised_modules(fields), is_read=True)


def _method(fields: Fields) -> WeightFormat:
    method = fields.given("quant_method")
    if fields.given("quant_algo") is not None or isinstance(fields.given("quantization"), Mapping):
        return _modelopt(fields)
    if method in ("fp8", "fbgemm_fp8"):
        return _float8(fields.given("weight_block_size"), 32, is_by_row=method == "fbgemm_fp8")
    if method == "mxfp4":
        return replace(_grouped("mxfp4", 4, 32, 8), is_experts_only=True)
    if method in ("gptq", "awq"):
        found = _integers(fields, "bits", _group_size(fields.given("group_size")), has_zeros=True)
        return replace(found, input_bits=32) if method == "gptq" else found
    if method == "bitsandbytes":
        if fields.given("load_in_8bit") or fields.given("_load_in_8bit"):
            return replace(WEIGHT_FORMATS["int8"], element_bits=8, group=(1, 0), scale_bits=32)
        # Absolute maxima of 64 elements are stored in float32, or in 8 bits with maxima of their own.
        scales = (
            Fraction(8, 64) + Fraction(32, 64 * 256) if fields.given("bnb_4bit_use_double_quant") else Fraction(1, 2)
        )
        return WeightFormat("int4", 4 + scales)
    if method == "compressed-tensors":
        return _compressed(fields)
    return _refuse(fields, "quant_method")


def _float8(block: object, scale_bits: int, is_by_row: bool = False) -> WeightFormat:
    """Return float8 with a scale of each block, of each output, or of each matrix."""
    sides: Any = block
    if isinstance(sides, list | tuple) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides):
        bits = Fraction(8) + Fraction(scale_bits, sides[0] * sides[1])
        return WeightFormat("fp8", bits, element_bits=8, group=(sides[0], sides[1]), scale_bits=scale_bits)
    return WeightFormat("fp8", Fraction(8), element_bits=8, group=(int(is_by_row), 0), scale_bits=scale_bits)


def _grouped(name: str, bits: int, size: int, scale_bits: int, matrix_bits: int = 0) -> WeightFormat:
    """Return a format whose scales are those of `size` inputs of an output; 0 for all inputs."""
    mean = Fraction(bits) + (Fraction(scale_bits, size) if size else 0)
    return WeightFormat(name, mean, element_bits=bits, group=(1, size), scale_bits=scale_bits, matrix_bits=matrix_bits)


def _modelopt(fields: Fields) -> WeightFormat:
    inner = fields.given("quantization")
    part = Fields(inner, fields.source, fields.name("quantization")) if isinstance(inner, Mapping) else fields
    name = _ALGORITHMS.get(str(part.given("quant_algo")).upper())
    if name == "nvfp4":
        # Global scales of weights and inputs.
        return _grouped("nvfp4", 4, 16, 8, matrix_bits=64)
    if name == "fp8":
        return replace(_float8(None, 32), matrix_bits=32)
    return WEIGHT_FORMATS[name] if name is not None else _refuse(part, "quant_algo")


def _compressed(fields: Fields) -> WeightFormat:
    """Return the format of the first group of compressed-tensors; others are rare."""
    groups = fields.given("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            part = Fields(weights, fields.source, fields.name(f"config_groups.{name}.weights"))
            size = _group_size(weights.get("group_size"))
            if weights.get("type") == "float" and weights.get("num_bits") == 4:
                return _grouped("nvfp4", 4, 16, 8, matrix_bits=64) if size == 16 else _grouped("mxfp4", 4, 32, 8)
            if weights.get("type") == "float" and weights.get("num_bits") == 8:
                block = weights.get("block_structure") if weights.get("strategy") == "block" else None
                return _float8(block, 16, is_by_row=weights.get("strategy") == "channel")
            return _integers(part, "num_bits", size, has_zeros=not weights.get("symmetric", True))
    return _refuse(fields, "config_groups")


def _integers(fields: Fields, name: str, group: int, has_zeros: bool) -> WeightFormat:
    bits = fields.given(name)
    if type(bits) is not int or bits not in (2, 3, 4, 8):
        return _refuse(fields, name)
    return _grouped(f"int{bits}", bits, group, 16 + (bits if has_zeros else 0))


def _group_size(given: object) -> int:
    """Return the elements that share a scale; 0 for a scale of each channel."""
    return given if isinstance(given, int) and given > 0 else 0


def _refuse(fields: Fields, name: str) -> WeightFormat:
    raise UnsupportedOption(
        f"{fields.source}: {fields.describe(name)}, whose bytes are unknown; pass weights= one of "
        f"{', '.join(WEIGHT_FORMATS)}, or bytes"
    )
