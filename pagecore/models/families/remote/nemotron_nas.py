"""Layers of Nemotron-NAS, each of which `block_configs` describes: attention, a linear layer in its place, or nothing.

Source: the configuration and modeling files of nvidia/Llama-3_3-Nemotron-Super-49B-v1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.families.family import Heads
from pagecore.models.layer_types import FULL, NEITHER
from pagecore.storage.checks import ceil_div

__all__ = ["block_part", "heads_of_block", "kinds_of_blocks", "mlp_width"]

_ATTENTION: Mapping[str, object] = dict.fromkeys(("no_op", "replace_with_linear"), False)
# Attention of a block that is not supported.
_UNSERVED = ("window_length", "num_sink_tokens", "sparsify", "llama4", "mamba")


def block_part(fields: Fields, layer: int, part: str) -> Fields:
    """Return the fields of the "attention" or the "ffn" of a layer."""
    blocks = fields.value("block_configs")
    name = f"block_configs[{layer}]"
    block = blocks[layer]
    if not isinstance(block, Mapping) or not isinstance(block.get(part), Mapping):
        fields.refuse(f"{fields.name(name)} must be an object with the objects attention and ffn")
    inner = Fields(block[part], fields.source, f"{fields.name(name)}.{part}")
    inner.defaults = {**_ATTENTION, "ffn_mult": None}
    return inner


def kinds_of_blocks(fields: Fields, num_layers: int) -> list[str]:
    """Return the kind of each layer; those without attention store nothing."""
    blocks = fields.value("block_configs")
    if not isinstance(blocks, list | tuple) or len(blocks) != num_layers:
        fields.refuse(
            f"{fields.describe('block_configs')}; it must list an object for each of "
            f"{fields.name('num_hidden_layers')}, {num_layers}"
        )
    return [_kind(block_part(fields, layer, "attention")) for layer in range(num_layers)]


def _kind(attention: Fields) -> str:
    if attention.flag("no_op") or attention.flag("replace_with_linear"):
        return NEITHER
    for name in _UNSERVED:
        if attention.given(name) not in (None, False):
            raise UnsupportedOption(
                f"{attention.source}: {attention.describe(name)}, which is not supported; pass a list of specs"
            )
    return FULL


def heads_of_block(fields: Fields, heads: Heads, layer: int, _slides: bool) -> Heads:
    """Return the heads of a layer, whose key-value heads each serve `n_heads_in_group` query heads."""
    attention = block_part(fields, layer, "attention")
    group = attention.integer("n_heads_in_group")
    if heads.queries % group:
        attention.refuse(
            f"{attention.describe('n_heads_in_group')}; it must divide {fields.name('num_attention_heads')}, "
            f"which is {heads.queries}"
        )
    return replace(heads, kv_heads=heads.queries // group)


def mlp_width(fields: Fields, ffn: Fields) -> int:
    """Return the width of an MLP: two thirds of `ffn_mult` times the hidden size, rounded up to a multiple of 256."""
    return 256 * ceil_div(ffn.scaled(2 * fields.integer("hidden_size"), "ffn_mult") // 3, 256)
