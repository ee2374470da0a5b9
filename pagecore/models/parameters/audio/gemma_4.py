"""Audio encoder of Gemma 4: convolutions, and layers of a Conformer with positions relative to the query.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["add_gemma_4_audio"]

_DEFAULTS: Mapping[str, object] = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "subsampling_conv_channels": [128, 32],
    "conv_kernel_size": 5,
    "output_proj_dims": 1536,
}


def add_gemma_4_audio(tally: Tally, _whole: Fields, fields: Fields, text: int) -> None:
    """Add the encoder, and the projection to the features of the text model."""
    fields.defaults = _DEFAULTS
    hidden, layers, outputs = (
        fields.integer(name) for name in ("hidden_size", "num_hidden_layers", "output_proj_dims")
    )
    _add_convolutions(tally, fields, hidden)
    # Queries, keys, values, outputs and positions; two matrices of width 4 in each of two MLPs; a gated convolution.
    encoder_linear(tally, hidden, hidden, copies=(5 + 16 + 3) * layers)
    encoder_add(tally, layers * hidden * fields.integer("conv_kernel_size"))
    norms, head_dim = 9, hidden // fields.integer("num_attention_heads")
    encoder_add(tally, layers * (norms * hidden + head_dim))
    encoder_linear(tally, hidden, outputs, bias=True)
    encoder_linear(tally, outputs, text)


def _add_convolutions(tally: Tally, fields: Fields, hidden: int) -> None:
    """Add two convolutions over time and frequency, each with a norm, and the projection of what they leave."""
    channels = fields.value("subsampling_conv_channels")
    if (
        not isinstance(channels, list | tuple)
        or len(channels) != 2
        or not all(type(n) is int and n > 0 for n in channels)
    ):
        fields.refuse(f"{fields.describe('subsampling_conv_channels')}; it must be a list of two integers above 0")
    first, second = channels
    encoder_linear(tally, 9, first)
    encoder_linear(tally, 9 * first, second)
    encoder_add(tally, first + second)
    encoder_linear(tally, first // 4 * second, hidden)
