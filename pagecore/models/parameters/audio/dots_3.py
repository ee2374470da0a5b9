"""Parameters of the audio encoder of dots.note, whose released files have the names of Whisper for its sizes.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.audio.formula_encoders import FormulaEncoder
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["add_dots_3_audio"]

_NAMES: Mapping[str, str] = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_ffn_dim": "intermediate_size",
    "num_mel_bins": "feature_size",
}
_ADAPTER: Mapping[str, str] = {
    "whisper_adapter_in_dim": "adapter_input_size",
    "whisper_adapter_out_dim": "adapter_out_dim",
    "adapter_output_size": "adapter_out_dim",
}
_ENCODER = FormulaEncoder(
    """(9 + 18 * downsample_hidden_size + (feature_size + 7) // 8 * hidden_size) * downsample_hidden_size
    + num_hidden_layers * (4 * hidden_size + 3 * intermediate_size) * hidden_size
    + (adapter_input_size + adapter_out_dim) * adapter_out_dim""",
    """3 * downsample_hidden_size
    + num_hidden_layers * ((3 + 3 * attention_bias) * hidden_size + 2 * intermediate_size)
    + hidden_size + 2 * adapter_input_size + 2 * adapter_out_dim""",
    defaults={
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "feature_size": 128,
        "downsample_hidden_size": 480,
        "attention_bias": True,
        "adapter_input_size": 1280,
        "adapter_out_dim": 5120,
    },
)


def add_dots_3_audio(tally: Tally, whole: Fields, fields: Fields, text: int) -> None:
    """Add convolutions, layers with gated MLPs, and an adapter with a norm."""
    values = {name: fields.given(name) for name in fields}
    values |= {name: fields.given(own) for own, name in _ADAPTER.items() if fields.given(own) is not None}
    if fields.has_object("whisper_config"):
        sizes = fields.inner("whisper_config")
        values |= {name: sizes.given(own) for own, name in _NAMES.items() if sizes.given(own) is not None}
    _ENCODER(tally, whole, Fields(values, fields.source, whole.name("audio_config")), text)
