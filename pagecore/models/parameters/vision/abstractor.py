"""The projector of HyperCLOVA X SEED Vision, whose convolutions are those of a RegNet (the C-Abstractor of Honeybee).

Source: the model of vLLM; the parameters of the convolutions as timm 1.0.31 builds them.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.tower_parts import image_side

__all__ = ["add_abstractor"]

_KINDS = ("linear", "cabstractor", "mlp", "inverted_mlp")
# Blocks of a stage, before and after the patches are pooled to the tokens of an image.
_BLOCKS = 2 * 3


def add_abstractor(
    tally: Tally, whole: Fields, fields: Fields, hidden: int, _merge: int, _depths: int, text: int
) -> None:
    """Add convolutions, a layer or an MLP, and the mark at the end of a line."""
    whole.defaults = {**whole.defaults, "mm_projector_type": "cabstractor", "anyres": False}
    whole.defaults |= {"proj_pos_emb": True, "proj_prenorm": False}
    kind = whole.value("mm_projector_type")
    if kind not in _KINDS:
        whole.refuse(f"{whole.describe('mm_projector_type')}; expected {', '.join(_KINDS[:-1])} or {_KINDS[-1]}")
    encoder_add(tally, text * whole.flag("anyres"))
    if kind == "linear":
        encoder_linear(tally, hidden, text, bias=True)
    elif kind == "cabstractor":
        patches = (image_side(fields, "image_size") // fields.integer("patch_size")) ** 2
        encoder_add(tally, patches * hidden * whole.flag("proj_pos_emb") + 2 * hidden * whole.flag("proj_prenorm"))
        _add_convolutions(tally, hidden)
        encoder_linear(tally, hidden, text, bias=True)
        encoder_linear(tally, text, text, bias=True)
    else:
        width = hidden * (2 if kind == "inverted_mlp" else 1)
        encoder_linear(tally, hidden, width, bias=True)
        encoder_linear(tally, width, text, bias=True)


def _add_convolutions(tally: Tally, hidden: int) -> None:
    """Add the blocks: three convolutions with norms, the middle one by channel, and a gate with a quarter of them."""
    gate = round(hidden / 4)
    encoder_linear(tally, hidden, hidden, copies=2 * _BLOCKS)
    encoder_linear(tally, hidden, gate, bias=True, copies=_BLOCKS)
    encoder_linear(tally, gate, hidden, bias=True, copies=_BLOCKS)
    encoder_add(tally, _BLOCKS * (9 + 3 * 2) * hidden)
