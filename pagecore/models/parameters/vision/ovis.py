"""Ovis 1.6 and 2 as AIDC-AI publishes them, whose tower transformers describes by other fields, or not at all.

Source: the configuration and modeling files of AIDC-AI/Ovis2-1B and Ovis1.6-Gemma2-9B, and the model of vLLM.
"""

from __future__ import annotations

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields

__all__ = ["ovis_of_transformers"]

_TOWERS = {"aimv2": "ovis2", "siglip_vision_model": "ovis_siglip"}


def ovis_of_transformers(whole: Fields) -> Fields:
    """Return the fields that transformers gives the tower of a published file.

    Raises
    ------
    UnsupportedOption
        The tower is neither an AIMv2 nor a SigLIP.
    """
    tokenizer = whole.inner("visual_tokenizer_config")
    backbone = tokenizer.inner("backbone_config")
    kind = backbone.given("model_type")
    if not isinstance(kind, str) or kind not in _TOWERS:
        raise UnsupportedOption(
            f"{backbone.source}: {backbone.describe('model_type')}, a vision tower that is unknown; expected "
            f"{' or '.join(_TOWERS)}: remove visual_tokenizer_config to plan the text model alone"
        )
    indicators = 5 if tokenizer.switch("use_indicators", True) else 0
    tower = {name: backbone.given(name) for name in backbone}
    tower |= {"model_type": _TOWERS[kind], "mlp_bias": backbone.given("use_bias")}
    tower["num_visual_indicator_tokens"] = indicators
    tower |= {name: tokenizer.given(name) for name in ("hidden_stride", "vocab_size")}
    found = {"model_type": "ovis2", "hidden_size": whole.given("hidden_size"), "vision_config": tower}
    return Fields(found | {"tie_word_embeddings": whole.given("tie_word_embeddings")}, whole.source)
