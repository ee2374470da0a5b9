"""Scales of stored keys and values, which a checkpoint keeps with its weights.

Names of the tensors: compressed-tensors (``self_attn.k_scale``), ModelOpt (``self_attn.k_proj.k_scale``), Quark
(``self_attn.k_proj.output_scale``), and one ``kv_scale`` of both; T5 has ``SelfAttention.k`` for ``k_proj``. Files of
scaling factors: ``quantization_param_path`` of vLLM and SGLang.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from pagecore.errors import PagecoreError, ShapeError, UnsupportedOption
from pagecore.models.config_files.fields import ConfigError, shown
from pagecore.models.config_files.json_files import read_json_object
from pagecore.models.config_files.open_config import FILE_BYTES_MAX
from pagecore.models.config_files.safetensors import read_tensors
from pagecore.models.model_config import ModelConfig, ModelSpec
from pagecore.storage import Alias, AttentionSpec, CrossSpec, LatentSpec
from pagecore.storage.checks import as_factor, require_int

__all__ = ["KVScales", "Scales", "read_kv_scales", "with_scales"]

Scale = float | tuple[float, ...]


class KVScales(NamedTuple):
    """Scales of the stored keys and values of one layer: a float, or one for each key-value head.

    Attributes
    ----------
    key, value : float, tuple of float or None
        None if a checkpoint has only the other one, as of latents, which have no values.
    """

    key: Scale | None
    value: Scale | None


class LayerName(NamedTuple):
    """Parsed name of a tensor or module: the model, the number of the layer, and the rest."""

    model: str
    layer: int
    module: str


class ScaleName(NamedTuple):
    """Parsed name of a tensor with scales: the model and the layer, and whether it is for keys, values or both."""

    model: str
    layer: int
    kinds: tuple[str, ...]


Scales = str | os.PathLike[str] | Mapping[int, tuple[Any, Any]]

# Numbers of layers have up to 9 digits, which is more than any model has.
_LAYER = re.compile(r"(?:^|(?P<model>.*)\.)(?:layers|h|blocks|block)\.(?P<layer>[0-9]{1,9})\.(?P<module>.*)")
_KINDS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(r"(.*\.)?k_scale"), ("key",)),
    (re.compile(r"(.*\.)?v_scale"), ("value",)),
    (re.compile(r"(.*\.)?kv_scale"), ("key", "value")),
    (re.compile(r"(.*\.)?(k_proj|SelfAttention\.k)\.output_scale"), ("key",)),
    (re.compile(r"(.*\.)?(v_proj|SelfAttention\.v)\.output_scale"), ("value",)),
)
# Parts of a model whose layers have numbers of their own, from 0 on: layers that predict several tokens, encoders.
_OTHER_PARTS = re.compile(r"(.*[._])?(mtp|vision|visual|vit|vpm|image|audio|apm|speech|encoder)([._].*)?")
_TEXT_ENCODER = "transformer.encoder"  # the text model of ChatGLM
# Cross attention of BART and Whisper, in the layer of the self-attention, and of T5, in a part of the layer.
_CROSS_ATTENTION = re.compile(r"encoder_attn\..*|layer\.[0-9]+\.EncDecAttention\..*")
_SPECS = "use dataclasses.replace(spec, key_scale=, value_scale=)"
_REMEDY = "pass kv_scales as a dict of (key, value) by layer"


def read_kv_scales(checkpoint: str | os.PathLike[str]) -> dict[int, KVScales]:
    """Return the scales of stored keys and values that a checkpoint has, by the number of the model layer.

    Only headers of safetensors files and the bytes of the scales are read; neither torch nor safetensors is needed.

    Parameters
    ----------
    checkpoint : str or path
        Folder of a checkpoint, one of its safetensors files, or a JSON file of scaling factors
        (`quantization_param_path` of vLLM and SGLang), which are scales of both keys and values. Tensors of a layer are
        ``k_scale`` and ``v_scale``, of the attention or of its projections (compressed-tensors, ModelOpt),
        ``output_scale`` of k_proj and v_proj (Quark), or ``kv_scale``, which is both. Those of encoders, and of layers
        that predict several tokens in a module of their own ("mtp"), are not read.

    Returns
    -------
    dict of int to KVScales
        Without layers that have none. Ascending. All scales are finite and above 0 as float32.

    Raises
    ------
    ConfigError
        A file cannot be read, or is neither a safetensors file nor one of scaling factors; a tensor is missing in the
        file that the index gives for it; there are no scales, or one is not finite and above 0; a layer has two of one
        kind; or they belong to several models.

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
    scales = _of_scaling_factors(path) if _is_json(checkpoint) else _of_tensors(path)
    if not scales:
        raise ConfigError(
            f"{path} has no scales of keys and values, such as k_scale; leave kv_scales out for scales of 1"
        )
    return dict(sorted(scales.items()))


def with_scales(model: ModelConfig, kv_scales: Scales | None, who: str) -> ModelConfig:
    """Return a model whose specs have the scales of a checkpoint.

    Layers without scales keep those of their specs, which are 1, and so does the cross attention of a decoder. Not used
    are scales of layers that read the keys and values of another one, of layers after the last one in safetensors
    files, which predict several tokens, and of values in layers with latents, which store none.

    Raises
    ------
    ConfigError
        As `read_kv_scales`; or a dict or a file of scaling factors has a layer that the model does not have.
    ShapeError, UnsupportedOption
        A layer has scales that its spec refuses, attends twice or not at all.
    """
    if kv_scales is None:
        return model
    layers: list[ModelSpec] = list(model.layers)
    for layer, (key, value) in _given(model, kv_scales, who).items():
        own = model.specs_by_layer[layer]
        if any(isinstance(layers[number], Alias) for number in own):
            continue
        attending = [number for number in own if isinstance(layers[number], AttentionSpec | LatentSpec)]
        if len(attending) > 1:
            attending = [number for number in attending if not isinstance(layers[number], CrossSpec)]
        if len(attending) != 1:
            has = "no keys and values" if not attending else f"keys and values of {len(attending)} attentions"
            raise UnsupportedOption(f"{who}: kv_scales has layer {layer}, which stores {has}; {_SPECS}")
        spec: Any = layers[attending[0]]
        if key is None or (value is None and isinstance(spec, AttentionSpec)):
            missing = "key" if key is None else "value"
            raise UnsupportedOption(f"{who}: kv_scales of layer {layer} have no {missing}; {_REMEDY}")
        scales = {"key_scale": key} if isinstance(spec, LatentSpec) else {"key_scale": key, "value_scale": value}
        try:
            layers[attending[0]] = replace(spec, **scales)
        except PagecoreError as error:
            raise type(error)(f"{who}: kv_scales of layer {layer}: {error}") from error
    return replace(model, layers=tuple(layers))


def _given(model: ModelConfig, kv_scales: Scales, who: str) -> dict[int, KVScales]:
    """Return the scales by layer, without layers of safetensors files that the model does not have."""
    if not isinstance(kv_scales, str | os.PathLike | Mapping):
        raise ConfigError(
            f"kv_scales is {shown(kv_scales)}; expected the path of a checkpoint, or a dict of (key, value) by layer"
        )
    given = _checked(kv_scales) if isinstance(kv_scales, Mapping) else read_kv_scales(kv_scales)
    is_exact = isinstance(kv_scales, Mapping) or _is_json(kv_scales)
    for layer in given:
        if is_exact and layer >= model.num_layers:
            raise ConfigError(
                f"{who}: kv_scales has layer {layer}; the model has {model.num_layers} layers, numbered from 0"
            )
    return {layer: scales for layer, scales in given.items() if layer < model.num_layers}


def _checked(kv_scales: Mapping[Any, Any]) -> dict[int, KVScales]:
    given: dict[int, KVScales] = {}
    for layer, pair in kv_scales.items():
        number = require_int("a layer of kv_scales", layer, min=0)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(f"kv_scales of layer {number} are {shown(pair)}; expected a pair of scales (key, value)")
        given[number] = KVScales(*pair)
    return given


def _is_json(path: str | os.PathLike[str]) -> bool:
    return Path(os.fsdecode(path)).suffix == ".json"


def _of_tensors(path: Path) -> dict[int, KVScales]:
    """Return the scales in safetensors files."""
    by_layer: dict[int, dict[str, tuple[str, Scale]]] = {}
    models: dict[str, str] = {}
    for name, numbers in sorted(read_tensors(path, lambda name: parse_scale_name(name) is not None).items()):
        parsed = cast(ScaleName, parse_scale_name(name))
        models.setdefault(parsed.model, name)
        if len(models) > 1:
            raise ConfigError(f"{path} has scales of several models, {' and '.join(models.values())}; {_REMEDY}")
        found = by_layer.setdefault(parsed.layer, {})
        for kind in parsed.kinds:
            if kind in found:
                raise ConfigError(f"{path} has two scales of a layer, {found[kind][0]} and {name}; {_REMEDY}")
            found[kind] = name, _of_numbers(f"{path}: {name}", numbers)
    return {
        layer: KVScales(*(found[kind][1] if kind in found else None for kind in ("key", "value")))
        for layer, found in by_layer.items()
    }


def _of_scaling_factors(path: Path) -> dict[int, KVScales]:
    """Return the scales of a file with ``{"kv_cache": {"dtype", "scaling_factor": {rank: {layer: factor}}}}``."""
    cache: Any = read_json_object(path, FILE_BYTES_MAX, _REMEDY, unique=True).get("kv_cache")
    ranks: Any = cache.get("scaling_factor") if isinstance(cache, Mapping) else None
    if not isinstance(ranks, Mapping) or not ranks or not all(isinstance(each, Mapping) for each in ranks.values()):
        raise ConfigError(f"{path}: kv_cache is {shown(cache)}; expected scaling_factor, by rank and layer")
    if cache.get("dtype") != "float8_e4m3fn":
        raise ConfigError(f"{path}: kv_cache.dtype is {shown(cache.get('dtype'))}; expected 'float8_e4m3fn'")
    first: Mapping[str, Any] = next(iter(ranks.values()))
    if any(each != first for each in ranks.values()):
        raise ConfigError(f"{path} has other scales for other ranks; {_REMEDY}")
    scales: dict[int, KVScales] = {}
    for layer, factor in first.items():
        if re.fullmatch("0|[1-9][0-9]{0,8}", layer) is None:
            raise ConfigError(f"{path} has the layer {shown(layer)}; expected an integer of at least 0")
        scale = _of_number(f"{path}: scale of layer {layer}", factor)
        scales[int(layer)] = KVScales(scale, scale)
    return scales


def _of_numbers(where: str, numbers: Sequence[float]) -> Scale:
    if not numbers:
        raise ConfigError(f"{where} has no numbers; {_REMEDY}")
    if len(numbers) == 1:
        return _of_number(where, numbers[0])
    return tuple(_of_number(f"{where}[{number}]", each) for number, each in enumerate(numbers))


def _of_number(where: str, given: Any) -> float:
    if type(given) not in (int, float):
        raise ConfigError(f"{where} is {shown(given)}; expected a number")
    try:
        return as_factor(where, given)
    except ShapeError as error:
        raise ConfigError(str(error)) from None


def parse_scale_name(name: str) -> ScaleName | None:
    """Return the parsed name of a tensor with scales; None for other tensors, and those of other parts of a model."""
    found = parse_layer_name(name)
    if found is None or _CROSS_ATTENTION.fullmatch(found.module) is not None or is_other_part(name):
        return None
    kinds = next((kinds for pattern, kinds in _KINDS if pattern.fullmatch(found.module)), None)
    return None if kinds is None else ScaleName(found.model, found.layer, kinds)


def parse_layer_name(name: str) -> LayerName | None:
    """Return the parsed name of a tensor or module of a layer; None for others."""
    found = _LAYER.fullmatch(name)
    return None if found is None else LayerName(found["model"] or "", int(found["layer"]), found["module"])


def is_other_part(name: str) -> bool:
    """Return True for a name in a tower, an encoder, or layers that predict several tokens."""
    found = parse_layer_name(name)
    model = name if found is None else found.model
    return model != _TEXT_ENCODER and _OTHER_PARTS.fullmatch(model) is not None
