"""Decoders of BERT's kin: encoders by default, whose layers store keys and values if `is_decoder` is true.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.families.family import Family
from pagecore.storage.checks import LAYERS_MAX

__all__ = ["BERT"]

_NAMES = (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
# Sizes that a file may leave out. add_cross_attention is refused: what these layers attend to is not in the config.
_SIZES: Mapping[str, Mapping[str, int]] = {
    "bert-generation": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
    "electra": {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4},
    "megatron-bert": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
    "rembert": {"hidden_size": 1152, "num_hidden_layers": 32, "num_attention_heads": 18},
    "xlm-roberta-xl": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32},
}
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}


def _layers(fields: Fields) -> int:
    """Return the number of layers of a decoder."""
    if not fields.flag("is_decoder"):
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('is_decoder')}, so each token attends to later ones and nothing is "
            "cached; set it to true"
        )
    return fields.integer("num_hidden_layers", max=LAYERS_MAX)


BERT: Mapping[str, Family] = {
    name: Family({"is_decoder": False, **_SIZES.get(name, _BASE)}, count_layers=_layers) for name in _NAMES
}
