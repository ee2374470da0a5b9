"""Families in which some layers keep recurrent states, and some attend.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.families.common_fields import GROUPED, LATENT
from pagecore.models.families.family import Family
from pagecore.models.layers.index_rows import index_rows_of_qwen_4
from pagecore.models.layers.latents.by_layer import latents_of_glm_5_next, latents_of_ling
from pagecore.models.layers.score_scales import multiplier
from pagecore.models.layers.states import kinds
from pagecore.models.layers.states import recurrent as states
from pagecore.models.layers.states import remote as remote_states
from pagecore.models.layers.states.recurrent import States
from pagecore.models.layers.windows import every_layer

__all__ = ["HYBRIDS", "NEMOTRON_H", "STATES_OF_NEMOTRON"]


def _half_head(_fields: Fields, head_dim: int, _layer: int) -> float:
    """Return the scale of Zamba2, whose heads are twice as wide as those that its scale was chosen for."""
    return float((head_dim / 2) ** -0.5)


def _every_fourth_slides(_fields: Fields, layer: int) -> bool:
    return layer > 0 and layer % 4 == 0


def _two_of_five_slide(_fields: Fields, layer: int) -> bool:
    return layer % 5 in (1, 4)


QWEN_3_NEXT: Mapping[str, object] = {
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mamba_ssm_dtype": None,
}
_QWEN_4: Mapping[str, object] = {
    **QWEN_3_NEXT,
    **dict.fromkeys(("indexer_n_heads", "indexer_head_dim", "indexer_compress_ratio", "ple_layer_ids")),
    "hc_count": 4,
    "ngram_size": 3,
    "ple_conv_kernel_size": 4,
}
KIMI_LINEAR = {
    **LATENT,
    "num_key_value_heads": 32,
    "layer_types": None,
    "linear_attn_config": None,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
NEMOTRON_H: Mapping[str, object] = {
    "num_hidden_layers": None,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "layer_types": None,
    "hybrid_override_pattern": None,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
    "mamba_ssm_cache_dtype": None,
}
# Mamba-2 of Bamba, Falcon-H1 and Granite.
MAMBA_2 = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
}
GROUPED_8 = {**GROUPED, "num_key_value_heads": 8}
JAMBA = {
    **GROUPED_8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
ZAYA: Mapping[str, object] = {
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "layer_types": None,
    "sliding_window": None,
    "cca_time0": 2,
    "cca_time1": 2,
}
MINIMAX = {
    **GROUPED_8,
    "layer_types": None,
    "attn_type_list": None,
    "block_size": 256,
    "sliding_window": None,
}
GLM_5_NEXT: Mapping[str, object] = {
    **KIMI_LINEAR,
    **dict.fromkeys(("indexer_types", "index_topk_pattern")),
    "num_key_value_heads": 64,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "linear_num_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}
LING: Mapping[str, object] = {
    **LATENT,
    "head_dim": 128,
    "num_key_value_heads": 32,
    "layer_types": None,
    "layer_group_size": 6,
    "short_conv_kernel_size": 4,
    "use_mla_nope": False,
}
RECURRENT_GEMMA = {
    **GROUPED,
    "block_types": ("recurrent", "recurrent", "attention"),
    "sliding_window": 2048,
    "lru_width": None,
    "conv1d_width": 4,
}
ZAMBA_2 = {
    **GROUPED,
    "layer_types": None,
    "n_mamba_heads": 8,
    "mamba_ngroups": 1,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "chunk_size": 256,
}
OLMO_HYBRID: Mapping[str, object] = {
    **GROUPED,
    **dict.fromkeys(("layer_types", "linear_num_key_heads", "linear_num_value_heads")),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim")),
    "linear_conv_kernel_dim": 4,
}
LARA: Mapping[str, object] = {
    **QWEN_3_NEXT,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
}
LFM_3: Mapping[str, object] = {
    "head_dim": 128,
    "num_key_value_heads": 4,
    "layer_types": None,
    "sliding_window": 256,
    "conv_L_cache": 7,
}
ZAMBA = {
    **JAMBA,
    "num_key_value_heads": 16,
    "layer_types": None,
    "attn_layer_period": 6,
}
LFM_2 = {**GROUPED_8, "layer_types": None, "full_attn_idxs": None, "conv_L_cache": 3}
_DELTA_RULE = States(
    kinds.every_nth_attends("full_attention_interval"), states.delta_rule, states.chunk_of_64, "mamba_ssm_dtype"
)
_MAMBA_2 = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand")
_CHUNK = states.chunk_of("mamba_chunk_size")
_OF_NEMOTRON = states.mamba_2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", None)
STATES_OF_NEMOTRON = States(
    kinds.kinds_of_nemotron, _OF_NEMOTRON, states.chunk_of("chunk_size"), "mamba_ssm_cache_dtype"
)
_OF_ZAMBA = states.mamba_2("n_mamba_heads", "", "mamba_ngroups", "mamba_d_state", "mamba_d_conv", "mamba_expand")
_SHORT_CONVOLUTIONS = States(kinds.kinds_of_lfm, states.short_convolution)
_LIGHTNING = Family(
    MINIMAX, states=States(kinds.kinds_of_minimax, states.lightning_attention, states.chunk_of("block_size"))
)

HYBRIDS: Mapping[str, Family] = {
    "qwen3_next": Family(QWEN_3_NEXT, states=_DELTA_RULE),
    "qwen3_5_text": Family({**QWEN_3_NEXT, "num_key_value_heads": 4}, states=_DELTA_RULE),
    "qwen3_5_moe_text": Family(QWEN_3_NEXT, states=_DELTA_RULE),
    **dict.fromkeys(
        ("qwen4_exp_text", "qwen3_8_flash_next_text"),  # the second one in exports for some engines
        Family(
            _QWEN_4,
            rows=index_rows_of_qwen_4,
            states=States(
                kinds.kinds_of_qwen_4,
                states.delta_rule,
                states.chunk_of_64,
                "mamba_ssm_dtype",
                states.delta_rule_of_qwen_4,
            ),
        ),
    ),
    "lara_mini": Family(
        LARA, _two_of_five_slide, states=States(kinds.kinds_of_lara, states.delta_rule, states.chunk_of_64)
    ),
    "kimi_linear": Family(
        KIMI_LINEAR,
        aliases={"max_position_embeddings": "model_max_length"},
        stores_latents=True,
        rotates=False,
        states=States(kinds.kinds_of_kimi, states.kimi_delta_rule, states.chunk_of_64),
    ),
    "nemotron_h": Family(
        NEMOTRON_H,
        aliases={"layer_types": "layers_block_type"},
        count_layers=kinds.count_by_kind,
        states=STATES_OF_NEMOTRON,
    ),
    "granitemoehybrid": Family(
        {**GROUPED, **MAMBA_2, "attention_multiplier": 1.0, "layer_types": None},
        aliases={"layer_types": "layers_block_type"},
        scale=multiplier,
        states=States(kinds.kinds_of_granite, states.mamba_2(*_MAMBA_2), _CHUNK),
    ),
    "falcon_h1": Family(
        {**GROUPED_8, **MAMBA_2, "mamba_d_ssm": 1024},
        states=States(kinds.every_layer_has_both, states.mamba_2(*_MAMBA_2, "mamba_d_ssm"), _CHUNK),
    ),
    "jamba": Family(JAMBA, states=States(kinds.one_layer_of_a_period_attends, states.mamba_1_of_jamba)),
    "bamba": Family(
        {**GROUPED_8, **MAMBA_2, "attn_layer_indices": None},
        states=States(kinds.listed_layers_attend, states.mamba_2(*_MAMBA_2), _CHUNK),
    ),
    "zamba2": Family(
        ZAMBA_2,
        aliases={"layer_types": "layers_block_type", "head_dim": "attention_head_dim"},
        attention_width=2,
        scale=_half_head,
        states=States(kinds.kinds_of_zamba, _OF_ZAMBA, states.chunk_of("chunk_size")),
    ),
    "zamba": Family(
        ZAMBA,
        aliases={"layer_types": "layers_block_type", "head_dim": "attention_head_dim"},
        attention_width=2,
        scale=_half_head,
        states=States(kinds.kinds_of_zamba_1, states.mamba_1_of_jamba),
    ),
    "lfm2": Family(LFM_2, states=_SHORT_CONVOLUTIONS),
    "lfm2_moe": Family(LFM_2, states=_SHORT_CONVOLUTIONS),
    "lfm3": Family(LFM_3, _every_fourth_slides, states=States(kinds.kinds_of_lfm_3, states.short_convolution)),
    "olmo_hybrid": Family(
        OLMO_HYBRID,
        states=States(kinds.every_fourth_or_the_last_attends, states.delta_rule_of_olmo, states.chunk_of_64),
    ),
    "glm5_next_text": Family(
        GLM_5_NEXT,
        stores_latents=True,
        latents=latents_of_glm_5_next,
        states=States(kinds.kinds_of_glm_5_next, states.kimi_delta_rule, states.chunk_of_64),
    ),
    "zaya": Family(ZAYA, states=States(kinds.kinds_of_zaya, states.convolution_of_zaya)),
    "minimax": _LIGHTNING,
    "minimax_m1": _LIGHTNING,
    "minimax_text_01": _LIGHTNING,
    "bailing_hybrid": Family(
        LING,
        aliases={"max_position_embeddings": "model_max_length"},
        stores_latents=True,
        latents=latents_of_ling,
        states=States(kinds.kinds_of_ling, remote_states.states_of_ling, remote_states.chunk_of_ling),
    ),
    "recurrent_gemma": Family(
        RECURRENT_GEMMA,
        every_layer,
        aliases={"sliding_window": "attention_window_size"},
        states=States(kinds.kinds_of_gemma, states.recurrent_unit),
    ),
}
