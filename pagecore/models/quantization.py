"""The format in which a checkpoint's config asks engines to store keys and values.

Sources: `kv_cache_scheme` of compressed-tensors and ModelOpt, `kv_cache_quant_algo` of ModelOpt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagecore.arrays.formats import FORMATS
from pagecore.errors import UnsupportedOption
from pagecore.models.fields import Fields, shown

__all__ = ["requested_format"]

_ALGORITHMS: Mapping[str, str] = {"FP8": "float8_e4m3fn", "NVFP4": "nvfp4"}
# (type, bits) of a scheme: the format for a scale of the layer or of each head, for one of each token, and for one of
# each group of numbers. None: not stored by any format.
_SCHEMES: Mapping[tuple[str, int], tuple[str | None, str | None, str | None]] = {
    ("float", 8): ("float8_e4m3fn", "float8_token", None),
    ("int", 8): (None, "int8_token", None),
    ("int", 4): (None, "int4_token", None),
    ("float", 4): (None, None, "nvfp4"),
}
_STATIC, _TOKEN, _GROUP = ("tensor", "attn_head"), ("token",), ("tensor_group", "group")


def requested_format(whole: Fields, text: Fields, format: str | None) -> str | None:
    """Return the name of the format that keys and values are stored in; None for the model's dtype.

    Parameters
    ----------
    whole, text : Fields
        Config of the model, and of its text model; the same object if the model has no other part.
    format : str or None
        "auto" reads the config; any other name, and None, overrides it. The spec of a layer checks the name.

    Raises
    ------
    UnsupportedOption
        A scheme that no format stores.
    """
    if format != "auto":
        return format
    for part in (text, whole):
        given = part.given("quantization_config")
        if isinstance(given, Mapping):
            return _of_config(Fields(given, part.source, part.name("quantization_config")))
    return None


def _of_config(fields: Fields) -> str | None:
    inner = fields.given("quantization")
    parts = (
        [fields, Fields(inner, fields.source, fields.name("quantization"))] if isinstance(inner, Mapping) else [fields]
    )
    for part in parts:
        algorithm, scheme = part.given("kv_cache_quant_algo"), part.given("kv_cache_scheme")
        if algorithm is not None:
            found = _ALGORITHMS.get(algorithm.upper()) if isinstance(algorithm, str) else None
            return found or _refuse(part, "kv_cache_quant_algo")
        if scheme is not None:
            found = _of_scheme(scheme) if isinstance(scheme, Mapping) else None
            return found or _refuse(part, "kv_cache_scheme")
    return None


def _of_scheme(scheme: Mapping[str, Any]) -> str | None:
    """Return the format of a scheme of compressed-tensors, or None if no format stores it."""
    static, token, group = _SCHEMES.get((str(scheme.get("type")), _bits(scheme)), (None, None, None))
    strategy = scheme.get("strategy") or ("tensor_group" if scheme.get("group_size") else "tensor")
    if strategy in _TOKEN:
        return token
    if strategy in _GROUP:
        return group if scheme.get("group_size", 16) == 16 else None
    return static if strategy in _STATIC and not scheme.get("dynamic") else None


def _bits(scheme: Mapping[str, Any]) -> int:
    bits = scheme.get("num_bits")
    return bits if isinstance(bits, int) else 0


def _refuse(fields: Fields, name: str) -> str:
    raise UnsupportedOption(
        f"{fields.source}: {fields.name(name)} is {shown(fields.given(name))}, which no format stores; pass format= "
        f"one of {', '.join(FORMATS)}, or None for the model's dtype"
    )
