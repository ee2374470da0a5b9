"""Description of the formats of a checkpoint: of its weights, and of the keys and values of its cache.

It is in the model's config, under one of several names, or in the hf_quant_config.json of ModelOpt next to it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.config_files.json_files import read_json_object
from pagecore.models.config_files.open_config import FILE_BYTES_MAX

__all__ = [
    "KV_FIELDS",
    "MIXED_PRECISION",
    "has_unquantised_weights",
    "is_unquantised",
    "layers_of_cache",
    "parts_of",
    "quantization_of",
]

# Fields of a config in order of precedence: of transformers, of early files of compressed-tensors, and of TensorRT-LLM
# and MLX.
_NAMES = ("quantization_config", "compression_config", "quantization")
_FILE = "hf_quant_config.json"
_NESTED = "quantization"
# Fields of ModelOpt for keys and values, in order of precedence: of all layers, and of single ones.
KV_FIELDS = ("kv_cache_quant_algo", "kv_cache_scheme", "kv_cache_quantized_layers")
# Layers with algorithms of their own, and the words for none.
MIXED_PRECISION = "MIXED_PRECISION"
_MODELOPT = re.compile("modelopt(_[a-z0-9_]+)?")
_NO_ALGORITHM = ("NO_QUANT", "NONE")


def quantization_of(whole: Fields, text: Fields) -> Fields | None:
    """Return the fields that describe the formats of a checkpoint; None if there are none.

    Parameters
    ----------
    whole, text : Fields
        Config of the model, and of its text model, which precedes; the same object if the model has no other part.
        Configs of other parts, such as a vision tower, are not read. The folder of `whole` may have a file of ModelOpt,
        which is read if neither config describes the formats; early checkpoints have them only there.

    Raises
    ------
    ConfigError
        A description is not an object, or the file cannot be read.
    """
    for name in _NAMES:
        for part in (text, whole):
            given = part.given(name)
            if given is not None and not isinstance(given, Mapping):
                part.refuse(f"{part.describe(name)}; it must be an object, or null for a model that is not quantised")
            if given is not None:
                return Fields(given, part.source, part.name(name))
    path = None if whole.folder is None else whole.folder / _FILE
    if path is None or not os.path.exists(path):  # unlike Path.exists, returns False for one that cannot be accessed
        return None
    return Fields(read_json_object(path, FILE_BYTES_MAX, "pass format= and weights=, or mend the file"), str(path))


def parts_of(fields: Fields) -> list[Fields]:
    """Return a description and, if ModelOpt wrote it, the object inside it that has the algorithms."""
    inner = fields.given(_NESTED)
    return [fields, Fields(inner, fields.source, fields.name(_NESTED))] if isinstance(inner, Mapping) else [fields]


def layers_of_cache(fields: Fields) -> Fields | None:
    """Return the part of a description that has formats of keys and values by layer; None if there is none."""
    return next((part for part in parts_of(fields) if part.given(KV_FIELDS[2]) not in (None, {})), None)


def is_unquantised(algorithm: object) -> bool:
    """Return True for an algorithm of ModelOpt or TensorRT-LLM that changes nothing: null, or the word for it."""
    return algorithm is None or (isinstance(algorithm, str) and algorithm.upper() in _NO_ALGORITHM)


def has_unquantised_weights(fields: Fields) -> bool:
    """Return True if ModelOpt or TensorRT-LLM left the weights as they were.

    `quant_algo` is null or "NO_QUANT", or so are those of all `quantized_layers` of "MIXED_PRECISION". A description of
    ModelOpt that has only keys and values (`KV_FIELDS`) has no `quant_algo`. Keys and values may have a format
    nevertheless.
    """
    part = parts_of(fields)[-1]
    method = fields.given("quant_method")
    if method is not None and not (isinstance(method, str) and _MODELOPT.fullmatch(method)):
        return False
    if "quant_algo" not in part:
        has_weights = part.given("config_groups") or part.given("quantized_layers")
        return not has_weights and any(part.given(name) is not None for name in KV_FIELDS)
    algorithm, layers = part.given("quant_algo"), part.given("quantized_layers")
    if isinstance(algorithm, str) and algorithm.upper() == MIXED_PRECISION and isinstance(layers, Mapping):
        return all(isinstance(each, Mapping) and is_unquantised(each.get("quant_algo")) for each in layers.values())
    return is_unquantised(algorithm)
