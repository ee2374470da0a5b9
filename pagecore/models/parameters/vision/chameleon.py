"""Parameters of the encoder that makes tokens of Chameleon's images: a VQ-VAE without a decoder.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.janus import (
    add_attention,
    add_block,
    add_convolution,
    add_levels,
    level_channels,
)

__all__ = ["add_chameleon"]

_DEFAULTS: Mapping[str, object] = {
    "embed_dim": 256,
    "num_embeddings": 8192,
    "double_latent": False,
    "latent_channels": 256,
    "resolution": 512,
    "in_channels": 3,
    "base_channels": 128,
    "channel_multiplier": [1, 1, 2, 2, 4],
    "num_res_blocks": 2,
    "attn_resolutions": None,
    "attn_type": "vanilla",
}


def add_chameleon(tally: Tally, whole: Fields) -> None:
    """Add the encoder of images and its table of codes, which a config without `vq_config` has too."""
    drawn = whole.inner("vq_config") if whole.has_object("vq_config") else Fields({}, whole.source, "vq_config")
    drawn.defaults = _DEFAULTS
    dim, latents, base = (drawn.integer(name) for name in ("embed_dim", "latent_channels", "base_channels"))
    channels, blocks, has_attention = level_channels(drawn), drawn.integer("num_res_blocks"), _attends(drawn)
    top, codes = channels[-1], latents * (1 + drawn.flag("double_latent"))
    add_convolution(tally, drawn.integer("in_channels"), base)
    add_levels(tally, [base, *channels], blocks)
    side = drawn.integer("resolution")
    for level, size in enumerate(channels):
        if has_attention and side >> level in _resolutions(drawn):
            add_attention(tally, size, copies=blocks)
    add_block(tally, top, top)
    add_block(tally, top, top)
    if has_attention:
        add_attention(tally, top)
    encoder_add(tally, 2 * top)
    add_convolution(tally, top, codes)
    encoder_add(tally, drawn.integer("num_embeddings") * dim)
    encoder_linear(tally, latents, dim, bias=True)
    encoder_linear(tally, dim, latents, bias=True)


def _attends(drawn: Fields) -> bool:
    return bool(drawn.value("attn_type") == "vanilla")


def _resolutions(drawn: Fields) -> list[int]:
    """Return the sides of images whose levels have attention."""
    listed = drawn.value("attn_resolutions")
    if listed is None:
        return []
    if not isinstance(listed, list | tuple) or not all(type(each) is int for each in listed):
        drawn.refuse(f"{drawn.describe('attn_resolutions')}; it must be a list of integers")
    return list(listed)
