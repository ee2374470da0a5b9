"""Ovis 2 as AIDC-AI publishes it, whose tower transformers describes by other fields.

Source: the configuration and modeling files of AIDC-AI/Ovis2-1B, and the model of vLLM.
"""

from __future__ import annotations

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields

__all__ = ["ovis_of_transformers"]


def ovis_of_transformers(whole: Fields) -> Fields:
    """Return the fields that transformers gives the tower of a published file.

    Raises
    ------
    UnsupportedOption
        The tower is not an AIMv2.
    """
    tokenizer = whole.inner("visual_tokenizer_config")
    backbone = tokenizer.inner("backbone_config")
    if backbone.given("model_type") != "aimv2":
        raise UnsupportedOption(
            f"{backbone.source}: {backbone.describe('model_type')}, a vision tower that is unknown; expected aimv2: "
            "remove visual_tokenizer_config to plan the text model alone"
        )
    tower = {name: backbone.given(name) for name in backbone}
    tower |= {"model_type": "ovis2", "mlp_bias": backbone.given("use_bias"), "num_visual_indicator_tokens": 5}
    tower |= {name: tokenizer.given(name) for name in ("hidden_stride", "vocab_size")}
    found = {"model_type": "ovis2", "hidden_size": whole.given("hidden_size"), "vision_config": tower}
    return Fields(found | {"tie_word_embeddings": whole.given("tie_word_embeddings")}, whole.source)
