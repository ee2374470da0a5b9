"""Multimodal models: where their text model is in a config, and its type if a file does not name it.

Source: the configuration files of transformers 5, and published files.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ANY_TEXT_MODEL", "FLAT", "RENAMED", "TEXT_FIELDS", "TEXT_MODELS", "THINKERS"]

# Models with the type of the text model in their `text_config`.
TEXT_MODELS: Mapping[str, str] = {
    "dots3_note": "dots3_note_text",
    "dots_ocr": "qwen2",
    "ernie4_5_moe_vl": "ernie4_5_vl_moe_text",
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "kimi_k25": "kimi_k2",
    "llama4": "llama4_text",
    "glm4v": "glm4v_text",
    "glm5_next": "glm5_next_text",
    "mistral_large4": "mistral_large4_text",
    "step3p7": "step3p5",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}
# Multimodal models whose `text_config` may be of any family, with the type that a missing `model_type` means.
ANY_TEXT_MODEL: Mapping[str, str] = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "idefics3": "llama",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "smolvlm": "llama",
    "vipllava": "llama",
}
# Models whose text model is not in `text_config`: its field, and the type that a missing `model_type` means.
TEXT_FIELDS: Mapping[str, tuple[str, str]] = {
    "deepseek_vl_v2": ("language_config", "deepseek_v2"),
    "internvl_chat": ("llm_config", "qwen2"),
    "musicgen_melody": ("decoder", "musicgen_melody_decoder"),
}
# Models that speak, with the model that listens, sees and thinks in `thinker_config`.
THINKERS = frozenset({"qwen2_5_omni", "qwen3_omni_moe"})
# Multimodal models whose published files have the fields of the text model at the top level.
FLAT = frozenset({"dots_ocr", "ernie4_5_moe_vl", "fuyu", "glm5_next", "qwen2_vl", "qwen2_5_vl"})
# Families that transformers serves under another name.
RENAMED: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
