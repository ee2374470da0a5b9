"""Vision towers, and their projectors, of models whose code is published with their weights.

Source: the modeling files of OpenGVLab/InternVL3-8B, openbmb/MiniCPM-V-2_6, deepseek-ai/DeepSeek-OCR,
deepseek-ai/deepseek-vl2, zai-org/glm-4v-9b, microsoft/Phi-3.5-vision-instruct and Phi-4-multimodal-instruct, and the
models of vLLM and SGLang (Keye-VL, NVLM).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear, encoder_matrices
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.abstractor import add_abstractor
from pagecore.models.parameters.vision.bagel import project_bagel
from pagecore.models.parameters.vision.kanana import KANANA_SIZES, project_kanana
from pagecore.models.parameters.vision.openpangu import OPENPANGU_SIZES, OPENPANGU_TOWER, project_openpangu
from pagecore.models.parameters.vision.radio import RADIO_PROJECTORS, RADIO_TOWERS
from pagecore.models.parameters.vision.special_towers import SPECIAL_TOWERS, TOWER_SIZES
from pagecore.models.parameters.vision.timm_towers import TIMM_PROJECTORS, TIMM_TOWERS
from pagecore.models.parameters.vision.tower_parts import (
    Projector,
    Sizes,
    Tower,
    add_positions,
    add_tower,
    count_colours,
)
from pagecore.models.parameters.vision.vit_towers import TOWERS

__all__ = ["IMPLIED_ENCODERS", "REMOTE_PROJECTORS", "REMOTE_SIZES", "REMOTE_TOWERS"]


def _positions_of_glm(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add a class token, and a position for it and for each patch."""
    encoder_add(tally, (1 + fields.integer("num_positions")) * sizes.hidden)


def _project_glm(
    tally: Tally, whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int
) -> None:
    """Add a convolution that merges patches, a gated MLP, and the tokens around an image."""
    width = whole.integer("ffn_hidden_size")
    encoder_linear(tally, hidden * merge**2, text, bias=True)
    encoder_linear(tally, text, text)
    encoder_linear(tally, text, width, copies=2)
    encoder_linear(tally, width, text)
    encoder_add(tally, 4 * text)


def _resample(tally: Tally, whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
    """Add the attention of MiniCPM-V, whose queries become the tokens of an image."""
    encoder_add(tally, (whole.integer("query_num") + 6) * text)
    if hidden != text:
        encoder_linear(tally, hidden, text)
    encoder_linear(tally, text, text, bias=True, copies=4)
    encoder_linear(tally, text, text)


def _clip_after_sam(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add the rest of the tower of high resolution, and the CLIP tower that reads what it returns."""
    SPECIAL_TOWERS["deepseek_ocr2"].add_rest(tally, fields, sizes)
    clip = Fields({"image_size": 224}, fields.source)
    add_tower(tally, clip, TOWERS["clip_vision_model"], Sizes(24, 1024, 4096, patch=14, frames=1))
    encoder_add(tally, -2 * 1024)  # no norm follows the layers


def _project_deepseek(
    tally: Tally, whole: Fields, _fields: Fields, _hidden: int, _merge: int, _depths: int, _text: int
) -> None:
    """Add one layer or an MLP, and the marks at the end of lines and between views."""
    part = whole.inner("projector_config")
    part.defaults = {"projector_type": "downsample_mlp_gelu", "depth": 2, "mlp_ratio": 2, "downsample_ratio": 2}
    inputs, outputs = part.integer("input_dim"), part.integer("n_embed")
    encoder_add(tally, 2 * outputs)
    if part.value("projector_type") == "linear":
        encoder_linear(tally, inputs, outputs, bias=True)
        return
    if part.value("projector_type") != "downsample_mlp_gelu":
        part.refuse(f"{part.describe('projector_type')}; expected linear or downsample_mlp_gelu")
    width = outputs * part.integer("mlp_ratio")
    encoder_linear(tally, inputs * part.integer("downsample_ratio") ** 2, width, bias=True)
    encoder_linear(tally, width, width, bias=True, copies=part.integer("depth", min=2) - 2)
    encoder_linear(tally, width, outputs, bias=True)


def _project_unlimited(
    tally: Tally, whole: Fields, fields: Fields, hidden: int, merge: int, depths: int, text: int
) -> None:
    """Add the projector of a published file, or of one of transformers, and the CLIP tower that reads the first one's.

    The latter has no embedding of patches.
    """
    if whole.has_object("projector_config"):
        _project_deepseek(tally, whole, fields, hidden, merge, depths, text)
        return
    clip = whole.inner("vision_config").inner("encoder_config")
    clip.defaults = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    clip.defaults |= {"image_size": 224, "patch_size": 14}
    inner, width, layers = map(clip.integer, ("hidden_size", "intermediate_size", "num_hidden_layers"))
    sizes = Sizes(layers, inner, width, clip.integer("patch_size"), frames=1)
    add_tower(tally, clip, TOWERS["clip_vision_model"], sizes)
    encoder_matrices(tally, -count_colours(clip) * sizes.patch**2 * inner)
    encoder_add(tally, -2 * inner)  # no norm follows the layers
    encoder_linear(tally, fields.integers("downsample_channels")[-1] + inner, text, bias=True)
    encoder_add(tally, 2 * text)


def _packed_positions(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add positions of patches, of which a second table has 32,768, and a norm."""
    add_positions(tally, fields, sizes)
    encoder_add(tally, 32768 * sizes.hidden)


def _project_keye(norm_is_merged: bool) -> Projector:
    """Return a projector with a norm of single patches, or of four at once."""

    def add(tally: Tally, _whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int) -> None:
        merged = hidden * merge**2
        encoder_add(tally, 2 * (merged if norm_is_merged else hidden))
        encoder_linear(tally, merged, merged, bias=True)
        encoder_linear(tally, merged, text, bias=True)

    return add


def _project_phi_3(
    tally: Tally, _whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int
) -> None:
    """Add an MLP that reads four patches, and the marks at the end of lines and between views."""
    encoder_linear(tally, 4 * hidden, text, bias=True)
    encoder_linear(tally, text, text, bias=True)
    encoder_add(tally, 8 * hidden)


def _nvlm(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add the rest of an InternViT, and the seven heads that make the number of heads a multiple of 8."""
    _INTERN.add_rest(tally, fields, sizes)
    added = 7 * (sizes.hidden // fields.integer("num_attention_heads"))
    encoder_linear(tally, sizes.hidden, added, copies=4 * sizes.layers)
    biases = 3 * fields.flag("attention_bias") + 2 * fields.flag("use_qk_norm")
    encoder_add(tally, biases * sizes.layers * added)


def _project_nvlm(
    tally: Tally, whole: Fields, _fields: Fields, hidden: int, merge: int, _depths: int, text: int
) -> None:
    """Add a norm, and an MLP with the width of those of the text model."""
    inputs = hidden * merge**2
    width = whole.inner("llm_config" if whole.has_object("llm_config") else "text_config").integer("intermediate_size")
    encoder_add(tally, 2 * inputs)
    encoder_linear(tally, inputs, width)
    encoder_linear(tally, width, text)


_INTERN = replace(TOWERS["internvl_vision"], aliases={"attention_bias": "qkv_bias", "use_qk_norm": "qk_normalization"})
# Encoders of models whose files do not describe them, as in the config of a model that has the same ones. The audio
# encoder of Phi-4 has the default sizes.
IMPLIED_ENCODERS: Mapping[str, Mapping[str, object]] = {
    "phi3_v": {
        "model_type": "phi3_v",
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "image_size": 336,
            "patch_size": 14,
            "spatial_merge_size": 2,
        },
    },
    "phi4mm": {
        "model_type": "phi4_multimodal",
        "audio_config": {"model_type": "phi4_multimodal_audio"},
        "vision_config": {
            "model_type": "phi4_multimodal_vision",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "image_size": 448,
            "patch_size": 14,
        },
    },
}
_KEYE: Mapping[str, object] = {"image_size": 384, "patch_size": 14, "spatial_merge_size": 2}
# Sizes that published files leave out.
REMOTE_SIZES: Mapping[str, Mapping[str, object]] = {
    **dict.fromkeys(("Keye", "KeyeVL1_5"), _KEYE),
    "deeplip_b_l": {**TOWER_SIZES["got_ocr2"], "downsample_channels": [512, 1024]},
    "kanana-1.5-v-visual-encoder": KANANA_SIZES,
    "openpangu_vl": OPENPANGU_SIZES,
    "siglip_so400m_patch14_384": {"image_size": 384},
}
REMOTE_TOWERS: Mapping[str, Tower] = {
    **RADIO_TOWERS,
    **TIMM_TOWERS,
    "deeplip_b_l": replace(SPECIAL_TOWERS["got_ocr2"], add_rest=_clip_after_sam),
    "eva2clip": Tower(add_rest=_positions_of_glm, merge=2),
    "intern_vit_6b": _INTERN,
    **dict.fromkeys(("Keye", "KeyeVL1_5"), Tower(add_rest=_packed_positions)),
    "kanana-1.5-v-visual-encoder": TOWERS["qwen2_vl"],
    "minicpmv": TOWERS["idefics3_vision"],
    "openpangu_vl": OPENPANGU_TOWER,
    "nvlm": replace(_INTERN, add_rest=_nvlm),
    "siglip_so400m_patch14_384": replace(
        TOWERS["siglip_vision_model"], layers="layers", hidden="width", width="", merge=2
    ),
}
REMOTE_PROJECTORS: Mapping[str, Projector] = {
    **RADIO_PROJECTORS,
    **TIMM_PROJECTORS,
    "Keye": _project_keye(norm_is_merged=False),
    "KeyeVL1_5": _project_keye(norm_is_merged=True),
    "NVLM_D": _project_nvlm,
    "bagel": project_bagel,
    "chatglm": _project_glm,
    "deepseek_vl_v2": _project_deepseek,
    "hyperclovax_vlm": add_abstractor,
    "kanana-1.5-v": project_kanana,
    "minicpmo": _resample,
    "minicpmv": _resample,
    "openpangu_vl": project_openpangu,
    "phi3_v": _project_phi_3,
    "unlimited_ocr": _project_unlimited,
}
