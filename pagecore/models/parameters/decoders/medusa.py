"""Parameters of Medusa heads, which predict further tokens from the last hidden state and store no keys.

Source: FasterDecoding's Medusa (T. Cai et al., 2024), and the heads that vLLM builds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pagecore.models.cache_format import stored_dtype
from pagecore.models.config_files.fields import Fields
from pagecore.models.config_files.open_config import open_config
from pagecore.models.families.registry import FAMILIES
from pagecore.models.multimodal.text_model import text_model
from pagecore.models.parameters.counting.tally import Kind, Parameters, Split, Tally
from pagecore.models.parameters.weights.formats import WEIGHT_FORMATS

__all__ = ["count_medusa", "medusa_bytes"]

Config = str | os.PathLike[str] | Mapping[str, Any]


def count_medusa(config: Config, model: Config) -> Parameters:
    """Count the parameters of Medusa heads from their config, in the format of FasterDecoding or of vLLM.

    Parameters
    ----------
    config : str, path or dict
        Config of the heads. The first format lists no sizes; those of the model take their place.
    model : str, path or dict
        Config of the model that the heads draft for.

    Raises
    ------
    ConfigError
        A number is missing or out of range; the message names the field.
    """
    whole = open_config(config)
    whole.aliases = {"num_heads": "medusa_num_heads", "num_hidden_layers": "medusa_num_layers"}
    whole.defaults = {"num_hidden_layers": 1}
    is_original = whole.given("medusa_num_heads") is not None
    hidden, vocabulary = (_size(whole, model, name) for name in ("hidden_size", "vocab_size"))
    rows = vocabulary if whole.given("truncated_vocab_size") is None else whole.integer("truncated_vocab_size")
    heads, layers = whole.integer("num_heads"), whole.integer("num_hidden_layers", min=0)
    tally = Tally()
    bias = whole.switch("medusa_fc_bias", is_original)
    tally.linear(hidden, hidden, bias=bias, split=Split.COPY, kind=Kind.OTHER, copies=heads * layers)
    count = 1 if whole.switch("original_lm_head", False) else heads
    tally.add(count * rows * hidden, Kind.EMBEDDING, Split.TENSOR)
    tally.head += count * rows * hidden
    return Parameters(dict(tally.counts), head=tally.head)


def medusa_bytes(config: Config, model: Config, ranks: int) -> int:
    """Return the bytes of Medusa heads on one rank, in their own dtype, or in that of the model if they name none."""
    dtype = stored_dtype(text_model(open_config(model))[1], open_config(config), "auto")
    return WEIGHT_FORMATS[str(dtype)].nbytes(count_medusa(config, model), ranks)


def _size(whole: Fields, model: Config, name: str) -> int:
    """Return a size of the heads, or that of the model."""
    if whole.given(name) is not None:
        return whole.integer(name)
    model_type, fields = text_model(open_config(model))
    fields.defaults, fields.aliases = FAMILIES[model_type].defaults, FAMILIES[model_type].aliases
    return fields.integer(name)
