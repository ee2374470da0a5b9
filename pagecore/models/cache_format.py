"""The dtype and the format in which a checkpoint's config asks engines to store keys and values.

Sources: `kv_cache_scheme` of compressed-tensors and ModelOpt, which may also be an algorithm there, and of AutoFP8, a
word; `kv_cache_quant_algo` of ModelOpt; `kv_cache_quant_config` and `kv_cache_group` of Quark; and `kv_cache_dtype`.
`layer_formats` has those of single layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, NoReturn

from pagecore.arrays import DType, as_dtype
from pagecore.arrays.dtypes.formats import FORMATS, FOUR_OVER_SIX, as_format
from pagecore.errors import UnsupportedDtype, UnsupportedOption
from pagecore.models.config_files.fields import Fields, shown
from pagecore.models.config_files.quantization import (
    KV_FIELDS,
    is_unquantised,
    layers_of_cache,
    parts_of,
    quantization_of,
)
from pagecore.storage import AttentionSpec, LatentSpec
from pagecore.storage.specs.rotation import check_rotation
from pagecore.storage.specs.sealing import format_of_layer
from pagecore.storage.specs.spec import CACHE_DTYPES, Side

__all__ = [
    "FORMAT_REMEDY",
    "Formats",
    "asking_field",
    "formats_of_algorithm",
    "requested_format",
    "stored_dtype",
    "uniform_formats",
    "with_rotations",
    "with_value_format",
]


class Formats(NamedTuple):
    """Formats of keys and of values; None for the model's dtype, and for values of the format of keys."""

    key: str | None
    value: str | None = None


_FP8_K_NVFP4_V = Formats("float8_e4m3fn", "nvfp4")
_ALGORITHMS: Mapping[str, Formats] = {
    "FP8": Formats("float8_e4m3fn"),
    "NVFP4": Formats("nvfp4"),
    "FP8_K_NVFP4_V": _FP8_K_NVFP4_V,
}
# (type, bits) of a scheme: the format for a scale of the layer or of each head, for one of each token, and for one of
# each group of numbers. None: not stored by any format.
_SCHEMES: Mapping[tuple[str, int], tuple[str | None, str | None, str | None]] = {
    ("float", 8): ("float8_e4m3fn", "float8_token", None),
    ("int", 8): (None, "int8_token", None),
    ("int", 4): (None, "int4_token", None),
    ("float", 4): (None, None, "nvfp4"),
}
# Schemes of AutoFP8 and AngelSlim: a scale of the layer, in the checkpoint.
_WORDS: Mapping[str, Formats] = {"static": Formats("float8_e4m3fn")}
# Names of vLLM and SGLang for a format (docs/vllm_sglang.md), and for the dtype of the model.
_DTYPES: Mapping[str, Formats] = {
    **{name: Formats(name) for name in (*FORMATS, FOUR_OVER_SIX)},
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e4m3fn"), Formats("float8_e4m3fn")),
    "fp8_e5m2": Formats("float8_e5m2"),
    "fp8_per_token_head": Formats("float8_token"),
    "int8_per_token_head": Formats("int8_token"),
    "int4_per_token_head": Formats("int4_token"),
    "fp4_mx_block16": Formats("fp4_block16"),
    "fp8_k_nvfp4_v": _FP8_K_NVFP4_V,
}
_OF_THE_MODEL = ("auto", *CACHE_DTYPES)
# Dtypes of the outputs of a projection of keys, in a config of Quark.
_QUARK: Mapping[str, str] = {"fp8_e4m3": "float8_e4m3fn"}
FORMAT_REMEDY = f"pass format= one of {', '.join(FORMATS)}, or None for the model's dtype"
_STATIC, _TOKEN, _GROUP = ("tensor", "attn_head"), ("token",), ("tensor_group", "group")


def stored_dtype(whole: Fields, text: Fields, dtype: object) -> DType:
    """Return `dtype`, or for "auto" that of the weights: of the text model, else of the whole model, else bfloat16.

    Older files call it torch_dtype.

    Raises
    ------
    ConfigError
        A config with both names and different dtypes.
    UnsupportedDtype
        A cache cannot have the dtype.
    """
    if not (isinstance(dtype, str) and dtype == "auto"):
        return as_dtype(dtype)
    for part in (text, whole):
        given = {name: part.given(name) for name in ("dtype", "torch_dtype") if part.given(name) is not None}
        if len({shown(value).replace("torch.", "", 1) for value in given.values()}) > 1:
            text.refuse(f"{part.describe('dtype')}, but {part.describe('torch_dtype')}; leave one of them out")
        for name, value in given.items():
            stripped = value.removeprefix("torch.") if isinstance(value, str) else ""
            if stripped not in CACHE_DTYPES:
                raise UnsupportedDtype(
                    f"{text.source}: {part.describe(name)}, which is not a dtype of a cache; "
                    f"pass dtype= one of {', '.join(CACHE_DTYPES)}"
                )
            return as_dtype(stripped)
    return as_dtype("bfloat16")


def requested_format(whole: Fields, text: Fields, format: Any) -> str | None:
    """Return the name of the format that keys and values are stored in; None for the model's dtype.

    Values may have another format, and layers formats of their own: see `layer_formats`.

    Parameters
    ----------
    whole, text : Fields
        Config of the model, and of its text model; the same object if the model has no other part.
    format : str or None
        "auto" reads the config; any other name, and None, overrides it. The spec of a layer checks the name.

    Raises
    ------
    ConfigError
        `quantization_config` is not an object, or the hf_quant_config.json of ModelOpt cannot be read.
    UnsupportedOption
        A scheme that no format stores, or a format that is not a name.
    """
    if format is not None and not isinstance(format, str):
        return as_format(format).name
    if format != "auto":
        return format
    if text.given("use_cache_quantization"):  # the first Qwen: integers of 8 bits with a zero point
        return _refuse(text, "use_cache_quantization")
    fields = quantization_of(whole, text)
    if fields is None or layers_of_cache(fields) is not None:
        return None
    return uniform_formats(fields).key


def formats_of_algorithm(algorithm: object) -> Formats | None:
    """Return the formats of an algorithm of ModelOpt; None for one that no format stores."""
    if is_unquantised(algorithm):
        return Formats(None)
    return _ALGORITHMS.get(algorithm.upper()) if isinstance(algorithm, str) else None


def with_value_format(specs: Iterable[Any], value_format: str | None, who: str) -> list[Any]:
    """Return the specs of a model, those with keys and values with another format of the values.

    Equal specs stay one object. Other specs (states, rows, aliases) are not changed.

    Parameters
    ----------
    specs : iterable of specs
    value_format : str or None
        As for `AttentionSpec`; None changes nothing.
    who : str
        Source of the specs in messages.

    Raises
    ------
    UnsupportedOption
        An unknown format, or layers that store latents or no keys and values.
    ShapeError
        The groups of the format do not divide the dim of the values.
    """
    given = list(specs)
    if value_format is None:
        return given
    attending = {
        spec: replace(spec, value_format=format_of_layer(value_format, spec.window or spec.chunk))
        for spec in given
        if isinstance(spec, AttentionSpec)
    }
    has_latents = any(isinstance(spec, LatentSpec) for spec in given)
    if has_latents or not attending:
        raise UnsupportedOption(
            f"{who}: value_format is {shown(value_format)}, but the layers store "
            f"{'latents' if has_latents else 'no keys and values'}; leave it out, or pass format="
        )
    return [attending[spec] if isinstance(spec, AttentionSpec) else spec for spec in given]


def with_rotations(specs: Iterable[Any], key_rotation: str | None, value_rotation: str | None, who: str) -> list[Any]:
    """Return the specs of a model, with rotations of the keys and values that have a format.

    Equal specs stay one object. Other specs (states, rows, aliases) are not changed.

    Parameters
    ----------
    specs : iterable of specs
    key_rotation, value_rotation : str or None
        As for `AttentionSpec`; None changes nothing.
    who : str
        Source of the specs in messages.

    Raises
    ------
    UnsupportedOption
        An unknown rotation, or no layer with keys or values in a format; latents have no rotations.
    ShapeError
        A dim that the rotation does not serve.
    """
    given = list(specs)
    asked: dict[Side, str | None] = {"key": key_rotation, "value": value_rotation}
    for side, rotation in asked.items():
        if rotation is None:
            continue
        check_rotation(side, rotation, "dim", 0)
        changed: dict[str, Any] = {f"{side}_rotation": rotation}
        stored = {
            spec: replace(spec, **changed)
            for spec in given
            if isinstance(spec, AttentionSpec) and has_format(spec, side)
        }
        kinds = {type(spec) for spec in given}
        if not stored and LatentSpec in kinds and AttentionSpec not in kinds:
            raise UnsupportedOption(
                f"{who}: {side}_rotation is {shown(rotation)}, but the layers store latents, which have no rotations; "
                "leave it out"
            )
        if not stored:
            raise UnsupportedOption(
                f"{who}: {side}_rotation is {shown(rotation)}, but no layer stores {side}s in a format, which a "
                f"rotation serves; leave it out, or pass {'format' if side == 'key' else 'value_format'}="
            )
        given = [stored.get(spec, spec) if isinstance(spec, AttentionSpec) else spec for spec in given]
    return given


def has_format(spec: AttentionSpec, side: Side) -> bool:
    """Return True if a layer stores its keys or values in a format, sealed ones included."""
    return spec.format is not None or (side == "value" and spec.value_format is not None)


def uniform_formats(fields: Fields) -> Formats:
    """Return the formats of all layers that a description asks for.

    Raises
    ------
    UnsupportedOption
        A scheme that no format stores.
    """
    if fields.given("quant_method") == "quark":
        return Formats(_of_quark(fields))
    asking = asking_field(fields)
    if asking is None:
        return Formats(None)
    part, name = asking
    given = part.given(name)
    if name == "kv_cache_dtype":
        found = _DTYPES.get(str(given))
    elif isinstance(given, Mapping) and name == "kv_cache_scheme":
        found = _of_scheme(given)
    else:
        found = formats_of_algorithm(given)
        if found is None and name == "kv_cache_scheme":
            found = _WORDS.get(str(given))
    return found or _refuse(part, name)


def asking_field(fields: Fields) -> tuple[Fields, str] | None:
    """Return the part and the field of a description that gives all layers their formats; None if there is none."""
    for part in parts_of(fields):
        for name in KV_FIELDS[:2]:
            if part.given(name) is not None:
                return part, name
        if part.given("kv_cache_dtype") not in (None, *_OF_THE_MODEL):
            return part, "kv_cache_dtype"
    return None


def _of_quark(fields: Fields) -> str | None:
    """Return the format of the outputs of projections that a config of Quark lists as keys and values."""
    given: Any = fields.given("export")
    named: Any = given.get("kv_cache_group") if isinstance(given, Mapping) else None
    layers: Any = fields.given("layer_quant_config") if named else fields.given("kv_cache_quant_config")
    if not isinstance(layers, Mapping) or not layers:
        return _refuse(fields, "export") if named else None
    wanted = _of_patterns(layers, named) if named and isinstance(named, list | tuple) else layers
    outputs = [each.get("output_tensors") if isinstance(each, Mapping) else None for each in wanted.values()]
    found = {_QUARK.get(str(each.get("dtype"))) if isinstance(each, Mapping) else None for each in outputs}
    # A scale for each channel, as qscheme may ask for, has no place in a cache.
    is_static = all(
        isinstance(each, Mapping) and not each.get("is_dynamic") and each.get("qscheme") in (None, "per_tensor")
        for each in outputs
    )
    (name,) = found if len(found) == 1 else (None,)
    return name if name and is_static else _refuse(fields, "layer_quant_config" if named else "kv_cache_quant_config")


def _of_patterns(layers: Mapping[str, Any], patterns: Iterable[object]) -> dict[str, Any]:
    """Return the layers that the patterns name, and a pattern that names none with None.

    A key of `layers` may be one of the patterns, brackets included, or match one. Otherwise it may be a pattern that
    holds for more layers; as in Quark, the first one counts.
    """
    found: dict[str, Any] = {}
    for pattern in map(str, patterns):
        named = {name: each for name, each in layers.items() if name == pattern or fnmatchcase(name, pattern)}
        wider = (name for name in layers if fnmatchcase(pattern, name))
        found |= named or {pattern: layers.get(next(wider, pattern))}
    return found


def _of_scheme(scheme: Mapping[str, Any]) -> Formats | None:
    """Return the formats of a scheme of compressed-tensors, or None if no format stores it."""
    found = _name_of_scheme(scheme)
    return None if found is None else Formats(found)


def _name_of_scheme(scheme: Mapping[str, Any]) -> str | None:
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


def _refuse(fields: Fields, name: str) -> NoReturn:
    raise UnsupportedOption(
        f"{fields.source}: {fields.name(name)} is {shown(fields.given(name))}, which no format stores; {FORMAT_REMEDY}"
    )
