"""Parameters of the encoders of models that are made of two others, by their type.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.formulas import add_formulas
from pagecore.models.parameters.counting.tally import Kind, Tally
from pagecore.models.parameters.decoders.text_model import add_text_model
from pagecore.models.parameters.encoders.convolutions import CONVOLUTIONS, add_convolutions
from pagecore.models.parameters.vision.tower_parts import image_side

__all__ = ["COMPOSED_ENCODERS"]

_VIT: Mapping[str, object] = {
    "hidden_size": 768,
    "image_size": 224,
    "intermediate_size": 3072,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "qkv_bias": True,
}
_VIT_MATRICES = """
    num_channels * patch_size ** 2 * hidden_size + hidden_size ** 2
    + num_hidden_layers * (4 * hidden_size ** 2 + 2 * hidden_size * intermediate_size)"""
_VIT_REST = """
    ((image_size // patch_size) ** 2 + 2 * further_tokens + 4) * hidden_size
    + num_hidden_layers * ((6 + 3 * qkv_bias) * hidden_size + intermediate_size)"""
_BEIT: Mapping[str, object] = {
    **_VIT,
    **dict.fromkeys(("use_mask_token", "use_absolute_position_embeddings"), False),
    **dict.fromkeys(("use_relative_position_bias", "use_shared_relative_position_bias"), False),
    "layer_scale_init_value": 0.1,
    "num_attention_heads": 12,
}
_SWIN: Mapping[str, object] = {
    "depths": (2, 2, 6, 2),
    "embed_dim": 96,
    "image_size": 224,
    "mlp_ratio": 4.0,
    "num_channels": 3,
    "num_heads": (3, 6, 12, 24),
    "patch_size": 4,
    "qkv_bias": True,
    "use_absolute_embeddings": False,
    "window_size": 7,
}
_WAV2VEC2: Mapping[str, object] = {
    **CONVOLUTIONS,
    "adapter_kernel_size": 3,
    "add_adapter": False,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_adapter_layers": 3,
    "num_hidden_layers": 12,
}
_WAV2VEC2_MATRICES = """
    channels * hidden_size
    + hidden_size * (hidden_size // num_conv_pos_embedding_groups) * num_conv_pos_embeddings
    + num_hidden_layers * (4 * hidden_size ** 2 + 2 * hidden_size * intermediate_size)"""
_WAV2VEC2_REST = """
    2 * normed_channels + 2 * channels + 5 * hidden_size + num_conv_pos_embeddings
    + num_hidden_layers * (9 * hidden_size + intermediate_size)"""


def _vit(further_tokens: int) -> Callable[[Tally, Fields], int]:
    """Return a function that adds a ViT with some tokens next to the patches of an image."""

    def add(tally: Tally, encoder: Fields) -> int:
        encoder.defaults = _VIT
        add_formulas(tally, _VIT_MATRICES, _VIT_REST, encoder, encoder, {"further_tokens": further_tokens})
        return encoder.integer("hidden_size")

    return add


def _beit(tally: Tally, encoder: Fields) -> int:
    """Add a BEiT, whose positions are embedded, or biases of the scores in each layer or in all of them."""
    encoder.defaults = _BEIT
    hidden, width = encoder.integer("hidden_size"), encoder.integer("intermediate_size")
    layers = encoder.integer("num_hidden_layers")
    patch = image_side(encoder, "patch_size")
    side = image_side(encoder, "image_size") // patch
    encoder_linear(tally, encoder.integer("num_channels") * patch**2, hidden, bias=True)
    encoder_add(tally, (3 + encoder.flag("use_mask_token")) * hidden)  # tokens, and a norm of the output
    encoder_add(tally, (side**2 + 1) * hidden * encoder.flag("use_absolute_position_embeddings"))
    tables = layers * encoder.flag("use_relative_position_bias") + encoder.flag("use_shared_relative_position_bias")
    encoder_add(tally, tables * ((2 * side - 1) ** 2 + 3) * encoder.integer("num_attention_heads"))
    encoder_linear(tally, hidden, hidden, copies=4 * layers)
    encoder_linear(tally, hidden, width, bias=True, copies=layers)
    encoder_linear(tally, width, hidden, bias=True, copies=layers)
    # Biases of all projections but that of keys, two norms, and two scales of residuals.
    encoder_add(tally, layers * (7 + 2 * (encoder.number("layer_scale_init_value") > 0)) * hidden)
    return hidden


def _swin(has_norm: bool) -> Callable[[Tally, Fields], int]:
    """Return a function that adds a Swin, whose stages have half the patches and twice the features."""

    def add(tally: Tally, encoder: Fields) -> int:
        encoder.defaults = _SWIN
        depths, heads, dim = encoder.integers("depths"), encoder.integers("num_heads"), encoder.integer("embed_dim")
        if len(depths) != len(heads):
            encoder.refuse(f"{encoder.describe('num_heads')}; it must list {len(depths)} integers, like depths")
        patch, has_bias = encoder.integer("patch_size"), encoder.flag("qkv_bias")
        encoder_linear(tally, encoder.integer("num_channels") * patch**2, dim, bias=True)
        encoder_add(tally, 2 * dim)
        if encoder.flag("use_absolute_embeddings"):
            sides = encoder.value("image_size")
            sides = (
                encoder.integers("image_size") if isinstance(sides, list | tuple) else [encoder.integer("image_size")]
            )
            encoder_add(tally, ((sides[0] // patch) * (sides[-1] // patch) + 1) * dim)
        for stage, (depth, count) in enumerate(zip(depths, heads, strict=True)):
            if stage:
                encoder_linear(tally, 4 * dim, 2 * dim)
                encoder_add(tally, 8 * dim)
                dim *= 2
            width = encoder.scaled(dim, "mlp_ratio")
            encoder_linear(tally, dim, dim, bias=has_bias, copies=3 * depth)
            encoder_linear(tally, dim, dim, bias=True, copies=depth)
            encoder_linear(tally, dim, width, bias=True, copies=depth)
            encoder_linear(tally, width, dim, bias=True, copies=depth)
            encoder_add(tally, depth * (4 * dim + (2 * encoder.integer("window_size") - 1) ** 2 * count))
        encoder_add(tally, 2 * dim * has_norm)
        return dim

    return add


def _wav2vec2(tally: Tally, encoder: Fields) -> int:
    """Add a Wav2Vec 2.0 or a HuBERT, and the convolutions that shorten its output."""
    encoder.defaults = _WAV2VEC2
    names = add_convolutions(tally, encoder)
    add_formulas(tally, _WAV2VEC2_MATRICES, _WAV2VEC2_REST, encoder, encoder, names)
    hidden = encoder.integer("hidden_size")
    if not encoder.flag("add_adapter"):
        return hidden
    outputs = hidden if encoder.given("output_hidden_size") is None else encoder.integer("output_hidden_size")
    if outputs != hidden:
        encoder_linear(tally, hidden, outputs, bias=True)
        encoder_add(tally, 2 * outputs)
    kernel, layers = encoder.integer("adapter_kernel_size"), encoder.integer("num_adapter_layers")
    encoder_linear(tally, kernel * outputs, 2 * outputs, bias=True, copies=layers)
    return hidden


def _bert(kind: str) -> Callable[[Tally, Fields], int]:
    """Return a function that adds a BERT without its output head, but with the layer that pools its first token."""

    def add(tally: Tally, encoder: Fields) -> int:
        own = Tally()
        config = {name: encoder.given(name) for name in encoder}
        config |= {"model_type": kind, "is_decoder": True, "tie_word_embeddings": True}
        add_text_model(own, config, encoder, encoder, kind, None, mtp=False)
        hidden = encoder.integer("hidden_size")
        for (split, each), count in own.counts.items():
            tally.add(count, each, split)
        # The head has a layer, a norm and a bias.
        tally.add(-2 * hidden - encoder.integer("vocab_size"), Kind.OTHER)
        return hidden

    return add


# Functions that add an encoder and return its features.
COMPOSED_ENCODERS: Mapping[str, Callable[[Tally, Fields], int]] = {
    **{kind: _bert(kind) for kind in ("bert", "camembert", "roberta", "xlm-roberta")},
    "beit": _beit,
    "deit": _vit(further_tokens=2),
    "donut-swin": _swin(has_norm=False),
    "hubert": _wav2vec2,
    "swin": _swin(has_norm=True),
    "vit": _vit(further_tokens=1),
    "wav2vec2": _wav2vec2,
}
