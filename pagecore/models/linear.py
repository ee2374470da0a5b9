"""Models without attention other than Mamba: RWKV and xLSTM, and the attention-free states of their layers.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pagecore.models import layer_kinds as kinds
from pagecore.models.families import Family
from pagecore.models.fields import Fields
from pagecore.models.states import Dtypes, Planes, States, chunk_of
from pagecore.storage.checks import ceil_div
from pagecore.storage.state_shapes import rwkv_planes, xlstm_planes

__all__ = ["LINEAR"]


def _rwkv(fields: Fields, dtypes: Dtypes) -> Planes:
    """The last inputs of both parts of a layer, and the weighted sums of values and weights with their exponent."""
    hidden = fields.integer("hidden_size")
    width = hidden if fields.value("attention_hidden_size") is None else fields.integer("attention_hidden_size")
    return partial(rwkv_planes, hidden, width, dtype=dtypes.window, state_dtype=dtypes.state)


def _xlstm(fields: Fields, dtypes: Dtypes) -> Planes:
    """The matrix memory of each head, its normaliser and the maximum of its gates."""
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    widths = [_rounded(fields, f"{name}_dim_factor", hidden) for name in ("qk", "v")]
    for width in widths:
        if width < heads:
            fields.refuse(f"{fields.describe('num_attention_heads')}; it must be at most {width}, the width of keys")
    return partial(xlstm_planes, heads, widths[0] // heads, widths[1] // heads, state_dtype=dtypes.state)


def _rounded(fields: Fields, name: str, hidden: int) -> int:
    """Return a multiple of hidden_size, rounded up to a multiple of 64."""
    return 64 * ceil_div(max(1, fields.scaled(hidden, name)), 64)


LINEAR: Mapping[str, Family] = {
    "rwkv": Family(
        {"attention_hidden_size": None},
        aliases={"max_position_embeddings": "context_length"},
        states=States(kinds.every_layer_keeps_a_state, _rwkv),
    ),
    "xlstm": Family(
        {"qk_dim_factor": 0.5, "v_dim_factor": 1.0, "num_attention_heads": 8, "chunk_size": 64},
        aliases={"num_attention_heads": "num_heads"},
        states=States(kinds.every_layer_keeps_a_state, _xlstm, chunk_of("chunk_size"), "inference_state_dtype"),
    ),
}
