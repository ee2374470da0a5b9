"""Audio encoder of Gemma 4: convolutions, and layers of a Conformer with positions relative to the query.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.formulas import add_formulas
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["add_gemma_3n_audio", "add_gemma_4_audio"]

_DEFAULTS: Mapping[str, object] = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "subsampling_conv_channels": [128, 32],
    "conv_kernel_size": 5,
    "output_proj_dims": 1536,
}


_DEFAULTS_OF_3N: Mapping[str, object] = {"hidden_size": 1536, "input_feat_size": 128, "vocab_size": 128}
_NAMES_OF_3N = {
    "num_hidden_layers": "conf_num_hidden_layers",
    "num_attention_heads": "conf_num_attention_heads",
    "conv_kernel_size": "conf_conv_kernel_size",
    "subsampling_conv_channels": "sscp_conv_channel_size",
}


def add_gemma_3n_audio(tally: Tally, whole: Fields, fields: Fields, text: int) -> None:
    """Add the encoder of Gemma 3n, the embeddings of the tokens around sound, and the projector."""
    fields.defaults, fields.aliases = {**_DEFAULTS, **_DEFAULTS_OF_3N}, _NAMES_OF_3N
    bins = fields.integer("input_feat_size")
    _add_conformer(tally, fields, bins)
    add_formulas(tally, "hidden_size * text", "(vocab_size + 2) * hidden_size", fields, whole, {"text": text})


def add_gemma_4_audio(tally: Tally, _whole: Fields, fields: Fields, text: int) -> None:
    """Add the encoder, and the projection to the features of the text model."""
    fields.defaults = _DEFAULTS
    hidden, outputs = fields.integer("hidden_size"), fields.integer("output_proj_dims")
    _add_conformer(tally, fields)
    encoder_linear(tally, hidden, outputs, bias=True)
    encoder_linear(tally, outputs, text)


def _add_conformer(tally: Tally, fields: Fields, bins: int | None = None) -> None:
    """Add the convolutions over `bins` frequencies, by default one for each channel of the first, and the layers."""
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    _add_convolutions(tally, fields, hidden, bins)
    # Queries, keys, values, outputs and positions; two matrices of width 4 in each of two MLPs; a gated convolution.
    encoder_linear(tally, hidden, hidden, copies=(5 + 16 + 3) * layers)
    encoder_add(tally, layers * hidden * fields.integer("conv_kernel_size"))
    norms, head_dim = 9, hidden // fields.integer("num_attention_heads")
    encoder_add(tally, layers * (norms * hidden + head_dim))


def _add_convolutions(tally: Tally, fields: Fields, hidden: int, bins: int | None) -> None:
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
    encoder_linear(tally, (first if bins is None else bins) // 4 * second, hidden)
