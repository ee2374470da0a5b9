"""Audio encoder of Muse Spark: levels of convolutions, each over patches of the one before.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["add_audio_levels"]

_LISTS = ("patch_sizes", "hidden_sizes", "depths")


def add_audio_levels(tally: Tally, _whole: Fields, fields: Fields, _text: int) -> None:
    """Add the levels, and the projection to the features of the text model."""
    fields.defaults = {"mlp_ratio": 4.0, "conv_kernel_size": 7}
    levels = [_numbers(fields, name) for name in _LISTS]
    if len({len(level) for level in levels}) != 1:
        fields.refuse(f"{' and '.join(map(fields.describe, _LISTS))}; they must have one number for each level")
    inputs, kernel = 1, fields.integer("conv_kernel_size")
    for patch, hidden, blocks in zip(*levels, strict=True):
        width = fields.scaled(hidden, "mlp_ratio")
        encoder_linear(tally, inputs * patch, hidden, bias=True)
        encoder_add(tally, hidden)
        encoder_add(tally, blocks * (kernel + 2) * hidden)  # a convolution over each feature, its bias, and a norm
        encoder_linear(tally, hidden, width, bias=True, copies=blocks)
        encoder_linear(tally, width, hidden, bias=True, copies=blocks)
        inputs = hidden
    outputs = fields.integer("out_hidden_size")
    encoder_add(tally, inputs + outputs)
    encoder_linear(tally, inputs, outputs, bias=True)


def _numbers(fields: Fields, name: str) -> list[int]:
    listed = fields.value(name)
    if not isinstance(listed, list | tuple) or not listed or not all(type(each) is int and each > 0 for each in listed):
        fields.refuse(f"{fields.describe(name)}; it must be a list of integers above 0")
    return list(listed)
