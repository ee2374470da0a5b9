"""Structure of the layers of decoders of speech and music, whose tokens are those of several codebooks.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.mlp import add_mlp
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.counting.traits import Settled, Traits, biased_traits

__all__ = ["SPEECH"]


def _bark(fields: Fields) -> Settled:
    """Embedding and head have rows of their own numbers, and all biases are switched together."""
    hidden, has_biases = fields.integer("hidden_size"), fields.flag("bias")
    names = ("qkv_bias", "output_bias", "mlp_bias", "norm_bias")
    rows = fields.integer("output_vocab_size") - fields.integer("vocab_size")
    return {**dict.fromkeys(names, has_biases), "width": 4 * hidden, "last": rows * hidden}


def _csm_depth(fields: Fields) -> Settled:
    """Each codebook has an embedding of the backbone's features, which are projected, and all but the first a head."""
    hidden, vocab, codebooks = (fields.integer(name) for name in ("hidden_size", "vocab_size", "num_codebooks"))
    features = fields.integer("backbone_hidden_size")
    # A table and a head of `vocab_size` rows and the hidden size are counted elsewhere.
    return {
        "first": codebooks * vocab * features + features * hidden - vocab * hidden,
        "last": (codebooks - 2) * vocab * hidden,
    }


def _higgs(fields: Fields) -> Settled:
    """The tokens of sound have a table and a head; text has a table alone."""
    hidden, rows = fields.integer("hidden_size"), fields.integer("num_codebooks") * fields.integer("codebook_size")
    return {"first": rows * hidden, "last": (rows - fields.integer("vocab_size")) * hidden}


def _half_of_ffn(fields: Fields, rows: int) -> Settled:
    """The field has the width of the gate and the projection next to it together; the embedding has more rows."""
    return {"width": fields.integer("ffn_dim") // 2, "first": rows * fields.integer("hidden_size")}


def _settle_moshi(fields: Fields) -> Settled:
    return _half_of_ffn(fields, 1)


def _kyutai(fields: Fields) -> Settled:
    """The embedding has the codes of all codebooks, too."""
    return _half_of_ffn(fields, fields.integer("num_codebooks") * fields.integer("codebook_vocab_size") + 1)


def _csm(fields: Fields) -> Settled:
    """There are tables for text and for the codes of all codebooks, and a head for those of the first one."""
    hidden, vocab = fields.integer("hidden_size"), fields.integer("vocab_size")
    rows = fields.integer("text_vocab_size") + (fields.integer("num_codebooks") - 1) * vocab
    return {"first": rows * hidden}


def _melody(fields: Fields) -> Settled:
    """Each codebook has a table, with a row for its beginning, and a head."""
    hidden, vocab, codebooks = (fields.integer(name) for name in ("hidden_size", "vocab_size", "num_codebooks"))
    return {"first": (codebooks * (vocab + 1) - vocab) * hidden, "last": (codebooks - 1) * vocab * hidden}


def _mlp_of_sound(tally: Tally, fields: Fields, _specs: Sequence[Any], _layer: int) -> None:
    add_mlp(tally, fields, _HIGGS, fields.integer("intermediate_size"), "audio_mlp.")


_BARK = Traits(
    can_tie=False,
    is_gated=False,
    has_positions=True,
    settle=_bark,
    aliases={"vocab_size": "input_vocab_size"},
    defaults={"bias": True, "vocab_size": 10048, "output_vocab_size": 10048, "max_position_embeddings": 1024},
)
_HIGGS = biased_traits(
    norms=4,
    mlp_bias="mlp_bias",
    can_tie=False,
    settle=_higgs,
    add_to_layer=_mlp_of_sound,
    defaults={"num_codebooks": 8, "codebook_size": 1024},
)

SPEECH: Mapping[str, Traits] = {
    "coarse_acoustics": _BARK,
    "csm": biased_traits(
        mlp_bias="mlp_bias",
        can_tie=False,
        settle=_csm,
        defaults={"num_codebooks": 32, "text_vocab_size": 128256, "vocab_size": 2051},
    ),
    "csm_depth_decoder_model": biased_traits(
        mlp_bias="mlp_bias",
        can_tie=False,
        settle=_csm_depth,
        defaults={"num_codebooks": 32, "backbone_hidden_size": 2048, "vocab_size": 2051},
    ),
    "higgs_audio_v2": _HIGGS,
    "kyutai_speech_to_text": Traits(
        can_tie=False, settle=_kyutai, defaults={"num_codebooks": 32, "codebook_vocab_size": 2049}
    ),
    "moshi": Traits(can_tie=False, settle=_settle_moshi),
    "musicgen_melody_decoder": Traits(
        can_tie=False,
        norm_bias=True,
        is_gated=False,
        settle=_melody,
        defaults={"num_codebooks": 4, "intermediate_size": 4096, "vocab_size": 2048},
        aliases={"intermediate_size": "ffn_dim"},
    ),
    "semantic": _BARK,
}
