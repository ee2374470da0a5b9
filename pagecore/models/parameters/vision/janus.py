"""Parameters of the part of Janus that draws images: a VQ-VAE, and the table and head of its codes.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["add_janus"]

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


def _add_coders(tally: Tally, drawn: Fields, latents: int) -> None:
    """Add encoder and decoder: levels of convolutions, with attention in the last one of the encoder."""
    listed = drawn.value("channel_multiplier")
    if not isinstance(listed, list | tuple) or not listed or not all(type(each) is int and each > 0 for each in listed):
        drawn.refuse(f"{drawn.describe('channel_multiplier')}; it must be a list of integers above 0")
    base, blocks = drawn.integer("base_channels"), drawn.integer("num_res_blocks")
    channels = [base * each for each in listed]
    top = channels[-1]
    _convolution(tally, drawn.integer("in_channels"), base)
    _levels(tally, [base, *channels], blocks)
    _convolution(tally, top, latents * (1 + drawn.flag("double_latent")))
    _convolution(tally, latents, top)
    _levels(tally, [top, *channels[::-1]], blocks + 1)
    _convolution(tally, base * listed[0], drawn.integer("out_channels"))
    encoder_add(tally, 2 * top + 2 * base * listed[0])  # norms before the last convolutions
    for size in (top, top):
        _block(tally, size, size)
        _block(tally, size, size)
        _attention(tally, size)
    _attention(tally, top, copies=2 * blocks + 1)


def _levels(tally: Tally, channels: list[int], blocks: int) -> None:
    """Add the blocks of each level, and the convolutions between levels."""
    for level, (inputs, outputs) in enumerate(pairwise(channels)):
        _block(tally, inputs, outputs)
        for _ in range(blocks - 1):
            _block(tally, outputs, outputs)
        if level < len(channels) - 2:
            _convolution(tally, outputs, outputs)


def _block(tally: Tally, inputs: int, outputs: int) -> None:
    encoder_add(tally, 2 * inputs + 2 * outputs)
    _convolution(tally, inputs, outputs)
    _convolution(tally, outputs, outputs)
    if inputs != outputs:
        encoder_linear(tally, inputs, outputs, bias=True)


def _convolution(tally: Tally, inputs: int, outputs: int) -> None:
    encoder_linear(tally, 9 * inputs, outputs, bias=True)


def _attention(tally: Tally, size: int, copies: int = 1) -> None:
    encoder_add(tally, 2 * size * copies)
    encoder_linear(tally, size, size, bias=True, copies=4 * copies)
