"""Vision towers that timm defines by their names: the Perception Encoder, and the network of FastVLM.

Source: the configuration and modeling files of transformers 5; the parameters of the networks as timm 1.0.31 builds
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.tower_parts import Projector, Sizes, Tower, count_patches

__all__ = ["TIMM_PROJECTORS", "TIMM_TOWERS", "add_fast_vlm_vision", "perception_encoder"]

# Networks for inference, without a classifier.
_NETWORKS: Mapping[str, int] = {"fastvit_mci3": 122_714_208}
_ENCODERS: Mapping[str, Mapping[str, object]] = {
    "vit_pe_core_large_patch14_336": {
        "class_token": True,
        "depth": 24,
        "embed_dim": 1024,
        "img_size": 336,
        "width": 4096,
    },
    "vit_pe_core_gigantic_patch14_448": {
        "class_token": False,
        "depth": 50,
        "embed_dim": 1536,
        "img_size": 448,
        "width": 8960,
    },
}


def perception_encoder(whole: Fields) -> Fields:
    """Return the fields of a model whose tower's fields are the arguments with which timm makes it.

    Raises
    ------
    UnsupportedOption
        The architecture is not a Perception Encoder, or its patches are pooled.
    """
    fields = whole.inner("vision_config")
    named = _known(fields, _ENCODERS)
    arguments = fields.inner("model_args") if fields.has_object("model_args") else Fields({}, fields.source)
    if arguments.given("global_pool") != "":
        raise UnsupportedOption(
            f"{fields.source}: {arguments.describe('global_pool')}; expected an empty string, for a tower that does "
            "not pool its patches: remove vision_config to plan the text model alone"
        )
    tower = {**_ENCODERS[named], "patch_size": 14, "use_post_transformer_norm": True, "init_values": None}
    tower |= {name: arguments.given(name) for name in arguments}
    ratio = whole.given("projector_pooling_ratio")
    tower |= {"model_type": "perception_encoder", "spatial_merge_size": 1 if ratio is None else ratio}
    return Fields({name: whole.given(name) for name in whole} | {"vision_config": tower}, whole.source)


def add_fast_vlm_vision(tally: Tally, whole: Fields, text: int) -> None:
    """Add the network and the projector of FastVLM."""
    fields = whole.inner("vision_config")
    fields.defaults = {"architecture": "fastvit_mci3", "hidden_size": 3072}
    encoder_add(tally, _NETWORKS[_known(fields, _NETWORKS)])
    has_bias = whole.switch("multimodal_projector_bias", True)
    encoder_linear(tally, fields.integer("hidden_size"), text, bias=has_bias)
    encoder_linear(tally, text, text, bias=has_bias)


def _known(fields: Fields, networks: Mapping[str, object]) -> str:
    named = fields.value("architecture")
    if not isinstance(named, str) or named not in networks:
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('architecture')}, a network that is unknown; expected "
            f"{', '.join(networks)}: remove vision_config to plan the text model alone"
        )
    return named


def _add_rest(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add positions and the class token, the scales of layers, and the norms before and after them."""
    has_token = fields.flag("class_token")
    encoder_add(tally, (count_patches(fields, sizes) + 2 * has_token) * sizes.hidden)
    encoder_add(tally, 2 * sizes.hidden * (1 + fields.flag("use_post_transformer_norm")))
    if fields.value("init_values") is not None:
        encoder_add(tally, 2 * sizes.layers * sizes.hidden)


def _project(tally: Tally, _whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
    encoder_linear(tally, hidden, text, bias=True)
    encoder_linear(tally, text, text, bias=True)


TIMM_TOWERS: Mapping[str, Tower] = {
    "perception_encoder": Tower(
        "depth", "embed_dim", "width", has_patch_bias=False, add_rest=_add_rest, aliases={"image_size": "img_size"}
    )
}
TIMM_PROJECTORS: Mapping[str, Projector] = {"perception_lm": _project}
