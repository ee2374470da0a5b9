"""MLPs of layers whose width or experts follow from rules of a family.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.experts import add_experts, has_experts
from pagecore.models.parameters.counting.mlp import add_mlp
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.models.parameters.counting.traits import Experts, Traits
from pagecore.models.parameters.decoders import gemma
from pagecore.storage.checks import ceil_div

__all__ = ["add_granite_experts", "add_longcat_experts", "add_nemotron_mlp", "width_of_layer"]


def width_of_layer(fields: Fields, traits: Traits, model_type: str, layer: int) -> int:
    """Return the width of a dense MLP."""
    if model_type == "gemma3n_text":
        return gemma.width_of_layer(fields, layer)
    if model_type == "gpt2" and fields.value("intermediate_size") is None:
        return 4 * fields.integer("hidden_size")
    if model_type == "lfm2":
        name = "intermediate_size" if fields.given("block_ff_dim") is None else "block_ff_dim"
        width = fields.integer(name)
        if fields.flag("block_auto_adjust_ff_dim"):
            multiple = fields.integer("block_multiple_of")
            width = fields.scaled(2 * width // 3, "block_ffn_dim_multiplier")
            width = multiple * ceil_div(width, multiple)
        return width
    name = "intermediate_size" if fields.value(traits.dense_width) is None else traits.dense_width
    return fields.integer(name)


def add_nemotron_mlp(tally: Tally, fields: Fields, traits: Traits, layer: int) -> None:
    """Add the experts, or the dense MLP, of a layer of Nemotron-H that neither attends nor keeps a state."""
    pattern = fields.given("hybrid_override_pattern")
    listed = fields.given("layer_types")
    kind = listed[layer] if isinstance(listed, list | tuple) else str(pattern)[layer]
    if kind in ("moe", "E") and traits.experts is not None:
        add_experts(tally, fields, traits, traits.experts)
    else:
        add_mlp(tally, fields, traits, fields.integer("intermediate_size"))


def add_granite_experts(tally: Tally, fields: Fields, traits: Traits) -> None:
    """Add the experts of a layer of Granite 4, or the shared MLP of a model without experts."""
    if traits.experts is not None and has_experts(fields, traits.experts, 0):
        add_experts(tally, fields, traits, traits.experts)
    else:
        add_mlp(tally, fields, traits, fields.integer("shared_intermediate_size"))


def add_longcat_experts(tally: Tally, fields: Fields, traits: Traits) -> None:
    """Add the experts that two attentions of LongCat share; experts that return their input have a router's row."""
    add_experts(tally, fields, traits, Experts("n_routed_experts", "expert_ffn_hidden_size"))
    tally.linear(
        fields.integer("hidden_size"), fields.integer("zero_expert_num", min=0), split=Split.COPY, kind=Kind.OTHER
    )
