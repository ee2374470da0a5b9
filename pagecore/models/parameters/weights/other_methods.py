"""Formats of further quantisation methods: vectors with codebooks (AQLM, VPTQ), trellises (EXL3), grids and integers.

Source: the quantisers of transformers (AQLM, BitNet, EETQ, FP-Quant, Four Over Six, HIGGS, Metal, Quanto, SINQ, SpQR),
VPTQ, ExLlamaV2, ExLlamaV3, and the packages sinq and spqr_quant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.weights.formats import WeightFormat, grouped
from pagecore.models.parameters.weights.reading import refuse

__all__ = ["OTHER_METHODS"]


def _integer(fields: Fields, name: str, default: int, *, max: int) -> int:
    given = fields.given(name)
    if given is None:
        return default
    if type(given) is not int or not 1 <= given <= max:
        refuse(fields, name)
    return given


def _aqlm(fields: Fields) -> WeightFormat:
    """Codes of each group of weights in 8 or 16 bits, codebooks of each matrix, and a scale of each output."""
    inputs, outputs = (_integer(fields, f"{name}_group_size", size, max=256) for name, size in (("in", 8), ("out", 1)))
    books = _integer(fields, "num_codebooks", 1, max=256)
    bits = _integer(fields, "nbits_per_codebook", 16, max=16)
    stored = 8 if bits <= 8 else 16
    return _vectors(
        "aqlm",
        (outputs, inputs),
        books * stored,
        matrix_bits=books * 2**bits * inputs * outputs * 16,
        output_bits=Fraction(16, outputs),
    )


def _vptq(fields: Fields) -> WeightFormat:
    """Codes of vectors of outputs, and of what the first codebook leaves; all modules have the same ones."""
    layers, shared = fields.given("config_for_layers"), fields.given("shared_layer_config")
    found = [each for part in (shared, layers) if isinstance(part, Mapping) for each in part.values()]
    if not found or not all(isinstance(each, Mapping) for each in found):
        refuse(fields, "config_for_layers")
    formats = {_of_vptq(Fields(each, fields.source, fields.name("config_for_layers"))) for each in found}
    if len(formats) > 1:
        refuse(fields, "config_for_layers")
    return formats.pop()


def _of_vptq(part: Fields) -> WeightFormat:
    """Return the format of a module; lists of two have the sizes of outliers, which must be none, and of the others."""
    length, first = _second(part, "vector_lens", max=256), _second(part, "num_centroids", max=1 << 24)
    left = part.given("num_res_centroids")
    rest = (
        0
        if left is None or (isinstance(left, list) and left[1:] == [-1])
        else _second(part, "num_res_centroids", max=1 << 24, min=0)
    )
    if part.given("outlier_size") not in (None, 0):
        refuse(part, "outlier_size")
    groups = _integer(part, "group_num", 1, max=1 << 16)
    codes = (first - 1).bit_length() + (max(rest, 1) - 1).bit_length()
    per_input = 32 * bool(part.given("enable_norm")) + 16 * bool(part.given("enable_perm"))
    books = groups * (first + rest) * length * 16
    return _vectors("vptq", (length, 1), codes, matrix_bits=books, input_bits=per_input)


def _second(part: Fields, name: str, *, max: int, min: int = 1) -> int:
    listed = part.given(name)
    if not isinstance(listed, list | tuple) or len(listed) != 2 or type(listed[1]) is not int:
        refuse(part, name)
    if not min <= listed[1] <= max:
        refuse(part, name)
    return int(listed[1])


def _vectors(name: str, group: tuple[int, int], codes: int, **parts: Any) -> WeightFormat:
    """Return a format with a code of some bits for each group of weights."""
    mean = Fraction(codes, group[0] * group[1])
    return WeightFormat(name, mean, group=group, scale_bits=codes, **parts)


def _exllama(fields: Fields, *, has_signs: bool) -> WeightFormat:
    """Codes of some bits on average, and the head in bits of its own; EXL3 has a number for each input and output."""
    for name in ("module_include", "scope", "non_routed_quantization", "base_quantization_config"):
        if fields.given(name) is not None:  # parts of the model have another format
            refuse(fields, name)
    bits = [_mean_bits(fields, name) for name in ("bits", "head_bits")]
    ends: dict[str, Any] = {"input_bits": 16, "output_bits": Fraction(16)} if has_signs else {}
    return WeightFormat("exl3" if has_signs else "exl2", bits[0], element_bits=bits[0], head_bits=bits[1], **ends)


def _mean_bits(fields: Fields, name: str) -> Fraction:
    given = fields.given(name)
    if given is None and name == "head_bits":
        return Fraction(0)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 1 <= given <= 8:
        refuse(fields, name)
    return Fraction(str(given))


def _higgs(fields: Fields) -> WeightFormat:
    """Points of a grid, a scale of each group, and two tables of each matrix."""
    bits = fields.given("bits") if fields.given("bits") is not None else 4
    if bits not in (2, 3, 4) or isinstance(bits, bool):
        refuse(fields, "bits")
    size = _integer(fields, "group_size", 256, max=1 << 16)
    return replace(grouped("higgs", int(bits), size, 16), matrix_bits=16 * (2**bits + 2 * 4**bits))


def _bitnet(fields: Fields) -> WeightFormat:
    """Three values in two bits, with a scale of each matrix; weights that are quantised while running keep 16 bits."""
    if fields.given("quantization_mode") not in (None, "offline"):
        refuse(fields, "quantization_mode")
    return WeightFormat("int2", Fraction(2), element_bits=2, scale_bits=16)


def _quanto(fields: Fields) -> WeightFormat:
    known = {"int8": (8, 0, 16), "float8": (8, 0, 16), "int4": (4, 128, 32), "int2": (2, 128, 32)}
    name = fields.given("weights") if fields.given("weights") is not None else "int8"
    if not isinstance(name, str) or name not in known:
        refuse(fields, "weights")
    return grouped("fp8" if name == "float8" else name, *known[name])


def _eetq(fields: Fields) -> WeightFormat:
    if fields.given("weights") not in (None, "int8"):
        refuse(fields, "weights")
    return grouped("int8", 8, 0, 16)


def _metal(fields: Fields) -> WeightFormat:
    """Integers with a scale and a bias of each group."""
    bits = _integer(fields, "bits", 4, max=8)
    if bits not in (2, 4, 8):
        refuse(fields, "bits")
    return grouped(f"int{bits}", bits, _integer(fields, "group_size", 64, max=1 << 16), 32)


def _spqr(fields: Fields) -> WeightFormat:
    """Mean bits of the arrays of all modules, whose lengths the config has: 64 bits for 16 weights, and outliers."""
    for name, value in (("bits", 3), ("beta1", 16), ("beta2", 16)):
        if fields.given(name) not in (None, value):
            refuse(fields, name)
    shapes = fields.given("shapes")
    if not isinstance(shapes, Mapping) or not shapes:
        refuse(fields, "shapes")
    numbers = {"dense_weights": 0, "row_offsets": 0, "col_vals": 0, "in_perm": 0}
    for name, shape in shapes.items():
        part = str(name).removesuffix(".shape").rpartition(".")[2]
        length = shape[0] if isinstance(shape, list | tuple) and len(shape) == 1 else shape
        if part not in numbers or type(length) is not int or not 0 <= length < 1 << 40:
            refuse(fields, "shapes")
        numbers[part] += length
    dense = numbers.pop("dense_weights")
    if not dense:
        refuse(fields, "shapes")
    bits = Fraction(64 * dense + 32 * sum(numbers.values()), 16 * dense)
    return WeightFormat("spqr", bits, element_bits=bits)


# Bits of a number in SINQ, which packs ten numbers of three bits in 32.
_SINQ_BITS: Mapping[int, Fraction] = {2: Fraction(2), 3: Fraction(32, 10), 4: Fraction(4), 8: Fraction(8)}


def _sinq(fields: Fields) -> WeightFormat:
    """Integers with a scale and a zero of each group, and a scale of each input."""
    bits, size = _integer(fields, "nbits", 4, max=8), _integer(fields, "group_size", 64, max=1 << 16)
    if bits not in _SINQ_BITS:
        refuse(fields, "nbits")
    for name, known in (("method", ("sinq", "asinq")), ("tiling_mode", ("1D",))):
        if fields.given(name) not in (None, *known):
            refuse(fields, name)
    return replace(grouped(f"int{bits}", _SINQ_BITS[bits], size, 32), input_bits=16)


def _mxfp8(fields: Fields) -> WeightFormat:
    """Floats of 8 bits, 32 of which share a power of two."""
    if fields.given("moe_quant_algo") is not None:  # experts have another format
        refuse(fields, "moe_quant_algo")
    if fields.given("weight_block_size") not in (None, [1, 32], (1, 32)):
        refuse(fields, "weight_block_size")
    return grouped("mxfp8", 8, 32, 8)


def _float4(dtype: str, *copies: str) -> Callable[[Fields], WeightFormat]:
    """Return a reader of 4-bit floats; `dtype` names their kind, and one of `copies` is true if 16 bits are stored."""

    def read(fields: Fields) -> WeightFormat:
        for name in copies:
            if fields.given(name):
                refuse(fields, name)
        kind = fields.given(dtype) if fields.given(dtype) is not None else "nvfp4"
        if kind not in ("nvfp4", "mxfp4"):
            refuse(fields, dtype)
        return grouped("nvfp4", 4, 16, 8, matrix_bits=64) if kind == "nvfp4" else grouped("mxfp4", 4, 32, 8)

    return read


OTHER_METHODS: Mapping[str, Callable[[Fields], WeightFormat]] = {
    "aqlm": _aqlm,
    "bitnet": _bitnet,
    "eetq": _eetq,
    "exl2": lambda fields: _exllama(fields, has_signs=False),
    "exl3": lambda fields: _exllama(fields, has_signs=True),
    "fouroversix": _float4("dtype", "keep_master_weights"),
    "fp_quant": _float4("forward_dtype", "store_master_weights", "pseudoquantization"),
    "higgs": _higgs,
    "metal": _metal,
    "mxfp8": _mxfp8,
    "quanto": _quanto,
    "sinq": _sinq,
    "spqr": _spqr,
    "vptq": _vptq,
}
