"""Parameters that only Gemma 4 has: inputs of each layer, and experts next to a dense MLP.

Source: the modeling file of Gemma 4 in transformers 5.
"""

from __future__ import annotations

from pagecore.models.fields import Fields
from pagecore.models.parameters.tally import Kind, Split, Tally

__all__ = ["add_inputs_of_layers", "add_to_layer"]


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


def add_to_layer(tally: Tally, fields: Fields) -> None:
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
