"""Rules for the scale of the scores, from the fields of a config, the head dim and the number of a layer.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields

__all__ = ["multiplier", "root_of_scalar", "unscaled"]


def root_of_scalar(fields: Fields, _head_dim: int, _layer: int) -> float:
    """Return the scale of queries that are divided by the root of `query_pre_attn_scalar`."""
    scalar = fields.number("query_pre_attn_scalar")
    if not scalar:
        fields.refuse(f"{fields.describe('query_pre_attn_scalar')}; it must be above 0: its root divides the scores")
    return float(scalar**-0.5)


def multiplier(fields: Fields, _head_dim: int, _layer: int) -> float:
    """Return `attention_multiplier`."""
    return fields.number("attention_multiplier")


def unscaled(_fields: Fields, _head_dim: int, _layer: int) -> float:
    """Return 1, the scale of a model that normalises queries and keys, or does not scale at all."""
    return 1.0
