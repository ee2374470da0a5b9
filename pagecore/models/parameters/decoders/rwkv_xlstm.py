"""Parameters of RWKV and xLSTM, whose blocks have no attention.

Source: the modeling files of transformers 5.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.storage import StateSpec
from pagecore.storage.checks import ceil_div

__all__ = ["add_rwkv", "add_xlstm"]


def add_rwkv(tally: Tally, fields: Fields, spec: StateSpec) -> None:
    """Add both parts of a block: the sums over time, and the mix of channels."""
    hidden, (width,) = fields.integer("hidden_size"), spec.planes[1].shape[1:]
    tally.linear(hidden, width, copies=3, name="key")
    tally.linear(width, hidden, name="output")
    tally.add(2 * width, Kind.OTHER, Split.TENSOR)  # decay, and the weight of the token itself
    inner = 4 * hidden if fields.value("intermediate_size") is None else fields.integer("intermediate_size")
    tally.linear(hidden, inner, name="feed_forward.key")
    tally.linear(hidden, hidden, name="feed_forward.receptance")
    tally.linear(inner, hidden, name="feed_forward.value")
    tally.add(5 * hidden)  # shares of the token before


def add_xlstm(tally: Tally, fields: Fields, spec: StateSpec) -> None:
    """Add the cell and the MLP of a block."""
    hidden, has_bias = fields.integer("hidden_size"), fields.flag("use_bias")
    heads, key_dim, value_dim = spec.planes[0].shape
    keys, values = heads * key_dim, heads * value_dim
    tally.linear(hidden, keys, copies=2, bias=has_bias, name="q")
    tally.linear(hidden, values, copies=2, bias=has_bias, name="v")
    tally.linear(hidden, heads, copies=2, bias=True, name="igate_preact")
    tally.add(values * (1 + has_bias), Kind.OTHER, Split.TENSOR)
    tally.linear(values, hidden, bias=has_bias, name="out_proj")
    multiple = fields.integer("ffn_round_up_to_multiple_of")
    width = multiple * ceil_div(max(1, fields.scaled(hidden, "ffn_proj_factor")), multiple)
    tally.linear(hidden, width, copies=2, bias=has_bias, name="ffn.proj_up_gate")
    tally.linear(width, hidden, bias=has_bias, name="ffn.proj_down")
