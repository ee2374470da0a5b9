"""Parameters of an EnCodec codec: convolutions with scales, and two LSTMs.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["add_encodec"]

_DEFAULTS: Mapping[str, object] = {
    "audio_channels": 1,
    "hidden_size": 128,
    "num_filters": 32,
    "num_residual_layers": 1,
    "upsampling_ratios": [8, 5, 4, 2],
    "norm_type": "weight_norm",
    "kernel_size": 7,
    "last_kernel_size": 7,
    "residual_kernel_size": 3,
    "compress": 2,
    "num_lstm_layers": 2,
    "use_conv_shortcut": True,
}


def add_encodec(tally: Tally, fields: Fields) -> None:
    """Add encoder and decoder; the codebooks are not parameters."""
    fields.defaults = _DEFAULTS
    ratios = fields.value("upsampling_ratios")
    if not isinstance(ratios, list | tuple) or not ratios or not all(type(each) is int and each > 0 for each in ratios):
        fields.refuse(f"{fields.describe('upsampling_ratios')}; it must be a list of integers above 0")
    if fields.value("norm_type") not in ("weight_norm", "time_group_norm"):
        fields.refuse(f"{fields.describe('norm_type')}; it must be weight_norm or time_group_norm")
    is_scaled = fields.value("norm_type") == "weight_norm"
    base, hidden, sounds = (fields.integer(name) for name in ("num_filters", "hidden_size", "audio_channels"))
    first, last = fields.integer("kernel_size"), fields.integer("last_kernel_size")
    top = base << len(ratios)
    ends = ((sounds, base, first), (top, hidden, last), (hidden, top, first), (base, sounds, last))
    for inputs, outputs, size in ends:
        _convolution(tally, inputs, outputs, size, is_scaled)
    for level, ratio in enumerate(reversed(ratios)):
        channels = base << level
        _convolution(tally, channels, 2 * channels, 2 * ratio, is_scaled)
        _convolution(tally, 2 * channels, channels, 2 * ratio, is_scaled, is_transposed=True)
        for _ in range(2 * fields.integer("num_residual_layers")):
            _block(tally, fields, channels, is_scaled)
    layers = 2 * fields.integer("num_lstm_layers", min=0)
    encoder_linear(tally, top, 4 * top, copies=2 * layers)
    encoder_add(tally, 8 * top * layers)


def _block(tally: Tally, fields: Fields, channels: int, is_scaled: bool) -> None:
    narrow = channels // fields.integer("compress")
    _convolution(tally, channels, narrow, fields.integer("residual_kernel_size"), is_scaled)
    _convolution(tally, narrow, channels, 1, is_scaled)
    if fields.flag("use_conv_shortcut"):
        _convolution(tally, channels, channels, 1, is_scaled)


def _convolution(
    tally: Tally, inputs: int, outputs: int, size: int, is_scaled: bool, is_transposed: bool = False
) -> None:
    """Add a convolution with a scale for each row of its weights, or followed by a norm."""
    encoder_linear(tally, size * inputs, outputs, bias=True)
    encoder_add(tally, (inputs if is_transposed else outputs) if is_scaled else 2 * outputs)
