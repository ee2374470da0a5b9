"""Vision towers of multimodal configs: their parameters, and the sizes that decide the memory of an image.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.config_files.open_config import open_config
from pagecore.models.encoders.mllama import MLLAMA, mllama_text
from pagecore.models.encoders.specs import has_encoder
from pagecore.models.families.registry import FAMILIES
from pagecore.models.multimodal.text_model import has_thinker, text_model
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.models.parameters.vision.bagel import bagel_with_tower
from pagecore.models.parameters.vision.chameleon import add_chameleon
from pagecore.models.parameters.vision.gemma_3n import add_gemma_3n_vision, has_convolutions
from pagecore.models.parameters.vision.ovis import ovis_of_transformers
from pagecore.models.parameters.vision.projectors import PROJECTORS
from pagecore.models.parameters.vision.radio import WITH_RADIO, radio_of_args
from pagecore.models.parameters.vision.remote_towers import IMPLIED_ENCODERS, REMOTE_PROJECTORS, REMOTE_TOWERS
from pagecore.models.parameters.vision.resamplers import FIXED_TOKENS, window_sides
from pagecore.models.parameters.vision.special_towers import SPECIAL_TOWERS
from pagecore.models.parameters.vision.timm_towers import add_fast_vlm_vision, perception_encoder
from pagecore.models.parameters.vision.tower_parts import Sizes, Tower, add_tower, image_side
from pagecore.models.parameters.vision.tower_sizes import BY_MODEL, DEFAULTS, MERGING, OTHER_TOWERS, SIZES, WITHOUT_HEAD
from pagecore.models.parameters.vision.vit_towers import TOWERS
from pagecore.storage.checks import ceil_div

__all__ = ["VisionTower", "add_vision", "vision_tower", "with_encoders"]


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
        return self._side(image_size) ** 2

    def tokens(self, image_size: int) -> int:
        """Return the tokens of the text model for a square image."""
        return self.tokens_per_image or ceil_div(self._side(image_size), self.merge) ** 2

    def _side(self, image_size: int) -> int:
        """Return the patches along each side; some towers leave out the pixels of an incomplete one."""
        whole = max(1, image_size // self.patch)
        return whole if self.model_type in _WITHOUT_PADDING else ceil_div(image_size, self.patch)


_WITHOUT_PADDING = frozenset({"clip_vision_model", "siglip_vision_model"})
_TOWERS: Mapping[str, Tower] = {**TOWERS, **SPECIAL_TOWERS, **REMOTE_TOWERS}
_PROJECTORS = {**PROJECTORS, **REMOTE_PROJECTORS}
# Models whose files describe their tower by other fields.
_DESCRIBED = {"perception_lm": perception_encoder, **dict.fromkeys(WITH_RADIO, radio_of_args)}
# Models whose files have their tower in a field of another name.
_NAMED = {"bagel": ("vit_config", bagel_with_tower), "ovis": ("visual_tokenizer_config", ovis_of_transformers)}
# Fields of the whole model with the patches along each side of a token.
_MERGES = ("spatial_merge_size", "downsample_factor", "hidden_stride", "scale_factor")
_RATIOS = ("pixel_shuffle_ratio", "downsample_ratio")


def vision_tower(config: str | os.PathLike[str] | Mapping[str, Any]) -> VisionTower | None:
    """Return the sizes of the vision tower of a config.

    None for a model without one, with an encoder of its own, or with convolutions only (Gemma 3n, FastVLM).

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
    encoded = with_encoders(whole)
    if not encoded.has_object("vision_config") or has_convolutions(encoded):
        return None
    model_type = whole.given("model_type")
    if isinstance(model_type, str) and has_encoder(model_type):
        return _sizes(encoded, mllama_text(whole, model_type).integer("hidden_size")) if model_type in MLLAMA else None
    text_type, text = text_model(whole)
    text.aliases = FAMILIES[text_type].aliases
    return _sizes(encoded, text.integer("hidden_size"))


def with_encoders(whole: Fields) -> Fields:
    """Return the fields of the model that listens and sees: of a model that also speaks, those of its thinker."""
    model_type = str(whole.given("model_type"))
    if model_type in IMPLIED_ENCODERS:
        return Fields(IMPLIED_ENCODERS[model_type], whole.source)
    if model_type in _DESCRIBED and whole.has_object("vision_config"):
        return _DESCRIBED[model_type](whole)
    name, described = _NAMED.get(model_type, ("", None))
    if described is not None and whole.has_object(name):
        return described(whole)
    return whole.inner("thinker_config") if has_thinker(whole) else whole


def _sizes(whole: Fields, text_hidden: int) -> VisionTower:
    kind, fields, tower = _open(whole)
    hidden = fields.integer(tower.hidden)
    width = fields.integer(tower.width) if tower.width else fields.scaled(hidden, "mlp_ratio")
    stacked = fields.value("deepstack_visual_indexes")
    has_size = fields.given("image_size") is not None or "image_size" in fields.sizes
    return VisionTower(
        model_type=kind,
        layers=fields.integer(tower.layers) - (kind == "minicpmv" and whole.switch("drop_vision_last_layer", False)),
        hidden=hidden,
        width=width,
        patch=image_side(fields, "patch_size"),
        frames=1 if fields.value("temporal_patch_size") is None else fields.integer("temporal_patch_size"),
        merge=tower.merge or _merge(whole, fields),
        tokens_per_image=_fixed_tokens(whole),
        is_gated=tower.is_gated,
        image_size=image_side(fields, "image_size") * _tiles(fields) if has_size else None,
        depths=1 + (len(stacked) if isinstance(stacked, list | tuple) and not tower.joins_depths else 0),
        text_hidden=text_hidden,
    )


def _tiles(fields: Fields) -> int:
    """Return the tiles along each side of the largest image: 1 for a tower that takes images whole."""
    most = 1 if fields.value("max_num_tiles") is None else fields.integer("max_num_tiles")
    return 1 + math.isqrt(most - 1)


def _fixed_tokens(whole: Fields) -> int | None:
    """Return the tokens of an image of any size; None if they depend on its size."""
    count = FIXED_TOKENS.get(str(whole.given("model_type")))
    if count is not None:
        return count(whole)
    return None if whole.given("mm_tokens_per_image") is None else whole.integer("mm_tokens_per_image")


def add_vision(tally: Tally, whole: Fields, text_hidden: int) -> None:
    """Add the vision tower and its projector to the features of the text model; nothing without a tower.

    `whole` are the fields of `with_encoders`.
    """
    if whole.given("model_type") == "fuyu":
        # Patches are projected; there is no tower.
        whole.defaults = {**whole.defaults, "patch_size": 30, "num_channels": 3}
        patch = whole.integer("num_channels") * whole.integer("patch_size") ** 2
        tally.linear(patch, text_hidden, bias=True, split=Split.COPY, kind=Kind.VISION)
    if whole.given("model_type") == "chameleon":
        add_chameleon(tally, whole)
    if not whole.has_object("vision_config"):
        return
    if has_convolutions(whole):
        add_network = add_fast_vlm_vision if whole.given("model_type") == "fast_vlm" else add_gemma_3n_vision
        add_network(tally, whole, text_hidden)
        return
    found = _sizes(whole, text_hidden)
    _, fields, tower = _open(whole)
    add_tower(tally, fields, tower, Sizes(found.layers, found.hidden, found.width, found.patch, found.frames))
    projector = _PROJECTORS.get(str(whole.given("model_type")))
    if projector is None:
        raise UnsupportedOption(
            f"{whole.source}: {whole.describe('model_type')}, whose projector is unknown; expected one of "
            f"{', '.join(_PROJECTORS)}: remove vision_config to plan the text model alone"
        )
    projector(tally, whole, fields, found.hidden, found.merge, found.depths, text_hidden)


def _open(whole: Fields) -> tuple[str, Fields, Tower]:
    fields = whole.inner("vision_config")
    model = str(whole.given("model_type"))
    fields.defaults = {**DEFAULTS, "vision_use_head": model not in WITHOUT_HEAD}
    given = fields.given("model_name" if fields.given("model_type") == "vision" else "model_type")
    kind = OTHER_TOWERS.get(model) or (BY_MODEL.get(model, model) if given is None else str(given))
    kind = kind if kind in _TOWERS else kind.removesuffix("_vision").removesuffix("_text")
    if kind not in _TOWERS:
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('model_type')}, a vision tower that is unknown; expected one of "
            f"{', '.join(_TOWERS)}: remove vision_config to plan the text model alone"
        )
    if kind in ("deepseek_ocr2", "unlimited_ocr"):
        # The tower is the first of two parts.
        fields = fields.inner("sam_config")
        fields.defaults = DEFAULTS
    fields.sizes, fields.aliases = SIZES.get(kind, {}), _TOWERS[kind].aliases
    return kind, fields, _TOWERS[kind]


def _merge(whole: Fields, fields: Fields) -> int:
    if fields.value("spatial_merge_size") is not None:
        return fields.integer("spatial_merge_size")
    for name in _MERGES:
        for part in (fields, whole):
            if part.given(name) is not None:
                return part.integer(name)
    if whole.given("model_type") == "granite4_vision":
        queries, patches = window_sides(whole)
        return max(1, patches // queries)
    kernel = fields.value("merge_kernel_size")
    if isinstance(kernel, list | tuple) and kernel and isinstance(kernel[0], int):
        return max(1, kernel[0])
    default = 2 if str(whole.given("model_type")) in MERGING else 1
    ratios = (part.given(name) for name in _RATIOS for part in (fields, whole))
    return next((round(1 / ratio) for ratio in ratios if isinstance(ratio, float) and 0 < ratio <= 1), default)
