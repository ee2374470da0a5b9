"""Decoders of speech and music, whose tokens are codes of sound.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.families.common_fields import GROUPED
from pagecore.models.families.family import Family
from pagecore.models.layers.windows import every_layer

__all__ = ["SPEECH"]


def _every_layer_slides(window: int) -> Family:
    """Return a family of which every layer slides."""
    return Family({**GROUPED, "sliding_window": window}, every_layer)


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
    "kyutai_speech_to_text": _every_layer_slides(375),
    "moshi": _every_layer_slides(3000),
    "moshi_depth": _every_layer_slides(8),
    "musicgen_melody_decoder": Family({}),
    "pocket_tts": Family(GROUPED),
    "semantic": _BARK,
}
