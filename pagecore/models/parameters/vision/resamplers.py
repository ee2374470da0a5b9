"""Projectors in which a fixed number of queries attend to the patches of an image: Q-Formers, Aria and Idefics 2.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.vision.tower_parts import Projector
from pagecore.storage.checks import ceil_div

__all__ = ["FIXED_TOKENS", "Q_FORMER", "RESAMPLERS", "add_q_former", "window_sides"]

Q_FORMER: Mapping[str, object] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "cross_attention_frequency": 2,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
_GRANITE: Mapping[str, object] = {**Q_FORMER, "num_hidden_layers": 1, "cross_attention_frequency": 1}
_PERCEIVER: Mapping[str, object] = {
    "resampler_n_latents": 64,
    "resampler_depth": 3,
    "resampler_n_heads": 16,
    "resampler_head_dim": 96,
    "num_key_value_heads": 4,
}
_ADAPTER: Mapping[str, object] = {
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "intermediate_size": 18944,
}


def _part(whole: Fields, name: str, defaults: Mapping[str, object]) -> Fields:
    """Return the fields of a part of a config, which a file may leave out."""
    part = whole.inner(name) if whole.given(name) is not None else Fields({}, whole.source, name)
    part.defaults = defaults
    return part


def _queries(whole: Fields) -> int:
    return 32 if whole.given("num_query_tokens") is None else whole.integer("num_query_tokens")


def _kosmos_queries(default: int) -> Callable[[Fields], int]:
    name = "latent_query_num"
    return lambda whole: default if whole.given(name) is None else whole.integer(name)


def _soft_tokens(whole: Fields) -> int:
    name = "vision_soft_tokens_per_image"
    return 280 if whole.given(name) is None else whole.integer(name)


def _latents(whole: Fields) -> int:
    return _part(whole, "perceiver_config", _PERCEIVER).integer("resampler_n_latents")


def _most_queries(whole: Fields) -> int:
    """Return the queries for the largest of the numbers of patches that are listed."""
    listed = whole.given("projector_patch_to_query_dict")
    if listed is None:
        return 256
    counts: list[int] = list(listed.values()) if isinstance(listed, Mapping) else []
    if not counts or not all(type(count) is int and count > 0 for count in counts):
        whole.refuse(f"{whole.describe('projector_patch_to_query_dict')}; it must map patches to numbers of queries")
    return max(counts)


# Tokens of an image of any size, by the type of the whole model.
FIXED_TOKENS: Mapping[str, Callable[[Fields], int]] = {
    "aria": _most_queries,
    "gemma4": _soft_tokens,
    "blip-2": _queries,
    "idefics2": _latents,
    "instructblip": _queries,
    "instructblipvideo": _queries,
    "kosmos-2": _kosmos_queries(64),
    "kosmos-2.5": _kosmos_queries(2048),
}


def _q_former(reads_text: bool) -> Projector:
    def add(tally: Tally, whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
        former = _part(whole, "qformer_config", Q_FORMER)
        add_q_former(tally, former, hidden, _queries(whole), text, reads_text=reads_text)

    return add


def add_q_former(
    tally: Tally, former: Fields, inputs: int, queries: int, text: int, *, reads_text: bool = False
) -> None:
    """Add a Q-Former that reads `inputs` features, its queries, and the projection to the features of the text model.

    `former` are its fields, with the defaults `Q_FORMER`.
    """
    dim, layers = former.integer("hidden_size"), former.integer("num_hidden_layers")
    width, has_text = former.integer("intermediate_size"), reads_text
    has_text = has_text or former.switch("use_qformer_text_input", False)
    crossed = ceil_div(layers, former.integer("cross_attention_frequency"))
    for read, copies in ((dim, layers), (inputs, crossed)):
        encoder_linear(tally, dim, dim, bias=True, copies=2 * copies)
        encoder_linear(tally, read, dim, bias=True, copies=2 * copies)
        encoder_add(tally, 2 * dim * copies)
    encoder_linear(tally, dim, width, bias=True, copies=layers * (1 + has_text))
    encoder_linear(tally, width, dim, bias=True, copies=layers * (1 + has_text))
    encoder_add(tally, 2 * dim * layers * (1 + has_text) + 2 * dim)
    if reads_text:
        encoder_add(tally, (former.integer("vocab_size") + former.integer("max_position_embeddings")) * dim)
    encoder_add(tally, queries * dim)
    encoder_linear(tally, dim, text, bias=True)


def _aria(tally: Tally, whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
    encoder_add(tally, _most_queries(whole) * hidden + 6 * hidden)
    encoder_linear(tally, hidden, hidden, copies=3)
    encoder_linear(tally, hidden, hidden, bias=True, copies=5)
    encoder_linear(tally, hidden, text)
    encoder_linear(tally, text, text)


def _idefics(tally: Tally, whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
    inner = whole.inner("text_config")
    inner.defaults = {"intermediate_size": 14336}
    width = inner.integer("intermediate_size")
    encoder_linear(tally, hidden, width, copies=2)
    encoder_linear(tally, width, text)
    part = _part(whole, "perceiver_config", _PERCEIVER)
    layers, dim = part.integer("resampler_depth"), part.integer("resampler_head_dim")
    queries, keys = part.integer("resampler_n_heads") * dim, part.integer("num_key_value_heads") * dim
    encoder_linear(tally, text, queries, copies=2 * layers)
    encoder_linear(tally, text, keys, copies=2 * layers)
    encoder_linear(tally, text, 4 * text, copies=3 * layers)
    encoder_add(tally, (_latents(whole) + 3 * layers + 1) * text)


def _molmo(tally: Tally, whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
    """Add the attention that pools groups of patches, of several layers of the tower, and an MLP."""
    part = _part(whole, "adapter_config", _ADAPTER)
    chosen = part.given("vision_feature_layer")
    inputs = hidden * (len(chosen) if isinstance(chosen, list | tuple) and chosen else 2)
    own, dim = part.integer("hidden_size"), part.integer("head_dim")
    queries, keys = part.integer("num_attention_heads") * dim, part.integer("num_key_value_heads") * dim
    has_bias = part.switch("attention_bias", True)
    encoder_linear(tally, inputs, queries, bias=has_bias)
    encoder_linear(tally, inputs, keys, bias=has_bias, copies=2)
    encoder_linear(tally, queries, own, bias=has_bias)
    width = part.integer("intermediate_size")
    encoder_linear(tally, own, width, bias=part.switch("mlp_bias", False), copies=2)
    outputs = text if part.given("text_hidden_size") is None else part.integer("text_hidden_size")
    encoder_linear(tally, width, outputs)


def window_sides(whole: Fields) -> list[int]:
    """Return the sides of the windows of queries and of patches of Granite 4 Vision."""
    rate: Any = whole.given("downsample_rate")
    sides = [int(side) for side in str(rate).split("/") if side.isdecimal() and 0 < len(side) < 5]
    if len(sides) != 2 or 0 in sides:
        whole.refuse(f'{whole.describe("downsample_rate")}; it must be the sides of two windows, such as "4/8"')
    return sides


def _granite(tally: Tally, whole: Fields, _fields: Fields, hidden: int, _merge: int, _depths: int, text: int) -> None:
    """Add a Q-Former that reads windows of patches for each layer of a deep stack, and four for parts of the image."""
    sides = window_sides(whole)
    stacked = whole.given("deepstack_layer_map")
    former = _part(whole, "qformer_config", _GRANITE)
    former.sizes = {"hidden_size": hidden}
    for _ in range(4 + (len(stacked) if isinstance(stacked, list | tuple) else 0)):
        add_q_former(tally, former, hidden, sides[0] ** 2, text)
        encoder_add(tally, (2 + sides[1] ** 2) * hidden)
    encoder_add(tally, text)


RESAMPLERS: Mapping[str, Projector] = {
    "aria": _aria,
    "blip-2": _q_former(reads_text=False),
    "granite4_vision": _granite,
    "idefics2": _idefics,
    "instructblip": _q_former(reads_text=True),
    "instructblipvideo": _q_former(reads_text=True),
    "molmo2": _molmo,
}
