"""Parameters of mixtures of experts, and the layers that have one.

Source: the modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.mlp import add_mlp
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.models.parameters.counting.traits import Experts, Traits, is_true

__all__ = ["add_experts", "expert_count", "has_experts"]

# Names of the number of routed experts; transformers writes some of them under another name than the published file.
_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
# Entries of `mlp_layer_types` for layers with experts.
_KINDS = ("sparse", "moe", "hash_moe")


def expert_count(fields: Fields, experts: Experts) -> int:
    """Return the number of routed experts; 0 for null, which means dense layers."""
    names = [experts.count, *(name for name in _COUNTS if name != experts.count)]
    name = next((each for each in names if fields.given(each) is not None), experts.count)
    return fields.integer(name, min=0) if fields.value(name) is not None else 0


def has_experts(fields: Fields, experts: Experts | None, layer: int) -> bool:
    """Return True if a layer has a mixture of experts."""
    if experts is None or not expert_count(fields, experts):
        return False
    listed: Any = fields.given("mlp_layer_types")
    if isinstance(listed, list | tuple) and layer < len(listed):
        return listed[layer] in _KINDS
    flags: Any = fields.given("moe_layer_freq")
    if isinstance(flags, list | tuple) and layer < len(flags):
        return bool(flags[layer])
    if experts.rule == "numbered" and fields.given("moe_layers_enum") is not None:
        return layer in _numbered_layers(fields)
    if experts.rule in ("after", "numbered"):
        is_within = not experts.last or layer <= fields.integer(experts.last, min=0)
        return is_within and layer >= fields.integer(experts.dense, min=0)
    if experts.rule == "range":
        first, last = fields.integer("moe_layer_start_index", min=0), fields.integer("moe_layer_end_index", min=-1)
        # -1 is the last layer.
        return (
            (layer + 1) % fields.integer("moe_layer_interval") == 0 and first <= layer and (last < 0 or layer <= last)
        )
    if experts.rule == "step":
        listed = _layer_numbers(fields, "mlp_only_layers")
        without = experts.unlisted if listed is None else listed
        return layer not in without and (layer + 1) % fields.integer("decoder_sparse_step") == 0
    if experts.rule == "period":
        return layer % fields.integer("expert_layer_period") == fields.integer("expert_layer_offset", min=0)
    if experts.rule == "interleaved":
        numbered = _layer_numbers(fields, "moe_layers")
        if numbered is not None:
            return layer in numbered
        return (layer + 1) % fields.integer("interleave_moe_layer_step") == 0
    return True


def _numbered_layers(fields: Fields) -> Collection[int]:
    """Return the layer numbers in `moe_layers_enum`, which is a list or a text such as "3,4,5"."""
    listed: Any = fields.given("moe_layers_enum")
    if not isinstance(listed, str):
        return _layer_numbers(fields, "moe_layers_enum") or ()
    parts = [part.strip() for part in listed.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        fields.refuse(f"{fields.describe('moe_layers_enum')}; it must list layer numbers, such as '3,4,5'")
    return {int(part) for part in parts}


def _layer_numbers(fields: Fields, name: str) -> Collection[int] | None:
    """Return a list of layer numbers; None if it is null."""
    listed: Any = fields.value(name)
    if listed is None:
        return None
    if not isinstance(listed, list | tuple) or not all(type(layer) is int for layer in listed):
        fields.refuse(f"{fields.describe(name)}; it must be a list of layer numbers")
    return listed


def add_experts(tally: Tally, fields: Fields, traits: Traits, experts: Experts) -> None:
    """Add a router, the routed experts and the shared expert of a layer."""
    hidden, count = fields.integer("hidden_size"), expert_count(fields, experts)
    width = fields.integer(experts.width)
    if experts.add_router is not None:
        experts.add_router(tally, fields, count)
    else:
        tally.linear(hidden, count, bias=experts.has_biases, split=Split.COPY, kind=Kind.OTHER)
    first = "gate_proj" if traits.is_gated else "up_proj"
    inputs = _add_latent_projections(tally, fields, traits, experts) or hidden
    tally.linear(inputs, width, kind=Kind.EXPERT, copies=count * (1 + traits.is_gated), name=f"experts.0.{first}")
    tally.linear(width, inputs, kind=Kind.EXPERT, copies=count, name="experts.0.down_proj")
    if experts.has_biases:
        tally.add(count * (width * (1 + traits.is_gated) + hidden), Kind.OTHER, Split.TENSOR)
    tally.add(count * experts.score_biases)
    if experts.has_output_bias:
        tally.add(hidden)
    if experts.gate_rank:
        rank = fields.integer(experts.gate_rank)
        tally.linear(hidden, rank, split=Split.COPY, kind=Kind.OTHER)
        tally.linear(rank, hidden, split=Split.COPY, kind=Kind.OTHER)
    if experts.has_norm:
        tally.norm(hidden)
    if experts.has_shared_gate:
        tally.linear(hidden, 1, split=Split.COPY, kind=Kind.OTHER)
    shared = _shared_width(fields, experts, width)
    if shared:
        add_mlp(tally, fields, traits, shared, "shared_experts.")


def _add_latent_projections(tally: Tally, fields: Fields, traits: Traits, experts: Experts) -> int:
    """Add the projections to and from the features of the experts; return their number, 0 for the hidden size."""
    if not experts.inputs or fields.given(experts.inputs) is None:
        return 0
    hidden, inputs = fields.integer("hidden_size"), fields.integer(experts.inputs)
    has_bias = is_true(fields, traits.mlp_bias)
    tally.linear(hidden, inputs, bias=has_bias, split=Split.COPY, name="fc1_latent_proj")
    tally.linear(inputs, hidden, bias=has_bias, split=Split.COPY, name="fc2_latent_proj")
    return inputs


def _shared_width(fields: Fields, experts: Experts, width: int) -> int:
    """Return the width of the shared expert; 0 without one."""
    if not experts.shared or fields.value(experts.shared) is None:
        return 0
    number = fields.integer(experts.shared, min=0)
    if experts.shared_width:
        return number * fields.integer(experts.shared_width)
    return number * width if experts.shared.startswith(("n_", "num_", "moe_num_")) else number
