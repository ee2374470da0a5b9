"""Text models of multimodal models that attend as Llama, Qwen 2, GLM or Granite do.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.families import GROUPED, Family
from pagecore.models.layer_rules import every_layer, layers_above, multiplier

__all__ = ["TEXT_PARTS"]


def _grouped(kv_heads: int | None, head_dim: int | None = None) -> Family:
    """Return a family of grouped-query attention with the given defaults."""
    return Family({**GROUPED, "num_key_value_heads": kv_heads, "head_dim": head_dim})


_QWEN_2_5_OMNI = {
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 28,
    "layer_types": None,
}

TEXT_PARTS: Mapping[str, Family] = {
    "cosmos3_edge_text": _grouped(8, 128),
    "deepseek_ocr2_text": _grouped(None, 128),
    "emu3_text_model": _grouped(8),
    "ernie4_5_vl_moe_text": _grouped(4),
    "glm4v_moe_text": Family({**GROUPED, "num_key_value_heads": 8}, rounds_head_dim=True),
    "glm_ocr_text": _grouped(8),
    "granite4_vision_text": Family({**GROUPED, "attention_multiplier": 1.0}, scale=multiplier),
    "granite_docling_text": Family(
        {**GROUPED, "num_key_value_heads": 4, "attention_multiplier": 0.015625}, scale=multiplier
    ),
    "hunyuan_vl_text": _grouped(None),
    "molmo2_text": _grouped(8, 128),
    "paddleocr_vl_text": _grouped(2, 128),
    "qwen2_5_omni_text": Family(_QWEN_2_5_OMNI, layers_above),
    "qwen3_omni_moe_text": Family(
        {**GROUPED, "num_key_value_heads": 4, "sliding_window": None}, every_layer, rounds_head_dim=True
    ),
    "voxtral_realtime_text": Family({**GROUPED, "num_key_value_heads": 8, "sliding_window": 8192}, every_layer),
}
