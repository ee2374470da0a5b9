"""Formats of ModelOpt: one for all matrices, or one for each module.

Source: the quantisation configs of ModelOpt, and their readers in vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.config_files.quantization import MIXED_PRECISION, is_unquantised, parts_of
from pagecore.models.parameters.weights.formats import WEIGHT_FORMATS, WeightFormat, float8, grouped
from pagecore.models.parameters.weights.reading import group_size, refuse

__all__ = ["read_modelopt"]

# Algorithms with a scale of each matrix, of each block, of each output and of each 32 inputs, and others by name.
_FORMATS: Mapping[str, WeightFormat] = {
    "FP8": replace(float8(None, 32), matrix_bits=32),
    "FP8_PB_WO": float8([128, 128], 32),
    "FP8_PER_CHANNEL_PER_TOKEN": float8(None, 32, is_by_row=True),
    "MXFP8": grouped("mxfp8", 8, 32, 8),
    # Global scales of weights and inputs.
    "NVFP4": grouped("nvfp4", 4, 16, 8, matrix_bits=64),
    "W4A16_NVFP4": grouped("nvfp4", 4, 16, 8, matrix_bits=32),
    **dict.fromkeys(("W4A16_AWQ", "W4A8_AWQ"), WEIGHT_FORMATS["int4"]),
    "INT8_SQ": WEIGHT_FORMATS["int8"],
}
_FURTHER_EXPERTS = re.compile(r"\bexperts\.[1-9][0-9]*")


def read_modelopt(fields: Fields) -> WeightFormat:
    """Return the format of an algorithm, or of the modules in `quantized_layers`.

    All experts of a layer are counted as the first one; UnsupportedOption if they differ.
    """
    part = parts_of(fields)[-1]
    if str(part.given("quant_algo")).upper() != MIXED_PRECISION:
        return _of_algorithm(part)
    layers = part.given("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        return refuse(part, "quantized_layers")
    modules, unquantised = {}, []
    for name, layer in layers.items():
        if not isinstance(name, str) or not isinstance(layer, Mapping):
            return refuse(part, "quantized_layers")
        first = _FURTHER_EXPERTS.sub("experts.0", name)
        if first != name:
            if _asked(layer) != _asked(layers.get(first)):
                _refuse_experts(part, name, first)
        elif is_unquantised(layer.get("quant_algo")):
            unquantised.append(name)
        else:
            modules[name] = _of_algorithm(Fields(layer, part.source, part.name(f"quantized_layers.{name}")))
    if not modules:
        return refuse(part, "quantized_layers")
    return replace(
        next(iter(modules.values())),
        modules=tuple(modules.items()),
        unquantised=tuple(unquantised),
        is_modules_only=True,
        head_bits=next((found.bits for name, found in modules.items() if name.endswith("lm_head")), 0),
    )


def _asked(layer: object) -> tuple[str | None, object]:
    """Return the algorithm and the size of groups of an entry, both None without quantisation."""
    algorithm = layer.get("quant_algo") if isinstance(layer, Mapping) else None
    if not isinstance(layer, Mapping) or is_unquantised(algorithm):
        return None, None
    return str(algorithm).upper(), layer.get("group_size")


def _refuse_experts(part: Fields, name: str, first: str) -> NoReturn:
    raise UnsupportedOption(
        f"{part.source}: {part.name('quantized_layers')} has other options for {name} than for {first}, and the "
        f"experts of a layer are counted alike; pass weights= one of {', '.join(WEIGHT_FORMATS)}, or bytes"
    )


def _of_algorithm(part: Fields) -> WeightFormat:
    found = _FORMATS.get(str(part.given("quant_algo")).upper())
    if found is None:
        return refuse(part, "quant_algo")
    size = group_size(part.given("group_size"))
    if found.name == "int4" and size:
        return grouped("int4", 4, size, 20)
    return grouped("nvfp4", 4, size, 8, matrix_bits=found.matrix_bits) if found.name == "nvfp4" and size else found
