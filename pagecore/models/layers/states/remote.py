"""Recurrent states of families whose code is published together with their weights.

Source: the configuration and modeling files of Ling, PLaMo 2, Solar Open 2, Jet-Nemotron and MiniCPM-SALA, and their
models in vLLM and SGLang.
"""

from __future__ import annotations

from functools import partial

from pagecore.models.config_files.fields import Fields
from pagecore.models.layers.states.kinds import kimi_fields
from pagecore.models.layers.states.recurrent import Dtypes, Planes, chunk_of_64, lightning_chunk
from pagecore.storage import Plane
from pagecore.storage.state_shapes import delta_planes, lightning_planes, mamba2_planes, short_conv_planes

__all__ = [
    "chunk_of_ling",
    "delta_rule_of_jet",
    "delta_rule_of_solar",
    "is_lightning",
    "lightning_of_minicpm",
    "mamba_of_plamo",
    "states_of_ling",
]


def is_lightning(fields: Fields) -> bool:
    """Return True for Ling 2.5, whose layers with states have no convolution; files of transformers name its kernel."""
    has_norm_of_groups = fields.given("group_norm_size") is not None
    return fields.given("short_conv_kernel_size") is None and has_norm_of_groups


def states_of_ling(fields: Fields, dtypes: Dtypes) -> Planes:
    """Kimi delta attention of Ling 3, or lightning attention of Ling 2.5.

    Heads and dims are those that published files name for attention.
    """
    heads = fields.integer("num_attention_heads")
    # transformers writes the dim under a name of its own, and in head_dim that of the rotary embedding.
    dim = fields.integer("head_dim" if fields.given("linear_head_dim") is None else "linear_head_dim")
    if is_lightning(fields):
        return partial(lightning_planes, heads, dim, state_dtype=dtypes.state)
    kernel = fields.integer("short_conv_kernel_size", min=2)
    return partial(delta_planes, heads, heads, dim, dim, kernel, dtype=dtypes.window, state_dtype=dtypes.state)


def chunk_of_ling(fields: Fields) -> int:
    """Return the chunk of the kernel of the states."""
    return lightning_chunk(fields) if is_lightning(fields) else chunk_of_64(fields)


def delta_rule_of_solar(fields: Fields, dtypes: Dtypes) -> Planes:
    """Kimi delta attention of Solar Open 2; without fields of its own it has the heads and the dim of attention."""
    inner = kimi_fields(fields)
    if inner is None:
        part, heads, dim = fields, "num_attention_heads", "head_dim"
        part.defaults = {**part.defaults, "short_conv_kernel_size": 4}
    else:
        part, heads, dim = inner, "num_heads", "head_dim"
        if part.given("num_kv_heads") not in (None, part.given("num_heads")):
            part.refuse(f"{part.describe('num_kv_heads')}; it must equal num_heads, {part.integer('num_heads')}")
    sizes = (part.integer(heads), part.integer(heads), part.integer(dim), part.integer(dim))
    kernel = part.integer("short_conv_kernel_size", min=2)
    return partial(delta_planes, *sizes, kernel, dtype=dtypes.window, state_dtype=dtypes.state)


def delta_rule_of_jet(fields: Fields, dtypes: Dtypes) -> Planes:
    """Gated delta rule of Jet-Nemotron, whose convolution covers the values alone."""
    part = "efficient_attention_config.jet"
    heads, dim = fields.integer(f"{part}.num_heads"), fields.integer(f"{part}.head_dim")
    values, kernel = fields.scaled(dim, f"{part}.expand_v"), fields.integer(f"{part}.conv_size", min=2)

    def split(ranks: int = 1) -> tuple[Plane, ...]:
        window = short_conv_planes(heads * values, kernel, ranks=ranks, dtype=dtypes.window)
        _, temporal = delta_planes(heads, heads, dim, values, ranks=ranks, state_dtype=dtypes.state)
        return (*window, temporal)

    return split


def lightning_of_minicpm(fields: Fields, dtypes: Dtypes) -> Planes:
    """Lightning attention of MiniCPM-SALA, with the heads and the dim of attention unless it has its own.

    Each query head has a state: heads that share keys differ in their decay.
    """
    heads, dim = "lightning_nh", "lightning_head_dim"
    own_dim = fields.value(dim) is not None or fields.value("head_dim") is not None
    size = (
        fields.integer(dim if fields.value(dim) is not None else "head_dim")
        if own_dim
        else fields.integer("hidden_size") // fields.integer("num_attention_heads")
    )
    count = fields.integer(heads if fields.value(heads) is not None else "num_attention_heads")
    return partial(lightning_planes, count, size, state_dtype=dtypes.state)


def mamba_of_plamo(fields: Fields, dtypes: Dtypes) -> Planes:
    """Mamba-2 of PLaMo 2, whose convolution covers the channels alone, without B and C."""
    heads, dim = fields.integer("mamba_num_heads"), fields.integer("head_dim")
    state, kernel = fields.integer("mamba_d_state"), fields.integer("mamba_d_conv", min=2)

    def split(ranks: int = 1) -> tuple[Plane, ...]:
        window = short_conv_planes(heads * dim, kernel, ranks=ranks, dtype=dtypes.window)
        sizes = (heads * dim, 1, heads, dim, state, kernel)
        _, temporal = mamba2_planes(*sizes, ranks=ranks, dtype=dtypes.window, state_dtype=dtypes.state)
        return (*window, temporal)

    return split
