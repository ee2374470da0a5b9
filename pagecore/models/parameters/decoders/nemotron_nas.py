"""Parameters of the layers of Nemotron-NAS.

Source: as for `pagecore.models.families.remote.nemotron_nas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.families.remote.nemotron_nas import block_part, mlp_width
from pagecore.models.parameters.counting.attention import add_attention
from pagecore.models.parameters.counting.mlp import add_mlp
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.counting.traits import Traits

__all__ = ["add_layer"]


def add_layer(tally: Tally, fields: Fields, traits: Traits, specs: Sequence[Any], layer: int) -> None:
    """Add attention and MLP of a layer, each with its norm; either may be a linear layer or missing."""
    hidden = fields.integer("hidden_size")
    for part, name in (("attention", "self_attn"), ("ffn", "mlp")):
        block = block_part(fields, layer, part)
        tally.module = f"model.layers.{layer}.{name}"
        if block.flag("no_op"):
            continue
        if block.given("moe") is not None:
            raise UnsupportedOption(
                f"{block.source}: {block.describe('moe')}, whose parameters are not counted; pass weights= in bytes"
            )
        tally.norm(hidden)
        if block.flag("replace_with_linear"):
            tally.linear(hidden, hidden, name="linear_attn" if specs else "linear_mlp")
        elif part == "attention":
            add_attention(tally, fields, traits, specs[0])
        else:
            add_mlp(tally, fields, traits, mlp_width(fields, block))
