"""Parameters of PP-FormulaNet, and of the parts that Florence-2 and UDOP have next to those of BART and T5.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Kind, Tally
from pagecore.models.parameters.encoders.cross_layers import DecoderStage, add_cross_layers, add_tables
from pagecore.models.parameters.vision.special_towers import SPECIAL_TOWERS, TOWER_SIZES
from pagecore.models.parameters.vision.tower_parts import Sizes, add_tower, image_side

__all__ = ["add_florence_tower", "add_pp_formulanet", "add_udop_inputs"]

_FLORENCE: Mapping[str, object] = {
    "depths": [1, 1, 9, 1],
    "embed_dim": [128, 256, 512, 1024],
    "in_channels": 3,
    "max_position_embeddings": 50,
    "mlp_ratio": 4,
    "patch_prenorm": [False, True, True, True],
    "patch_size": [7, 3, 3, 3],
    "projection_dim": 1024,
    "qkv_bias": True,
}
_FORMULAS: Mapping[str, object] = {
    "decoder_hidden_size": 512,
    "post_conv_in_channels": 256,
    "post_conv_mid_channels": 512,
    "post_conv_out_channels": 1024,
    "qkv_bias": True,
}
_UDOP: Mapping[str, object] = {"max_2d_position_embeddings": 1024, "num_channels": 3, "patch_size": 16}


def add_pp_formulanet(tally: Tally, whole: Fields, decoder: DecoderStage) -> None:
    """Add a PP-FormulaNet, or a stage of its decoder: a BART that reads formulas, with the tower of GOT-OCR 2."""
    fields, hidden, layers = decoder.fields, decoder.hidden, len(decoder.own)
    fields.defaults = {**fields.defaults, "decoder_ffn_dim": 2048, "vocab_size": 50000}
    width = fields.integer("decoder_ffn_dim")
    add_cross_layers(tally, decoder, hidden, bias=True, output_bias=True)
    tally.linear(hidden, width, bias=True, copies=layers)
    tally.linear(width, hidden, bias=True, copies=layers)
    tally.norm(hidden, bias=True, copies=3 * layers + decoder.is_first + decoder.is_last)
    add_tables(tally, decoder, fields.integer("vocab_size"), is_tied=False)
    if decoder.is_first:
        tally.add((fields.integer("max_position_embeddings") + 2) * hidden, Kind.EMBEDDING)
        _add_formula_tower(tally, whole)


def _add_formula_tower(tally: Tally, whole: Fields) -> None:
    name = "vision_config"
    tower = whole.inner(name) if whole.has_object(name) else Fields({}, whole.source, name)
    tower.sizes = {**TOWER_SIZES["got_ocr2"], "image_size": 512}
    tower.defaults = _FORMULAS
    layers, hidden, width = map(tower.integer, ("num_hidden_layers", "hidden_size", "mlp_dim"))
    sizes = Sizes(layers, hidden, width, image_side(tower, "patch_size"), frames=1)
    add_tower(tally, tower, SPECIAL_TOWERS["got_ocr2"], sizes)
    first, between, last = (tower.integer(f"post_conv_{part}_channels") for part in ("in", "mid", "out"))
    encoder_linear(tally, 9 * first, between)
    encoder_linear(tally, 9 * between, last)
    encoder_linear(tally, last, last, bias=True)
    encoder_linear(tally, last, tower.integer("decoder_hidden_size"), bias=True)


def add_florence_tower(tally: Tally, whole: Fields) -> None:
    """Add the tower of Florence-2, whose blocks attend within windows and among channels, and the projector."""
    name = "vision_config"
    tower = whole.inner(name) if whole.has_object(name) else Fields({}, whole.source, name)
    tower.defaults = _FLORENCE
    depths, dims, patches = (tower.integers(name) for name in ("depths", "embed_dim", "patch_size"))
    norms_first = tower.value("patch_prenorm")
    if not isinstance(norms_first, list | tuple) or not all(isinstance(each, bool) for each in norms_first):
        tower.refuse(f"{tower.describe('patch_prenorm')}; it must be a list of true and false")
    if not len(depths) == len(dims) == len(patches) == len(norms_first):
        tower.refuse(
            f"{tower.describe('depths')}; embed_dim, patch_size and patch_prenorm must have {len(depths)} entries"
        )
    inputs, has_bias = tower.integer("in_channels"), tower.flag("qkv_bias")
    for depth, dim, patch, is_first in zip(depths, dims, patches, norms_first, strict=True):
        encoder_linear(tally, patch**2 * inputs, dim, bias=True)
        encoder_add(tally, 2 * (inputs if is_first else dim))
        blocks, width = 2 * depth, tower.scaled(dim, "mlp_ratio")
        encoder_linear(tally, dim, dim, bias=has_bias, copies=3 * blocks)
        encoder_linear(tally, dim, dim, bias=True, copies=blocks)
        encoder_linear(tally, dim, width, bias=True, copies=blocks)
        encoder_linear(tally, width, dim, bias=True, copies=blocks)
        encoder_add(tally, blocks * (2 * 10 + 4) * dim)  # two convolutions of single channels, and two norms
        inputs = dim
    outputs = tower.integer("projection_dim")
    encoder_add(tally, tower.integer("max_position_embeddings") * inputs + 2 * outputs)
    encoder_linear(tally, inputs, outputs)


def add_udop_inputs(tally: Tally, fields: Fields, heads: int) -> None:
    """Add the embeddings of patches, one of them unused, and those of the positions on a page.

    The biases of positions in both directions of a page have 32 rows, next to those along the text.
    """
    fields.defaults = {**fields.defaults, **_UDOP}
    hidden, patch = fields.integer("hidden_size"), fields.integer("patch_size")
    encoder_linear(tally, fields.integer("num_channels") * patch**2, hidden, bias=True, copies=2)
    tally.add(2 * fields.integer("max_2d_position_embeddings") * hidden, Kind.EMBEDDING)
    listed = fields.given("relative_bias_args")
    if listed is not None and not isinstance(listed, list | tuple):
        fields.refuse(f"{fields.describe('relative_bias_args')}; it must be a list of objects")
    further = 2 if listed is None else max(0, len(listed) - 1)
    tally.add(2 * 32 * heads * further)
