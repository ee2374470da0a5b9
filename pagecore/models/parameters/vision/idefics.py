"""Resampler of images of IDEFICS.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["add_idefics_resampler"]

_RESAMPLER: Mapping[str, object] = {
    "qk_layer_norms_perceiver": False,
    "resampler_depth": 6,
    "resampler_head_dim": 96,
    "resampler_n_heads": 16,
    "resampler_n_latents": 64,
}


def add_idefics_resampler(
    tally: Tally, whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, _text: int
) -> None:
    """Add latents that attend to the patches of an image, if the model has them."""
    if not whole.switch("use_resampler", False):
        return
    name = "perceiver_config"
    part = whole.inner(name) if whole.has_object(name) else Fields({}, whole.source, name)
    part.defaults = _RESAMPLER
    depth, dim = part.integer("resampler_depth"), part.integer("resampler_head_dim")
    width = part.integer("resampler_n_heads") * dim
    encoder_linear(tally, hidden, width, copies=3 * depth)
    encoder_linear(tally, width, hidden, copies=depth)
    encoder_linear(tally, hidden, 4 * hidden, copies=depth)
    encoder_linear(tally, 4 * hidden, hidden, copies=depth)
    encoder_add(tally, (part.integer("resampler_n_latents") + 6 * depth + 2) * hidden)
    encoder_add(tally, 4 * depth * dim * part.flag("qk_layer_norms_perceiver"))
