"""Parameters of the part of Janus that draws images: a VQ-VAE, and the table and head of its codes.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["add_attention", "add_block", "add_convolution", "add_janus", "add_levels", "level_channels"]

_DEFAULTS: Mapping[str, object] = {
    "embed_dim": 8,
    "num_embeddings": 16384,
    "double_latent": False,
    "latent_channels": 256,
    "in_channels": 3,
    "out_channels": 3,
    "base_channels": 128,
    "channel_multiplier": [1, 1, 2, 2, 4],
    "num_res_blocks": 2,
    "projection_dim": 2048,
    "num_hidden_layers": 2,
    "image_token_embed_dim": 2048,
}


def add_janus(tally: Tally, whole: Fields, fields: Fields, hidden: int, _merge: int, _depths: int, _text: int) -> None:
    """Add the projector of the tower, and all that draws images."""
    fields.defaults = {**fields.defaults, "projection_dim": 2048, "depth": 2}
    _aligner(tally, hidden, fields.integer("projection_dim"), fields.integer("depth"))
    drawn = whole.inner("vq_config") if whole.given("vq_config") is not None else Fields({}, whole.source, "vq_config")
    drawn.defaults = _DEFAULTS
    codes, dim, width = (drawn.integer(name) for name in ("num_embeddings", "embed_dim", "projection_dim"))
    latents = drawn.integer("latent_channels")
    _add_coders(tally, drawn, latents)
    encoder_add(tally, 2 * codes * dim)  # the table of the VQ-VAE, and that of the text model's inputs
    encoder_linear(tally, latents, dim, bias=True)
    encoder_linear(tally, dim, latents, bias=True)
    _aligner(tally, dim, width, drawn.integer("num_hidden_layers"))
    encoder_linear(tally, drawn.integer("image_token_embed_dim"), width, bias=True)
    encoder_linear(tally, width, codes, bias=True)


def _aligner(tally: Tally, inputs: int, width: int, depth: int) -> None:
    encoder_linear(tally, inputs, width, bias=True)
    encoder_linear(tally, width, width, bias=True, copies=depth - 1)


def level_channels(drawn: Fields) -> list[int]:
    """Return the channels of each level."""
    listed = drawn.value("channel_multiplier")
    if not isinstance(listed, list | tuple) or not listed or not all(type(each) is int and each > 0 for each in listed):
        drawn.refuse(f"{drawn.describe('channel_multiplier')}; it must be a list of integers above 0")
    return [drawn.integer("base_channels") * each for each in listed]


def _add_coders(tally: Tally, drawn: Fields, latents: int) -> None:
    """Add encoder and decoder: levels of convolutions, with attention in the last one of the encoder."""
    base, blocks = drawn.integer("base_channels"), drawn.integer("num_res_blocks")
    channels = level_channels(drawn)
    top = channels[-1]
    add_convolution(tally, drawn.integer("in_channels"), base)
    add_levels(tally, [base, *channels], blocks)
    add_convolution(tally, top, latents * (1 + drawn.flag("double_latent")))
    add_convolution(tally, latents, top)
    add_levels(tally, [top, *channels[::-1]], blocks + 1)
    add_convolution(tally, channels[0], drawn.integer("out_channels"))
    encoder_add(tally, 2 * top + 2 * channels[0])  # norms before the last convolutions
    for size in (top, top):
        add_block(tally, size, size)
        add_block(tally, size, size)
        add_attention(tally, size)
    add_attention(tally, top, copies=2 * blocks + 1)


def add_levels(tally: Tally, channels: list[int], blocks: int) -> None:
    """Add the blocks of each level, and the convolutions between levels."""
    for level, (inputs, outputs) in enumerate(pairwise(channels)):
        add_block(tally, inputs, outputs)
        for _ in range(blocks - 1):
            add_block(tally, outputs, outputs)
        if level < len(channels) - 2:
            add_convolution(tally, outputs, outputs)


def add_block(tally: Tally, inputs: int, outputs: int) -> None:
    """Add two convolutions, their norms, and a projection of the inputs to other channels."""
    encoder_add(tally, 2 * inputs + 2 * outputs)
    add_convolution(tally, inputs, outputs)
    add_convolution(tally, outputs, outputs)
    if inputs != outputs:
        encoder_linear(tally, inputs, outputs, bias=True)


def add_convolution(tally: Tally, inputs: int, outputs: int) -> None:
    """Add a convolution over three by three pixels."""
    encoder_linear(tally, 9 * inputs, outputs, bias=True)


def add_attention(tally: Tally, size: int, copies: int = 1) -> None:
    """Add attentions of pixels."""
    encoder_add(tally, 2 * size * copies)
    encoder_linear(tally, size, size, bias=True, copies=4 * copies)
