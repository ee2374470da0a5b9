"""Specs of the decoders of models with an encoder, by `model_type`."""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.errors import UnsupportedOption
from pagecore.models.cache_format import requested_format, stored_dtype
from pagecore.models.config_files.fields import Fields
from pagecore.models.encoders.bart_t5 import ENCODER_DECODERS, decoder_specs
from pagecore.models.encoders.cross_attention import COMPOSED, CROSS_DECODERS, composed_specs, cross_decoder_specs
from pagecore.models.encoders.mllama import MLLAMA, mllama_specs
from pagecore.models.families.attention_specs import Sinks, SpecOptions
from pagecore.models.model_config import ModelConfig, ModelSpec

__all__ = ["ENCODER_TYPES", "decoder_fields", "has_encoder", "read_encoder_decoder"]

ENCODER_TYPES = frozenset({*ENCODER_DECODERS, *CROSS_DECODERS, *COMPOSED, *MLLAMA})


def has_encoder(model_type: str) -> bool:
    """Return True for a family with an encoder, whose decoder stores the encoder's keys and values."""
    return model_type in ENCODER_TYPES


def read_encoder_decoder(
    whole: Fields, model_type: str, dtype: object, sinks: Sinks | None, format: str | None
) -> ModelConfig:
    """Return the specs of a family with an encoder: the decoder's own layers, then its cross-attention layers.

    In a Mllama layers of both kinds alternate, and none attends twice.
    """
    if sinks is not None:
        raise UnsupportedOption(f"sinks are given, but {model_type} has no sinks; leave sinks out")
    decoder = decoder_fields(whole, model_type)
    asked = SpecOptions(stored_dtype(whole, decoder, dtype), requested_format(whole, decoder, format), None)
    layers: tuple[ModelSpec, ...]
    if model_type in MLLAMA:
        return ModelConfig(model_type, *mllama_specs(whole, model_type, asked))
    if model_type in ENCODER_DECODERS:
        layers, longest = decoder_specs(whole, model_type, asked.dtype, asked.format)
    elif model_type in COMPOSED:
        layers, longest = composed_specs(whole, model_type, asked)
    else:
        layers, longest = cross_decoder_specs(whole, model_type, asked)
    num_layers = len(layers) // 2
    return ModelConfig(model_type, layers, longest, tuple((n, num_layers + n) for n in range(num_layers)))


def decoder_fields(whole: Fields, model_type: str) -> Fields:
    """Return the fields of the decoder of a model with an encoder; those of the model if they are not nested."""
    path = (
        CROSS_DECODERS[model_type].path if model_type in CROSS_DECODERS else {**COMPOSED, **MLLAMA}.get(model_type, "")
    )
    return whole.inner(path) if isinstance(whole.given(path), Mapping) else whole
