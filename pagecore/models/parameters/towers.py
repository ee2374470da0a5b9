"""Structure of vision towers: their layers, embeddings and norms, without the projectors that follow.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagecore.models.fields import Fields
from pagecore.models.parameters.tally import Kind, Split, Tally

__all__ = [
    "TOWERS",
    "Projector",
    "Sizes",
    "Tower",
    "add_positions",
    "add_tower",
    "count_colours",
    "count_patches",
    "image_side",
    "vision_add",
    "vision_linear",
]

# Adds a projector from the fields of model and tower, the features of a patch, the patches along each side of a token,
# the projections of a deep stack, and the features of the text model.
Projector = Callable[[Tally, Fields, Fields, int, int, int, int], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a tower that its parameters follow from, named as in `VisionTower`."""

    layers: int
    hidden: int
    width: int
    patch: int
    frames: int


@dataclass(frozen=True)
class Tower:
    """Names of the fields of a tower, and the structure of its layers.

    Parameters
    ----------
    layers, hidden, width : str
        Fields with the number of layers, the features of a patch, and those inside the MLP; "" for a multiple
        (`mlp_ratio`) of the features of a patch.
    has_norm_bias, has_mlp_bias, has_patch_bias : bool
        Norms, MLPs and the embedding of patches have biases.
    attention_biases : int
        Projections of an attention with a bias, of four.
    is_gated : bool
        The MLP has a gate.
    add_rest : callable
        Adds what is outside of the layers and the embedding of patches.
    aliases : mapping
        The tower's own names of fields.
    merge : int, optional
        Patches along each side that become one token of the text model, if no field has the number.
    """

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    width: str = "intermediate_size"
    has_norm_bias: bool = True
    attention_biases: int = 4
    has_mlp_bias: bool = True
    is_gated: bool = False
    has_patch_bias: bool = True
    add_rest: Callable[[Tally, Fields, Sizes], None] = lambda _tally, _fields, _sizes: None
    aliases: Mapping[str, str] = field(default_factory=dict)
    merge: int | None = None


def vision_linear(tally: Tally, inputs: int, outputs: int, *, bias: bool = False, copies: int = 1) -> None:
    """Add `copies` matrices of a tower or projector."""
    tally.linear(inputs, outputs, bias=bias, copies=copies, kind=Kind.VISION)


def vision_add(tally: Tally, count: int) -> None:
    """Add `count` parameters of a tower or projector."""
    tally.add(count, Kind.VISION, Split.COPY)


def add_tower(tally: Tally, fields: Fields, tower: Tower, sizes: Sizes) -> None:
    """Add the parameters of a tower."""
    hidden, width, layers = sizes.hidden, sizes.width, sizes.layers
    vision_linear(tally, hidden, hidden, copies=4 * layers)
    vision_add(tally, layers * tower.attention_biases * hidden)
    vision_linear(tally, hidden, width, bias=tower.has_mlp_bias, copies=layers * (1 + tower.is_gated))
    vision_linear(tally, width, hidden, bias=tower.has_mlp_bias, copies=layers)
    vision_add(tally, 2 * layers * hidden * (1 + tower.has_norm_bias))
    vision_linear(tally, count_colours(fields) * sizes.frames * sizes.patch**2, hidden, bias=tower.has_patch_bias)
    tower.add_rest(tally, fields, sizes)


def count_colours(fields: Fields) -> int:
    """Return the channels of an image; 3 if the config does not say it."""
    named = "in_channels" if fields.given("in_channels") is not None else "num_channels"
    return fields.integer(named) if fields.given(named) is not None else 3


def image_side(fields: Fields, name: str) -> int:
    """Return a size in pixels; a list must have equal sides."""
    sides = fields.value(name)
    if not isinstance(sides, list | tuple):
        return fields.integer(name)
    if len(sides) != 2 or sides[0] != sides[1] or type(sides[0]) is not int or not 1 <= sides[0] <= 1 << 20:
        fields.refuse(f"{fields.describe(name)}; it must be an integer, or two equal ones")
    return sides[0]


def count_patches(fields: Fields, sizes: Sizes) -> int:
    """Return the patches of an image of the size that the tower fixes."""
    return (image_side(fields, "image_size") // sizes.patch) ** 2


def _qwen(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    if fields.given("num_position_embeddings") is not None:
        vision_add(tally, fields.integer("num_position_embeddings") * sizes.hidden)


def _siglip(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    add_positions(tally, fields, sizes)
    _siglip_head(tally, fields, sizes)


def _siglip_head(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add the head that pools the patches, unless the tower has none."""
    hidden, width = sizes.hidden, sizes.width
    if fields.flag("vision_use_head"):
        vision_add(tally, 3 * hidden)
        vision_linear(tally, hidden, hidden, bias=True, copies=4)
        vision_linear(tally, hidden, width, bias=True)
        vision_linear(tally, width, hidden, bias=True)


def add_positions(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add positions of patches and a norm."""
    vision_add(tally, (count_patches(fields, sizes) + 2) * sizes.hidden)


def _clip(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    # The class token, its position, and two norms.
    vision_add(tally, (count_patches(fields, sizes) + 2) * sizes.hidden + 4 * sizes.hidden)


def _internvl(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    hidden, layers = sizes.hidden, sizes.layers
    norm_type = fields.value("norm_type")
    if norm_type not in ("layer_norm", "rms_norm"):
        fields.refuse(f"{fields.describe('norm_type')}; it must be layer_norm or rms_norm")
    if norm_type == "rms_norm":
        vision_add(tally, -2 * layers * hidden)
    vision_add(tally, 2 * layers * hidden + hidden * (1 + fields.flag("use_mask_token")))
    vision_add(tally, 3 * layers * hidden * fields.flag("attention_bias"))
    vision_add(tally, 2 * layers * hidden * fields.flag("use_qk_norm"))
    if fields.flag("use_absolute_position_embeddings"):
        vision_add(tally, (count_patches(fields, sizes) + 1) * hidden)
    if not fields.flag("use_mean_pooling"):
        vision_add(tally, 2 * hidden)


def _pixtral(tally: Tally, _fields: Fields, sizes: Sizes) -> None:
    vision_add(tally, sizes.hidden)


def _glm(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    add_positions(tally, fields, sizes)
    vision_add(tally, 3 * sizes.layers * sizes.hidden * fields.flag("attention_bias"))


def _glm_ocr(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add a norm, those of queries and keys, and the biases of all matrices of the layers."""
    hidden, heads = sizes.hidden, fields.integer("num_heads")
    vision_add(tally, hidden + 2 * sizes.layers * (hidden // heads))
    if fields.given("attention_bias") is not False:
        vision_add(tally, sizes.layers * (5 * hidden + 2 * sizes.width))


def _siglip_2(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add a position for each of the patches of an image, whose sides may differ."""
    vision_add(tally, (fields.integer("num_patches") + 2) * sizes.hidden)
    _siglip_head(tally, fields, sizes)


def _norm(tally: Tally, _fields: Fields, sizes: Sizes) -> None:
    vision_add(tally, 2 * sizes.hidden)


def _ovis(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add positions, two norms, and the head that gives each patch a distribution over the visual words."""
    vision_add(tally, (count_patches(fields, sizes) + 2) * sizes.hidden)
    words = fields.integer("vocab_size") - fields.integer("num_visual_indicator_tokens")
    vision_linear(tally, sizes.hidden * fields.integer("hidden_stride") ** 2, words)
    vision_add(tally, 2 * words)
    vision_add(tally, 4 * sizes.layers * sizes.hidden * fields.flag("qkv_bias"))
    vision_add(tally, sizes.layers * (2 * sizes.width + sizes.hidden) * fields.flag("mlp_bias"))


def _kimi(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    vision_add(tally, fields.integer("pos_emb_height") * fields.integer("pos_emb_width") * sizes.hidden)
    vision_add(tally, 2 * sizes.hidden)


def _llama_4(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    vision_add(tally, (count_patches(fields, sizes) + 2) * sizes.hidden + 4 * sizes.hidden)


_QWEN_2_5 = Tower("depth", has_norm_bias=False, is_gated=True, has_patch_bias=False, add_rest=_qwen)
_QWEN_3 = Tower("depth", add_rest=_qwen)
_IDEFICS = Tower(add_rest=add_positions)
_GLM_4 = Tower(
    "depth",
    width="out_hidden_size",
    has_norm_bias=False,
    attention_biases=0,
    has_mlp_bias=False,
    is_gated=True,
    add_rest=_glm,
)
TOWERS: Mapping[str, Tower] = {
    "siglip_vision_model": Tower(add_rest=_siglip),
    "clip_vision_model": Tower(has_patch_bias=False, add_rest=_clip),
    "internvl_vision": Tower(attention_biases=1, add_rest=_internvl),
    "idefics3_vision": _IDEFICS,
    "idefics3": _IDEFICS,
    "smolvlm_vision": _IDEFICS,
    "smolvlm": _IDEFICS,
    "pixtral": Tower(
        has_norm_bias=False,
        attention_biases=0,
        has_mlp_bias=False,
        is_gated=True,
        has_patch_bias=False,
        add_rest=_pixtral,
    ),
    "qwen2_vl": Tower("depth", "embed_dim", "", has_patch_bias=False, add_rest=_qwen),
    "qwen2_5_omni_vision_encoder": _QWEN_2_5,
    "qwen2_5_vl": _QWEN_2_5,
    "qwen3_omni_moe_vision_encoder": _QWEN_3,
    "qwen3_vl": _QWEN_3,
    "qwen3_vl_moe": _QWEN_3,
    "qwen3_5": _QWEN_3,
    "qwen3_5_moe": _QWEN_3,
    "glm4v": _GLM_4,
    "glm4v_moe": _GLM_4,
    "glm_ocr": Tower(
        "depth", has_norm_bias=False, attention_biases=0, has_mlp_bias=False, is_gated=True, add_rest=_glm_ocr
    ),
    "ovis2": Tower(has_norm_bias=False, attention_biases=0, has_mlp_bias=False, is_gated=True, add_rest=_ovis),
    "paddleocr_vl": _IDEFICS,
    "siglip2_vision_model": Tower(add_rest=_siglip_2),
    "video_llama_3": Tower(add_rest=_norm),
    "kimi_k25": Tower(add_rest=_kimi),
    "llama4_vision_model": Tower(has_patch_bias=False, add_rest=_llama_4),
}
