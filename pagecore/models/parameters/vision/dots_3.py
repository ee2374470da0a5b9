"""The vision tower of dots.note, whose later layers have experts, more from layer to layer.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.tower_parts import Sizes, Tower

__all__ = ["DOTS_3_SIZES", "DOTS_3_TOWER", "project_dots_3"]

DOTS_3_SIZES: Mapping[str, object] = {
    "hidden_size": 1536,
    "intermediate_size": 4224,
    "num_attention_heads": 24,
    "num_hidden_layers": 42,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "moe_intermediate_size": 2112,
    "num_local_experts": 64,
    "mlp_layer_types": None,
    "per_layer_config": None,
    "pyramid_num_routed": None,
    "adapter_out_dim": 5120,
}
# Experts by layer, unless a file says otherwise.
_PYRAMID = (*[-1] * 25, *range(4, 65, 4), 64)


def _experts(fields: Fields, layers: int) -> list[int]:
    """Return the number of experts of each layer; 0 or less for a dense layer."""
    name = "pyramid_num_routed" if fields.value("mlp_layer_types") is None else "mlp_layer_types"
    listed: Any = fields.value(name)
    listed = _PYRAMID if listed is None else listed
    kind = int if name == "pyramid_num_routed" else str
    if not isinstance(listed, list | tuple) or len(listed) != layers or not all(type(each) is kind for each in listed):
        fields.refuse(f"{fields.describe(name)}; it must have an entry for each of {layers} layers")
    if kind is int:
        return list(listed)
    parts = fields.inner("per_layer_config") if fields.has_object("per_layer_config") else Fields({}, fields.source)
    most = fields.integer("num_local_experts")
    counts = []
    for layer, each in enumerate(listed):
        own = parts.inner(str(layer)) if parts.has_object(str(layer)) else parts
        count = most if own.given("num_local_experts") is None else own.integer("num_local_experts")
        counts.append(count if each == "sparse" else 0)
    return counts


def _add_rest(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add two norms, those of queries and keys, biases, and experts with their routers instead of some MLPs."""
    encoder_add(tally, 2 * sizes.layers * (sizes.hidden // fields.integer("num_attention_heads")))
    encoder_add(tally, 2 * sizes.hidden + 4 * sizes.layers * sizes.hidden * fields.flag("attention_bias"))
    encoder_add(tally, sizes.layers * (2 * sizes.width + sizes.hidden) * fields.flag("mlp_bias"))
    width = fields.integer("moe_intermediate_size")
    for experts in _experts(fields, sizes.layers):
        if experts > 0:
            encoder_linear(tally, sizes.hidden, sizes.width, copies=-3)
            encoder_linear(tally, sizes.hidden, width, copies=3 * experts)
            encoder_linear(tally, sizes.hidden, experts)


def project_dots_3(
    tally: Tally, _whole: Fields, fields: Fields, hidden: int, merge: int, _depths: int, _text: int
) -> None:
    """Add a norm and an MLP that merges patches."""
    merged = hidden * merge**2
    encoder_add(tally, 2 * hidden)
    encoder_linear(tally, merged, merged, bias=True)
    encoder_linear(tally, merged, fields.integer("adapter_out_dim"), bias=True)


DOTS_3_TOWER = Tower(
    has_norm_bias=False,
    attention_biases=0,
    has_mlp_bias=False,
    is_gated=True,
    add_rest=_add_rest,
    aliases={
        "hidden_size": "embed_dim",
        "num_attention_heads": "num_heads",
        "attention_bias": "use_bias",
        "spatial_merge_size": "adapter_merge_size",
    },
)
