"""Parameters of a text model, or of a pipeline stage of it: its layers, embeddings and output head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.models.families.registry import FAMILIES
from pagecore.models.layer_types import FULL
from pagecore.models.model_config import ModelConfig
from pagecore.models.parameters.counting.attention import add_attention, add_latent_attention
from pagecore.models.parameters.counting.experts import add_experts, has_experts
from pagecore.models.parameters.counting.mlp import add_mlp
from pagecore.models.parameters.counting.tally import Kind, Split, Tally, check_stage
from pagecore.models.parameters.counting.traits import Traits, is_true
from pagecore.models.parameters.decoders import gemma, nemotron_nas, zamba
from pagecore.models.parameters.decoders.mtp import add_mtp_ends, count_mtp_layers, mtp_experts, mtp_parts, mtp_spec
from pagecore.models.parameters.decoders.other_mlps import (
    add_granite_experts,
    add_longcat_experts,
    add_nemotron_mlp,
    width_of_layer,
)
from pagecore.models.parameters.decoders.states import STATE_LAYERS
from pagecore.models.parameters.structures.module_names import MODULE_NAMES
from pagecore.models.parameters.structures.registry import STRUCTURES
from pagecore.models.specs import read_model_config
from pagecore.storage import Alias, AttentionSpec, LatentSpec, RowSpec, StateSpec

__all__ = ["add_text_model"]

# Families whose layers have no MLP, or one that is counted with the recurrence.
_WITHOUT_MLP = frozenset({"mamba", "falcon_mamba", "mamba2", "rwkv", "xlstm"})
# Multimodal models whose head is never the embedding, those whose text model alone says whether it is, and those whose
# files may say so in either place.
_NEVER_TIED = frozenset(
    {"audioflamingo3", "cosmos3_edge", "inkling2", "inkling2_loop", "molmo2", "musicflamingo"}
    | {"muse_spark", "qwen2_audio", "vibevoice_asr", "voxtral"}
)
_TIED_BY_TEXT = frozenset({"blip-2", "instructblip", "instructblipvideo", "llama4", "vibevoice"})
_TIED_BY_EITHER = frozenset(
    {"fast_vlm", "glm4v", "glm4v_moe", "glm_ocr", "llava", "llava_next_video", "llava_onevision", "minimax_m3_vl"}
    | {"qwen2_5_vl", "qwen2_vl", "video_llama_3"}
)
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


def add_text_model(
    tally: Tally, config: Any, whole: Fields, fields: Fields, model_type: str, stage: range | None, mtp: bool
) -> tuple[int, bool]:
    """Add the text model, or a stage of it; return its number of key-value heads, and True for the first stage."""
    model = read_model_config(config, dtype="bfloat16", format=None)
    family, traits = FAMILIES[model_type], STRUCTURES.get(model_type)
    if traits is None:
        raise UnsupportedOption(
            f"{fields.source}: the parameters of {model_type} cannot be counted; pass weights= in bytes"
        )
    fields.defaults = {"max_position_embeddings": None, **_DEFAULTS, **family.defaults, **traits.defaults}
    fields.aliases = {**family.aliases, **traits.aliases}
    fields.lift(family.nested)
    tally.names = MODULE_NAMES.get(model_type, {})
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
            nemotron_nas.add_layer(tally, fields, traits, specs, layer)
        else:
            _add_layer(tally, fields, traits, [*shared, *specs], layer, model_type)
    if model_type in ("zamba", "zamba2"):
        zamba.add_shared_blocks(tally, fields, traits, attending, model_type)
    is_first, is_last = layers.start == 0, layers.stop == count
    if model_type == "gemma4_text" and is_first:
        gemma.add_inputs_of_layers(tally, fields)
    if model_type == "gemma3n_text":
        gemma.add_ends_of_gemma_3n(tally, fields, is_first=is_first, is_last=is_last)
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
    own = replace(traits, experts=mtp_experts(fields, model_type, traits.experts))
    spec = mtp_spec(model.layers, fields, model_type)
    for number in range(count):
        for part in mtp_parts(fields, model_type):
            if part == FULL:
                _add_layer(tally, fields, own, [spec], model.num_layers + number, model_type)
            elif own.experts is not None:
                tally.norm(fields.integer("hidden_size"))
                add_experts(tally, fields, own, own.experts)
        add_mtp_ends(tally, fields, model_type, number, count)


def _add_layer(tally: Tally, fields: Fields, traits: Traits, specs: list[Any], layer: int, model_type: str) -> None:
    hidden = fields.integer("hidden_size")
    norms = traits.norms + 2 * (traits.post_norms != "" and fields.flag(traits.post_norms))
    tally.norm(hidden, bias=traits.norm_bias, copies=norms)
    tally.add(traits.activation)
    path = f"model.layers.{layer}"
    is_shared = any(isinstance(spec, Alias) for spec in specs)
    if traits.add_attention is not None:
        tally.module = f"{path}.self_attn"
        traits.add_attention(tally, fields, specs)
    for spec in _with_weights(specs, traits):
        tally.module = f"{path}.{'mixer' if isinstance(spec, StateSpec) else 'self_attn'}"
        if isinstance(spec, StateSpec):
            STATE_LAYERS[model_type](tally, fields, spec)
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
        gemma.add_to_layer_of_gemma_4(tally, fields)
    elif model_type == "gemma3n_text":
        gemma.add_to_layer_of_gemma_3n(tally, fields)
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


def _with_weights(specs: list[Any], traits: Traits) -> list[Any]:
    """Return the specs of a layer without its rows, and without the states of tokens that wait to become rows."""
    if traits.add_attention is not None:
        return []
    has_rows = any(isinstance(spec, RowSpec) for spec in specs)
    return [spec for spec in specs if not isinstance(spec, StateSpec | RowSpec)] if has_rows else specs


def _add_ends(
    tally: Tally, whole: Fields, fields: Fields, traits: Traits, hidden: int, is_first: bool, is_last: bool
) -> None:
    """Add the embeddings of the first stage, and the last norm and the output head of the last stage."""
    vocab = fields.integer("vocab_size")
    is_copied = is_last and not (traits.can_tie and _is_tied(whole, fields, traits) and is_first)
    width = traits.embedding_width or hidden
    head = (fields.integer(traits.head_rows) if traits.head_rows else vocab) * width * is_copied
    tally.add(vocab * width * is_first + head, Kind.EMBEDDING, Split.TENSOR)
    tally.head += head
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
    if model_type in _TIED_BY_EITHER and fields.given("tie_word_embeddings"):
        return fields.flag("tie_word_embeddings")
    parts = (fields,) if model_type in _TIED_BY_TEXT else (whole, fields)
    first = next((part for part in parts if part.given("tie_word_embeddings") is not None), fields)
    return first.switch("tie_word_embeddings", traits.is_tied)
