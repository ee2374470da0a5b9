"""Families whose layers all attend to all preceding tokens, as those of Llama do.

Source: the configuration and modeling files of transformers 5, and of tencent/Tencent-Hunyuan-Large.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.families.common_fields import DIMS_OF_128, GROUPED, MOSAIC_NAMES
from pagecore.models.families.family import Family
from pagecore.models.layers.index_rows import index_rows_of_minimax
from pagecore.models.layers.score_scales import multiplier
from pagecore.storage.checks import LAYERS_MAX

__all__ = ["FULL_ATTENTION", "HUNYUAN"]


def _multiplier_or_default(fields: Fields, head_dim: int, layer: int) -> float | None:
    return None if fields.value("attention_multiplier") is None else multiplier(fields, head_dim, layer)


def _heads_of_experts(fields: Fields) -> int:
    """Return the query heads of JetMoe: each chosen expert has one for each key-value head.

    Query head ``h`` attends to key-value head ``h % kv_heads``: order them by key-value head for grouped attention.
    """
    heads = fields.integer("num_key_value_heads") * fields.integer("num_experts_per_tok")
    if fields.given("num_attention_heads") not in (None, heads):
        fields.refuse(
            f"{fields.describe('num_attention_heads')}; it must be {heads}, num_key_value_heads times "
            "num_experts_per_tok, or be left out"
        )
    return heads


_GRANITE_MOE = Family({**GROUPED, "attention_multiplier": 1.0}, scale=multiplier)
_JETMOE = {"head_dim": 128, "num_key_value_heads": 16, "num_experts_per_tok": 2}


def _grouped(kv_heads: int | None, head_dim: int | None = None) -> Family:
    """Return a family of grouped-query attention with the given defaults."""
    return Family({**GROUPED, "num_key_value_heads": kv_heads, "head_dim": head_dim})


def _layers_of_all_cycles(fields: Fields) -> int:
    """Return the layers of all passes through the two stacks, each of which stores keys and values of its own.

    transformers writes their number as num_hidden_layers, together with num_layers_per_stack.
    """
    if fields.flag("prefix_lm"):
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('prefix_lm')}, so prompts attend to later tokens, which is not "
            "supported; set it to false for a model that attends to preceding tokens only"
        )
    cycles = fields.integer("H_cycles", max=LAYERS_MAX) * (fields.integer("L_cycles", max=LAYERS_MAX) + 1)
    if cycles > LAYERS_MAX:
        fields.refuse(f"{fields.describe('H_cycles')} and {fields.describe('L_cycles')}; expected {LAYERS_MAX} passes")
    is_total = fields.value("num_layers_per_stack") is not None
    per_stack = fields.integer(
        "num_layers_per_stack" if is_total else "num_hidden_layers", max=max(1, LAYERS_MAX // cycles)
    )
    if is_total and fields.given("num_hidden_layers") not in (None, cycles * per_stack):
        fields.refuse(
            f"{fields.describe('num_hidden_layers')}; it must be {cycles * per_stack}, num_layers_per_stack times "
            f"{cycles} passes"
        )
    return cycles * per_stack


def _sources_of_hunyuan(fields: Fields, num_layers: int) -> list[int]:
    """Return the layer whose keys and values each layer reads: the first of each group of `cla_share_factor`."""
    if not fields.flag("use_cla"):
        return list(range(num_layers))
    factor = fields.integer("cla_share_factor")
    return [layer - layer % factor for layer in range(num_layers)]


_HRM = {
    "head_dim": 128,
    "H_cycles": 2,
    "L_cycles": 3,
    "num_layers_per_stack": None,
    "prefix_lm": True,
}
_MINIMAX_M3 = {
    **DIMS_OF_128,
    "num_key_value_heads": 4,
    "layer_types": None,
    "sparse_attention_config": None,
    "index_head_dim": 128,
}
_KOSMOS_NAMES = {"num_attention_heads": "attention_heads", "hidden_size": "embed_dim", "num_hidden_layers": "layers"}
_DBRX_NAMES = {**MOSAIC_NAMES, "num_key_value_heads": "attn_config.kv_n_heads"}

_CLA: Mapping[str, object] = {
    **GROUPED,
    "use_cla": False,
    "cla_share_factor": 1,
}
HUNYUAN = Family(_CLA, aliases={"head_dim": "attention_head_dim"}, sources=_sources_of_hunyuan)

FULL_ATTENTION: Mapping[str, Family] = {
    "apertus": Family(GROUPED),
    "apertus1p5_text": Family(GROUPED),
    "arcee": Family(GROUPED),
    "aria_text": Family(GROUPED),
    "bitnet": Family({**GROUPED, "num_key_value_heads": 5}),
    "chameleon": Family({**GROUPED, "num_key_value_heads": 32}),
    "cohere": Family(GROUPED),
    "cosmos3_edge_text": _grouped(8, 128),
    "dbrx": Family({"num_key_value_heads": 1}, aliases=_DBRX_NAMES, nested=("attn_config", "ffn_config")),
    "deepseek_ocr2_text": _grouped(None, 128),
    "diffllama": Family(GROUPED),
    "doge": Family(GROUPED),
    "emu3_text_model": _grouped(8),
    "ernie4_5": Family({**DIMS_OF_128, "num_key_value_heads": 2}),
    "ernie4_5_moe": Family({**GROUPED, "num_key_value_heads": 4}),
    "ernie4_5_vl_moe_text": _grouped(4),
    "flex_olmo": Family(GROUPED),
    "gemma": Family({"head_dim": 256, "num_key_value_heads": 16}),
    "git": Family({}),
    "glm": Family({"head_dim": 128, "num_key_value_heads": 2}),
    "glm4": Family({"head_dim": 128, "num_key_value_heads": 2}),
    "glm4_moe": Family({**GROUPED, "num_key_value_heads": 8}, rounds_head_dim=True),
    "glm4v_moe_text": Family({**GROUPED, "num_key_value_heads": 8}, rounds_head_dim=True),
    "glm4v_text": Family({"num_key_value_heads": 2}),
    "glm_image_text": _grouped(2),
    "glm_ocr_text": _grouped(8),
    "granite": Family({**GROUPED, "attention_multiplier": 1.0}, scale=multiplier),
    "granite4_vision_text": Family({**GROUPED, "attention_multiplier": 1.0}, scale=multiplier),
    "granite_docling_text": Family(
        {**GROUPED, "num_key_value_heads": 4, "attention_multiplier": 0.015625}, scale=multiplier
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "helium": Family({**DIMS_OF_128, "num_key_value_heads": 20}),
    "hrm_text": Family(_HRM, count_layers=_layers_of_all_cycles),
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": HUNYUAN,
    "hunyuan_vl_text": _grouped(None),
    "hy_v3": Family({**DIMS_OF_128, "num_key_value_heads": 8}),
    "hyperclovax": Family({**GROUPED, "attention_multiplier": None}, scale=_multiplier_or_default),
    "idefics": Family({}),
    "internlm3": Family({**DIMS_OF_128, "num_key_value_heads": 2}),
    "iquestcoder": Family({**DIMS_OF_128, "num_key_value_heads": 8}),
    "jais2": Family(GROUPED),
    "jetmoe": Family(_JETMOE, aliases={"head_dim": "kv_channels"}, count_heads=_heads_of_experts),
    "kosmos_2_5_text_model": Family({}, aliases=_KOSMOS_NAMES),
    "kosmos_2_text_model": Family({}, aliases=_KOSMOS_NAMES),
    "llama": Family(GROUPED),
    "minimax_m2": Family({"head_dim": 128, "num_key_value_heads": 8}),
    "minimax_m3_vl_text": Family(_MINIMAX_M3, rows=index_rows_of_minimax),
    "molmo2_text": _grouped(8, 128),
    "nanochat": Family(GROUPED),
    "nemotron": Family(GROUPED),
    "olmo": Family(GROUPED),
    "olmo2": Family(GROUPED),
    "olmoe": Family(GROUPED),
    "paddleocr_vl_text": _grouped(2, 128),
    "persimmon": Family({}),
    "phi": Family(GROUPED),
    "qwen3_vl_moe_text": Family({**GROUPED, "num_key_value_heads": 16}),
    "qwen3_vl_text": Family({"head_dim": 128, "num_key_value_heads": 32}),
    "seed_oss": Family({"head_dim": 128, "num_key_value_heads": 8}),
    "solar_open": Family({**DIMS_OF_128, "num_key_value_heads": 8}),
    "stablelm": Family({**GROUPED, "num_key_value_heads": 32}),
    # Keys of the prompt stay, and those of the output are needed for a window; all are stored.
    "unlimited_ocr_text": Family(
        {**GROUPED, "num_key_value_heads": 10, "sliding_window": None, "layer_types": None},
        windows=lambda _fields, num_layers: [None] * num_layers,
    ),
}
