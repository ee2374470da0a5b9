"""Parameters of Mllama (Llama 3.2 Vision), whose text model attends to images in some layers.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagecore.models.fields import Fields
from pagecore.models.mllama import mllama_text
from pagecore.models.parameters.tally import Kind, Split, Tally, check_stage
from pagecore.models.parameters.towers import Sizes, Tower, count_patches, vision_add, vision_linear
from pagecore.storage import AttentionSpec, CrossSpec

__all__ = ["MLLAMA_SIZES", "MLLAMA_TOWER", "add_mllama", "project_mllama"]

# Rows of the embedding for the tokens of images.
_IMAGE_ROWS = 8
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


def add_mllama(
    tally: Tally, whole: Fields, model_type: str, layers: Sequence[AttentionSpec | CrossSpec], stage: range | None
) -> tuple[int, bool]:
    """Add the text model, or a stage of it; return its features, and True for the first stage."""
    fields = mllama_text(whole, model_type)
    own = check_stage(range(len(layers)) if stage is None else stage, len(layers))
    hidden, width, vocab = (fields.integer(name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    for number in own:
        spec, path = layers[number], f"model.language_model.layers.{number}"
        is_crossed = isinstance(spec, CrossSpec)
        tally.module = f"{path}.{'cross_attn' if is_crossed else 'self_attn'}"
        queries = (spec.num_query_heads or spec.num_kv_heads) * spec.head_dim
        keys = spec.num_kv_heads * spec.head_dim
        tally.linear(hidden, queries, split=Split.ATTENTION, name="q_proj")
        tally.linear(hidden, keys, split=Split.KEY_VALUE, name="k_proj")
        tally.linear(hidden, keys, split=Split.KEY_VALUE, name="v_proj")
        tally.linear(queries, hidden, split=Split.ATTENTION, name="o_proj")
        tally.add(is_crossed * (2 * spec.head_dim + 2))  # norms of queries and keys, and gates
        tally.module = f"{path}.mlp"
        tally.linear(hidden, width, copies=2, name="gate_proj")
        tally.linear(width, hidden, name="down_proj")
        tally.norm(hidden, copies=2)
    is_first, is_last = own.start == 0, own.stop == len(layers)
    rows = (vocab + _IMAGE_ROWS) * is_first + vocab * is_last
    tally.add(rows * hidden, Kind.EMBEDDING, Split.TENSOR)
    tally.norm(hidden, copies=is_last)
    return hidden, is_first


def _add_rest(tally: Tally, fields: Fields, sizes: Sizes) -> None:
    """Add the layers with gates, the embeddings of positions and of tiles, and the norms at both ends."""
    hidden, tiles, layers = sizes.hidden, fields.integer("max_num_tiles"), fields.integer("num_global_layers")
    vision_linear(tally, hidden, hidden, copies=4 * layers)
    vision_linear(tally, hidden, sizes.width, bias=True, copies=layers)
    vision_linear(tally, sizes.width, hidden, bias=True, copies=layers)
    vision_add(tally, layers * (4 * hidden + 2))
    listed = fields.given("supported_aspect_ratios")
    ratios = 1 + (len(listed) if isinstance(listed, list | tuple) else 8)
    tokens = count_patches(fields, sizes) + 1
    vision_add(tally, ratios * tiles * hidden * (tokens + 2) + 3)
    vision_add(tally, (tokens + 5) * hidden)


def project_mllama(
    tally: Tally, _whole: Fields, fields: Fields, _hidden: int, _merge: int, _depths: int, text: int
) -> None:
    """Add the projector, which reads the features of several layers of the tower."""
    vision_linear(tally, fields.integer("vision_output_dim"), text, bias=True)


MLLAMA_TOWER = Tower(attention_biases=0, has_patch_bias=False, add_rest=_add_rest)
