"""Parameters of a Mimi codec.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["MIMI", "add_mimi"]

MIMI: Mapping[str, object] = {
    "sampling_rate": 24000,
    "audio_channels": 1,
    "hidden_size": 512,
    "num_filters": 64,
    "num_residual_layers": 1,
    "upsampling_ratios": [8, 6, 5, 4],
    "kernel_size": 7,
    "last_kernel_size": 3,
    "residual_kernel_size": 3,
    "compress": 2,
    "use_conv_shortcut": False,
    "vector_quantization_hidden_dimension": 256,
    "upsample_groups": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "attention_bias": False,
}


def add_mimi(tally: Tally, fields: Fields) -> None:
    """Add a Mimi codec: convolutions and a transformer on each side, and the projections of its quantisers."""
    hidden, layers, width = (fields.integer(name) for name in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    ratios = fields.value("upsampling_ratios")
    if not isinstance(ratios, list | tuple) or not ratios or not all(type(each) is int and each > 0 for each in ratios):
        fields.refuse(f"{fields.describe('upsampling_ratios')}; it must be a list of integers above 0")
    _convolutions(tally, fields, ratios)
    heads = fields.integer("num_attention_heads")
    dim = hidden // heads if fields.given("head_dim") is None else fields.integer("head_dim")
    keys, has_bias = fields.integer("num_key_value_heads") * dim, fields.flag("attention_bias")
    encoder_linear(tally, hidden, heads * dim, bias=has_bias, copies=2 * layers)
    encoder_linear(tally, hidden, keys, bias=has_bias, copies=4 * layers)
    encoder_linear(tally, heads * dim, hidden, bias=has_bias, copies=2 * layers)
    encoder_linear(tally, hidden, width, copies=2 * layers)
    encoder_linear(tally, width, hidden, copies=2 * layers)
    encoder_add(tally, 12 * hidden * layers)  # norms and scales
    stride = _stride(fields, math.prod(ratios))
    if stride > 1:
        encoder_add(tally, 2 * stride * hidden * (hidden + hidden // fields.integer("upsample_groups")))
    encoder_add(tally, 4 * hidden * fields.integer("vector_quantization_hidden_dimension"))


def _stride(fields: Fields, hop: int) -> int:
    """Return the factor between the frames of the convolutions and those of the codes."""
    rate = fields.integer("sampling_rate")
    given = fields.given("frame_rate")
    frames = rate / (2 * hop) if given is None else fields.number("frame_rate")
    return int(math.ceil(rate / hop) / frames) if frames else 1


def _convolutions(tally: Tally, fields: Fields, ratios: Sequence[int]) -> None:
    """Add the levels of encoder and decoder, each with twice the channels of the one before."""
    base, hidden, sounds = (fields.integer(name) for name in ("num_filters", "hidden_size", "audio_channels"))
    kernel, last, inner = (fields.integer(name) for name in ("kernel_size", "last_kernel_size", "residual_kernel_size"))
    top = base << len(ratios)
    for inputs, outputs, size in (
        (sounds, base, kernel),
        (top, hidden, last),
        (hidden, top, kernel),
        (base, sounds, last),
    ):
        encoder_linear(tally, size * inputs, outputs, bias=True)
    for level, ratio in enumerate(reversed(ratios)):
        channels = base << level
        encoder_linear(tally, 2 * ratio * channels, 2 * channels, bias=True)
        encoder_linear(tally, 2 * ratio * 2 * channels, channels, bias=True)
        narrow, blocks = channels // fields.integer("compress"), 2 * fields.integer("num_residual_layers")
        encoder_linear(tally, inner * channels, narrow, bias=True, copies=blocks)
        encoder_linear(tally, narrow, channels, bias=True, copies=blocks)
        if fields.flag("use_conv_shortcut"):
            encoder_linear(tally, channels, channels, bias=True, copies=blocks)
