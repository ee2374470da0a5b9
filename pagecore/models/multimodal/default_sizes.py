"""Sizes of text models whose `text_config` leaves them out, because they are those of the family's default model.

Source: the configuration files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["sizes_of"]

_NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_SIZES: Mapping[str, tuple[int, ...]] = {
    "aria_text": (4096, 32, 32, 4096, 32000),
    "cohere2": (8192, 40, 64, 22528, 256000),
    "ernie4_5_vl_moe_text": (2560, 28, 20, 12288, 103424),
    "gemma": (3072, 28, 16, 24576, 256000),
    "gemma2": (2304, 26, 8, 9216, 256000),
    "gemma3_text": (2304, 26, 8, 9216, 262208),
    "gemma4_text": (2304, 30, 8, 9216, 262144),
    "glm4": (4096, 40, 32, 13696, 151552),
    "glm4v_moe_text": (4096, 46, 96, 10944, 151424),
    "glm4v_text": (4096, 40, 32, 13696, 151552),
    "granite": (4096, 32, 32, 11008, 32000),
    "lfm2": (2560, 32, 32, 12288, 65536),
    "llama": (4096, 32, 32, 11008, 32000),
    "llama4_text": (5120, 48, 40, 8192, 202048),
    "ministral3": (4096, 34, 32, 14336, 131072),
    "mistral": (4096, 32, 32, 14336, 32000),
    "mixtral": (4096, 32, 32, 14336, 32000),
    "moondream3_text": (2048, 24, 32, 8192, 51200),
    "phi": (2048, 24, 32, 8192, 51200),
    "phi3": (3072, 32, 32, 8192, 32064),
    "qwen2": (4096, 32, 32, 22016, 151936),
    "qwen2_5_vl_text": (8192, 80, 64, 29568, 152064),
    "qwen2_vl_text": (8192, 80, 64, 29568, 152064),
    "qwen3": (4096, 32, 32, 22016, 151936),
    "qwen3_5_text": (4096, 32, 16, 12288, 248320),
    "qwen3_moe": (2048, 24, 32, 6144, 151936),
    "qwen3_vl_moe_text": (2048, 24, 16, 5632, 151936),
    "qwen3_vl_text": (4096, 32, 32, 22016, 151936),
    "smollm3": (2048, 36, 16, 11008, 128256),
    "starcoder2": (3072, 30, 24, 12288, 49152),
}


# Sizes that are not those of the family, by the types of the whole model and of its text model.
_OF_WHOLE: Mapping[tuple[str, str], Mapping[str, int]] = {
    ("glmasr", "llama"): {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "vocab_size": 59264,
    },
    ("voxtral", "llama"): {
        "hidden_size": 3072,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "vocab_size": 131072,
    },
    ("voxtral_realtime", "voxtral_realtime_text"): {"head_dim": 128, "sliding_window": 8192},
}


def sizes_of(model_type: str, whole: object) -> Mapping[str, int]:
    """Return the default sizes of a family inside a model of type `whole` by the names of their fields."""
    own = dict(zip(_NAMES, _SIZES.get(model_type, ()), strict=False))
    return {**own, **_OF_WHOLE.get((str(whole), model_type), {})}
