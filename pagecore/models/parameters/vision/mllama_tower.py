"""The vision tower of Mllama (Llama 3.2 Vision) and its projector, and the projector of MOSS-VL.

Source: the configuration and modeling files of transformers 5, and SGLang's model of MOSS-VL.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.tower_parts import Sizes, Tower, count_patches

__all__ = ["MLLAMA_SIZES", "MLLAMA_TOWER", "project_mllama", "project_moss"]

MLLAMA_SIZES = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_global_layers": 8,
    "image_size": 448,
    "patch_size": 14,
    "max_num_tiles": 4,
    "vision_output_dim": 7680,
}


def _add_rest(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add the layers with gates, the embeddings of positions and of tiles, and the norms at both ends."""
    hidden, tiles, layers = sizes.hidden, fields.integer("max_num_tiles"), fields.integer("num_global_layers")
    encoder_linear(tally, hidden, hidden, copies=4 * layers)
    encoder_linear(tally, hidden, sizes.width, bias=True, copies=layers)
    encoder_linear(tally, sizes.width, hidden, bias=True, copies=layers)
    encoder_add(tally, layers * (4 * hidden + 2))
    listed = fields.given("supported_aspect_ratios")
    ratios = 1 + (len(listed) if isinstance(listed, list | tuple) else 8)
    tokens = count_patches(fields, sizes) + 1
    encoder_add(tally, ratios * tiles * hidden * (tokens + 2) + 3)
    encoder_add(tally, (tokens + 5) * hidden)


def project_mllama(
    tally: Tally, _whole: Fields, fields: Fields, _hidden: int, _merge: int, _depths: int, text: int
) -> None:
    """Add the projector, which reads the features of several layers of the tower."""
    encoder_linear(tally, fields.integer("vision_output_dim"), text, bias=True)


def project_moss(
    tally: Tally, _whole: Fields, fields: Fields, hidden: int, merge: int, _depths: int, text: int
) -> None:
    """Add an MLP that reads several layers of the tower together, and the token between images."""
    stacked = fields.value("deepstack_visual_indexes")
    depths = 1 + (len(stacked) if isinstance(stacked, list | tuple) else 0)
    inputs = hidden * merge**2 * depths
    outputs = text if fields.given("out_hidden_size") is None else fields.integer("out_hidden_size")
    encoder_add(tally, 2 * hidden * depths + outputs)
    encoder_linear(tally, inputs, inputs, bias=True)
    encoder_linear(tally, inputs, outputs, bias=True)


MLLAMA_TOWER = Tower(attention_biases=0, has_patch_bias=False, add_rest=_add_rest)
