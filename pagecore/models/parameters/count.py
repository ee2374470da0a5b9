"""Number of parameters of a model, from its config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config import ModelConfig, has_encoder, read_model_config, text_model
from pagecore.models.fields import Fields
from pagecore.models.opening import open_config
from pagecore.models.parameters import block_configs, gemma_3n, gemma_4, zamba
from pagecore.models.parameters.audio import add_audio
from pagecore.models.parameters.blocks import (
    add_attention,
    add_experts,
    add_latent_attention,
    add_mlp,
    has_experts,
    is_true,
)
from pagecore.models.parameters.earlier import EARLIER_TRAITS
from pagecore.models.parameters.linear import LINEAR_TRAITS
from pagecore.models.parameters.mtp import add_mtp_ends, count_mtp_layers, is_dense_mtp, mtp_spec
from pagecore.models.parameters.own_mlps import (
    add_granite_experts,
    add_longcat_experts,
    add_nemotron_mlp,
    width_of_layer,
)
from pagecore.models.parameters.recent import RECENT_TRAITS
from pagecore.models.parameters.recurrent import RECURRENT
from pagecore.models.parameters.remote import REMOTE_TRAITS
from pagecore.models.parameters.speaking import add_speaking_parts, depth_decoder
from pagecore.models.parameters.speech import SPEECH_TRAITS
from pagecore.models.parameters.structures import TRAITS
from pagecore.models.parameters.tally import Kind, Parameters, Split, Tally, check_stage
from pagecore.models.parameters.text_parts import BERT_TRAITS, TEXT_TRAITS
from pagecore.models.parameters.traits import Traits
from pagecore.models.parameters.vision import add_vision, with_encoders
from pagecore.models.parameters.with_encoder import count_with_encoder
from pagecore.models.served import SERVED
from pagecore.storage import Alias, AttentionSpec, LatentSpec, StateSpec

__all__ = ["ALL_TRAITS", "count_parameters", "mtp_specs"]

ALL_TRAITS: Mapping[str, Traits] = {
    **TRAITS,
    **EARLIER_TRAITS,
    **TEXT_TRAITS,
    **BERT_TRAITS,
    **LINEAR_TRAITS,
    **REMOTE_TRAITS,
    **RECENT_TRAITS,
    **SPEECH_TRAITS,
}

# Families whose layers have no MLP, or one that is counted with the recurrence.
_WITHOUT_MLP = frozenset({"mamba", "falcon_mamba", "mamba2", *LINEAR_TRAITS})
# Multimodal models whose head is never the embedding, and those whose text model alone says whether it is.
_NEVER_TIED = frozenset({"audioflamingo3", "musicflamingo"})
_TIED_BY_TEXT = frozenset({"llama4"})
# Fields that published files leave out, with the value that transformers gives them. Sizes have no default: a file
# without one is refused.
_DEFAULTS: Mapping[str, object] = {
    **dict.fromkeys(("tie_word_embeddings", "mlp_layer_types", "moe_layers", "mlp_only_layers", "n_inner")),
    **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias", "use_qk_norm", "use_bias"), False),
    **dict.fromkeys(("use_qkv_bias", "qk_layernorm", "lm_head_bias"), False),
    **dict.fromkeys(("mamba_proj_bias", "mamba_rms_norm", "projectors_bias", "conv_bias", "add_bias_linear"), False),
    **dict.fromkeys(("use_conv_bias", "mamba_conv_bias", "block_auto_adjust_ff_dim"), True),
    **dict.fromkeys(("decoder_sparse_step", "interleave_moe_layer_step", "num_mem_blocks"), 1),
    **dict.fromkeys(("use_shared_attention_adapter", "use_double_wide_mlp"), False),
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "zero_expert_num": 0,
}


def count_parameters(
    config: str | os.PathLike[str] | Mapping[str, Any], *, layers: range | None = None, mtp: bool = False
) -> Parameters:
    """Count the parameters of a model from its config.

    The counts equal those of the models that transformers builds, with their encoders of images and sound. Of a model
    that also speaks (Qwen-Omni) they are those of its thinker.

    Parameters
    ----------
    config : str, path or dict
        As for `specs_from_config`.
    layers : range, optional
        Layers of one pipeline stage. The stage of the first layer has the embedding and all encoders; that of the last
        one the norm and the head. A head that is tied to the embedding is a copy there, except in a single stage.
    mtp : bool
        Add the layers for the prediction of further tokens (`num_nextn_predict_layers`) after the last layer.
        transformers does not build them, and engines load them only as a draft.

    Returns
    -------
    Parameters

    Raises
    ------
    ConfigError
        The config lacks a size; the message names the field.
    ShapeError
        `layers` are not layers of the model.
    UnsupportedOption
        The family, or one of its encoders, is unknown; `mtp` of a model without such layers.
    """
    whole = open_config(config)
    tally = Tally()
    model_type = whole.given("model_type")
    if isinstance(model_type, str) and has_encoder(model_type):
        if mtp:
            raise UnsupportedOption(
                f"{whole.source}: {model_type} has an encoder, and no layers for further tokens; leave the draft out"
            )
        return count_with_encoder(config, whole, model_type, layers)
    model_type, fields = text_model(whole)
    encoded = with_encoders(whole)
    kv_heads, is_first = _add_text_model(tally, config, encoded, fields, model_type, layers, mtp)
    if is_first:
        add_vision(tally, encoded, fields.integer("hidden_size"))
        add_audio(tally, encoded, fields.integer("hidden_size"))
        add_speaking_parts(tally, whole, fields.integer("hidden_size"))
        depth = depth_decoder(whole)
        if depth is not None:
            inner = count_parameters(depth)
            tally.counts.update(inner.counts)
            tally.matrices.update(inner.matrices)
    return Parameters(dict(tally.counts), kv_heads, dict(tally.matrices))


def mtp_specs(
    config: str | os.PathLike[str] | Mapping[str, Any], layers: Sequence[object]
) -> tuple[AttentionSpec | LatentSpec, ...]:
    """Return the specs of a model's layers for the prediction of further tokens, to be planned as layers of its cache.

    Parameters
    ----------
    config : str, path or dict
        As for `specs_from_config`.
    layers : sequence of specs
        Specs of the model, whose dtype and format these layers share.

    Raises
    ------
    UnsupportedOption
        The model has no such layers, or the family's are not known.
    """
    model_type, fields = text_model(open_config(config))
    return (mtp_spec(layers),) * count_mtp_layers(fields, model_type)


def _add_text_model(
    tally: Tally, config: Any, whole: Fields, fields: Fields, model_type: str, stage: range | None, mtp: bool
) -> tuple[int, bool]:
    """Add the text model, or a stage of it; return its number of key-value heads, and True for the first stage."""
    model = read_model_config(config, dtype="bfloat16", format=None)
    family, traits = SERVED[model_type], ALL_TRAITS.get(model_type)
    if traits is None:
        raise UnsupportedOption(
            f"{fields.source}: the parameters of {model_type} cannot be counted; pass weights= in bytes"
        )
    fields.defaults = {"max_position_embeddings": None, **_DEFAULTS, **family.defaults, **traits.defaults}
    fields.aliases = {**family.aliases, **traits.aliases}
    fields.lift(family.nested)
    if traits.settle is not None:
        traits = replace(traits, **traits.settle(fields))
    count = model.num_layers
    layers = check_stage(range(count) if stage is None else stage, count)
    hidden = fields.integer("hidden_size")
    kv_heads = max((getattr(spec, "num_kv_heads", 1) for spec in model.layers), default=1)
    attending: list[AttentionSpec] = []
    for layer in _layers_with_weights(fields, traits, layers):
        specs = [model.layers[number] for number in model.specs_by_layer[layer]]
        attending += [spec for spec in specs if isinstance(spec, AttentionSpec)]
        shared = [model.layers[spec.layer] for spec in specs if isinstance(spec, Alias)]
        if model_type in ("zamba", "zamba2"):
            zamba.add_layer(tally, fields, specs, layer, model_type)
        elif model_type == "nemotron-nas":
            block_configs.add_layer(tally, fields, traits, specs, layer)
        else:
            _add_layer(tally, fields, traits, [*shared, *specs], layer, model_type)
    if model_type in ("zamba", "zamba2"):
        zamba.add_shared_blocks(tally, fields, traits, attending, model_type)
    is_first, is_last = layers.start == 0, layers.stop == count
    if model_type == "gemma4_text" and is_first:
        gemma_4.add_inputs_of_layers(tally, fields)
    if model_type == "gemma3n_text":
        gemma_3n.add_ends(tally, fields, is_first=is_first, is_last=is_last)
    _add_ends(tally, whole, fields, traits, hidden, is_first, is_last)
    if mtp and is_last:
        _add_mtp_layers(tally, fields, traits, model, model_type)
    return kv_heads, is_first


def _layers_with_weights(fields: Fields, traits: Traits, layers: range) -> list[int]:
    """Return the layers of a stage without those whose weights an earlier one of them has."""
    if traits.weights_of_layer is None:
        return list(layers)
    first: dict[int, int] = {}
    for layer in layers:
        first.setdefault(traits.weights_of_layer(fields, layer), layer)
    return list(first.values())


def _add_mtp_layers(tally: Tally, fields: Fields, traits: Traits, model: ModelConfig, model_type: str) -> None:
    count = count_mtp_layers(fields, model_type)
    own = replace(traits, experts=None) if is_dense_mtp(model_type) else traits
    for number in range(count):
        _add_layer(tally, fields, own, [mtp_spec(model.layers)], model.num_layers + number, model_type)
        add_mtp_ends(tally, fields.integer("hidden_size"), model_type)


def _add_layer(tally: Tally, fields: Fields, traits: Traits, specs: list[Any], layer: int, model_type: str) -> None:
    hidden = fields.integer("hidden_size")
    norms = traits.norms + 2 * (traits.post_norms != "" and fields.flag(traits.post_norms))
    tally.norm(hidden, bias=traits.norm_bias, copies=norms)
    tally.add(traits.activation)
    path = f"model.layers.{layer}"
    is_shared = any(isinstance(spec, Alias) for spec in specs)
    for spec in specs:
        tally.module = f"{path}.{'mixer' if isinstance(spec, StateSpec) else 'self_attn'}"
        if isinstance(spec, StateSpec):
            RECURRENT[model_type](tally, fields, spec)
        elif isinstance(spec, LatentSpec):
            sizes = traits.sizes_of_layer(fields, layer) if traits.sizes_of_layer and spec.window else fields
            add_latent_attention(tally, fields, traits, spec, sizes, has_latents=not is_shared)
        elif isinstance(spec, AttentionSpec):
            add_attention(tally, fields, traits, spec, has_keys=not is_shared)
    if traits.add_to_layer is not None:
        traits.add_to_layer(tally, fields, specs, layer)
    tally.module = f"{path}.mlp"
    if model_type in _WITHOUT_MLP:
        return
    if model_type == "gemma4_text":
        gemma_4.add_to_layer(tally, fields)
    elif model_type == "gemma3n_text":
        gemma_3n.add_to_layer(tally, fields)
    if model_type == "nemotron_h":
        if not specs:
            add_nemotron_mlp(tally, fields, traits, layer)
    elif model_type == "granitemoehybrid":
        add_granite_experts(tally, fields, traits)
    elif traits.experts is not None and has_experts(fields, traits.experts, layer):
        add_experts(tally, fields, traits, traits.experts)
    else:
        width = traits.width or width_of_layer(fields, traits, model_type, layer)
        add_mlp(tally, fields, traits, width * (1 + (is_shared and fields.flag("use_double_wide_mlp"))))
        if model_type == "longcat_flash" and layer % 2:
            add_longcat_experts(tally, fields, traits)


def _add_ends(
    tally: Tally, whole: Fields, fields: Fields, traits: Traits, hidden: int, is_first: bool, is_last: bool
) -> None:
    """Add the embeddings of the first stage, and the last norm and the output head of the last stage."""
    vocab = fields.integer("vocab_size")
    is_copied = is_last and not (traits.can_tie and _is_tied(whole, fields, traits) and is_first)
    width = traits.embedding_width or hidden
    tally.add(vocab * width * (is_first + is_copied), Kind.EMBEDDING, Split.TENSOR)
    tally.add(traits.first * is_first + traits.last * is_last)
    if traits.has_positions and is_first:
        rows = fields.integer("max_position_embeddings") + traits.position_rows
        tally.add(rows * hidden, Kind.EMBEDDING)
    if not is_last:
        return
    if is_true(fields, traits.has_head_bias):
        tally.add(vocab)
    if traits.norms and traits.has_last_norm:
        tally.norm(hidden, bias=traits.norm_bias)


def _is_tied(whole: Fields, fields: Fields, traits: Traits) -> bool:
    """Return True if the head is the embedding, as the config of the whole model or of its text model says."""
    model_type = whole.given("model_type")
    if model_type in _NEVER_TIED:
        return False
    parts = (fields,) if model_type in _TIED_BY_TEXT else (whole, fields)
    given = [part.given("tie_word_embeddings") for part in parts]
    return next((flag for flag in given if isinstance(flag, bool)), traits.is_tied)
