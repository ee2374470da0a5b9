"""Multimodal models: where their text model is in a config, and its type if a file does not name it.

Source: the configuration files of transformers 5, and published files.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "ANY_TEXT_MODEL",
    "FLAT",
    "NESTED",
    "RENAMED",
    "TEXT_FIELDS",
    "TEXT_MODELS",
    "THINKERS",
    "VERSIONED",
    "WITHOUT_LATENTS",
]

# Models with the type of the text model in their `text_config`.
TEXT_MODELS: Mapping[str, str] = {
    "apertus1p5": "apertus1p5_text",
    "aria": "aria_text",
    "cohere_compass": "cohere_compass_text",
    "cosmos3_edge": "cosmos3_edge_text",
    "deepseek_ocr2": "deepseek_ocr2_text",
    "deepseek_v41": "deepseek_v41_text",
    "dots3_note": "dots3_note_text",
    "dots_ocr": "qwen2",
    "dots_vlm": "deepseek_v3",
    "emu3": "emu3_text_model",
    "ernie4_5_moe_vl": "ernie4_5_vl_moe_text",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe_text",
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm5_next": "glm5_next_text",
    "glm_image": "glm_image_text",
    "glm_ocr": "glm_ocr_text",
    "granite4_vision": "granite4_vision_text",
    "granite_docling": "granite_docling_text",
    "hunyuan_vl": "hunyuan_vl_text",
    "hy_v4_vl": "hy_v4_vl_text",
    "inkling2_loop": "inkling2_loop_text",
    "inkling2": "inkling2_text",
    "inkling_mm_model": "inkling_text",
    "interns1_pro": "interns1_pro_text",
    "interns2_mobius": "interns2_mobius_text",
    "isaac": "qwen3",
    "jet_vlm": "jet_nemotron",
    "kanana-1.5-v": "llama",
    "Keye": "qwen3",
    "KeyeVL1_5": "qwen3",
    "kimi_k25": "kimi_k2",
    "kimi_k3": "kimi_linear",
    "kosmos-2": "kosmos_2_text_model",
    "kosmos-2.5": "kosmos_2_5_text_model",
    "llama4": "llama4_text",
    "llava_gemma": "gemma",
    "llava_llama": "llama",
    "llava_mistral": "mistral",
    "llava_mixtral": "mixtral",
    "llava_mpt": "mpt",
    "llava_qwen": "qwen2",
    "llava_qwen3": "qwen3",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "minimax_vl_01": "minimax_text_01",
    "mistral_large4": "mistral_large4_text",
    "molmo2": "molmo2_text",
    "muse_glimmer": "muse_glimmer_text",
    "muse_spark": "muse_spark_text",
    "openpangu_vl": "openpangu_dense",
    "paddleocr_vl": "paddleocr_vl_text",
    "phi3_v": "phi3",
    "phi4-siglip": "phi3",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_8_flash_next": "qwen3_8_flash_next_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen4_exp": "qwen4_exp_text",
    "step3_vl": "step3_text",
    "step3p7": "step3p5",
    "step5_vl": "step5",
    "unlimited_ocr": "unlimited_ocr_text",
}
# Multimodal models whose `text_config` may be of any family, with the type that a missing `model_type` means.
ANY_TEXT_MODEL: Mapping[str, str] = {
    **dict.fromkeys(
        ("audioflamingo3", "musicflamingo", "fast_vlm", "got_ocr2", "internvl", "llava_onevision"), "qwen2"
    ),
    **dict.fromkeys(("ovis2", "pp_chart2table", "qwen2_audio", "vibevoice"), "qwen2"),
    "midashenglm": "qwen2_5_omni_text",
    **dict.fromkeys(("vibevoice_asr", "video_llama_3"), "qwen2"),
    **dict.fromkeys(
        ("deepseek_vl", "deepseek_vl_hybrid", "glmasr", "idefics3", "janus", "llava", "llava_next"), "llama"
    ),
    **dict.fromkeys(
        ("llava_next_video", "omniasr", "perception_lm", "smolvlm", "video_llava", "vipllava", "voxtral"), "llama"
    ),
    **dict.fromkeys(("fun_asr_nano", "lighton_ocr", "moss_transcribe_diarize", "qianfan_ocr", "qwen3_asr"), "qwen3"),
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), "opt"),
    **dict.fromkeys(("aya_vision", "cohere2_vision"), "cohere2"),
    **dict.fromkeys(("glm46v", "glmga"), "glm4v_text"),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), "granite"),
    **dict.fromkeys(("idefics2", "mistral3"), "mistral"),
    **dict.fromkeys(("jev", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), "qwen3_5_text"),
    **dict.fromkeys(("nemo_speechlm", "nemotron_h_omni"), "nemotron_h"),
    "cosmos3_omni": "qwen3_vl_text",
    "exaone4_5": "exaone4",
    "hyperclovax_vision_v2": "hyperclovax",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "paligemma": "gemma",
    "qwen3_asr_thinker": "qwen3_asr_text",
    "shieldgemma2": "gemma3_text",
    "voxtral_realtime": "voxtral_realtime_text",
}
# Models whose text model is not in `text_config`: its field, and the type that a missing `model_type` means. A field
# inside another one may be missing.
TEXT_FIELDS: Mapping[str, tuple[str, str]] = {
    "alpamayo2_super": ("vlm_config.text_config", "qwen3_vl_text"),
    "bagel": ("llm_config", "qwen2"),
    "deepseek_vl_v2": ("language_config", "deepseek_v2"),
    "internvl_chat": ("llm_config", "qwen2"),
    "moondream3": ("config.text", "moondream3_text"),
    "musicgen_melody": ("decoder", "musicgen_melody_decoder"),
    **{f"NemotronH_{size}Omni_Reasoning_V3": ("llm_config", "nemotron_h") for size in ("", "Nano_", "Super_")},
    # Drafts in the format of the library speculators.
    "speculator_model": ("transformer_layer_config", "llama"),
}
# Fields that hold the text model of a multimodal model whose type is not known.
NESTED = ("text_config", "llm_config", "language_config", "llm_cfg")
# Multimodal models with the fields of the text model at the top level, whose `version` decides its type: the first one
# in the list whose version is at most that of the model.
VERSIONED: Mapping[str, tuple[tuple[float, str], ...]] = {
    "minicpmv": ((4.5, "qwen3"), (4.0, "llama"), (2.6, "qwen2"), (2.5, "llama"), (0.0, "minicpm")),
    "minicpmo": ((4.5, "qwen3"), (0.0, "qwen2")),
}
# Models that speak, with the model that listens, sees and thinks in `thinker_config`.
THINKERS = frozenset({"qwen2_5_omni", "qwen3_asr", "qwen3_omni_moe"})
# Multimodal models whose published files have the fields of the text model at the top level.
FLAT = frozenset(
    {"deepseek_v41", "dots_ocr", "dots_vlm", "ernie4_5_moe_vl", "fuyu", "glm5_next", "hunyuan_vl", "isaac"}
    | {"Keye", "KeyeVL1_5", "llava_gemma", "llava_llama", "llava_mistral", "llava_mixtral", "llava_mpt", "llava_qwen"}
    | {
        "llava_qwen3",
        "openpangu_vl",
        "paddleocr_vl",
        "phi3_v",
        "phi4-siglip",
        "qwen2_vl",
        "qwen2_5_vl",
        "unlimited_ocr",
    }
)
# Families that have grouped attention if their config has dims of 0 for latents or says `use_mla` false.
WITHOUT_LATENTS: Mapping[str, str] = {"deepseek_v2": "deepseek"}
# Families that transformers serves under another name.
RENAMED: Mapping[str, str] = {
    "inkling_text": "inkling_model",
    "kimi_k2": "deepseek_v3",
    "llama": "kanana-1.5-3b-instruct",
}
