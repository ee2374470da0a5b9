"""Families with latent attention (MLA), some of them with an indexer.

Source: the configuration and modeling files of transformers 5, and of openPangu-Ultra-MoE.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.families.common_fields import LATENT
from pagecore.models.families.family import Family, count_layers
from pagecore.models.layers.latents.by_layer import latents_of_mistral_large_4
from pagecore.models.layers.latents.compressed import latents_of_deepseek_4, rows_of_deepseek_4
from pagecore.models.layers.latents.indexers import every_layer_indexes, layers_that_index
from pagecore.models.layers.latents.with_windows import latents_of_dots
from pagecore.storage.checks import LAYERS_MAX

__all__ = ["LATENT_ATTENTION"]


def _two_attentions_each(fields: Fields) -> int:
    """Return twice num_layers; transformers calls this number num_hidden_layers."""
    if fields.given("num_layers") is None:
        if fields.given("num_hidden_layers") is None:
            fields.refuse(f"{fields.name('num_layers')} is missing; add it to the config")
        count = count_layers(fields)
        if count % 2:
            fields.refuse(f"{fields.describe('num_hidden_layers')}; it must be even: each of num_layers attends twice")
        return count
    count = 2 * fields.integer("num_layers", max=LAYERS_MAX // 2)
    if fields.given("num_hidden_layers") not in (None, count):
        fields.refuse(f"{fields.describe('num_hidden_layers')}; it must be {count}, twice {fields.name('num_layers')}")
    return count


GLM_4_MOE_LITE = {**LATENT, "num_key_value_heads": 20, "qk_nope_head_dim": 192}
MINICPM_3 = {**LATENT, "num_key_value_heads": 40, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
MISTRAL_4 = {
    **LATENT,
    "num_key_value_heads": 32,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "rope_parameters": {"rope_type": "yarn", "factor": 128.0, "mscale_all_dim": 1.0},
}
# Sparse latent attention: an indexer selects the keys.
DEEPSEEK_32 = {
    **LATENT,
    "num_key_value_heads": 128,
    "layer_types": None,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
AXK_2 = {
    **DEEPSEEK_32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "index_n_heads": 16,
}
GLM_DSA = {
    **DEEPSEEK_32,
    **dict.fromkeys(("indexer_types", "index_topk_pattern")),
    "num_key_value_heads": 64,
    "qk_nope_head_dim": 192,
    "index_n_heads": 32,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}
HY_V4 = {
    **GLM_DSA,
    "num_key_value_heads": None,
    "index_n_heads": 16,
    "index_topk_freq": 4,
}
MISTRAL_LARGE_4: Mapping[str, object] = {
    **GLM_DSA,
    **dict.fromkeys(("no_rope_layers", "kv_source_layers")),
    "qk_nope_head_dim": 64,
    "no_rope_layer_interval": 4,
}
DEEPSEEK_4: Mapping[str, object] = {
    **dict.fromkeys(("layer_types", "compress_ratios", "compress_rates")),
    **dict.fromkeys(("kv_source_layer_ids", "index_source_layer_ids", "kv_lora_rank")),
    "head_dim": 512,
    "num_key_value_heads": 1,
    "sliding_window": 128,
    "index_head_dim": 128,
}
DOTS_3: Mapping[str, object] = {
    **LATENT,
    **dict.fromkeys(("layer_types", "per_layer_config", "sliding_window", "use_sliding_window", "use_dsa")),
    "sliding_window_size": 512,
    "index_head_dim": 128,
    "index_topk": 2048,
}
_PANGU_NAMES = {
    "kv_lora_rank": "attention_kv_lora_dim",
    "q_lora_rank": "attention_q_lora_dim",
    "qk_nope_head_dim": "attention_qk_dim",
    "qk_rope_head_dim": "attention_qk_rope_dim",
    "v_head_dim": "attention_v_dim",
}
_DEEPSEEK_4 = Family(
    DEEPSEEK_4,
    stores_latents=True,
    latents=latents_of_deepseek_4,
    rows=rows_of_deepseek_4,
    aliases={"sliding_window": "window_size"},
)

LATENT_ATTENTION: Mapping[str, Family] = {
    "axk1": Family({**LATENT, "num_key_value_heads": 64}, stores_latents=True),
    "axk2": Family(AXK_2, stores_latents=True, indexes=every_layer_indexes),
    "deepseek_v2": Family(LATENT, stores_latents=True),
    "deepseek_v3": Family({**LATENT, "num_key_value_heads": 128}, stores_latents=True),
    "deepseek_v32": Family(DEEPSEEK_32, stores_latents=True, indexes=every_layer_indexes),
    "deepseek_v4": _DEEPSEEK_4,
    "deepseek_v41_text": _DEEPSEEK_4,
    "dots3_note_text": Family(DOTS_3, stores_latents=True, latents=latents_of_dots),
    "glm4_moe_lite": Family(GLM_4_MOE_LITE, stores_latents=True),
    "glm_moe_dsa": Family(GLM_DSA, stores_latents=True, indexes=layers_that_index),
    "hy_v4": Family(HY_V4, stores_latents=True, indexes=layers_that_index),
    "hy_v4_vl_text": Family({**HY_V4, "index_n_heads": 32}, stores_latents=True, indexes=layers_that_index),
    "kimi_k2": Family({**LATENT, "num_key_value_heads": 128}, stores_latents=True),
    "longcat_flash": Family(LATENT, stores_latents=True, count_layers=_two_attentions_each),
    "minicpm3": Family(MINICPM_3, stores_latents=True),
    "mistral4": Family(MISTRAL_4, stores_latents=True),
    "mistral_large4_text": Family(MISTRAL_LARGE_4, stores_latents=True, latents=latents_of_mistral_large_4),
    "pangu_ultra_moe": Family({**LATENT, "num_key_value_heads": 128}, stores_latents=True, aliases=_PANGU_NAMES),
    "sarvam_mla": Family(LATENT, stores_latents=True),
    "youtu": Family({**LATENT, "num_key_value_heads": 16}, stores_latents=True),
}
