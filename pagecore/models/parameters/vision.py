"""Vision towers of multimodal configs: their parameters, and the sizes that decide the memory of an image.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config import text_model
from pagecore.models.fields import Fields, open_config
from pagecore.models.parameters.tally import Kind, Split, Tally
from pagecore.storage.checks import ceil_div

__all__ = ["VisionTower", "add_vision", "vision_tower"]


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Sizes of a vision tower.

    Attributes
    ----------
    model_type : str
        Type of the `vision_config`.
    layers, hidden, width : int
        Number of layers, features of a patch, and features inside the MLP.
    patch, frames : int
        Pixels of a patch along each side, and images of a video that a patch covers; an image is repeated for it.
    merge : int
        Patches along each side that become one token of the text model.
    tokens_per_image : int or None
        Tokens of an image of any size, if the model fixes them.
    is_gated : bool
        The MLP has a gate.
    image_size : int or None
        Pixels along each side, if the tower fixes them.
    depths : int
        Embeddings of a token for the text model: 1, and one for each layer of a deep stack.
    text_hidden : int
        Features of an embedding for the text model.
    """

    model_type: str
    layers: int
    hidden: int
    width: int
    patch: int
    frames: int = 1
    merge: int = 1
    tokens_per_image: int | None = None
    is_gated: bool = False
    image_size: int | None = None
    depths: int = 1
    text_hidden: int = 0

    def patches(self, image_size: int) -> int:
        """Return the patches of a square image with `image_size` pixels along each side."""
        return ceil_div(image_size, self.patch) ** 2

    def tokens(self, image_size: int) -> int:
        """Return the tokens of the text model for a square image."""
        return self.tokens_per_image or ceil_div(self.patches(image_size), self.merge**2)


@dataclass(frozen=True)
class _Tower:
    """Names of the fields of a tower, and the structure of its layers."""

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    width: str = "intermediate_size"
    has_norm_bias: bool = True
    has_attention_bias: bool = True
    has_mlp_bias: bool = True
    is_gated: bool = False
    has_patch_bias: bool = True


_QWEN_3 = _Tower("depth")
_TOWERS: Mapping[str, _Tower] = {
    "siglip_vision_model": _Tower(),
    "pixtral": _Tower(
        has_norm_bias=False, has_attention_bias=False, has_mlp_bias=False, is_gated=True, has_patch_bias=False
    ),
    "qwen2_vl": _Tower("depth", "embed_dim", "", has_patch_bias=False),
    "qwen2_5_vl": _Tower("depth", has_norm_bias=False, is_gated=True, has_patch_bias=False),
    "qwen3_vl": _QWEN_3,
    "qwen3_vl_moe": _QWEN_3,
    "qwen3_5": _QWEN_3,
    "qwen3_5_moe": _QWEN_3,
    "glm4v": _Tower(
        "depth",
        width="out_hidden_size",
        has_norm_bias=False,
        has_attention_bias=False,
        has_mlp_bias=False,
        is_gated=True,
    ),
    "kimi_k25": _Tower(),
    "llama4_vision_model": _Tower(has_patch_bias=False),
}
# Types of the tower by the type of the model, for a file whose vision_config does not name it.
_BY_MODEL: Mapping[str, str] = {"gemma3": "siglip_vision_model", "mistral3": "pixtral", "llama4": "llama4_vision_model"}
_DEFAULTS: Mapping[str, object] = {
    **dict.fromkeys(("image_size", "deepstack_visual_indexes", "merge_kernel_size", "mm_tokens_per_image")),
    "vision_use_head": True,
    "multimodal_projector_bias": False,
    "mlp_ratio": 4,
    "in_channels": 3,
    "num_channels": 3,
}


def vision_tower(config: str | os.PathLike[str] | Mapping[str, Any]) -> VisionTower | None:
    """Return the sizes of the vision tower of a config; None for a model without one.

    Parameters
    ----------
    config : str, path or dict
        As for `specs_from_config`.

    Raises
    ------
    ConfigError
        A size is missing; the message names the field.
    UnsupportedOption
        A tower of an unknown type.
    """
    whole = open_config(config)
    if not isinstance(whole.given("vision_config"), Mapping):
        return None
    return _sizes(whole, text_model(whole)[1].integer("hidden_size"))


def _sizes(whole: Fields, text_hidden: int) -> VisionTower:
    kind, fields, tower = _open(whole)
    hidden = fields.integer(tower.hidden)
    width = fields.integer(tower.width) if tower.width else hidden * fields.integer("mlp_ratio")
    stacked = fields.given("deepstack_visual_indexes")
    tokens = whole.given("mm_tokens_per_image")
    return VisionTower(
        model_type=kind,
        layers=fields.integer(tower.layers),
        hidden=hidden,
        width=width,
        patch=fields.integer("patch_size"),
        frames=fields.integer("temporal_patch_size") if fields.given("temporal_patch_size") is not None else 1,
        merge=_merge(whole, fields),
        tokens_per_image=whole.integer("mm_tokens_per_image") if tokens is not None else None,
        is_gated=tower.is_gated,
        image_size=fields.integer("image_size") if fields.given("image_size") is not None else None,
        depths=1 + (len(stacked) if isinstance(stacked, list | tuple) else 0),
        text_hidden=text_hidden,
    )


def add_vision(tally: Tally, whole: Fields, text_hidden: int) -> None:
    """Add the vision tower and its projector to the features of the text model; nothing without a tower."""
    if not isinstance(whole.given("vision_config"), Mapping):
        return
    sizes = _sizes(whole, text_hidden)
    kind, fields, tower = _open(whole)
    _layers(tally, sizes, tower)
    colours = fields.integer("num_channels") if fields.given("num_channels") is not None else 3
    inputs = colours * sizes.frames * sizes.patch**2
    _linear(tally, inputs, sizes.hidden, bias=tower.has_patch_bias)
    if kind.startswith("qwen"):
        _qwen_merger(tally, fields, sizes, tower, kind)
    else:
        _OTHERS[kind](tally, whole, fields, sizes, text_hidden)


def _open(whole: Fields) -> tuple[str, Fields, _Tower]:
    fields = whole.inner("vision_config")
    fields.defaults = _DEFAULTS
    model = str(whole.given("model_type"))
    given = fields.given("model_type")
    kind = str(given) if given is not None else _BY_MODEL.get(model, model)
    kind = kind if kind in _TOWERS else kind.removesuffix("_vision").removesuffix("_text")
    if kind not in _TOWERS:
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('model_type')}, a vision tower that is unknown; expected one of "
            f"{', '.join(_TOWERS)}: remove vision_config to plan the text model alone"
        )
    return kind, fields, _TOWERS[kind]


def _merge(whole: Fields, fields: Fields) -> int:
    for part in (fields, whole):
        if part.given("spatial_merge_size") is not None:
            return part.integer("spatial_merge_size")
    kernel = fields.given("merge_kernel_size")
    if isinstance(kernel, list | tuple) and kernel and isinstance(kernel[0], int):
        return max(1, kernel[0])
    ratio = fields.given("pixel_shuffle_ratio")
    return round(1 / ratio) if isinstance(ratio, float) and 0 < ratio <= 1 else 1


def _linear(tally: Tally, inputs: int, outputs: int, *, bias: bool = False, copies: int = 1) -> None:
    tally.linear(inputs, outputs, bias=bias, copies=copies, kind=Kind.VISION)


def _add(tally: Tally, count: int) -> None:
    tally.add(count, Kind.VISION, Split.COPY)


def _layers(tally: Tally, sizes: VisionTower, tower: _Tower) -> None:
    hidden, width, layers = sizes.hidden, sizes.width, sizes.layers
    _linear(tally, hidden, hidden, bias=tower.has_attention_bias, copies=4 * layers)
    _linear(tally, hidden, width, bias=tower.has_mlp_bias, copies=layers * (1 + tower.is_gated))
    _linear(tally, width, hidden, bias=tower.has_mlp_bias, copies=layers)
    _add(tally, 2 * layers * hidden * (1 + tower.has_norm_bias))


def _qwen_merger(tally: Tally, fields: Fields, sizes: VisionTower, tower: _Tower, kind: str) -> None:
    merged = sizes.hidden * sizes.merge**2
    is_first = kind == "qwen2_vl"
    outputs = fields.integer("hidden_size" if is_first else "out_hidden_size")
    if fields.given("num_position_embeddings") is not None:
        _add(tally, fields.integer("num_position_embeddings") * sizes.hidden)
    # The merger of a deep stack normalises merged patches, the other one single patches.
    for depth in range(sizes.depths):
        _add(tally, (merged if depth else sizes.hidden) * (1 + tower.has_norm_bias))
        _linear(tally, merged, merged, bias=True)
        _linear(tally, merged, outputs, bias=True)


def _siglip(tally: Tally, _whole: Fields, fields: Fields, sizes: VisionTower, text_hidden: int) -> None:
    hidden, width = sizes.hidden, sizes.width
    _add(tally, (fields.integer("image_size") // sizes.patch) ** 2 * hidden + 2 * hidden)
    if fields.flag("vision_use_head"):
        _add(tally, 3 * hidden)
        _linear(tally, hidden, hidden, bias=True, copies=4)
        _linear(tally, hidden, width, bias=True)
        _linear(tally, width, hidden, bias=True)
    _linear(tally, hidden, text_hidden)
    _add(tally, hidden)


def _pixtral(tally: Tally, whole: Fields, _fields: Fields, sizes: VisionTower, text_hidden: int) -> None:
    has_bias = whole.given("multimodal_projector_bias") is True
    _add(tally, 2 * sizes.hidden)
    _linear(tally, sizes.hidden * sizes.merge**2, sizes.hidden)
    _linear(tally, sizes.hidden, text_hidden, bias=has_bias)
    _linear(tally, text_hidden, text_hidden, bias=has_bias)


def _glm(tally: Tally, _whole: Fields, fields: Fields, sizes: VisionTower, _text_hidden: int) -> None:
    outputs, width = fields.integer("out_hidden_size"), fields.integer("intermediate_size")
    _add(tally, (fields.integer("image_size") // sizes.patch) ** 2 * sizes.hidden)
    _add(tally, 2 * sizes.hidden + 2 * outputs)
    _linear(tally, sizes.hidden * sizes.merge**2, outputs, bias=True)
    _linear(tally, outputs, outputs)
    _linear(tally, outputs, width, copies=2)
    _linear(tally, width, outputs)


def _kimi(tally: Tally, _whole: Fields, fields: Fields, sizes: VisionTower, text_hidden: int) -> None:
    merged = sizes.hidden * sizes.merge**2
    _add(tally, fields.integer("pos_emb_height") * fields.integer("pos_emb_width") * sizes.hidden)
    _add(tally, 4 * sizes.hidden)
    _linear(tally, merged, merged, bias=True)
    _linear(tally, merged, text_hidden, bias=True)


def _llama_4(tally: Tally, _whole: Fields, fields: Fields, sizes: VisionTower, text_hidden: int) -> None:
    projected = fields.integer("projector_input_dim")
    outputs = fields.integer("projector_output_dim")
    _add(tally, ((fields.integer("image_size") // sizes.patch) ** 2 + 2) * sizes.hidden + 4 * sizes.hidden)
    _linear(tally, sizes.width, projected)
    _linear(tally, projected, outputs)
    _linear(tally, fields.integer("vision_output_dim"), text_hidden)


_OTHERS = {
    "siglip_vision_model": _siglip,
    "pixtral": _pixtral,
    "glm4v": _glm,
    "kimi_k25": _kimi,
    "llama4_vision_model": _llama_4,
}
