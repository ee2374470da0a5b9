"""Tokenizers of sound of VibeVoice, whose levels halve time and double features, and its diffusion head.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["add_vibevoice", "add_vibevoice_encoder"]

_DEFAULTS: Mapping[str, object] = {
    "channels": 1,
    "hidden_size": 64,
    "kernel_size": 7,
    "num_filters": 32,
    "downsampling_ratios": [2, 2, 4, 5, 5, 8],
    "depths": [3, 3, 3, 3, 3, 3, 8],
    "ffn_expansion": 4,
}
_HEAD: Mapping[str, object] = {
    "num_hidden_layers": 4,
    "intermediate_size": 4608,
    "frequency_embedding_size": 256,
    "mlp_bias": False,
}


def add_vibevoice(tally: Tally, whole: Fields, fields: Fields, text: int) -> None:
    """Add a tokenizer, its projector, and the head that predicts sound."""
    add_vibevoice_encoder(tally, whole, fields, text)
    _add_levels(tally, fields, encodes=False)
    head = whole.inner("diffusion_head_config")
    head.defaults = _HEAD
    latent, width = fields.integer("hidden_size"), head.integer("intermediate_size")
    layers, has_bias = head.integer("num_hidden_layers"), head.flag("mlp_bias")
    encoder_linear(tally, latent, text, copies=2)
    encoder_linear(tally, head.integer("frequency_embedding_size"), text)
    encoder_linear(tally, text, text, copies=4 + 3 * layers)
    encoder_linear(tally, text, width, bias=has_bias, copies=2 * layers)
    encoder_linear(tally, width, text, bias=has_bias, copies=layers)
    encoder_add(tally, layers * text + 2)


def add_vibevoice_encoder(tally: Tally, _whole: Fields, fields: Fields, text: int) -> None:
    """Add the encoder of a tokenizer, and its projector."""
    fields.defaults = _DEFAULTS
    _add_levels(tally, fields, encodes=True)
    encoder_linear(tally, fields.integer("hidden_size"), text, bias=True)
    encoder_linear(tally, text, text, bias=True)
    encoder_add(tally, text)


def _add_levels(tally: Tally, fields: Fields, *, encodes: bool) -> None:
    """Add the levels of an encoder or a decoder, whose convolutions read what those of the other one write."""
    ratios, depths = fields.integers("downsampling_ratios"), fields.integers("depths")
    if len(depths) != len(ratios) + 1 or len(ratios) > 20:
        fields.refuse(f"{fields.describe('depths')}; it must have one number more than downsampling_ratios")
    names = ("channels", "num_filters", "hidden_size", "kernel_size", "ffn_expansion")
    channels, filters, latent, kernel, expansion = (fields.integer(name) for name in names)
    widths = [channels, *(filters << level for level in range(len(depths))), latent]
    for level, size in enumerate([kernel, *(2 * ratio for ratio in ratios), kernel]):
        narrow, wide = widths[level : level + 2]
        encoder_linear(tally, narrow * size, wide)
        encoder_add(tally, wide if encodes else narrow)
    for width, blocks in zip(widths[1:-1], depths, strict=True):
        encoder_linear(tally, width, expansion * width, bias=True, copies=blocks)
        encoder_linear(tally, expansion * width, width, bias=True, copies=blocks)
        encoder_add(tally, blocks * (kernel + 5) * width)
