"""The vision tower and the projector of Kanana-V: a Qwen2-VL tower, and convolutions as in a RegNet.

Source: the configuration and modeling files of kakaocorp/kanana-1.5-v-3b-instruct, and the stages of a RegNet in timm.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["KANANA_SIZES", "project_kanana"]

KANANA_SIZES = {
    "depth": 32,
    "embed_dim": 1280,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_PROJECTOR = {
    "depth": 2,
    "encoder_hidden_size": 1280,
    "hidden_size": 1024,
    "merge_size": 2,
    "mlp_depth": 2,
    "num_eos_tokens": 0,
    "output_hidden_size": 2048,
    "pos_emb": True,
    "pos_emb_size": 576,
    "prenorm": False,
}


def project_kanana(
    tally: Tally, whole: Fields, _fields: Fields, _hidden: int, _merge: int, _depths: int, _text: int
) -> None:
    """Add two stages of convolutions, between which patches are merged, and an MLP."""
    part = whole.inner("projector_config") if whole.has_object("projector_config") else Fields({}, whole.source)
    part.defaults = _PROJECTOR
    inputs, hidden, outputs = map(part.integer, ("encoder_hidden_size", "hidden_size", "output_hidden_size"))
    blocks = part.integer("depth", min=0)
    encoder_add(tally, part.integer("pos_emb_size") * inputs * part.flag("pos_emb"))
    encoder_add(tally, 2 * inputs * part.flag("prenorm") + part.integer("num_eos_tokens", min=0) * outputs)
    for stage_inputs in (inputs, hidden * part.integer("merge_size") ** 2):
        for block in range(blocks):
            _add_block(tally, hidden if block else stage_inputs, hidden)
    encoder_linear(tally, hidden if blocks else inputs, outputs, bias=True)
    encoder_linear(tally, outputs, outputs, bias=True, copies=part.integer("mlp_depth") - 1)


def _add_block(tally: Tally, inputs: int, hidden: int) -> None:
    """Add three convolutions with norms, the second one by channel, a gate, and a shortcut to other channels."""
    gate = round(inputs / 4)
    encoder_linear(tally, inputs, hidden)
    encoder_linear(tally, hidden, hidden)
    encoder_linear(tally, hidden, gate, bias=True)
    encoder_linear(tally, gate, hidden, bias=True)
    encoder_add(tally, (9 + 3 * 2) * hidden)
    if inputs != hidden:
        encoder_linear(tally, inputs, hidden)
        encoder_add(tally, 2 * hidden)
