"""Types of fields that readers take as they are, by the name of the field.

Sizes, numbers and flags have types by the method that reads them (`Fields.integer` and others). The fields here are
names, lists and alternatives, of which a reader looks for some values only; one of another type would be taken for none
of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["FIELD_TYPES", "FieldType"]


@dataclass(frozen=True, slots=True)
class FieldType:
    """Type of a field that is not null.

    Attributes
    ----------
    expected : str
        Description for messages: "a text".
    fits : callable
        Returns True for a value of the type.
    """

    expected: str
    fits: Callable[[object], bool]


def _is_integer(value: object) -> bool:
    return type(value) is int


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _lists(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list | tuple) and all(fits(each) for each in value)


def _either(*kinds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: any(fits(value) for fits in kinds)


_INTEGERS, _TEXTS = _lists(_is_integer), _lists(_is_text)
_FLAG = FieldType("true or false", _is_flag)
_INTEGER = FieldType("an integer", _is_integer)
_LIST_OF_INTEGERS = FieldType("a list of integers", _INTEGERS)
_NUMBER = FieldType("a finite number", _is_number)
_OBJECT = FieldType("an object with fields", _is_object)
_ONE_OR_MORE = FieldType("an integer or a list of integers", _either(_is_integer, _INTEGERS))
_TEXT = FieldType("a text", _is_text)
_TEXT_OR_FLAG = FieldType("a text, or true or false", _either(_is_text, _is_flag))

FIELD_TYPES: Mapping[str, FieldType] = {
    **dict.fromkeys(("is_encoder_decoder", "share_encoder_decoder_embeddings", "use_prompt"), _FLAG),
    **dict.fromkeys(("conv_L_cache", "group_norm_size", "kv_lora_rank", "linear_num_value_heads"), _INTEGER),
    **dict.fromkeys(
        ("lru_width", "mamba_d_state", "num_ln_in_parallel_attn", "ssm_state_size", "state_size"), _INTEGER
    ),
    **dict.fromkeys(("attn_type_list", "deepstack_visual_indexes", "global_attn_indexes"), _LIST_OF_INTEGERS),
    **dict.fromkeys(("merge_kernel_size", "window_kernel_size"), _LIST_OF_INTEGERS),
    **dict.fromkeys(("layer_group_size", "moe_layer_end_index", "vision_feature_layer"), _ONE_OR_MORE),
    **dict.fromkeys(("downsample_ratio", "pixel_shuffle_ratio"), _NUMBER),
    **dict.fromkeys(("codec_config", "depth_decoder_config", "encoder", "encoder_config"), _OBJECT),
    **dict.fromkeys(("linear_attn_config", "sparse_attention_config", "text_config", "vision_config"), _OBJECT),
    **dict.fromkeys(("encoder_attention_type", "feed_forward_proj", "hybrid_override_pattern"), _TEXT),
    **dict.fromkeys(("feat_extract_norm", "position_embeddings_type", "rope_type", "type"), _TEXT),
    **dict.fromkeys(("gate_kind", "gating"), _TEXT_OR_FLAG),
    "block_types": FieldType("a list of texts", _TEXTS),
    "mlp_layer_types": FieldType("a list of texts", _TEXTS),
    "moe_layer_freq": FieldType(
        "an integer or a list of integers or of true and false",
        _either(_is_integer, _lists(_either(_is_integer, _is_flag))),
    ),
    "supported_aspect_ratios": FieldType("a list of pairs of integers", _lists(_INTEGERS)),
}
