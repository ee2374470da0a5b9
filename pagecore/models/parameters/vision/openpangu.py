"""The vision tower and the projector of openPangu-VL.

Source: the model of vLLM.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.tower_parts import Sizes, Tower

__all__ = ["OPENPANGU_SIZES", "OPENPANGU_TOWER", "project_openpangu"]

OPENPANGU_SIZES = {
    "depth": 26,
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
# Layers of the tower that the projector reads, each by an MLP of its own.
_READ = 2


def _add_rest(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add the last norm, and gates if the activation has one."""
    encoder_add(tally, sizes.hidden)
    if fields.given("hidden_act") == "silu":
        encoder_linear(tally, sizes.hidden, sizes.width, bias=True, copies=sizes.layers)


def project_openpangu(
    tally: Tally, _whole: Fields, fields: Fields, hidden: int, merge: int, _depths: int, text: int
) -> None:
    """Add an MLP for each layer that is read, and a layer after their sum."""
    listed = fields.given("mm_unit_vision_select_layer")
    read = len(listed) if isinstance(listed, list | tuple) else _READ
    merged, outputs = hidden * merge**2, fields.integer("out_hidden_size")
    encoder_add(tally, read * hidden)
    encoder_linear(tally, merged, merged, bias=True, copies=read)
    encoder_linear(tally, merged, outputs, bias=True, copies=read)
    encoder_linear(tally, outputs, text, bias=True)


OPENPANGU_TOWER = Tower("depth", has_norm_bias=False, has_patch_bias=False, add_rest=_add_rest)
