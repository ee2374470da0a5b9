"""Towers and projectors as formulas of their fields, where no other model has the same ones.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add
from pagecore.models.parameters.counting.formulas import add_formulas
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.tower_parts import Projector, Sizes, Tower, add_positions

__all__ = ["FORMULA_PROJECTORS", "FORMULA_SIZES", "FORMULA_TOWERS"]


def _tower(matrices: str, rest: str) -> Callable[[Tally, Fields, Sizes], None]:
    """Return a function that adds a tower, or a part of it, from its fields, `layers`, `hidden`, `width`, `patch`."""

    def add(tally: Tally, fields: Fields, sizes: Sizes) -> None:
        names = {"layers": sizes.layers, "hidden": sizes.hidden, "width": sizes.width}
        names |= {"patch": sizes.patch, "frames": sizes.frames}
        add_formulas(tally, matrices, rest, fields, fields, names)

    return add


def _projector(matrices: str, rest: str, defaults: Mapping[str, object] | None = None) -> Projector:
    """Return a projector from the fields of tower and `model`, and from `hidden`, `merge`, `depths` and `text`."""

    def add(tally: Tally, whole: Fields, fields: Fields, hidden: int, merge: int, depths: int, text: int) -> None:
        whole.defaults = {**whole.defaults, **(defaults or {})}
        names = {"hidden": hidden, "merge": merge, "depths": depths, "text": text}
        add_formulas(tally, matrices, rest, fields, whole, names)

    return add


def _with_router(matrices: str, rest: str) -> Projector:
    """Return a projector next to which a network may choose the parts of an image that need more tokens."""
    project = _projector(matrices, rest)

    def add(tally: Tally, whole: Fields, fields: Fields, hidden: int, merge: int, depths: int, text: int) -> None:
        project(tally, whole, fields, hidden, merge, depths, text)
        if whole.given("density_router_hidden_size") is not None:
            width = whole.integer("density_router_hidden_size")
            encoder_add(tally, 3 * hidden + 2 + (hidden + 2) * width)

    return add


def _quantiser(
    tally: Tally, whole: Fields, _fields: Fields, _hidden: int, _merge: int, _depths: int, _text: int
) -> None:
    """Add the quantiser that turns patches into tokens: a codebook, and a convolution before and after it."""
    name = "vq_config"
    part = whole.inner(name) if whole.has_object(name) else Fields({}, whole.source, name)
    part.defaults = {"embed_dim": 2048, "latent_channels": 1536, "num_embeddings": 16384}
    matrices, rest = "2 * latent_channels * embed_dim", "(num_embeddings + 1) * embed_dim + latent_channels"
    add_formulas(tally, matrices, rest, part, whole)


_BLIP: Mapping[str, object] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "image_size": 384,
    "patch_size": 16,
}
_KOSMOS_2_5: Mapping[str, object] = {
    "hidden_size": 1536,
    "intermediate_size": 3968,
    "num_hidden_layers": 18,
    "patch_size": 16,
    "max_num_patches": 4096,
}
# Sizes that published files leave out.
_INKLING_2_SIZES: Mapping[str, object] = {"posemb_grid_size": 32, "projector_bias": False, "spatial_merge_size": 2}
FORMULA_SIZES: Mapping[str, Mapping[str, object]] = {
    "blip_vision_model": _BLIP,
    "glm_image": {
        "attention_bias": True,
        "depth": 40,
        "hidden_size": 1536,
        "image_size": 2048,
        "intermediate_size": 6144,
        "patch_size": 16,
    },
    "inkling2": _INKLING_2_SIZES,
    "inkling2_loop": _INKLING_2_SIZES,
    "kosmos_2_5_vision_model": _KOSMOS_2_5,
}
_INKLING_2 = Tower(
    has_patch_bias=False,
    add_rest=_tower("0", "(posemb_grid_size ** 2 + 4 + 2 * layers) * hidden"),
    aliases={"patch_size": "native_patch_size", "spatial_merge_size": "adapter_merge_size"},
)
FORMULA_TOWERS: Mapping[str, Tower] = {
    "glm_image": Tower(
        "depth",
        attention_biases=0,
        add_rest=_tower("0", "((image_size // patch) ** 2 + 4 * layers * attention_bias) * hidden"),
    ),
    "granite_docling": Tower(add_rest=add_positions),
    **dict.fromkeys(("inkling2", "inkling2_loop"), _INKLING_2),
    "kosmos_2_5_vision_model": Tower(
        has_norm_bias=False,
        attention_biases=0,
        has_mlp_bias=False,
        is_gated=True,
        add_rest=_tower("0", "(2 * max_num_patches + 1) * hidden"),
    ),
    "lfm3_vl": Tower(
        add_all=_tower(
            """in_channels * frames * patch ** 2 * hidden
            + layers * 3 * hidden * width
            + count(layer_types, 'conv') * 4 * hidden ** 2
            + count(layer_types, 'full_attention') * 2 * hidden * (
                hidden + hidden // num_attention_heads * num_key_value_heads)""",
            """(2 * layers + 1) * hidden
            + count(layer_types, 'conv') * conv_kernel_size ** 2 * hidden
            + count(layer_types, 'full_attention') * 2 * (hidden // num_attention_heads)""",
        )
    ),
    "radio": Tower(
        width="",
        has_patch_bias=False,
        add_rest=_tower(
            "video_temporal_patch_size * num_channels * patch ** 2 * hidden",
            """((max_img_size // patch) ** 2 + num_cls_tokens + num_registers) * hidden
            + 2 * layers * hidden""",
        ),
    ),
}
_KOSMOS = _projector("hidden * text + 4 * text ** 2", "model.latent_query_num * text + 5 * text")
FORMULA_PROJECTORS: Mapping[str, Projector] = {
    "blip": _projector("0", "0"),
    "paligemma": _projector("hidden * text", "text"),
    "t5gemma2_encoder": _projector("hidden * text", "hidden"),
    "glm_image": _quantiser,
    "granite_docling": _with_router(
        """(hidden * scale_factor ** 2 + text) * out_hidden_size
        + use_fine_route * hidden * (scale_factor // 2) ** 2 * out_hidden_size
        + len(deepstack_visual_indexes) * out_hidden_size * (
            hidden * scale_factor ** 2 + out_hidden_size
            + use_fine_route * (hidden * (scale_factor // 2) ** 2 + out_hidden_size))""",
        """2 * hidden + 4 * out_hidden_size
        + len(deepstack_visual_indexes) * 2 * (
            hidden * scale_factor ** 2 + out_hidden_size
            + use_fine_route * (hidden * (scale_factor // 2) ** 2 + out_hidden_size))""",
    ),
    "inkling_mm_model": _projector("0", "0"),
    **dict.fromkeys(
        ("inkling2", "inkling2_loop"),
        _projector(
            "(hidden * merge ** 2 + text) * projection_hidden_dim", "projector_bias * (projection_hidden_dim + text)"
        ),
    ),
    "kosmos-2": _KOSMOS,
    "kosmos-2.5": _KOSMOS,
    "lfm3_vl": _projector(
        "(hidden * merge ** 2 + text) * model.projector_hidden_size",
        "2 * hidden + model.projector_bias * (model.projector_hidden_size + text)",
        {"projector_bias": True},
    ),
}
