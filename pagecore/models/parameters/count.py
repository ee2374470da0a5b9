"""Number of parameters of a model, from its config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.open_config import open_config
from pagecore.models.encoders.specs import has_encoder
from pagecore.models.layer_types import FULL
from pagecore.models.multimodal.text_model import text_model
from pagecore.models.parameters.audio.encoders import add_audio
from pagecore.models.parameters.audio.speaking import add_speaking_parts, depth_decoder
from pagecore.models.parameters.counting.tally import Parameters, Tally
from pagecore.models.parameters.decoders.dflash import add_dflash, is_dflash
from pagecore.models.parameters.decoders.eagle import add_eagle, eagle_version
from pagecore.models.parameters.decoders.mtp import count_mtp_layers, mtp_parts, mtp_spec
from pagecore.models.parameters.decoders.text_model import add_text_model
from pagecore.models.parameters.encoders.count_with_encoder import count_with_encoder
from pagecore.models.parameters.encoders.sound import add_melody_parts
from pagecore.models.parameters.encoders.unknown_parts import refuse_unknown_parts
from pagecore.models.parameters.vision.tower import add_vision, with_encoders
from pagecore.storage import AttentionSpec, LatentSpec, RowSpec

__all__ = ["count_parameters", "mtp_specs"]


def count_parameters(
    config: str | os.PathLike[str] | Mapping[str, Any], *, layers: range | None = None, mtp: bool = False
) -> Parameters:
    """Count the parameters of a model from its config.

    The counts equal those of the models that transformers builds, with their encoders of images and sound. Of a model
    that also speaks (Qwen-Omni) they are those of its thinker, and of a draft of the EAGLE kind those that it does not
    share with its model.

    Parameters
    ----------
    config : str, path or dict
        As for `specs_from_config`.
    layers : range, optional
        Layers of one pipeline stage. The stage of the first layer has the embedding and all encoders; that of the last
        one the norm and the head. A head that is tied to the embedding is a copy there, except in a single stage.
    mtp : bool
        Add the layers for the prediction of further tokens (`num_nextn_predict_layers`) after the last layer.
        transformers does not build them, and engines load them only as a draft.

    Returns
    -------
    Parameters

    Raises
    ------
    ConfigError
        The config lacks a size; the message names the field.
    ShapeError
        `layers` are not layers of the model.
    UnsupportedOption
        The family, or one of its encoders, is unknown; `mtp` of a model without such layers.
    """
    whole = open_config(config)
    tally = Tally()
    model_type = whole.given("model_type")
    if isinstance(model_type, str) and has_encoder(model_type):
        if mtp:
            raise UnsupportedOption(
                f"{whole.source}: {model_type} has an encoder, and no layers for further tokens; leave the draft out"
            )
        return count_with_encoder(config, whole, model_type, layers)
    model_type, fields = text_model(whole)
    version = eagle_version(whole)
    if (version or is_dflash(whole)) and not mtp:
        if layers is not None:
            raise UnsupportedOption(f"{whole.source}: a draft of the EAGLE kind is one stage; leave layers out")
        if is_dflash(whole):
            kv_heads = add_dflash(tally, config, whole, fields, model_type)
        else:
            kv_heads = add_eagle(tally, config, whole, fields, model_type, version)
        return Parameters(dict(tally.counts), kv_heads, dict(tally.matrices), tally.head)
    refuse_unknown_parts(whole, fields)
    encoded = with_encoders(whole)
    kv_heads, is_first = add_text_model(tally, config, encoded, fields, model_type, layers, mtp)
    if is_first:
        add_vision(tally, encoded, fields.integer("hidden_size"))
        add_audio(tally, encoded, fields.integer("hidden_size"))
        add_speaking_parts(tally, whole, fields.integer("hidden_size"))
        add_melody_parts(tally, whole, fields.integer("hidden_size"))
        depth = depth_decoder(whole)
        if depth is not None:
            inner = count_parameters(depth)
            tally.counts.update(inner.counts)
            tally.matrices.update(inner.matrices)
    return Parameters(dict(tally.counts), kv_heads, dict(tally.matrices), tally.head)


def mtp_specs(
    config: str | os.PathLike[str] | Mapping[str, Any], layers: Sequence[object]
) -> tuple[AttentionSpec | LatentSpec | RowSpec, ...]:
    """Return the specs of a model's layers for the prediction of further tokens, to be planned as layers of its cache.

    Parameters
    ----------
    config : str, path or dict
        As for `specs_from_config`.
    layers : sequence of specs
        Specs of the model, whose dtype and format these layers share.

    Raises
    ------
    UnsupportedOption
        The model has no such layers, or the family's are not known.
    """
    model_type, fields = text_model(open_config(config))
    count = count_mtp_layers(fields, model_type)
    return (mtp_spec(layers, fields, model_type),) * (count * mtp_parts(fields, model_type).count(FULL))
