"""Projectors of ERNIE 4.5 VL, DeepSeek-OCR 2, GIT and Phi-4-multimodal, and the convolutions of a tower.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.tower_parts import Projector

__all__ = ["DOCUMENT_PROJECTORS", "add_downsampling"]

# Queries of an encoder for images of 768 and of 1024 pixels along each side.
_QUERIES = 144 + 256


def add_downsampling(tally: Tally, fields: Fields) -> None:
    """Add two convolutions of DeepSeek-OCR 2 after those of SAM."""
    listed = fields.value("downsample_channels")
    if not isinstance(listed, list | tuple) or len(listed) != 2 or not all(type(each) is int for each in listed):
        fields.refuse(f"{fields.describe('downsample_channels')}; it must be a list of two integers")
    if min(listed) < 1:
        fields.refuse(f"{fields.describe('downsample_channels')}; they must be above 0")
    encoder_linear(tally, 9 * fields.integer("output_channels"), listed[0])
    encoder_linear(tally, 9 * listed[0], listed[1])


def _deepseek(tally: Tally, whole: Fields, _fields: Fields, _hidden: int, _merge: int, _depths: int, text: int) -> None:
    """Add the encoder between tower and text model: layers of Qwen2, and queries that read an image."""
    encoder = whole.inner("vision_config").inner("encoder_config")
    hidden, width, layers, heads = (
        encoder.integer(name)
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    )
    kv_heads = heads if encoder.given("num_key_value_heads") is None else encoder.integer("num_key_value_heads")
    if hidden % heads:
        encoder.refuse(f"{encoder.name('num_attention_heads')} is {heads}, which does not divide hidden_size {hidden}")
    encoder_linear(tally, hidden, hidden, bias=True, copies=layers)
    encoder_linear(tally, hidden, kv_heads * (hidden // heads), bias=True, copies=2 * layers)
    encoder_linear(tally, hidden, hidden, copies=layers)
    encoder_linear(tally, hidden, width, copies=2 * layers)
    encoder_linear(tally, width, hidden, copies=layers)
    encoder_add(tally, (2 * layers + 1 + _QUERIES) * hidden + text)
    encoder_linear(tally, hidden, text, bias=True)


def _ernie(tally: Tally, whole: Fields, fields: Fields, hidden: int, merge: int, _depths: int, text: int) -> None:
    """Add a resampler that merges patches of an image, then images of a video, and two projections."""
    part = whole if fields.given("temporal_merge_size") is None else fields
    name = "temporal_conv_size" if part is whole else "temporal_merge_size"
    images = 2 if part.given(name) is None else part.integer(name)
    merged = hidden * merge**2
    for inputs in (merged, images * merged):
        encoder_linear(tally, inputs, merged, bias=True)
        encoder_linear(tally, merged, merged, bias=True)
        encoder_add(tally, 2 * merged)
    encoder_linear(tally, merged, text, bias=True)
    encoder_add(tally, text)


def _phi(tally: Tally, _whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
    """Add two layers, and the marks at the end of lines of a tile and between tiles."""
    encoder_add(tally, 2 * hidden)
    encoder_linear(tally, hidden, text, bias=True)
    encoder_linear(tally, text, text, bias=True)


def _git(tally: Tally, whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
    """Add a layer, its norm, and an embedding of the place of each image of a video."""
    name = "num_image_with_embedding"
    encoder_linear(tally, hidden, text, bias=True)
    encoder_add(tally, 2 * text + (0 if whole.given(name) is None else whole.integer(name)) * hidden)


DOCUMENT_PROJECTORS: Mapping[str, Projector] = {
    "deepseek_ocr2": _deepseek,
    "ernie4_5_moe_vl": _ernie,
    "ernie4_5_vl_moe": _ernie,
    "git": _git,
    "phi4_multimodal": _phi,
}
