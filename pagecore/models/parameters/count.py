"""Number of parameters of a model, from its config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config import read_model_config, text_model
from pagecore.models.encoder_decoder import ENCODER_DECODERS
from pagecore.models.families import FAMILIES
from pagecore.models.fields import Fields, open_config
from pagecore.models.hybrids import HYBRIDS
from pagecore.models.llama_kin import LLAMA_KIN
from pagecore.models.parameters.blocks import (
    add_attention,
    add_experts,
    add_latent_attention,
    add_mlp,
    has_experts,
    is_true,
)
from pagecore.models.parameters.encoder_decoder import add_encoder_decoder
from pagecore.models.parameters.recurrent import RECURRENT
from pagecore.models.parameters.tally import Kind, Parameters, Split, Tally
from pagecore.models.parameters.traits import TRAITS, Experts, Traits
from pagecore.models.parameters.vision import add_vision
from pagecore.storage import AttentionSpec, LatentSpec, StateSpec
from pagecore.storage.checks import ceil_div

__all__ = ["count_parameters"]

# Fields that published files leave out, with the value that transformers gives them. Sizes have no default: a file
# without one is refused.
_DEFAULTS: Mapping[str, object] = {
    **dict.fromkeys(("tie_word_embeddings", "mlp_layer_types", "moe_layers", "mlp_only_layers", "n_inner")),
    **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias", "use_qk_norm", "use_bias"), False),
    **dict.fromkeys(("use_qkv_bias", "qk_layernorm", "lm_head_bias"), False),
    **dict.fromkeys(("mamba_proj_bias", "mamba_rms_norm", "conv_bias", "add_bias_linear"), False),
    **dict.fromkeys(("use_conv_bias", "mamba_conv_bias", "block_auto_adjust_ff_dim"), True),
    **dict.fromkeys(("decoder_sparse_step", "interleave_moe_layer_step", "num_mem_blocks"), 1),
    **dict.fromkeys(("use_shared_attention_adapter",), False),
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "zero_expert_num": 0,
    "feed_forward_proj": "relu",
    "relative_attention_num_buckets": 32,
}


def count_parameters(config: str | os.PathLike[str] | Mapping[str, Any]) -> Parameters:
    """Count the parameters of a model from its config.

    The counts equal those of the models that transformers builds, vision towers included. Layers for the prediction of
    further tokens (`num_nextn_predict_layers`), which transformers does not build, are not counted.

    Parameters
    ----------
    config : str, path or dict
        As for `specs_from_config`.

    Returns
    -------
    Parameters

    Raises
    ------
    ConfigError
        The config lacks a size; the message names the field.
    UnsupportedOption
        The family, or its vision tower, is unknown.
    """
    whole = open_config(config)
    tally = Tally()
    model_type = whole.given("model_type")
    if isinstance(model_type, str) and model_type in ENCODER_DECODERS:
        family = ENCODER_DECODERS[model_type]
        whole.defaults = {**_DEFAULTS, **family.defaults}
        whole.aliases = family.aliases
        add_encoder_decoder(tally, whole, model_type)
        return Parameters(dict(tally.counts), whole.integer("num_attention_heads"))
    model_type, fields = text_model(whole)
    kv_heads = _add_text_model(tally, config, whole, fields, model_type)
    add_vision(tally, whole, fields.integer("hidden_size"))
    return Parameters(dict(tally.counts), kv_heads)


def _add_text_model(tally: Tally, config: Any, whole: Fields, fields: Fields, model_type: str) -> int:
    """Add the text model; return its number of key-value heads."""
    model = read_model_config(config, dtype="bfloat16", format=None)
    family, traits = {**FAMILIES, **LLAMA_KIN, **HYBRIDS}[model_type], TRAITS.get(model_type)
    if traits is None:
        raise UnsupportedOption(
            f"{fields.source}: the parameters of {model_type} cannot be counted; pass weights= in bytes"
        )
    fields.defaults = {"max_position_embeddings": None, **_DEFAULTS, **family.defaults, **traits.defaults}
    fields.aliases = {**family.aliases, **traits.aliases}
    hidden = fields.integer("hidden_size")
    kv_heads = 1
    for layer, own in enumerate(model.specs_by_layer):
        specs = [model.layers[number] for number in own]
        for spec in specs:
            kv_heads = max(kv_heads, getattr(spec, "num_kv_heads", 1))
        if model_type == "zamba2":
            _add_zamba_layer(tally, fields, specs)
        else:
            _add_layer(tally, fields, traits, specs, layer, model_type)
    if model_type == "zamba2":
        _add_shared_blocks(tally, fields, traits, [s for s in model.layers if isinstance(s, AttentionSpec)])
    _add_ends(tally, whole, fields, traits, hidden)
    return kv_heads


def _add_layer(tally: Tally, fields: Fields, traits: Traits, specs: list[Any], layer: int, model_type: str) -> None:
    hidden = fields.integer("hidden_size")
    tally.norm(hidden, bias=traits.norm_bias, copies=traits.norms)
    tally.add(traits.activation)
    for spec in specs:
        if isinstance(spec, StateSpec):
            RECURRENT[model_type](tally, fields, spec)
        elif isinstance(spec, LatentSpec):
            add_latent_attention(tally, fields, traits, spec)
        else:
            add_attention(tally, fields, traits, spec)
    if model_type in ("mamba", "falcon_mamba", "mamba2"):
        return
    if model_type == "nemotron_h":
        if not specs:
            _add_nemotron_mlp(tally, fields, traits, layer)
    elif model_type == "granitemoehybrid":
        _add_granite_experts(tally, fields, traits)
    elif traits.experts is not None and has_experts(fields, traits.experts, layer):
        add_experts(tally, fields, traits, traits.experts)
    else:
        add_mlp(tally, fields, traits, _width(fields, model_type))
        if model_type == "longcat_flash" and layer % 2:
            _add_longcat_experts(tally, fields, traits)


def _width(fields: Fields, model_type: str) -> int:
    """Return the width of a dense MLP."""
    if model_type == "gpt2" and fields.value("intermediate_size") is None:
        return 4 * fields.integer("hidden_size")
    if model_type == "llama4_text":
        return fields.integer("intermediate_size_mlp")
    if model_type == "lfm2":
        name = "intermediate_size" if fields.given("block_ff_dim") is None else "block_ff_dim"
        width = fields.integer(name)
        if fields.flag("block_auto_adjust_ff_dim"):
            multiple = fields.integer("block_multiple_of")
            width = int(fields.number("block_ffn_dim_multiplier") * (2 * width // 3))
            width = multiple * ceil_div(width, multiple)
        return width
    return fields.integer("intermediate_size")


def _add_nemotron_mlp(tally: Tally, fields: Fields, traits: Traits, layer: int) -> None:
    pattern = fields.given("hybrid_override_pattern")
    listed = fields.given("layer_types")
    kind = listed[layer] if isinstance(listed, list | tuple) else str(pattern)[layer]
    if kind in ("moe", "E") and traits.experts is not None:
        add_experts(tally, fields, traits, traits.experts)
    else:
        add_mlp(tally, fields, traits, fields.integer("intermediate_size"))


def _add_granite_experts(tally: Tally, fields: Fields, traits: Traits) -> None:
    if traits.experts is not None and has_experts(fields, traits.experts, 0):
        add_experts(tally, fields, traits, traits.experts)
    else:
        add_mlp(tally, fields, traits, fields.integer("shared_intermediate_size"))


def _add_longcat_experts(tally: Tally, fields: Fields, traits: Traits) -> None:
    """Add the experts that two attentions of LongCat share; experts that return their input have a router's row."""
    add_experts(tally, fields, traits, Experts("n_routed_experts", "expert_ffn_hidden_size"))
    tally.linear(
        fields.integer("hidden_size"), fields.integer("zero_expert_num", min=0), split=Split.COPY, kind=Kind.OTHER
    )


def _add_zamba_layer(tally: Tally, fields: Fields, specs: list[Any]) -> None:
    """Add Mamba of a layer, and what a layer with attention has of its own: a projection and adapters."""
    hidden = fields.integer("hidden_size")
    for spec in specs:
        if isinstance(spec, StateSpec):
            RECURRENT["zamba2"](tally, fields, spec)
            tally.norm(hidden)
            continue
        tally.linear(hidden, hidden)
        rank, width = fields.integer("adapter_rank"), fields.integer("intermediate_size")
        tally.linear(hidden, rank, split=Split.COPY)
        tally.linear(rank, 2 * width)
        if fields.flag("use_shared_attention_adapter"):
            heads = (spec.num_query_heads or spec.num_kv_heads) * spec.head_dim
            tally.linear(2 * hidden, rank, split=Split.COPY, copies=3)
            tally.linear(rank, heads, copies=3)


def _add_shared_blocks(tally: Tally, fields: Fields, traits: Traits, specs: list[AttentionSpec]) -> None:
    """Add the blocks of attention that the layers of Zamba2 share."""
    hidden = fields.integer("hidden_size")
    for _ in range(min(fields.integer("num_mem_blocks"), len(specs))):
        add_attention(tally, fields, traits, specs[0], inputs=2 * hidden)
        add_mlp(tally, fields, traits, fields.integer("intermediate_size"))
        tally.norm(3 * hidden)


def _add_ends(tally: Tally, whole: Fields, fields: Fields, traits: Traits, hidden: int) -> None:
    """Add the embeddings, the last norm and the output head."""
    vocab = fields.integer("vocab_size")
    tied = next((part.given("tie_word_embeddings") for part in (whole, fields) if _has_tie(part)), traits.is_tied)
    tally.add(vocab * hidden * (1 if tied else 2), Kind.EMBEDDING, Split.TENSOR)
    if is_true(fields, traits.has_head_bias):
        tally.add(vocab)
    if traits.has_positions:
        tally.add(fields.integer("max_position_embeddings") * hidden, Kind.EMBEDDING)
    if traits.norms:
        tally.norm(hidden, bias=traits.norm_bias)


def _has_tie(fields: Fields) -> bool:
    return isinstance(fields.given("tie_word_embeddings"), bool)
