"""Parameters of models whose decoder stores keys and values of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.encoders.bart_t5 import ENCODER_DECODERS
from pagecore.models.encoders.mllama import MLLAMA
from pagecore.models.parameters.counting.tally import Parameters, Tally
from pagecore.models.parameters.encoders.bart_t5 import add_encoder_decoder
from pagecore.models.parameters.encoders.composed import add_composed, add_nemotron_parse
from pagecore.models.parameters.encoders.cross_attention import COUNTED_CROSS_DECODERS, add_cross_decoder
from pagecore.models.parameters.encoders.documents import add_florence_tower
from pagecore.models.parameters.encoders.mllama import add_mllama
from pagecore.models.parameters.vision.tower import add_vision
from pagecore.models.specs import read_model_config
from pagecore.storage import AttentionSpec, CrossSpec

__all__ = ["count_with_encoder"]

_COMPOSED = frozenset({"encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"})


def count_with_encoder(config: Any, whole: Fields, model_type: str, stage: range | None) -> Parameters:
    """Return the parameters of a model with an encoder, or of a stage of its decoder.

    Raises
    ------
    UnsupportedOption
        The parameters of the family cannot be counted.
    """
    tally = Tally()
    if model_type in ENCODER_DECODERS or model_type == "florence2":
        sees = model_type == "florence2"
        fields, kind = (whole.inner("text_config"), "bart") if sees else (whole, model_type)
        family = ENCODER_DECODERS[kind]
        fields.defaults, fields.aliases = family.defaults, family.aliases
        add_encoder_decoder(tally, fields, kind, stage)
        if sees and (stage is None or stage.start == 0):
            add_florence_tower(tally, whole)
        return Parameters(dict(tally.counts), fields.integer("num_attention_heads"), dict(tally.matrices))
    if model_type not in {*MLLAMA, *COUNTED_CROSS_DECODERS, *_COMPOSED, "nemotron_parse"}:
        raise UnsupportedOption(
            f"{whole.source}: the parameters of {model_type} cannot be counted; pass weights= in bytes"
        )
    specs = cast("Sequence[AttentionSpec | CrossSpec]", read_model_config(config, dtype="bfloat16").layers)
    if model_type in MLLAMA:
        hidden, is_first = add_mllama(tally, whole, model_type, specs, stage)
        if is_first:
            add_vision(tally, whole, hidden)
    elif model_type in _COMPOSED:
        add_composed(tally, whole, specs, stage)
    elif model_type == "nemotron_parse":
        add_nemotron_parse(tally, whole, specs, stage)
    else:
        add_cross_decoder(tally, whole, model_type, specs, stage)
    return Parameters(dict(tally.counts), max(spec.num_kv_heads for spec in specs), dict(tally.matrices))
