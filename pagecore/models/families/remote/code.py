"""Families whose code is published together with their weights, not in transformers.

Source: the configuration and modeling files of internlm/internlm2-chat-7b, baichuan-inc/Baichuan2-7B-Base,
THUDM/glm-4-9b-chat, LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct, deepseek-ai/deepseek-moe-16b-base, XiaomiMiMo/MiMo-7B-Base,
openbmb/MiniCPM-2B-sft-bf16, Qwen/Qwen-7B, inclusionAI/Ling-mini-2.0, stepfun-ai/step3,
Snowflake/snowflake-arctic-instruct, nvidia/Llama-3_3-Nemotron-Super-49B-v1, hpcai-tech/grok-1 and
microsoft/Phi-4-multimodal-instruct.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.families.common_fields import GROUPED, QWEN
from pagecore.models.families.family import Family, Heads
from pagecore.models.families.remote.nemotron_nas import heads_of_block, kinds_of_blocks
from pagecore.models.layers.windows import every_layer, layers_above

__all__ = ["REMOTE_CODE"]


def _groups_of_chatglm(fields: Fields, heads: Heads, _layer: int, _slides: bool) -> Heads:
    """Return the groups of multi-query attention, or all heads without it; refuse the first ChatGLM."""
    if fields.given("position_encoding_2d"):
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('position_encoding_2d')}, so prompts attend to later tokens, which is "
            "not supported; pass a list of specs"
        )
    if not fields.flag("multi_query_attention"):
        return heads
    name = "multi_query_group_num"
    return replace(heads, kv_heads=fields.integer(name), kv_field=name)


def _multiplier_of_grok(fields: Fields, _head_dim: int, _layer: int) -> float:
    return fields.number("attn_output_multiplier")


# The scores are multiplied before they are capped.
_GROK: Mapping[str, object] = {**GROUPED, "attn_output_multiplier": 1.0, "attn_logit_softcapping": 1.0}

REMOTE_CODE: Mapping[str, Family] = {
    "arctic": Family({**GROUPED, "sliding_window": None}, every_layer),
    "baichuan": Family({}, aliases={"max_position_embeddings": "model_max_length"}),
    "bailing_moe": Family(QWEN, layers_above),
    "chatglm": Family(
        {"head_dim": 128, "multi_query_attention": False, "multi_query_group_num": 1},
        aliases={"head_dim": "kv_channels", "num_hidden_layers": "num_layers", "max_position_embeddings": "seq_length"},
        heads=_groups_of_chatglm,
    ),
    "deepseek": Family(GROUPED),
    "exaone": Family(GROUPED, aliases={"num_hidden_layers": "num_layers"}),
    "grok-1": Family(_GROK, scale=_multiplier_of_grok, aliases={"attn_logit_softcapping": "max_attn_value"}),
    "internlm2": Family(GROUPED),
    "mimo": Family({**QWEN, "num_key_value_heads": 8}, layers_above),
    "minicpm": Family(GROUPED),
    "nemotron-nas": Family(GROUPED, heads=heads_of_block, kinds=kinds_of_blocks),
    "phi4mm": Family({"num_key_value_heads": None, "sliding_window": None}, every_layer),
    "qwen": Family({"head_dim": 128}, aliases={"head_dim": "kv_channels", "max_position_embeddings": "seq_length"}),
    # The heads share keys and values, and queries pass through a low rank.
    "step3_text": Family(
        {"head_dim": 256, "num_key_value_heads": 1},
        aliases={"num_key_value_heads": "num_attention_groups", "max_position_embeddings": "max_seq_len"},
    ),
}
