"""RADIO towers as NVIDIA publishes them, whose config names a network and what it was distilled from.

Source: the models of vLLM and SGLang (Nemotron Nano VL and Parse).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.tower_parts import Projector, Sizes, Tower, add_tower

__all__ = ["RADIO_PROJECTORS", "RADIO_TOWERS", "WITH_RADIO", "add_radio", "radio_of_args"]

# Models that have the projector of the Omni model of transformers, or one with biases and another norm; and that model
# as it is published.
_OMNI = tuple(f"NemotronH_{size}Omni_Reasoning_V3" for size in ("", "Nano_", "Super_"))
WITH_RADIO = ("NemotronH_Nano_VL_V2", "Llama_Nemotron_Nano_VL", *_OMNI)
# Features and layers by name.
_NETWORKS: Mapping[str, tuple[int, int]] = {
    "vit_small_patch16_224": (384, 12),
    "vit_base_patch16_224": (768, 12),
    "vit_large_patch16_224": (1024, 24),
    "vit_huge_patch16_224": (1280, 32),
}


def radio_of_args(whole: Fields) -> Fields:
    """Return the fields of a model with the sizes of its tower, which a published file has in `args`.

    Raises
    ------
    UnsupportedOption
        The network is unknown.
    """
    return Fields(
        {name: whole.given(name) for name in whole} | {"vision_config": _sizes(whole, "vision_config")}, whole.source
    )


def add_radio(tally: Tally, whole: Fields, name: str) -> int:
    """Add a tower that is not part of a text model, from the name of its field; return the features of a patch."""
    fields = Fields(_sizes(whole, name), whole.source, whole.name(name))
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "patch_size")
    layers, hidden, width, patch = map(fields.integer, names)
    add_tower(tally, fields, RADIO_TOWERS["c_radio"], Sizes(layers, hidden, width, patch, frames=1))
    return hidden


def _sizes(whole: Fields, name: str) -> dict[str, object]:
    fields = whole.inner(name)
    args = fields.inner("args")
    network = args.given("model")
    if not isinstance(network, str) or network not in _NETWORKS:
        raise UnsupportedOption(
            f"{fields.source}: {args.describe('model')}, a network that is unknown; expected "
            f"{', '.join(_NETWORKS)}: pass weights= in bytes"
        )
    hidden, layers = _NETWORKS[network]
    tokens = _class_tokens(args)
    multiple = _optional(args, "register_multiple", 0)
    return {
        "model_type": "c_radio",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 4 * hidden,
        "patch_size": _optional(fields, "patch_size", 16),
        "max_img_size": _optional(args, "cpe_max_size", 2048),
        "video_frames": _optional(fields, "video_temporal_patch_size", 1),
        "num_tokens": tokens + (multiple - tokens % multiple if multiple else 0),
    }


def _optional(fields: Fields, name: str, default: int) -> int:
    return default if fields.given(name) is None else fields.integer(name)


def _class_tokens(args: Fields) -> int:
    """Return the number of class tokens: one, or one for each teacher."""
    teachers: Any = args.given("teachers")
    if not args.switch("cls_token_per_teacher", False):
        return 1
    if not isinstance(teachers, list | tuple) or not all(isinstance(each, Mapping) for each in teachers):
        args.refuse(f"{args.describe('teachers')}; it must be a list of objects with a name each")
    return len({str(each.get("name")) for each in teachers})


def _add_rest(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add the positions of the largest image, class tokens, registers, and another embedding of patches of videos."""
    side = fields.integer("max_img_size") // sizes.patch
    encoder_add(tally, (side**2 + fields.integer("num_tokens")) * sizes.hidden)
    if fields.integer("video_frames") > 1:
        encoder_linear(tally, 3 * fields.integer("video_frames") * sizes.patch**2, sizes.hidden)


def _project(has_bias: bool, of_model: str = "") -> Projector:
    """Return the projector, with RMSNorm and without biases, or with LayerNorm and biases.

    `of_model` is the field of the model with the features of a patch; "" for those of the tower.
    """

    def add(tally: Tally, whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int) -> None:
        if of_model:
            hidden = 1280 if whole.given(of_model) is None else whole.integer(of_model)
        inputs, width = hidden * merge**2, whole.integer("projector_hidden_size")
        encoder_add(tally, inputs * (1 + has_bias) + 2 * hidden * _predicts_tokens(whole))
        encoder_linear(tally, inputs, width, bias=has_bias)
        encoder_linear(tally, width, text, bias=has_bias)

    return add


def _predicts_tokens(whole: Fields) -> bool:
    """Return True for a text model with layers for further tokens, with which a norm follows the tower."""
    for name in ("text_config", "llm_config"):
        if whole.has_object(name):
            return bool(whole.inner(name).given("num_nextn_predict_layers"))
    return False


RADIO_TOWERS: Mapping[str, Tower] = {"c_radio": Tower(has_patch_bias=False, add_rest=_add_rest)}
RADIO_PROJECTORS: Mapping[str, Projector] = {
    "Llama_Nemotron_Nano_VL": _project(has_bias=True),
    **dict.fromkeys(("NemotronH_Nano_VL_V2", *_OMNI), _project(has_bias=False)),
    "nemotron_h_omni": _project(has_bias=False, of_model="vision_hidden_size"),
}
