"""Decoders that speak or listen, and further decoders whose rules are of their own.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.models.families import GROUPED, Family, Heads
from pagecore.models.fields import Fields
from pagecore.models.layer_rules import every_layer, no_layer

__all__ = ["SPEECH"]


def _heads_of_sliding_layers(fields: Fields, heads: Heads, _layer: int, slides: bool) -> Heads:
    """Layers with a window may have other heads: published files describe them in `attention_other_setting`."""
    if not slides:
        return heads
    if fields.value("num_sliding_attention_heads") is not None:
        return replace(heads, queries=fields.integer("num_sliding_attention_heads"))
    if fields.value("attention_other_setting") is None:
        return heads
    other = fields.inner("attention_other_setting")
    other.defaults = {
        "num_attention_heads": heads.queries,
        "num_attention_groups": heads.kv_heads,
        "head_dim": heads.head_dim,
    }
    return replace(
        heads,
        queries=other.integer("num_attention_heads"),
        kv_heads=other.integer("num_attention_groups"),
        head_dim=other.integer("head_dim"),
    )


def _root_of_scalar_or_dim(fields: Fields, head_dim: int, _layer: int) -> float | None:
    """Return the root of `query_pre_attn_scalar`, and None for a null, which means the head dim."""
    scalar = fields.value("query_pre_attn_scalar")
    return None if scalar in (None, head_dim) else float(fields.integer("query_pre_attn_scalar") ** -0.5)


def _windowed(window: int) -> Family:
    """Return a family of which every layer slides."""
    return Family({**GROUPED, "sliding_window": window}, every_layer)


_STEP: Mapping[str, object] = {
    **dict.fromkeys(("sliding_window", "layer_types", "query_pre_attn_scalar")),
    **dict.fromkeys(("num_sliding_attention_heads", "attention_other_setting")),
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_nextn_predict_layers": 0,
}
# The first two models of Bark; the third one computes all tokens at once.
_BARK = Family(
    {},
    aliases={
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "block_size",
    },
)

SPEECH: Mapping[str, Family] = {
    "coarse_acoustics": _BARK,
    "csm": Family({**GROUPED, "num_key_value_heads": 8}),
    "csm_depth_decoder_model": Family({**GROUPED, "num_key_value_heads": 2}),
    "gradium_phonon_tts": Family(GROUPED),
    "higgs_audio_v2": Family({"num_key_value_heads": 8, "head_dim": 128}),
    "kyutai_speech_to_text": _windowed(375),
    "moshi": _windowed(3000),
    "moshi_depth": _windowed(8),
    "musicgen_melody_decoder": Family({}),
    "pocket_tts": Family(GROUPED),
    "semantic": _BARK,
    "step3p5": Family(
        _STEP,
        no_layer,
        scale=_root_of_scalar_or_dim,
        aliases={"num_key_value_heads": "num_attention_groups"},
        heads=_heads_of_sliding_layers,
    ),
}
