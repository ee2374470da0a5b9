"""Vision towers with the layers of a vision transformer (ViT): CLIP, SigLIP, Pixtral, those of Qwen-VL and others.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.tower_parts import Sizes, Tower, add_positions, count_patches

__all__ = ["TOWERS"]


def _qwen(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    if fields.value("num_position_embeddings") is not None:
        encoder_add(tally, fields.integer("num_position_embeddings") * sizes.hidden)


def _siglip(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    add_positions(tally, fields, sizes)
    _siglip_head(tally, fields, sizes)


def _siglip_head(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add the head that pools the patches, unless the tower has none."""
    hidden, width = sizes.hidden, sizes.width
    if fields.flag("vision_use_head"):
        encoder_add(tally, 3 * hidden)
        encoder_linear(tally, hidden, hidden, bias=True, copies=4)
        encoder_linear(tally, hidden, width, bias=True)
        encoder_linear(tally, width, hidden, bias=True)


def _clip(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    # The class token, its position, and two norms.
    encoder_add(tally, (count_patches(fields, sizes) + 2) * sizes.hidden + 4 * sizes.hidden)


def _internvl(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    hidden, layers = sizes.hidden, sizes.layers
    norm_type = fields.value("norm_type")
    if norm_type not in ("layer_norm", "rms_norm"):
        fields.refuse(f"{fields.describe('norm_type')}; it must be layer_norm or rms_norm")
    if norm_type == "rms_norm":
        encoder_add(tally, -2 * layers * hidden)
    encoder_add(tally, 2 * layers * hidden + hidden * (1 + fields.flag("use_mask_token")))
    encoder_add(tally, 3 * layers * hidden * fields.flag("attention_bias"))
    encoder_add(tally, 2 * layers * hidden * fields.flag("use_qk_norm"))
    if fields.flag("use_absolute_position_embeddings"):
        encoder_add(tally, (count_patches(fields, sizes) + 1) * hidden)
    if not fields.flag("use_mean_pooling"):
        encoder_add(tally, 2 * hidden)


def _pixtral(tally: Tally, _fields: Fields, sizes: Sizes) -> None:
    encoder_add(tally, sizes.hidden)


def _glm(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    add_positions(tally, fields, sizes)
    encoder_add(tally, 3 * sizes.layers * sizes.hidden * fields.flag("attention_bias"))


def _glm_ocr(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add a norm, those of queries and keys, and the biases of all matrices of the layers."""
    hidden, heads = sizes.hidden, fields.integer("num_heads")
    encoder_add(tally, hidden + 2 * sizes.layers * (hidden // heads))
    if fields.switch("attention_bias", True):
        encoder_add(tally, sizes.layers * (5 * hidden + 2 * sizes.width))


def _siglip_2(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add a position for each of the patches of an image, whose sides may differ."""
    encoder_add(tally, (fields.integer("num_patches") + 2) * sizes.hidden)
    _siglip_head(tally, fields, sizes)


def _norm(tally: Tally, _fields: Fields, sizes: Sizes) -> None:
    encoder_add(tally, 2 * sizes.hidden)


def _ovis(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add positions, two norms, and the head of visual words."""
    encoder_add(tally, (count_patches(fields, sizes) + 2) * sizes.hidden)
    _visual_words(tally, fields, sizes)
    encoder_add(tally, 4 * sizes.layers * sizes.hidden * fields.flag("qkv_bias"))
    encoder_add(tally, sizes.layers * (2 * sizes.width + sizes.hidden) * fields.flag("mlp_bias"))


def _ovis_siglip(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    _siglip(tally, fields, sizes)
    _visual_words(tally, fields, sizes)


def _visual_words(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add the head that gives each patch a distribution over the visual words."""
    words = fields.integer("vocab_size") - fields.integer("num_visual_indicator_tokens", min=0)
    encoder_linear(tally, sizes.hidden * fields.integer("hidden_stride") ** 2, words)
    encoder_add(tally, 2 * words)


def _kimi(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    encoder_add(tally, fields.integer("pos_emb_height") * fields.integer("pos_emb_width") * sizes.hidden)
    encoder_add(tally, 2 * sizes.hidden)


def _llama_4(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    encoder_add(tally, (count_patches(fields, sizes) + 2) * sizes.hidden + 4 * sizes.hidden)


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
_INTERN = Tower(attention_biases=1, add_rest=_internvl)
# Names of published files.
_MOON_POSITIONS: Mapping[str, str] = {f"pos_emb_{side}": f"init_pos_emb_{side}" for side in ("height", "width")}
_MOON_SIZES: Mapping[str, str] = {
    name: f"vt_{name}" for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
}
TOWERS: Mapping[str, Tower] = {
    "siglip_vision_model": Tower(add_rest=_siglip),
    "clip_vision_model": Tower(has_patch_bias=False, add_rest=_clip),
    "interns1_vision": _INTERN,
    "internvl_vision": _INTERN,
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
    "cohere_compass": _QWEN_3,
    "qwen3_omni_moe_vision_encoder": _QWEN_3,
    "qwen3_vl": _QWEN_3,
    "qwen3_vl_moe": _QWEN_3,
    "qwen3_5": _QWEN_3,
    "qwen3_5_moe": _QWEN_3,
    **dict.fromkeys(("qwen4_exp", "qwen3_8_flash_next"), _QWEN_3),
    "deepseek_v41": Tower(
        has_norm_bias=False,
        has_mlp_bias=False,
        is_gated=True,
        aliases={"spatial_merge_size": "downsample_ratio"},
        add_rest=_pixtral,
    ),
    "moss_vl": Tower("depth", add_rest=_qwen, joins_depths=True),
    "glm4v": _GLM_4,
    "glm4v_moe": _GLM_4,
    "glm_ocr": Tower(
        "depth", has_norm_bias=False, attention_biases=0, has_mlp_bias=False, is_gated=True, add_rest=_glm_ocr
    ),
    "ovis2": Tower(has_norm_bias=False, attention_biases=0, has_mlp_bias=False, is_gated=True, add_rest=_ovis),
    "ovis_siglip": Tower(add_rest=_ovis_siglip),
    "paddleocr_vl": _IDEFICS,
    "siglip2_vision_model": Tower(add_rest=_siglip_2),
    "phi4_multimodal": Tower(add_rest=_siglip, merge=2),
    "video_llama_3": Tower(add_rest=_norm),
    "kimi_k25": Tower(add_rest=_kimi, aliases={**_MOON_POSITIONS, **_MOON_SIZES}),
    "moonvit": Tower(add_rest=_kimi, aliases=_MOON_POSITIONS),
    "llama4_vision_model": Tower(has_patch_bias=False, add_rest=_llama_4),
}
