"""Projectors of models with a second vision tower, which they add, too: Video-LLaVA and the hybrid DeepSeek-VL.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.special_towers import SPECIAL_TOWERS, TOWER_SIZES
from pagecore.models.parameters.vision.tower_parts import Sizes, add_tower, image_side
from pagecore.models.parameters.vision.vit_towers import TOWERS

__all__ = ["project_deepseek_hybrid", "project_video_llava"]


def project_video_llava(
    tally: Tally, whole: Fields, fields: Fields, hidden: int, _merge: int, _depths: int, text: int
) -> None:
    """Add the tower of videos, which is like that of images, and the projector."""
    layers, width = fields.integer("num_hidden_layers"), fields.integer("intermediate_size")
    sizes = Sizes(layers, hidden, width, image_side(fields, "patch_size"), frames=1)
    add_tower(tally, fields, TOWERS["clip_vision_model"], sizes)
    has_bias = whole.switch("multimodal_projector_bias", True)
    encoder_linear(tally, hidden, text, bias=has_bias)
    encoder_linear(tally, text, text, bias=has_bias)


def project_deepseek_hybrid(
    tally: Tally, whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int
) -> None:
    """Add the tower of images of high resolution, its convolutions, its weight, and the projector of both towers."""
    fields = whole.inner("high_res_vision_config")
    fields.sizes = TOWER_SIZES["got_ocr2"]
    layers, own, width = (fields.integer(name) for name in ("num_hidden_layers", "hidden_size", "mlp_dim"))
    add_tower(tally, fields, SPECIAL_TOWERS["got_ocr2"], Sizes(layers, own, width, image_side(fields, "patch_size"), 1))
    channels = fields.integer("output_channels")
    encoder_linear(tally, own, channels)
    encoder_linear(tally, 9 * channels, channels)
    encoder_linear(tally, 9 * channels, 2 * channels)
    encoder_linear(tally, 18 * channels, 4 * channels)
    encoder_add(tally, 4 * channels + 1)
    encoder_linear(tally, hidden, text // 2, bias=True)
    encoder_linear(tally, 4 * channels, text // 2, bias=True)
    encoder_linear(tally, text, text, bias=True)
