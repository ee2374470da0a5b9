"""Parameters of dense MLPs.

Source: the modeling files of transformers 5.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.counting.traits import Traits, is_true

__all__ = ["add_mlp"]


def add_mlp(tally: Tally, fields: Fields, traits: Traits, width: int, inside: str = "") -> None:
    """Add an MLP of `width` features, with a gate or without; `inside` is the name of its own module and a dot."""
    hidden, has_bias = fields.integer("hidden_size"), is_true(fields, traits.mlp_bias)
    first = "gate_proj" if traits.is_gated else "up_proj"
    tally.linear(hidden, width, bias=has_bias, copies=1 + traits.is_gated, name=f"{inside}{first}")
    tally.linear(width, hidden, bias=has_bias, name=f"{inside}down_proj")
    if traits.has_mlp_norm:
        tally.norm(width)
