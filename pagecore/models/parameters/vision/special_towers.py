"""Structure of vision towers with parts of their own: Q-Former models, Janus, GOT-OCR, Molmo 2, MiniCPM-V and others.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.document_towers import add_downsampling
from pagecore.models.parameters.vision.dots_3 import DOTS_3_SIZES, DOTS_3_TOWER
from pagecore.models.parameters.vision.formulas import FORMULA_SIZES, FORMULA_TOWERS
from pagecore.models.parameters.vision.inkling_tower import INKLING_SIZES, INKLING_TOWER
from pagecore.models.parameters.vision.mllama_tower import MLLAMA_SIZES, MLLAMA_TOWER
from pagecore.models.parameters.vision.tower_parts import Sizes, Tower, add_positions, count_patches
from pagecore.models.parameters.vision.vit_towers import TOWERS
from pagecore.storage.checks import ceil_div

__all__ = ["SPECIAL_TOWERS", "TOWER_SIZES"]

_BLIP_SIZES: Mapping[str, object] = {
    "hidden_size": 1408,
    "intermediate_size": 6144,
    "num_hidden_layers": 39,
    "image_size": 224,
    "patch_size": 14,
}
_GEMMA_4_SIZES: Mapping[str, object] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "patch_size": 16,
    "spatial_merge_size": 3,
    "position_embedding_size": 10240,
}
_GOT_SIZES: Mapping[str, object] = {
    "hidden_size": 768,
    "mlp_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 1024,
    "patch_size": 16,
    "output_channels": 256,
    "window_size": 14,
}
# Sizes that published files leave out.
TOWER_SIZES: Mapping[str, Mapping[str, object]] = {
    **FORMULA_SIZES,
    "dots3_note_vision_encoder": DOTS_3_SIZES,
    "inkling_vision": INKLING_SIZES,
    "blip_2_vision_model": _BLIP_SIZES,
    "deepseek_ocr2": {**_GOT_SIZES, "downsample_channels": [512, 896]},
    "gemma4": _GEMMA_4_SIZES,
    "got_ocr2": _GOT_SIZES,
    "instructblip_vision_model": _BLIP_SIZES,
    "instructblipvideo_vision_model": _BLIP_SIZES,
    "mllama_vision_model": MLLAMA_SIZES,
    "pp_chart2table": _GOT_SIZES,
    "idefics": {
        "embed_dim": 768,
        "image_size": 224,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "patch_size": 14,
    },
    "unlimited_ocr": {**_GOT_SIZES, "downsample_channels": [512, 1024]},
}


def _add_query_bias(tally: Tally, fields: Fields, sizes: Sizes, name: str) -> None:
    """Add the biases of queries, keys and values, unless a flag turns them off."""
    encoder_add(tally, 3 * sizes.layers * sizes.hidden * (fields.given(name) is not False))


def _narrow_keys(tally: Tally, sizes: Sizes, width: int, bias: bool) -> None:
    """Replace the projections of keys and values, which have the width of the queries, by those of another width."""
    narrower = width - sizes.hidden
    encoder_linear(tally, sizes.hidden, narrower, copies=2 * sizes.layers)
    encoder_add(tally, 2 * sizes.layers * narrower * bias)


def _blip(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add a class token, its position, and a norm."""
    add_positions(tally, fields, sizes)
    encoder_add(tally, 2 * sizes.hidden)
    _add_query_bias(tally, fields, sizes, "qkv_bias")


def _janus(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    add_positions(tally, fields, sizes)
    _add_query_bias(tally, fields, sizes, "attention_bias")
    encoder_add(tally, 4 * sizes.layers * sizes.hidden * fields.flag("use_qk_norm"))


def _got(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add positions, those of each layer relative to its window, and the convolutions after the layers."""
    hidden, channels = sizes.hidden, fields.integer("output_channels")
    _add_query_bias(tally, fields, sizes, "qkv_bias")
    patches = count_patches(fields, sizes)
    if fields.switch("use_abs_pos", True):
        encoder_add(tally, patches * hidden)
    if fields.switch("use_rel_pos", True):
        whole = fields.given("global_attn_indexes")
        listed = whole if isinstance(whole, list | tuple) else (2, 5, 8, 11)
        wide = len({layer for layer in listed if isinstance(layer, int) and 0 <= layer < sizes.layers})
        rows = wide * (2 * round(patches**0.5) - 1)
        rows += (sizes.layers - wide) * (2 * fields.integer("window_size") - 1)
        encoder_add(tally, 2 * rows * (hidden // fields.integer("num_attention_heads")))
    encoder_linear(tally, hidden, channels)
    encoder_linear(tally, 9 * channels, channels)
    encoder_add(tally, 4 * channels)


def _molmo(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    hidden, has_bias = sizes.hidden, fields.switch("attention_bias", True)
    encoder_add(tally, fields.integer("num_position_embeddings") * hidden)
    heads, dim = fields.integer("num_attention_heads"), fields.integer("head_dim")
    width = heads * dim - hidden
    encoder_linear(tally, hidden, width, copies=2 * sizes.layers)
    encoder_add(tally, sizes.layers * ((2 * hidden + width) * has_bias + 2 * hidden * has_bias))
    _narrow_keys(tally, sizes, fields.integer("num_key_value_heads") * dim, has_bias)


def _minicpm(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add what merges the patches of a window in one of the layers: an attention and an MLP."""
    hidden = sizes.hidden
    add_positions(tally, fields, sizes)
    window = fields.given("window_kernel_size")
    patches = window[0] * window[1] if isinstance(window, list | tuple) and len(window) == 2 else 4
    encoder_linear(tally, hidden, hidden, bias=True, copies=4)
    encoder_linear(tally, patches * hidden, patches * sizes.width, bias=True)
    encoder_linear(tally, patches * sizes.width, hidden, bias=True)
    encoder_add(tally, 2 * hidden + 2 * patches * hidden)


def _hunyuan(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add a position for each patch of the largest image, and one more."""
    side = ceil_div(fields.integer("max_image_size") + 1, sizes.patch) - 1
    encoder_add(tally, (side**2 + 1) * sizes.hidden)


def _exaone(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    dim = sizes.hidden // fields.integer("num_heads")
    _narrow_keys(tally, sizes, fields.integer("num_key_value_heads") * dim, bias=True)


def _cosmos(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    encoder_add(tally, (fields.integer("num_patches") + 2) * sizes.hidden)


def _norm(tally: Tally, _fields: Fields, sizes: Sizes) -> None:
    encoder_add(tally, 2 * sizes.hidden)


def _muse(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add positions, and a norm at each end."""
    rows = fields.integer("pos_emb_height") * fields.integer("pos_emb_width")
    encoder_add(tally, (rows + 4) * sizes.hidden)


def _gemma_4(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add positions by row and column, norms after attention and MLP, and those of queries and keys."""
    hidden, layers, dim = sizes.hidden, sizes.layers, fields.integer("head_dim")
    encoder_linear(tally, hidden, fields.integer("num_attention_heads") * dim - hidden, copies=2 * layers)
    _narrow_keys(tally, sizes, fields.integer("num_key_value_heads") * dim, bias=False)
    encoder_add(tally, 2 * layers * (hidden + dim))
    encoder_add(tally, 2 * fields.integer("position_embedding_size") * hidden)


def _step(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add positions, a norm, the scales of each layer, and two convolutions that halve the sides of the image."""
    hidden = sizes.hidden
    add_positions(tally, fields, sizes)
    encoder_add(tally, 2 * sizes.layers * hidden)
    encoder_linear(tally, 9 * hidden, 2 * hidden, bias=True)
    encoder_linear(tally, 18 * hidden, 4 * hidden, bias=True)


_BLIP = Tower(attention_biases=1, add_rest=_blip)


def _deepseek(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    _got(tally, fields, sizes)
    add_downsampling(tally, fields)


_ERNIE = Tower("depth", has_patch_bias=False, add_rest=_norm)
_GOT = Tower(width="mlp_dim", attention_biases=1, add_rest=_got, merge=4)
_MINICPM = Tower(add_rest=_minicpm, merge=4)
_MUSE = Tower(
    has_patch_bias=False,
    add_rest=_muse,
    aliases={"temporal_patch_size": "patch_temporal", "spatial_merge_size": "merge_size"},
)
SPECIAL_TOWERS: Mapping[str, Tower] = {
    **FORMULA_TOWERS,
    "dots3_note_vision_encoder": DOTS_3_TOWER,
    "inkling_vision": INKLING_TOWER,
    "blip_2_vision_model": _BLIP,
    "blip_vision_model": _BLIP,
    "cosmos3_edge": Tower(add_rest=_cosmos),
    "DFNRope_vision_transformer": replace(_ERNIE, hidden="embed_dim", width=""),
    "deepseek_ocr2": replace(_GOT, add_rest=_deepseek),
    "ernie4_5_vl_moe": _ERNIE,
    "exaone4_5": replace(TOWERS["qwen2_5_vl"], add_rest=_exaone),
    "gemma4": Tower(
        has_norm_bias=False,
        attention_biases=0,
        has_mlp_bias=False,
        is_gated=True,
        has_patch_bias=False,
        add_rest=_gemma_4,
        aliases={"spatial_merge_size": "pooling_kernel_size"},
    ),
    "git_vision_model": TOWERS["clip_vision_model"],
    "glm5_next": TOWERS["glm_ocr"],
    "got_ocr2": _GOT,
    "hunyuan_vl": Tower(add_rest=_hunyuan),
    "idefics": replace(TOWERS["clip_vision_model"], hidden="embed_dim"),
    "idefics2": TOWERS["idefics3"],
    "instructblip_vision_model": _BLIP,
    "instructblipvideo_vision_model": _BLIP,
    "janus_vision_model": Tower(width="", attention_biases=1, add_rest=_janus),
    "kosmos_2_vision_model": TOWERS["clip_vision_model"],
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM,
    "minimax_m3_vl": Tower(has_patch_bias=False, add_rest=_norm),
    "mllama_vision_model": MLLAMA_TOWER,
    "molmo2": Tower(attention_biases=0, add_rest=_molmo, merge=2),
    "muse_glimmer": _MUSE,
    "muse_spark": _MUSE,
    "pp_chart2table": _GOT,
    "qianfan_ocr": TOWERS["internvl_vision"],
    "step3p5": Tower(has_patch_bias=False, add_rest=_step, merge=4),
    "unlimited_ocr": replace(_GOT, add_rest=_deepseek),
}
