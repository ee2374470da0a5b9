"""Structure of the layers of families without attention.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.traits import Settled, Traits

__all__ = ["RECURRENT"]

_MAMBA = Traits(norms=1, is_tied=True)


def _norm_before_rwkv(fields: Fields) -> Settled:
    """The first block has one more norm."""
    return {"first": 2 * fields.integer("hidden_size")}


def _norms_of_xlstm(fields: Fields) -> Settled:
    """The last norm has no bias."""
    return {"norm_bias": fields.flag("use_bias"), "last": fields.integer("hidden_size")}


RECURRENT: Mapping[str, Traits] = {
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": Traits(norms=1),
    "rwkv": Traits(norm_bias=True, settle=_norm_before_rwkv, defaults={"intermediate_size": None}),
    "xlstm": Traits(
        settle=_norms_of_xlstm,
        has_last_norm=False,
        defaults={"ffn_proj_factor": 2.667, "ffn_round_up_to_multiple_of": 64},
    ),
}
