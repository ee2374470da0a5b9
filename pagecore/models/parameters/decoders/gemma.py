"""Parameters that only Gemma 3n and Gemma 4 have: inputs of each layer, experts next to an MLP, alternating updates.

Source: the modeling files of Gemma 3n and Gemma 4 in transformers 5.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Kind, Split, Tally

__all__ = [
    "add_ends_of_gemma_3n",
    "add_inputs_of_layers",
    "add_to_layer_of_gemma_3n",
    "add_to_layer_of_gemma_4",
    "width_of_layer",
]


def _input_width(fields: Fields) -> int:
    return fields.integer("hidden_size_per_layer_input", min=0)


def add_inputs_of_layers(tally: Tally, fields: Fields) -> None:
    """Add the table of the inputs of all layers, their projection and its norm."""
    width, hidden = _input_width(fields), fields.integer("hidden_size")
    if not width:
        return
    inputs = width * fields.integer("num_hidden_layers")
    tally.add(fields.integer("vocab_size_per_layer_input") * inputs, Kind.EMBEDDING, Split.TENSOR)
    tally.linear(hidden, inputs, name="per_layer_model_projection")
    tally.norm(width)


def add_to_layer_of_gemma_4(tally: Tally, fields: Fields) -> None:
    """Add the gate and the projection of a layer's own input, and its experts."""
    width, hidden = _input_width(fields), fields.integer("hidden_size")
    if width:
        tally.linear(hidden, width, name="per_layer_input_gate")
        tally.linear(width, hidden, name="per_layer_projection")
        tally.norm(hidden)
    if not fields.flag("enable_moe_block"):
        return
    count, inner = fields.integer("num_experts"), fields.integer("moe_intermediate_size")
    tally.linear(hidden, count, split=Split.COPY, kind=Kind.OTHER)
    tally.add(hidden + count)
    tally.linear(hidden, inner, kind=Kind.EXPERT, copies=2 * count, name="experts.0.gate_proj")
    tally.linear(inner, hidden, kind=Kind.EXPERT, copies=count, name="experts.0.down_proj")
    tally.norm(hidden, copies=3)


def add_ends_of_gemma_3n(tally: Tally, fields: Fields, *, is_first: bool, is_last: bool) -> None:
    """Add the inputs of all layers and the projections that make the alternating streams, and those that merge them."""
    hidden, streams = fields.integer("hidden_size"), fields.integer("altup_num_inputs")
    if is_first:
        add_inputs_of_layers(tally, fields)
    tally.linear(hidden, hidden, copies=(streams - 1) * (is_first + is_last), name="altup_projections")


def add_to_layer_of_gemma_3n(tally: Tally, fields: Fields) -> None:
    """Add the streams, the learned residual and the own input of a layer."""
    hidden, streams, rank = (fields.integer(name) for name in ("hidden_size", "altup_num_inputs", "laurel_rank"))
    add_to_layer_of_gemma_4(tally, fields)
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
