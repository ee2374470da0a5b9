"""Parameters of models of two others that read an image and write its text: TrOCR with its encoder.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.formulas import add_formulas
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.encoders.cross_attention import add_cross_decoder
from pagecore.storage import AttentionSpec, CrossSpec

__all__ = ["add_image_reader"]

_VIT: Mapping[str, object] = {
    "hidden_size": 768,
    "image_size": 224,
    "intermediate_size": 3072,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "qkv_bias": True,
}
# Tokens next to the patches of an image, by the type of the encoder.
_FURTHER_TOKENS: Mapping[str, int] = {"deit": 2, "vit": 1}
_MATRICES = """
    num_channels * patch_size ** 2 * hidden_size + hidden_size ** 2
    + num_hidden_layers * (4 * hidden_size ** 2 + 2 * hidden_size * intermediate_size)"""
_REST = """
    ((image_size // patch_size) ** 2 + 2 * further_tokens + 4) * hidden_size
    + num_hidden_layers * ((6 + 3 * qkv_bias) * hidden_size + intermediate_size)"""


def add_image_reader(
    tally: Tally, whole: Fields, specs: Sequence[AttentionSpec | CrossSpec], stage: range | None
) -> None:
    """Add a TrOCR with its encoder, or a stage of its decoder; `specs` are those of the config.

    Raises
    ------
    UnsupportedOption
        The encoder or the decoder is another one.
    """
    encoder, decoder = whole.inner("encoder"), whole.inner("decoder")
    for part, known in ((encoder, [*_FURTHER_TOKENS]), (decoder, ["trocr"])):
        if part.value("model_type") not in known:
            raise UnsupportedOption(
                f"{whole.source}: {part.describe('model_type')}, whose parameters cannot be counted; expected "
                f"{' or '.join(known)}: pass weights= in bytes"
            )
    add_cross_decoder(tally, decoder, "trocr", specs, stage)
    if stage is None or stage.start == 0:
        encoder.defaults = _VIT
        names = {"further_tokens": _FURTHER_TOKENS[encoder.value("model_type")]}
        add_formulas(tally, _MATRICES, _REST, encoder, whole, names)
        inputs, hidden = encoder.integer("hidden_size"), decoder.integer("hidden_size")
        if inputs != hidden and decoder.given("cross_attention_hidden_size") is None:
            tally.linear(inputs, hidden, bias=True)
