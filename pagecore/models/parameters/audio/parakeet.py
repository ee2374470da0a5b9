"""The Parakeet encoder of sound, a Fast Conformer, and its projector in Nemotron Omni.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.formulas import add_formulas
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["add_parakeet", "add_sound_of_nemotron"]

_PARAKEET: Mapping[str, object] = {
    "attention_bias": True,
    "conv_kernel_size": 9,
    "convolution_bias": True,
    "num_mel_bins": 80,
    "subsampling_conv_channels": 256,
    "subsampling_conv_kernel_size": 3,
    "subsampling_factor": 8,
}
_MATRICES = """
    (rounds - 1) * subsampling_conv_channels ** 2
    + subsampling_conv_channels * (num_mel_bins // subsampling_factor) * hidden_size
    + num_hidden_layers * (8 * hidden_size ** 2 + 4 * hidden_size * intermediate_size)"""
_REST = """
    rounds * subsampling_conv_kernel_size ** 2 * subsampling_conv_channels
    + (2 * rounds - 1) * subsampling_conv_channels + hidden_size
    + num_hidden_layers * (
        (14 + conv_kernel_size + 6 * attention_bias + 4 * convolution_bias) * hidden_size
        + 2 * attention_bias * intermediate_size)"""
# Sizes that the files of Nemotron Omni leave out.
_OF_NEMOTRON: Mapping[str, object] = {
    "attention_bias": False,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "projection_bias": False,
}


def add_parakeet(tally: Tally, whole: Fields, encoder: Fields, defaults: Mapping[str, object] | None = None) -> int:
    """Add the encoder, with convolutions that each halve the length of sound; return its features."""
    encoder.defaults = {**_PARAKEET, **(defaults or {})}
    rounds = encoder.integer("subsampling_factor").bit_length() - 1
    add_formulas(tally, _MATRICES, _REST, encoder, whole, {"rounds": rounds})
    return encoder.integer("hidden_size")


def add_sound_of_nemotron(tally: Tally, whole: Fields, fields: Fields, text: int) -> None:
    """Add the encoder of Nemotron Omni, and a norm and two layers after it."""
    hidden = add_parakeet(tally, whole, fields, _OF_NEMOTRON)
    width, has_bias = fields.integer("projection_hidden_size"), fields.flag("projection_bias")
    encoder_add(tally, hidden)
    encoder_linear(tally, hidden, width, bias=has_bias)
    encoder_linear(tally, width, text, bias=has_bias)
