"""Parameters that only Gemma 3n has: alternating updates (AltUp), learned residuals (Laurel) and inputs of each layer.

Source: the modeling file of Gemma 3n in transformers 5.
"""

from __future__ import annotations

from pagecore.models.fields import Fields
from pagecore.models.parameters import gemma_4
from pagecore.models.parameters.tally import Kind, Split, Tally

__all__ = ["add_ends", "add_to_layer", "width_of_layer"]


def add_ends(tally: Tally, fields: Fields, *, is_first: bool, is_last: bool) -> None:
    """Add the inputs of all layers and the projections that make the alternating streams, and those that merge them."""
    hidden, streams = fields.integer("hidden_size"), fields.integer("altup_num_inputs")
    if is_first:
        gemma_4.add_inputs_of_layers(tally, fields)
    tally.linear(hidden, hidden, copies=(streams - 1) * (is_first + is_last), name="altup_projections")


def add_to_layer(tally: Tally, fields: Fields) -> None:
    """Add the streams, the learned residual and the own input of a layer."""
    hidden, streams, rank = (fields.integer(name) for name in ("hidden_size", "altup_num_inputs", "laurel_rank"))
    gemma_4.add_to_layer(tally, fields)
    tally.linear(hidden, rank, split=Split.COPY, name="laurel.linear_left")
    tally.linear(rank, hidden, split=Split.COPY, name="laurel.linear_right")
    tally.norm(hidden, copies=2)
    tally.linear(hidden, streams, split=Split.COPY, kind=Kind.OTHER)
    tally.add(hidden + streams**2 + streams**3)


def width_of_layer(fields: Fields, layer: int) -> int:
    """Return the width of the MLP of a layer: `intermediate_size` is a number, or lists one for each layer."""
    given = fields.given("intermediate_size")
    if not isinstance(given, list | tuple):
        return fields.integer("intermediate_size")
    layers = fields.integer("num_hidden_layers")
    if len(given) != layers or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in given):
        fields.refuse(f"{fields.describe('intermediate_size')}; it must list a width for each of the {layers} layers")
    return int(given[layer])
