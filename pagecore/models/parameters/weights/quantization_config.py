"""Bytes of weights: the format of a checkpoint's matrices, from its `quantization_config` or by name.

Sources: the quantisation configs of transformers (fine-grained FP8, GPTQ, AWQ, AutoRound, bitsandbytes, HQQ, MXFP4,
torchao) and of Quark; `compressed_tensors`, `modelopt` and `other_methods` have further ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.cache_format import stored_dtype
from pagecore.models.config_files.fields import Fields, shown
from pagecore.models.config_files.open_config import open_config
from pagecore.models.config_files.quantization import has_unquantised_weights, parts_of, quantization_of
from pagecore.models.encoders.specs import has_encoder
from pagecore.models.multimodal.text_model import text_model
from pagecore.models.parameters.weights.compressed_tensors import read_compressed_tensors
from pagecore.models.parameters.weights.excluded_modules import bits_of_modules, unquantised_modules
from pagecore.models.parameters.weights.formats import DTYPE_BITS, WEIGHT_FORMATS, WeightFormat, float8, grouped
from pagecore.models.parameters.weights.modelopt import read_modelopt
from pagecore.models.parameters.weights.other_methods import OTHER_METHODS
from pagecore.models.parameters.weights.reading import group_size, integers, refuse

__all__ = ["WEIGHT_FORMATS", "WeightFormat", "weight_format"]


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
        `quantization_config` is not an object, or the hf_quant_config.json of ModelOpt cannot be read.
    UnsupportedOption
        An unknown name, or a quantisation that is not known; the message names the field.
    """
    whole = open_config(config)
    text = whole if has_encoder(str(whole.given("model_type"))) else text_model(whole)[1]
    if isinstance(weights, str) and weights in WEIGHT_FORMATS:
        found = WEIGHT_FORMATS[weights]
        return found if weights in DTYPE_BITS else replace(found, other_bits=_dtype_bits(whole, text))
    if not isinstance(weights, str) or weights != "auto":
        raise UnsupportedOption(
            f"weights is {shown(weights)}; use 'auto', bytes, or one of {', '.join(WEIGHT_FORMATS)}"
        )
    fields = quantization_of(whole, text)
    if fields is not None and not has_unquantised_weights(fields):
        found = replace(_quantised(fields), other_bits=_dtype_bits(whole, text))
        return _with_experts(
            found, next((each for each in (fields, text, whole) if each.given("expert_dtype")), fields)
        )
    return WEIGHT_FORMATS[str(stored_dtype(whole, text, "auto"))]


def _with_experts(found: WeightFormat, fields: Fields) -> WeightFormat:
    """Return a format whose experts may have 4 bits, with a scale of 8 bits for 32 of them (DeepSeek-V4)."""
    kind = fields.given("expert_dtype")
    if kind in (None, "fp8"):
        return found
    return replace(found, experts=grouped("mxfp4", 4, 32, 8)) if kind == "fp4" else refuse(fields, "expert_dtype")


def _dtype_bits(whole: Fields, text: Fields) -> int:
    return DTYPE_BITS[str(stored_dtype(whole, text, "auto"))]


def _quantised(fields: Fields) -> WeightFormat:
    found = _method(fields)
    return replace(found, unquantised=(*found.unquantised, *unquantised_modules(fields)), is_read=True)


def _method(fields: Fields) -> WeightFormat:
    method = fields.given("quant_method")
    if fields.given("quant_algo") is not None or len(parts_of(fields)) > 1:
        return read_modelopt(fields)
    if method in ("fp8", "fbgemm_fp8"):
        return float8(fields.given("weight_block_size"), 32, is_by_row=method == "fbgemm_fp8")
    if method == "mxfp4":
        return replace(grouped("mxfp4", 4, 32, 8), is_experts_only=True)
    if method == "awq":
        return _with_zeros(fields)
    if method == "gptq":
        return _gptq(fields)
    if method == "bitsandbytes":
        if fields.given("load_in_8bit") or fields.given("_load_in_8bit"):
            return replace(WEIGHT_FORMATS["int8"], element_bits=8, group=(1, 0), scale_bits=32)
        if fields.given("load_in_4bit") is False:
            return refuse(fields, "load_in_4bit")
        # Absolute maxima of 64 elements are stored in float32, or in 8 bits with maxima of their own.
        scales = (
            Fraction(8, 64) + Fraction(32, 64 * 256) if fields.given("bnb_4bit_use_double_quant") else Fraction(1, 2)
        )
        return WeightFormat("int4", 4 + scales)
    if method == "compressed-tensors":
        return read_compressed_tensors(fields)
    if method in ("auto-round", "intel/auto-round"):
        return _auto_round(fields)
    if method == "hqq":
        return _hqq(fields)
    if method == "torchao":
        return _torchao(fields)
    if method == "quark":
        return _quark(fields)
    if isinstance(method, str) and method in OTHER_METHODS:
        return OTHER_METHODS[method](fields)
    return refuse(fields, "quant_method")


def _with_zeros(fields: Fields) -> WeightFormat:
    return integers(fields, "bits", group_size(fields.given("group_size")), has_zeros=True)


def _gptq(fields: Fields) -> WeightFormat:
    """Return the format of GPTQ, whose inputs each have the number of their group.

    Rules of GPTQModel give modules that a regular expression names other bits or groups.
    """
    found = replace(_with_zeros(fields), input_bits=32)
    rules = fields.given("dynamic")
    modules = []
    for rule, own in rules.items() if isinstance(rules, Mapping) else ():
        if rule.startswith("-:"):  # excluded
            continue
        if not isinstance(own, Mapping):
            return refuse(fields, "dynamic")
        both = {name: own.get(name, fields.given(name)) for name in ("bits", "group_size")}
        part = Fields(both, fields.source, fields.name(f"dynamic.{rule}"))
        modules.append((f"re:{rule.removeprefix('+:')}", replace(_with_zeros(part), input_bits=32)))
    return replace(found, modules=tuple(modules), head_bits=found.bits if fields.given("lm_head") is True else 0)


def _auto_round(fields: Fields) -> WeightFormat:
    """Return the format of AutoRound: integers with scales and zeros, or floats in blocks."""
    kind, size = str(fields.given("data_type") or "int"), group_size(fields.given("group_size"))
    bits = fields.given("bits")
    if any(own != bits and own < 16 for own in bits_of_modules(fields).values()):
        return refuse(fields, "extra_config")
    if kind.startswith("int"):
        return integers(fields, "bits", size, has_zeros=True)
    if kind.startswith("nv_fp") and bits == 4:
        return grouped("nvfp4", 4, 16, 8, matrix_bits=32)
    if kind.startswith("mx_fp") and bits in (4, 8):
        return grouped(f"mxfp{bits}", bits, 32, 8)
    return refuse(fields, "data_type")


def _hqq(fields: Fields) -> WeightFormat:
    """Return the format of HQQ, whose scales and zeros have 16 bits each."""
    given = fields.given("quant_config")
    weights = given.get("weight_quant_params") if isinstance(given, Mapping) else None
    if not isinstance(weights, Mapping):  # bits of each kind of module
        return refuse(fields, "quant_config")
    part = Fields(weights, fields.source, fields.name("quant_config.weight_quant_params"))
    found = integers(part, "nbits", group_size(weights.get("group_size")), has_zeros=True)
    size = found.group[1]
    return grouped(found.name, found.element_bits, size, 32)


# Configs of torchao: bits of an element, size of a group (0 for all inputs of an output) and bits of its scale and
# zero, for a config that does not give the size.
_TORCHAO: Mapping[str, tuple[int, int, int]] = {
    "Int4WeightOnlyConfig": (4, 128, 32),
    "Int8WeightOnlyConfig": (8, 0, 16),
    "Int8DynamicActivationInt8WeightConfig": (8, 0, 16),
    "Int8DynamicActivationInt4WeightConfig": (4, 32, 16),
}


def _torchao(fields: Fields) -> WeightFormat:
    """Return the format of a config of torchao: an object with `_type` and `_data`, or a name in older files."""
    given, name, data = fields.given("quant_type"), None, None
    if isinstance(given, str):
        name, data = "".join(map(str.capitalize, given.split("_"))) + "Config", fields.given("quant_type_kwargs")
    else:
        chosen = given.get("default") if isinstance(given, Mapping) else None
        if isinstance(chosen, Mapping):
            name, data = chosen.get("_type"), chosen.get("_data")
    options: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
    if name in ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"):
        return float8(None, 32, is_by_row="PerRow" in str(options.get("granularity")))
    if not isinstance(name, str) or name not in _TORCHAO:
        return refuse(fields, "quant_type")
    bits, size, scale_bits = _TORCHAO[name]
    return grouped(f"int{bits}", bits, group_size(options.get("group_size", size)), scale_bits)


def _quark(fields: Fields) -> WeightFormat:
    """Return the format of Quark's weights: floats by matrix or row, or numbers in groups."""
    whole = fields.given("global_quant_config")
    weights = whole.get("weight") if isinstance(whole, Mapping) else None
    if not isinstance(weights, Mapping):  # a list quantises twice
        return refuse(fields, "global_quant_config")
    kind, scheme, size = weights.get("dtype"), weights.get("qscheme"), group_size(weights.get("group_size"))
    if kind == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
        return float8(None, 32, is_by_row=scheme == "per_channel")
    if kind == "fp4" and scheme == "per_group" and size == 32:
        return grouped("mxfp4", 4, 32, 8)
    if kind in ("int4", "uint4") and scheme == "per_group":
        return grouped("int4", 4, size, 20)
    if kind == "int8" and scheme in ("per_tensor", "per_channel"):
        return replace(WEIGHT_FORMATS["int8"], element_bits=8, group=(int(scheme == "per_channel"), 0), scale_bits=32)
    return refuse(fields, "global_quant_config")
