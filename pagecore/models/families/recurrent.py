"""Families without attention, whose layers all keep states: Mamba, RWKV and xLSTM.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pagecore.models.config_files.fields import Fields
from pagecore.models.families.family import Family
from pagecore.models.layers.states import kinds
from pagecore.models.layers.states import recurrent as states
from pagecore.models.layers.states.recurrent import Dtypes, Planes, States, chunk_of
from pagecore.storage.checks import ceil_div
from pagecore.storage.state_shapes import rwkv_planes, xlstm_planes

__all__ = ["RECURRENT"]

MAMBA = {"intermediate_size": None, "state_size": 16, "conv_kernel": 4, "expand": 2}
PURE_MAMBA_2 = {
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 256,
}
_OF_MAMBA_2 = states.mamba_2("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "expand")
_MAMBA_1 = Family(MAMBA, states=States(kinds.every_layer_keeps_a_state, states.mamba_1))


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


RECURRENT: Mapping[str, Family] = {
    "mamba": _MAMBA_1,
    "falcon_mamba": _MAMBA_1,
    "mamba2": Family(
        PURE_MAMBA_2, states=States(kinds.every_layer_keeps_a_state, _OF_MAMBA_2, states.chunk_of("chunk_size"))
    ),
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
