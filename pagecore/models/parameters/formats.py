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
from pagecore.models.config import text_model
from pagecore.models.dtypes import stored_dtype
from pagecore.models.encoder_decoder import ENCODER_DECODERS
from pagecore.models.fields import Fields, open_config, shown
from pagecore.models.parameters.tally import Kind, Parameters

__all__ = ["WEIGHT_FORMATS", "WeightFormat", "weight_format"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Bits of a parameter.

    Attributes
    ----------
    name : str
    bits : Fraction
        Bits of an element of a layer's matrix, its share of the scales included.
    other_bits : int
        Bits of a parameter that is not quantised: of embeddings, norms, biases, routers and vision towers.
    is_experts_only : bool
        Matrices outside of experts are not quantised.
    """

    name: str
    bits: Fraction
    other_bits: int = 16
    is_experts_only: bool = False

    @property
    def is_quantised(self) -> bool:
        """True if matrices have scales; a checkpoint may leave some of its matrices unquantised."""
        return self.name not in _DTYPES

    def nbytes(self, parameters: Parameters, ranks: int = 1, data_parallel: int = 1) -> int:
        """Return the bytes of the weights on one rank."""
        total = Fraction(0)
        for kind, count in parameters.on_rank(ranks, data_parallel).items():
            is_stored = kind is Kind.EXPERT or (kind is Kind.LINEAR and not self.is_experts_only)
            total += count * (self.bits if is_stored else self.other_bits)
        return math.ceil(total / 8)


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
    UnsupportedOption
        An unknown name, or a quantisation that is not known; the message names the field.
    """
    whole = open_config(config)
    is_encoder_decoder = whole.given("model_type") in ENCODER_DECODERS
    text = whole if is_encoder_decoder else text_model(whole)[1]
    if weights in WEIGHT_FORMATS:
        found = WEIGHT_FORMATS[weights]
        return found if weights in _DTYPES else replace(found, other_bits=_dtype_bits(whole, text))
    if weights != "auto":
        raise UnsupportedOption(
            f"weights is {shown(weights)}; use 'auto', bytes, or one of {', '.join(WEIGHT_FORMATS)}"
        )
    for part in (text, whole):
        given = part.given("quantization_config")
        if isinstance(given, Mapping):
            fields = Fields(given, part.source, part.name("quantization_config"))
            return replace(_quantised(fields), other_bits=_dtype_bits(whole, text))
    return WEIGHT_FORMATS[str(stored_dtype(whole, text, "auto"))]


def _dtype_bits(whole: Fields, text: Fields) -> int:
    return _DTYPES[str(stored_dtype(whole, text, "auto"))]


def _quantised(fields: Fields) -> WeightFormat:
    method = fields.given("quant_method")
    if fields.given("quant_algo") is not None or isinstance(fields.given("quantization"), Mapping):
        return _modelopt(fields)
    if method in ("fp8", "fbgemm_fp8"):
        block: Any = fields.given("weight_block_size")
        scales = Fraction(32, block[0] * block[1]) if isinstance(block, list | tuple) and len(block) == 2 else 0
        return replace(WEIGHT_FORMATS["fp8"], bits=Fraction(8) + scales)
    if method == "mxfp4":
        return replace(WEIGHT_FORMATS["mxfp4"], is_experts_only=True)
    if method in ("gptq", "awq"):
        return _integers(fields, "bits", _group_size(fields.given("group_size")), has_zeros=True)
    if method == "bitsandbytes":
        if fields.given("load_in_8bit") or fields.given("_load_in_8bit"):
            return WEIGHT_FORMATS["int8"]
        # Absolute maxima of 64 elements are stored in float32, or in 8 bits with maxima of their own.
        scales = (
            Fraction(8, 64) + Fraction(32, 64 * 256) if fields.given("bnb_4bit_use_double_quant") else Fraction(1, 2)
        )
        return WeightFormat("int4", 4 + scales)
    if method == "compressed-tensors":
        return _compressed(fields)
    return _refuse(fields, "quant_method")


def _modelopt(fields: Fields) -> WeightFormat:
    inner = fields.given("quantization")
    part = Fields(inner, fields.source, fields.name("quantization")) if isinstance(inner, Mapping) else fields
    name = _ALGORITHMS.get(str(part.given("quant_algo")).upper())
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
                return WEIGHT_FORMATS["nvfp4" if size == 16 else "mxfp4"]
            if weights.get("type") == "float" and weights.get("num_bits") == 8:
                return WEIGHT_FORMATS["fp8"]
            return _integers(part, "num_bits", size, has_zeros=not weights.get("symmetric", True))
    return _refuse(fields, "config_groups")


def _integers(fields: Fields, name: str, group: int, has_zeros: bool) -> WeightFormat:
    bits = fields.given(name)
    if bits not in (2, 3, 4, 8):
        return _refuse(fields, name)
    scales = Fraction(16 + (bits if has_zeros else 0), group) if group else Fraction(0)
    return WeightFormat(f"int{bits}", bits + scales)


def _group_size(given: object) -> int:
    """Return the elements that share a scale; 0 for a scale of each channel."""
    return given if isinstance(given, int) and given > 0 else 0


def _refuse(fields: Fields, name: str) -> WeightFormat:
    raise UnsupportedOption(
        f"{fields.source}: {fields.describe(name)}, whose bytes are unknown; pass weights= one of "
        f"{', '.join(WEIGHT_FORMATS)}, or bytes"
    )
