"""Audio encoder of Phi-4-multimodal: convolutions, and layers of a Conformer with a bias for each distance.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.storage.checks import ceil_div

__all__ = ["add_phi_4_audio"]

_DEFAULTS: Mapping[str, object] = {
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_blocks": 24,
    "num_attention_heads": 16,
    "ext_pw_out_channel": 1024,
    "depthwise_separable_out_channel": 1024,
    "depthwise_multiplier": 1,
    "kernel_size": 3,
    "input_size": 80,
    "time_reduction": 8,
    "bias_max_distance": 1000,
    "bias_symmetric": False,
    "nemo_conv_channels": 1024,
    "downsample_rate": 1,
}


def add_phi_4_audio(tally: Tally, _whole: Fields, fields: Fields, text: int) -> None:
    """Add the encoder, and its projectors for sound alone and for sound next to images."""
    fields.defaults = _DEFAULTS
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_blocks")
    _add_subsampling(tally, fields, hidden)
    distances = fields.integer("bias_max_distance") * (1 if fields.flag("bias_symmetric") else 2)
    encoder_add(tally, distances * fields.integer("num_attention_heads"))
    _add_layers(tally, fields, hidden, layers)
    for _ in range(2):
        encoder_linear(tally, hidden * fields.integer("downsample_rate"), text, bias=True)
        encoder_linear(tally, text, text, bias=True)


def _add_subsampling(tally: Tally, fields: Fields, hidden: int) -> None:
    """Add convolutions that halve time and frequency, and the projection of what they leave."""
    channels, reduction = fields.integer("nemo_conv_channels"), fields.integer("time_reduction", min=2)
    halvings = reduction.bit_length() - 1
    encoder_linear(tally, 9, channels, bias=True)
    encoder_linear(tally, 9, channels, bias=True, copies=halvings - 1)  # each channel has its own convolution
    encoder_linear(tally, channels, channels, bias=True, copies=halvings - 1)
    bins = fields.integer("input_size")
    for _ in range(halvings):
        bins = ceil_div(bins, 2)
    encoder_linear(tally, channels * bins, hidden, bias=True)


def _add_layers(tally: Tally, fields: Fields, hidden: int, layers: int) -> None:
    """Add layers of an attention, a gated convolution, and two MLPs."""
    width, outputs = fields.integer("intermediate_size"), fields.integer("ext_pw_out_channel")
    encoder_linear(tally, hidden, hidden, bias=True, copies=4 * layers)
    encoder_linear(tally, hidden, width, bias=True, copies=2 * 2 * layers)
    encoder_linear(tally, width, hidden, bias=True, copies=2 * layers)
    encoder_add(tally, 2 * 5 * hidden * layers)  # norms
    encoder_linear(tally, hidden, outputs, bias=True, copies=3 * layers)
    encoder_add(tally, 2 * outputs * layers)
    inner = hidden * fields.integer("depthwise_multiplier")
    encoder_linear(tally, fields.integer("kernel_size"), inner, bias=True, copies=layers)
    encoder_linear(tally, inner, fields.integer("depthwise_separable_out_channel"), bias=True, copies=layers)
