"""Convolutions over samples of sound, with which Wav2Vec 2.0, HuBERT and SpeechT5 begin.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["CONVOLUTIONS", "add_convolutions"]

CONVOLUTIONS: Mapping[str, object] = {
    "conv_bias": False,
    "conv_dim": (512, 512, 512, 512, 512, 512, 512),
    "conv_kernel": (10, 3, 3, 3, 3, 2, 2),
    "num_conv_pos_embedding_groups": 16,
    "num_conv_pos_embeddings": 128,
}


def add_convolutions(tally: Tally, fields: Fields) -> dict[str, int]:
    """Add the convolutions; return `channels`, those of the last one, and `normed_channels`, those with a norm."""
    channels, kernels = fields.integers("conv_dim"), fields.integers("conv_kernel")
    if len(channels) != len(kernels):
        fields.refuse(f"{fields.describe('conv_kernel')}; it must list {len(channels)} integers, like conv_dim")
    for inputs, outputs, kernel in zip([1, *channels], channels, kernels, strict=False):
        encoder_linear(tally, kernel * inputs, outputs, bias=fields.flag("conv_bias"))
    # A norm follows the first convolution, or each of them.
    normed = sum(channels) if fields.given("feat_extract_norm") == "layer" else channels[0]
    return {"normed_channels": normed, "channels": channels[-1]}
