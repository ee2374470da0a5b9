"""Parts of models that speak, next to their text model: the codec of sound, tables of codes, and a depth decoder.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pagecore.models.fields import Fields
from pagecore.models.parameters.tally import Kind, Split, Tally
from pagecore.models.parameters.towers import vision_add, vision_linear

__all__ = ["add_speaking_parts", "depth_decoder"]

# Fields with the codec, by the type of the model.
_CODECS: Mapping[str, str] = {
    "csm": "codec_config",
    "kyutai_speech_to_text": "codec_config",
    "moshi": "audio_encoder_config",
}
_MIMI: Mapping[str, object] = {
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
_CSM_DEPTH: Mapping[str, object] = {
    "model_type": "csm_depth_decoder_model",
    "num_codebooks": 32,
    "backbone_hidden_size": 2048,
    "vocab_size": 2051,
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_MOSHI_DEPTH: Mapping[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "input_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "head_dim": None,
    "audio_vocab_size": 2048,
    "ffn_dim": 5632,
    "num_codebooks": 8,
}


def depth_decoder(whole: Fields) -> Mapping[str, object] | None:
    """Return the config of a decoder of codes that is counted as a model of its own; None without one."""
    if whole.given("model_type") != "csm":
        return None
    given = whole.given("depth_decoder_config")
    return {**_CSM_DEPTH, **(given if isinstance(given, Mapping) else {})}


def add_speaking_parts(tally: Tally, whole: Fields, hidden: int) -> None:
    """Add the codec, the tables of codes and the depth decoder of a model that speaks; nothing for other models.

    `hidden` is the number of features of the text model. A Moshi without `audio_vocab_size` is its text model alone.
    """
    model_type = str(whole.given("model_type"))
    speaks = model_type != "moshi" or whole.given("audio_vocab_size") is not None
    if model_type not in _CODECS or not speaks:
        return
    _mimi(tally, _part(whole, _CODECS[model_type], _MIMI))
    if model_type == "csm" and whole.given("tie_codebooks_embeddings") is not False:
        depth = _part(whole, "depth_decoder_config", _CSM_DEPTH)
        rows = depth.integer("num_codebooks") * depth.integer("vocab_size")
        tally.add(-rows * depth.integer("backbone_hidden_size"))  # the table of the text model, counted there
    if model_type == "moshi":
        whole.defaults = {**whole.defaults, "num_codebooks": 8}
        rows = 2 * whole.integer("num_codebooks") * (whole.integer("audio_vocab_size") + 1)
        tally.add(rows * hidden, Kind.EMBEDDING, Split.TENSOR)
        _moshi_depth(tally, _part(whole, "depth_decoder_config", _MOSHI_DEPTH))


def _part(whole: Fields, name: str, defaults: Mapping[str, object]) -> Fields:
    part = whole.inner(name) if isinstance(whole.given(name), Mapping) else Fields({}, whole.source, name)
    part.defaults = defaults
    return part


def _moshi_depth(tally: Tally, fields: Fields) -> None:
    """Add a decoder whose matrices are one for each codebook."""
    hidden, codebooks, width = (fields.integer(name) for name in ("hidden_size", "num_codebooks", "ffn_dim"))
    codes, heads, layers = (
        fields.integer(name) for name in ("audio_vocab_size", "num_attention_heads", "num_hidden_layers")
    )
    dim = hidden // heads if fields.value("head_dim") is None else fields.integer("head_dim")
    keys = fields.integer("num_key_value_heads") if fields.given("num_key_value_heads") is not None else heads
    tally.add((fields.integer("vocab_size") + 1) * hidden, Kind.EMBEDDING, Split.TENSOR)
    tally.add((codebooks - 1) * (codes + 1) * hidden, Kind.EMBEDDING, Split.TENSOR)
    tally.linear(fields.integer("input_size"), hidden, copies=codebooks)
    tally.linear(hidden, heads * dim, split=Split.ATTENTION, copies=2 * layers * codebooks)
    tally.linear(hidden, keys * dim, split=Split.KEY_VALUE, copies=2 * layers * codebooks)
    tally.linear(hidden, width, copies=layers * codebooks)
    tally.linear(width // 2, hidden, copies=layers * codebooks)
    tally.norm(hidden, copies=2 * layers)
    tally.add(codebooks * codes * hidden, Kind.EMBEDDING, Split.TENSOR)


def _mimi(tally: Tally, fields: Fields) -> None:
    """Add a Mimi codec: convolutions and a transformer on each side, and the projections of its quantisers."""
    hidden, layers, width = (fields.integer(name) for name in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    ratios = fields.value("upsampling_ratios")
    if not isinstance(ratios, list | tuple) or not ratios or not all(type(each) is int and each > 0 for each in ratios):
        fields.refuse(f"{fields.describe('upsampling_ratios')}; it must be a list of integers above 0")
    _convolutions(tally, fields, ratios)
    heads = fields.integer("num_attention_heads")
    dim = hidden // heads if fields.given("head_dim") is None else fields.integer("head_dim")
    keys, has_bias = fields.integer("num_key_value_heads") * dim, fields.flag("attention_bias")
    vision_linear(tally, hidden, heads * dim, bias=has_bias, copies=2 * layers)
    vision_linear(tally, hidden, keys, bias=has_bias, copies=4 * layers)
    vision_linear(tally, heads * dim, hidden, bias=has_bias, copies=2 * layers)
    vision_linear(tally, hidden, width, copies=2 * layers)
    vision_linear(tally, width, hidden, copies=2 * layers)
    vision_add(tally, 12 * hidden * layers)  # norms and scales
    stride = _stride(fields, math.prod(ratios))
    if stride > 1:
        vision_add(tally, 2 * stride * hidden * (hidden + hidden // fields.integer("upsample_groups")))
    vision_add(tally, 4 * hidden * fields.integer("vector_quantization_hidden_dimension"))


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
        vision_linear(tally, size * inputs, outputs, bias=True)
    for level, ratio in enumerate(reversed(ratios)):
        channels = base << level
        vision_linear(tally, 2 * ratio * channels, 2 * channels, bias=True)
        vision_linear(tally, 2 * ratio * 2 * channels, channels, bias=True)
        narrow, blocks = channels // fields.integer("compress"), 2 * fields.integer("num_residual_layers")
        vision_linear(tally, inner * channels, narrow, bias=True, copies=blocks)
        vision_linear(tally, narrow, channels, bias=True, copies=blocks)
        if fields.flag("use_conv_shortcut"):
            vision_linear(tally, channels, channels, bias=True, copies=blocks)
