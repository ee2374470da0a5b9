"""Structure of the layers of text models that only models with images have: Chameleon, ERNIE 4.5 VL and others.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.experts import add_experts, has_experts
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.counting.traits import Experts, Settled, Traits, biased_traits
from pagecore.models.parameters.structures.common_traits import LLAMA, SHARED_EXPERTS
from pagecore.models.parameters.structures.idefics import IDEFICS_DEFAULTS, add_gated_layer, further_tokens
from pagecore.storage.checks import INT32_MAX

__all__ = ["WITH_IMAGES"]

_ERNIE = Traits(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", is_tied=True)
_TEXT_EXPERTS = Experts(
    "number_of_experts",
    "width_of_text_experts",
    shared="moe_num_shared_experts",
    rule="after",
    dense="first_layer_of_experts",
    last="last_layer_of_experts",
    score_biases=1,
)
_IMAGE_EXPERTS = replace(_TEXT_EXPERTS, width="width_of_image_experts", shared="")


def _ernie(fields: Fields) -> Settled:
    """Two sets of experts, for text and for images, have widths of their own; other fields are equal."""
    text, images = _two(fields, "moe_intermediate_size")
    counts, firsts = _two(fields, "moe_num_experts"), _two(fields, "moe_layer_start_index")
    for name, (one, other) in (("moe_num_experts", counts), ("moe_layer_start_index", firsts)):
        if one != other:
            fields.refuse(f"{fields.describe(name)}; the experts of text and of images must have the same number")
    fields.defaults = {
        **fields.defaults,
        "width_of_text_experts": text,
        "width_of_image_experts": images,
        "number_of_experts": counts[0],
        "first_layer_of_experts": firsts[0],
        "last_layer_of_experts": _last_layer(fields),
    }
    return {}


def _last_layer(fields: Fields) -> int:
    """Return the last layer with experts of text or of images; -1 is the last layer of all."""
    listed: Any = fields.given("moe_layer_end_index")
    ends = [-1] if listed is None else list(listed) if isinstance(listed, list | tuple) else [listed]
    if not ends or min(ends) < -1 or max(ends) > INT32_MAX:
        fields.refuse(f"{fields.describe('moe_layer_end_index')}; it must have layer numbers, or -1 for the last layer")
    return INT32_MAX if -1 in ends else max(ends)


def _two(fields: Fields, name: str) -> tuple[int, int]:
    """Return a field for the experts of text and of images: two integers, or one for both."""
    listed = fields.value(name)
    if not isinstance(listed, list | tuple):
        number = fields.integer(name)
        return number, number
    if len(listed) != 2 or not all(type(each) is int and 1 <= each <= INT32_MAX for each in listed):
        fields.refuse(f"{fields.describe(name)}; it must be a list of two integers between 1 and {INT32_MAX}")
    return listed[0], listed[1]


def _image_experts(tally: Tally, fields: Fields, _specs: Sequence[Any], layer: int) -> None:
    """Add the experts of images; the shared experts are those of text."""
    if has_experts(fields, _IMAGE_EXPERTS, layer):
        tally.module = f"model.layers.{layer}.mlp"
        add_experts(tally, fields, _ERNIE, _IMAGE_EXPERTS)


def _norm_biases(tally: Tally, _fields: Fields, specs: Sequence[Any], _layer: int) -> None:
    """Add the biases of the norms of queries and keys, which each head has for itself."""
    tally.add((specs[0].num_query_heads + specs[0].num_kv_heads) * specs[0].head_dim)


def _git(fields: Fields) -> Settled:
    """A norm follows the embedding."""
    return {"first": 2 * fields.integer("hidden_size")}


WITH_IMAGES: Mapping[str, Traits] = {
    "chameleon": biased_traits(mlp_bias="mlp_bias", qk_norm="heads", add_to_layer=_norm_biases),
    "deepseek_ocr2_text": replace(LLAMA, experts=SHARED_EXPERTS),
    "ernie4_5_vl_moe_text": replace(
        _ERNIE,
        experts=_TEXT_EXPERTS,
        settle=_ernie,
        add_to_layer=_image_experts,
        defaults={
            "moe_intermediate_size": [1536, 512],
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "git": Traits(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        is_gated=False,
        has_positions=True,
        has_last_norm=False,
        has_head_bias=True,
        settle=_git,
        defaults={"intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 1024},
    ),
    "idefics": Traits(defaults=IDEFICS_DEFAULTS, add_to_layer=add_gated_layer, settle=further_tokens),
    "phi4_multimodal": Traits(),
    "unlimited_ocr_text": replace(LLAMA, experts=SHARED_EXPERTS),
}
