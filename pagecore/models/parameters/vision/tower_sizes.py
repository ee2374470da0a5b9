"""Types and sizes of vision towers that published files leave out.

Source: the configuration files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.parameters.vision.remote_towers import REMOTE_SIZES
from pagecore.models.parameters.vision.special_towers import TOWER_SIZES

__all__ = ["BY_MODEL", "DEFAULTS", "MERGING", "OTHER_TOWERS", "SIZES", "WITHOUT_HEAD"]

# Types of the tower by the type of the model, for a file whose vision_config does not name it.
BY_MODEL: Mapping[str, str] = {
    **dict.fromkeys(("glm46v", "glmga"), "glm4v"),
    **dict.fromkeys(("lighton_ocr", "mistral3"), "pixtral"),
    **dict.fromkeys(("aria", "idefics3"), "idefics3_vision"),
    **dict.fromkeys(("llava", "llava_next", "llava_next_video", "video_llava", "vipllava"), "clip_vision_model"),
    **dict.fromkeys(
        ("aya_vision", "cohere2_vision", "gemma3", "llava_onevision", "shieldgemma2"), "siglip_vision_model"
    ),
    "lfm2_vl": "siglip2_vision_model",
    "blip": "blip_vision_model",
    "blip-2": "blip_2_vision_model",
    "chatglm": "eva2clip",
    "ernie4_5_moe_vl": "DFNRope_vision_transformer",
    "deepseek_vl": "siglip_vision_model",
    "dots3_note": "dots3_note_vision_encoder",
    "deepseek_vl_hybrid": "siglip_vision_model",
    "hyperclovax_vision_v2": "qwen2_5_vl",
    "inkling_mm_model": "inkling_vision",
    "instructblip": "instructblip_vision_model",
    "instructblipvideo": "instructblipvideo_vision_model",
    "janus": "janus_vision_model",
    "kanana-1.5-v": "kanana-1.5-v-visual-encoder",
    "step3p7": "step3p5",
    "internvl": "internvl_vision",
    "llama4": "llama4_vision_model",
    "qwen2_5_omni_thinker": "qwen2_5_omni_vision_encoder",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_vision_encoder",
    "mllama": "mllama_vision_model",
    "smolvlm": "smolvlm_vision",
    "t5gemma2_encoder": "siglip_vision_model",
}
# Models whose files name a tower of other layers.
OTHER_TOWERS: Mapping[str, str] = {**dict.fromkeys(("minicpmv", "minicpmo"), "minicpmv"), "NVLM_D": "nvlm"}
# Models whose files leave out that their SigLIP has no head that pools the patches.
WITHOUT_HEAD = frozenset({"eagle_2_5_vl"})
DEFAULTS: Mapping[str, object] = {
    **dict.fromkeys(("deepstack_visual_indexes", "max_num_tiles", "merge_kernel_size", "mm_tokens_per_image")),
    **dict.fromkeys(("num_position_embeddings", "spatial_merge_size", "temporal_patch_size")),
    **dict.fromkeys(("attention_bias", "use_mask_token", "use_qk_norm", "qkv_bias", "mlp_bias"), False),
    **dict.fromkeys(("use_absolute_position_embeddings", "use_mean_pooling", "vision_use_head"), True),
    "norm_type": "layer_norm",
    "mlp_ratio": 4,
}
_MERGED: Mapping[str, object] = {"spatial_merge_size": 2}
_MERGED_IN_TIME: Mapping[str, object] = {**_MERGED, "temporal_patch_size": 2}
_KIMI: Mapping[str, object] = {"merge_kernel_size": (2, 2)}
_QWEN_3: Mapping[str, object] = {**_MERGED_IN_TIME, "num_position_embeddings": 2304}
_QWEN_3_VL: Mapping[str, object] = {**_QWEN_3, "deepstack_visual_indexes": (8, 16, 24)}
# Sizes that published files leave out.
SIZES: Mapping[str, Mapping[str, object]] = {
    **REMOTE_SIZES,
    **TOWER_SIZES,
    **dict.fromkeys(("cosmos3_edge", "ernie4_5_vl_moe", "hunyuan_vl", "paddleocr_vl"), _MERGED),
    **dict.fromkeys(("exaone4_5", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "lfm3_vl"), _MERGED_IN_TIME),
    **dict.fromkeys(("minimax_m3_vl", "muse_glimmer", "muse_spark"), _MERGED_IN_TIME),
    **dict.fromkeys(("qwen2_5_omni_vision_encoder", "qwen2_vl"), _MERGED_IN_TIME),
    **dict.fromkeys(("kimi_k25", "moonvit"), _KIMI),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_8_flash_next", "qwen4_exp"), _QWEN_3),
    **dict.fromkeys(("cohere_compass", "qwen3_omni_moe_vision_encoder", "qwen3_vl", "qwen3_vl_moe"), _QWEN_3_VL),
    "deepseek_v41": {"spatial_merge_size": 3},
    "moss_vl": {**_QWEN_3_VL, "temporal_patch_size": 1},
    "pixtral": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    "qianfan_ocr": {"attention_bias": True},
    "qwen2_5_vl": {**_MERGED_IN_TIME, "depth": 32, "intermediate_size": 3420, "patch_size": 14},
}
# Models that merge four patches unless their file says otherwise.
MERGING = frozenset(
    {"NVLM_D", "aya_vision", "cohere2_vision", "eagle_2_5_vl", "h2ovl_chat", "idefics3", "interns1", "internvl"}
    | {"internvl_chat", "lfm2_vl", "lighton_ocr", "mistral3", "mistral_large4", "nemotron_h_omni", "qianfan_ocr"}
    | {"skywork_chat", "smolvlm"}
)
