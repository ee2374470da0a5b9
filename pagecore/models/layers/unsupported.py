"""Detection of attention that no spec describes, from the fields of a config.

Used by `specs_from_config` and by the cache for transformers, which read fields in different ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagecore.models.layer_types import CHUNKED_LAYER

__all__ = ["UNATTENDED_TYPES", "UNSUPPORTED_TYPES", "unsupported_fields", "unsupported_layers"]

LATENT, LINEAR, CHUNKED = "latent attention", "linear-attention states", "chunked attention"
RECURRENT, CONVOLUTION = "recurrent states", "convolution states"
CROSS = "cross attention to images in some layers"
SPARSE, SPARSE_LAYER = "sparse attention to blocks of keys", "minimax_m3_sparse"

# Entries of `layer_types` that are not supported, and what their layers store.
KINDS: Mapping[str, str] = {
    "linear_attention": LINEAR,
    CHUNKED_LAYER: CHUNKED,
    "conv": CONVOLUTION,
    "mamba": RECURRENT,
    "recurrent": RECURRENT,
    SPARSE_LAYER: SPARSE,
}
# Fields that are only set in models with such layers.
FIELDS: Mapping[str, str] = {
    "linear_num_value_heads": LINEAR,
    "linear_attn_config": LINEAR,
    "mamba_d_state": RECURRENT,
    "ssm_state_size": RECURRENT,
    "state_size": RECURRENT,
    "lru_width": RECURRENT,
    "conv_L_cache": CONVOLUTION,
    "kv_lora_rank": LATENT,
    "sparse_attention_config": SPARSE,
    "cross_attention_layers": CROSS,
}
# Model types whose config.json may have none of these fields.
TYPES: Mapping[str, str] = {
    "qwen3_next": LINEAR,
    "qwen3_5": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "kimi_linear": LINEAR,
    "minimax": LINEAR,
    "minimax_text_01": LINEAR,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    "falcon_mamba": RECURRENT,
    "jamba": RECURRENT,
    "bamba": RECURRENT,
    "zamba": RECURRENT,
    "zamba2": RECURRENT,
    "nemotron_h": RECURRENT,
    "falcon_h1": RECURRENT,
    "granitemoehybrid": RECURRENT,
    "recurrent_gemma": RECURRENT,
    "lfm2": CONVOLUTION,
    "lfm2_moe": CONVOLUTION,
}
_DENOISED = "blocks of tokens that are denoised together and attend to each other"
_AT_ONCE = "all of its output computed at once, so that nothing is cached"
_IMAGES = "images that attend to later tokens"
_PREFIX = "prompts that attend to later tokens"
# Model types of which no model is supported, whatever its fields are.
UNSUPPORTED_TYPES: Mapping[str, str] = {
    "bark": "three models with caches of their own: pass semantic_config or coarse_acoustics_config",
    "blt": "transformers over bytes and over patches, whose lengths depend on the text",
    "cpmant": _PREFIX,
    "diffusion_gemma": _DENOISED,
    "diffusion_gemma_text": _DENOISED,
    "evolla": "cross attention to proteins between its layers",
    "evolla_text": "cross attention to proteins between its layers",
    "gemma4_assistant": "layers that all read the keys and values of another model",
    "gemma4_unified_assistant": "layers that all read the keys and values of another model",
    "fastspeech2_conformer": _AT_ONCE,
    "fastspeech2_conformer_with_hifigan": _AT_ONCE,
    "phi4flash": "differential attention",
    "pi0": "actions that are denoised together and attend to each other",
    "prophetnet": "streams of predicted tokens next to its text",
    "reformer": "attention within buckets of hashed keys",
    "vits": _AT_ONCE,
    "xlm": "attention whose keys and values are not cached",
    "xlnet": "a memory of hidden states of earlier segments",
}


_CONVOLVED = "convolution states of keys and values, and biases of positions"
# Model types whose layers are stored, and whose attention no spec describes.
UNATTENDED_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("deepseek_v4", "deepseek_v41", "deepseek_v41_text"), "attention to compressed keys"),
    **dict.fromkeys(("inkling2", "inkling2_text", "inkling_mm_model", "inkling_model", "inkling_text"), _CONVOLVED),
    **dict.fromkeys(("inkling2_loop", "inkling2_loop_text"), _CONVOLVED),
    **dict.fromkeys(("git", "moondream3", "moondream3_text"), _IMAGES),
    **dict.fromkeys(("Dream", "llada2_moe", "sdar", "sdar_moe"), _DENOISED),
    **dict.fromkeys(("unlimited_ocr", "unlimited_ocr_text"), "windows next to a prompt that all queries attend to"),
    "diffllama": "differential attention",
    "doge": "attention with a dynamic mask that is computed from the values",
    "idefics": "cross attention to images between its layers",
    "iquest_q1": "sinks that depend on the query",
    "minicpm_sala": "attention to selected blocks of keys",
    "paligemma": _PREFIX,
    "phi3small": "block-sparse attention",
    "step5": "attention to selected blocks of keys",
}


def unsupported_fields(given: Callable[[str], Any]) -> str | None:
    """Return the unsupported attention of a model together with the field that reveals it, or None.

    Parameters
    ----------
    given : callable
        Returns the value of a field by its name; None for null and for a missing field.
    """
    # If `layer_types` is present, it decides in place of the fields of hybrid families, some of whose models only have
    # attention layers.
    names = ["kv_lora_rank", "cross_attention_layers"] if _listed(given) else FIELDS
    for name in names:
        value = given(name)
        if value and not isinstance(value, str):
            return f"{FIELDS[name]} ({name} = {value if isinstance(value, int) else '...'})"
    sparse = [layer for layer, kind in enumerate(_listed(given)) if kind == SPARSE_LAYER]
    if sparse:
        return f"{SPARSE} (layer_types[{sparse[0]}] = {SPARSE_LAYER!r})"
    attention = given("attn_type_list")
    if isinstance(attention, list | tuple) and 0 in attention:
        return f"{LINEAR} (attn_type_list[{attention.index(0)}] = 0)"
    return None


def unsupported_layers(model_type: object, given: Callable[[str], Any]) -> str | None:
    """Detect as `unsupported_fields`, and also by `layer_types`, `attention_chunk_size` and the model type alone."""
    named = {**UNSUPPORTED_TYPES, **UNATTENDED_TYPES}
    if isinstance(model_type, str) and model_type in named:
        return named[model_type]
    found = unsupported_fields(given)
    if found is not None:
        return found
    for layer, kind in enumerate(_listed(given)):
        if isinstance(kind, str) and kind in KINDS:
            return f"{KINDS[kind]} (layer_types[{layer}] = {kind!r})"
    by_type = TYPES.get(model_type) if isinstance(model_type, str) else None
    if _listed(given):
        return None
    slides = given("sliding_window") is not None and given("use_sliding_window") is not False
    if isinstance(given("attention_chunk_size"), int) and not slides:
        return f"{CHUNKED} (attention_chunk_size = {given('attention_chunk_size')})"
    return by_type


def _listed(given: Callable[[str], Any]) -> list[Any] | tuple[Any, ...]:
    kinds = given("layer_types")
    return kinds if isinstance(kinds, list | tuple) else ()
