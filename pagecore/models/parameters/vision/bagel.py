"""BAGEL's SigLIP and its projector; the parts that make images are not loaded by engines of text.

Source: the model of vLLM.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["bagel_with_tower", "project_bagel"]

# Layers in published files, of which the weights have one less.
_LISTED = 27


def bagel_with_tower(whole: Fields) -> Fields:
    """Return the fields of a model whose `vit_config` is its `vision_config`; without one if it does not see."""
    fields = {name: whole.given(name) for name in whole}
    tower = whole.inner("vit_config")
    if whole.switch("visual_und", True):
        sizes = {name: tower.given(name) for name in tower}
        sizes = {"model_type": "siglip_vision_model", "vision_use_head": False, **sizes}
        if sizes.get("num_hidden_layers") == _LISTED:
            sizes["num_hidden_layers"] = _LISTED - 1
        fields["vision_config"] = sizes
    return Fields(fields, whole.source)


def project_bagel(
    tally: Tally, _whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int
) -> None:
    """Add an MLP of two layers."""
    encoder_linear(tally, hidden, text, bias=True)
    encoder_linear(tally, text, text, bias=True)
