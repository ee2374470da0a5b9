"""Encoder-decoder families: specs of the decoder's own layers, and of its cross-attention layers.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagecore.arrays import DType
from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.storage import AttentionSpec, CrossSpec
from pagecore.storage.checks import LAYERS_MAX

__all__ = ["ENCODER_DECODERS", "OF_THE_ENCODER", "Encoder", "decoder_specs"]


@dataclass(frozen=True)
class Encoder:
    """The encoder of a model that is made of two others.

    Parameters
    ----------
    max_tokens : int or None
        Most tokens of an output.
    """

    max_tokens: int | None


@dataclass(frozen=True)
class EncoderDecoder:
    """The fields of a family.

    Parameters
    ----------
    defaults : mapping
        Fields that the family reads, with the value of each if a file does not have it.
    aliases : mapping
        The family's own names of num_hidden_layers and num_attention_heads, of the decoder, and of hidden_size.
    source_length, target_length : str
        Fields with the longest encoder and decoder sequences.
    scale : float, optional
        Factor of the scores; ``head_dim ** -0.5`` by default.
    layers_by_default : str, optional
        Field with the number of the decoder's layers if its own is null or missing.
    """

    defaults: Mapping[str, object]
    aliases: Mapping[str, str]
    source_length: str
    target_length: str
    scale: float | None = None
    layers_by_default: str | None = None


_DECODER = {
    "hidden_size": "d_model",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
}
_T5 = {"hidden_size": "d_model", "num_hidden_layers": "num_decoder_layers", "num_attention_heads": "num_heads"}


# Common names that files of these families have for the encoder's sizes (distilled models have fewer decoder layers).
OF_THE_ENCODER = ("num_hidden_layers", "num_attention_heads")


def _t5(num_layers: int = 6, mlp: str = "relu") -> EncoderDecoder:
    """Return a family with the decoder of T5, and the defaults of its number of layers and of its MLP."""
    return EncoderDecoder(
        {"n_positions": None, "d_kv": 64, "num_layers": num_layers, "feed_forward_proj": mlp},
        _T5,
        "n_positions",
        "n_positions",
        scale=1.0,
        layers_by_default="num_layers",
    )


def _two_lengths(source: str, target: str, sizes: tuple[int, int]) -> EncoderDecoder:
    """Return a family with the decoder of BART whose encoder has a maximum length of its own."""
    return EncoderDecoder(dict(zip((source, target), sizes, strict=True)), _DECODER, source, target)


def _bart(longest: int = 1024) -> EncoderDecoder:
    """Return a family with the decoder of BART; `longest` is the default of its longest sequence."""
    name = "max_position_embeddings"
    return EncoderDecoder({name: longest}, _DECODER, name, name)


# Sparse and local attention (BigBird-Pegasus, LED, LongT5, PEGASUS-X) is in the encoder only, which stores nothing. A
# T5 adds a bias for the relative position to the scores of the decoder's own layers, which no spec describes: `attend`
# serves its cross attention only.
ENCODER_DECODERS: Mapping[str, EncoderDecoder] = {
    **{
        name: _bart() for name in ("bart", "fsmt", "marian", "mbart", "m2m_100", "mvp", "nllb-moe", "pegasus", "plbart")
    },
    "blenderbot": _bart(128),
    "blenderbot-small": _bart(512),
    "bigbird_pegasus": _bart(4096),
    "pegasus_x": _bart(16384),
    "led": _two_lengths("max_encoder_position_embeddings", "max_decoder_position_embeddings", (16384, 1024)),
    "speech_to_text": _two_lengths("max_source_positions", "max_target_positions", (6000, 1024)),
    **{name: _t5() for name in ("longt5", "t5")},
    **{name: _t5(8, "gated-gelu") for name in ("mt5", "umt5")},
    "pop2piano": _t5(mlp="gated-gelu"),
    "switch_transformers": _t5(12),
    "udop": _t5(24),
    "whisper": _two_lengths("max_source_positions", "max_target_positions", (1500, 448)),
}


def decoder_specs(
    fields: Fields, model_type: str, dtype: DType, format: str | None, *, encoder: Encoder | None = None
) -> tuple[tuple[AttentionSpec, ...], int | None]:
    """Return the specs of a decoder's own layers, then of its cross-attention layers, and its maximum length.

    With `encoder` the decoder attends to another encoder than that of its own family.

    Raises
    ------
    ConfigError
        A field is missing or invalid.
    PagecoreError
        As `AttentionSpec`, for a format that does not store keys of this dim.
    """
    family = ENCODER_DECODERS[model_type]
    fields.defaults, fields.aliases = family.defaults, family.aliases
    fields.check_aliases(but=OF_THE_ENCODER)
    if encoder is None and fields.given("is_encoder_decoder") is False:
        raise UnsupportedOption(
            f"{fields.source}: is_encoder_decoder is false, but a {model_type} has an encoder; set it to true, or pass "
            "a list of specs"
        )
    if model_type == "mvp" and fields.given("use_prompt"):
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('use_prompt')}, but the keys and values of a prompt, which every layer "
            "attends to first, are not supported; set it to false"
        )
    layers_field = "num_hidden_layers"
    if family.layers_by_default is not None and fields.given("num_hidden_layers") is None:
        layers_field = family.layers_by_default
    num_layers = fields.integer(layers_field, max=LAYERS_MAX // 2)
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("d_kv") if "d_kv" in family.defaults else _head_dim(fields, heads)
    own = AttentionSpec(heads, head_dim, dtype=dtype, num_query_heads=heads, scale=family.scale, format=format)
    cross = CrossSpec(
        heads,
        head_dim,
        dtype=dtype,
        num_query_heads=heads,
        scale=family.scale,
        format=format,
        max_tokens=_length(fields, family.source_length) if encoder is None else encoder.max_tokens,
    )
    return (own,) * num_layers + (cross,) * num_layers, _length(fields, family.target_length)


def _head_dim(fields: Fields, heads: int) -> int:
    hidden = fields.integer("hidden_size")
    if hidden % heads:
        fields.refuse(
            f"{fields.name('hidden_size')} is {hidden}, not a multiple of {fields.name('num_attention_heads')} "
            f"{heads}; correct one of the two"
        )
    return hidden // heads


def _length(fields: Fields, name: str) -> int | None:
    return None if fields.value(name) is None else fields.integer(name)
