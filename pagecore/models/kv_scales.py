"""Given factors of stored keys and values, which a checkpoint keeps with its weights.

Names of the tensors: compressed-tensors (``self_attn.k_scale``), ModelOpt (``self_attn.k_proj.k_scale``), Quark
(``self_attn.k_proj.output_scale``), and one ``kv_scale`` of both. Files of scaling factors: ``quantization_param_path``
of vLLM and SGLang.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.models.config_files.fields import ConfigError, shown
from pagecore.models.config_files.json_files import read_json_object
from pagecore.models.config_files.open_config import FILE_BYTES_MAX
from pagecore.models.config_files.safetensors import read_tensors
from pagecore.models.model_config import ModelConfig, ModelSpec
from pagecore.storage import Alias, AttentionSpec, LatentSpec
from pagecore.storage.checks import as_factor, require_int

__all__ = ["KVScales", "Scales", "read_kv_scales", "with_scales"]

Factor = float | tuple[float, ...]


class KVScales(NamedTuple):
    """Factors of the stored keys and values of one layer: a float, or one for each key-value head.

    Attributes
    ----------
    key, value : float, tuple of float or None
        None if a checkpoint has only the other one, as of latents, which have no values.
    """

    key: Factor | None
    value: Factor | None


class _Place(NamedTuple):
    """The model and the layer of a factor, and whether it is that of keys, of values or of both."""

    model: str
    layer: int
    kinds: tuple[str, ...]


Scales = str | os.PathLike[str] | Mapping[int, tuple[Any, Any]]

_LAYER = re.compile(r"(?:^|(?P<model>.*)\.)(?:layers|h|blocks)\.(?P<layer>\d+)\.(?P<module>.*)")
_KINDS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(r"(.*\.)?k_scale"), ("key",)),
    (re.compile(r"(.*\.)?v_scale"), ("value",)),
    (re.compile(r"(.*\.)?kv_scale"), ("key", "value")),
    (re.compile(r"(.*\.)?k_proj\.output_scale"), ("key",)),
    (re.compile(r"(.*\.)?v_proj\.output_scale"), ("value",)),
)
# Layers that predict several tokens have numbers of their own, from 0 on.
_PREDICTION = "mtp"


def read_kv_scales(checkpoint: str | os.PathLike[str]) -> dict[int, KVScales]:
    """Return the factors of stored keys and values that a checkpoint has, by the number of the model layer.

    Only headers of safetensors files and the bytes of the factors are read; neither torch nor safetensors is needed.

    Parameters
    ----------
    checkpoint : str or path
        Folder of a checkpoint, one of its safetensors files, or a JSON file of scaling factors
        (`quantization_param_path` of vLLM and SGLang), whose factors are those of keys and of values. Tensors of a
        layer are ``k_scale`` and ``v_scale``, of the attention or of its projections (compressed-tensors, ModelOpt),
        ``output_scale`` of k_proj and v_proj (Quark), or ``kv_scale``, which is both.

    Returns
    -------
    dict of int to KVScales
        Without layers that have none. Ascending.

    Raises
    ------
    ConfigError
        A file cannot be read, or is neither a safetensors file nor one of scaling factors; there are no factors; a
        layer has two of one kind; or they belong to several models.

    Examples
    --------
    >>> from pagecore import specs_from_config
    >>> from pagecore.models import read_kv_scales
    >>> read_kv_scales("Llama-3.1-8B-Instruct-FP8")[0]                        # doctest: +SKIP
    KVScales(key=0.0236, value=0.0041)
    >>> specs = specs_from_config("Llama-3.1-8B-Instruct-FP8", kv_scales="Llama-3.1-8B-Instruct-FP8")  # doctest: +SKIP
    """
    if not isinstance(checkpoint, str | os.PathLike):
        raise ConfigError(f"checkpoint is {shown(checkpoint)}; expected the path of a folder or a file")
    path = Path(os.fsdecode(checkpoint))
    if path.suffix == ".json":
        return _of_factors(path)
    by_layer: dict[int, dict[str, tuple[str, Factor]]] = {}
    models: dict[str, str] = {}
    for name, numbers in sorted(read_tensors(path, lambda name: _place(name) is not None).items()):
        place = cast(_Place, _place(name))
        models.setdefault(place.model, name)
        if len(models) > 1:
            raise ConfigError(f"{path} has factors of several models, {' and '.join(models.values())}; {_REMEDY}")
        found = by_layer.setdefault(place.layer, {})
        for kind in place.kinds:
            if kind in found:
                raise ConfigError(f"{path} has two factors of a layer, {found[kind][0]} and {name}; {_REMEDY}")
            found[kind] = name, numbers[0] if len(numbers) == 1 else tuple(numbers)
    if not by_layer:
        raise ConfigError(
            f"{path} has no factors of keys and values, such as k_scale; leave kv_scales out for factors of 1"
        )
    return {
        layer: KVScales(*(found[kind][1] if kind in found else None for kind in ("key", "value")))
        for layer, found in sorted(by_layer.items())
    }


_SPECS = "use dataclasses.replace(spec, key_scale=, value_scale=)"
_REMEDY = "pass kv_scales as a dict of (key, value) by layer"


def with_scales(model: ModelConfig, kv_scales: Scales | None, who: str) -> ModelConfig:
    """Return a model whose specs have the factors of a checkpoint.

    Layers without factors keep those of their specs, which are 1. Not used are factors of layers that read the keys and
    values of another one, of layers after the last one, which predict several tokens, and of values in layers with
    latents, which store none.

    Raises
    ------
    ConfigError
        As `read_kv_scales`.
    ShapeError, UnsupportedOption
        A layer has factors that its spec refuses, attends twice or not at all.
    """
    if kv_scales is None:
        return model
    given = _checked(kv_scales) if isinstance(kv_scales, Mapping) else read_kv_scales(kv_scales)
    layers: list[ModelSpec] = list(model.layers)
    for layer, (key, value) in given.items():
        if layer >= model.num_layers:
            continue
        own = model.specs_by_layer[layer]
        if any(isinstance(layers[number], Alias) for number in own):
            continue
        attending = [number for number in own if isinstance(layers[number], AttentionSpec | LatentSpec)]
        if len(attending) != 1:
            has = "no keys and values" if not attending else "those of an encoder, too"
            raise UnsupportedOption(f"{who}: kv_scales has layer {layer}, which stores {has}; {_SPECS}")
        spec: Any = layers[attending[0]]
        if key is None or (value is None and isinstance(spec, AttentionSpec)):
            missing = "key" if key is None else "value"
            raise UnsupportedOption(f"{who}: kv_scales of layer {layer} have no {missing}; {_REMEDY}")
        factors = {"key_scale": key} if isinstance(spec, LatentSpec) else {"key_scale": key, "value_scale": value}
        try:
            layers[attending[0]] = replace(spec, **factors)
        except PagecoreError as error:
            raise type(error)(f"{who}: kv_scales of layer {layer}: {error}") from error
    return replace(model, layers=tuple(layers))


def _checked(kv_scales: Mapping[Any, Any]) -> dict[int, KVScales]:
    given: dict[int, KVScales] = {}
    for layer, pair in kv_scales.items():
        number = require_int("a layer of kv_scales", layer, min=0)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(f"kv_scales of layer {number} are {shown(pair)}; expected a pair of factors (key, value)")
        given[number] = KVScales(*pair)
    return given


def _of_factors(path: Path) -> dict[int, KVScales]:
    """Return the factors of a file with ``{"kv_cache": {"dtype", "scaling_factor": {rank: {layer: factor}}}}``."""
    cache: Any = read_json_object(path, FILE_BYTES_MAX, _REMEDY, unique=True).get("kv_cache")
    ranks: Any = cache.get("scaling_factor") if isinstance(cache, Mapping) else None
    if not isinstance(ranks, Mapping) or not ranks or not all(isinstance(each, Mapping) for each in ranks.values()):
        raise ConfigError(f"{path}: kv_cache is {shown(cache)}; expected scaling_factor, by rank and layer")
    if cache.get("dtype") != "float8_e4m3fn":
        raise ConfigError(f"{path}: kv_cache.dtype is {shown(cache.get('dtype'))}; expected 'float8_e4m3fn'")
    first: Mapping[str, Any] = next(iter(ranks.values()))
    if any(each != first for each in ranks.values()):
        raise ConfigError(f"{path} has other factors for other ranks; {_REMEDY}")
    factors: dict[int, KVScales] = {}
    for layer, factor in first.items():
        if not layer.isdecimal():
            raise ConfigError(f"{path} has the layer {shown(layer)}; expected an integer of at least 0")
        number = as_factor(f"{path}: factor of layer {layer}", factor)
        factors[int(layer)] = KVScales(number, number)
    return dict(sorted(factors.items()))


def _place(name: str) -> _Place | None:
    """Return what a tensor is a factor of; None for other tensors, and those of layers that predict several tokens."""
    found = _LAYER.fullmatch(name)
    if found is None or (found["model"] or "").split(".")[0] == _PREDICTION:
        return None
    kinds = next((kinds for pattern, kinds in _KINDS if pattern.fullmatch(found["module"])), None)
    return None if kinds is None else _Place(found["model"] or "", int(found["layer"]), kinds)
