"""Parameters of Mllama (Llama 3.2 Vision) and MOSS-VL, whose text models attend to images in some layers.

Source: the configuration and modeling files of transformers 5, and SGLang's model of MOSS-VL.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagecore.models.config_files.fields import Fields
from pagecore.models.encoders.mllama import mllama_text
from pagecore.models.parameters.counting.tally import Kind, Split, Tally, check_stage
from pagecore.storage import AttentionSpec, CrossSpec

__all__ = ["add_mllama"]

# Rows of the embedding for the tokens of images.
_IMAGE_ROWS = 8


def add_mllama(
    tally: Tally, whole: Fields, model_type: str, layers: Sequence[AttentionSpec | CrossSpec], stage: range | None
) -> tuple[int, bool]:
    """Add the text model, or a stage of it; return its features, and True for the first stage."""
    fields, is_moss = mllama_text(whole, model_type), model_type == "moss_vl"
    has_bias = is_moss and fields.switch("attention_bias", False)
    own = check_stage(range(len(layers)) if stage is None else stage, len(layers))
    hidden, width, vocab = (fields.integer(name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    for number in own:
        spec, path = layers[number], f"model.language_model.layers.{number}"
        is_crossed = isinstance(spec, CrossSpec)
        tally.module = f"{path}.{'cross_attn' if is_crossed else 'self_attn'}"
        queries = (spec.num_query_heads or spec.num_kv_heads) * spec.head_dim
        keys = spec.num_kv_heads * spec.head_dim
        tally.linear(hidden, queries, bias=has_bias, split=Split.ATTENTION, name="q_proj")
        tally.linear(hidden, keys, bias=has_bias, split=Split.KEY_VALUE, name="k_proj")
        tally.linear(hidden, keys, bias=has_bias, split=Split.KEY_VALUE, name="v_proj")
        tally.linear(queries, hidden, bias=has_bias, split=Split.ATTENTION, name="o_proj")
        tally.add((is_crossed or is_moss) * 2 * spec.head_dim + 2 * is_crossed)  # norms of queries and keys, and gates
        tally.module = f"{path}.mlp"
        tally.linear(hidden, width, copies=2, name="gate_proj")
        tally.linear(width, hidden, name="down_proj")
        tally.norm(hidden, copies=2)
    is_first, is_last = own.start == 0, own.stop == len(layers)
    rows = (vocab + _IMAGE_ROWS * (not is_moss)) * is_first + vocab * is_last
    tally.add(rows * hidden, Kind.EMBEDDING, Split.TENSOR)
    tally.norm(hidden, copies=is_last)
    return hidden, is_first
