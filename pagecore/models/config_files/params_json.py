"""Files named params.json: the fields that Mistral and Meta publish next to their weights, as those of a config.json.

Source: params.json of Mistral 7B to Mistral Large 3 and of Llama to Llama 3.2, and the code published with them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields, shown
from pagecore.models.layer_types import FULL, SLIDING
from pagecore.storage.checks import LAYERS_MAX, ceil_div

__all__ = ["as_config", "is_params"]

_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
}
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LENGTHS = ("max_position_embeddings", "max_seq_len", "model_max_length")
_TOWER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "patch_size")
_COMMON = (*_NAMES, *_LENGTHS, "quantization", "quantization_config", "vision_encoder")
# Hidden size, layers and vocabulary of Llama 3.2 1B and 3B. Meta's files do not say that their heads are tied.
_TIED_LLAMAS = frozenset({(2048, 16, 128256), (3072, 28, 128256)})
# Fields that decide neither specs nor parameters. YaRN changes the scale of scores of latents alone.
_WITHOUT_EFFECT = frozenset(
    {"norm_eps", "rope_theta", "rope_scaling_factor", "use_scaled_rope", "llama_4_scaling", "yarn", "max_batch_size"}
    | {"num_expert_groups", "num_expert_groups_per_tok", "routed_scale", "expert_parallel", "expert_model_parallel"}
)
# The only value that a field may have where it is not read.
_FIXED: Mapping[str, object] = {
    "use_biases": False,
    "causal": True,
    "route_every_n": 1,
    "num_shared_experts": 0,
    "first_k_dense_replace": 0,
}


def is_params(values: Mapping[str, Any]) -> bool:
    """Return True for the fields of a params.json: it names no type, and has a `dim`."""
    return values.get("model_type") is None and None not in (values.get("dim"), values.get("n_layers"))


def as_config(values: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the fields of a params.json as those of a config.json.

    Raises
    ------
    ConfigError
        A field is missing or invalid.
    UnsupportedOption
        A field that is not read, such as those of models that listen and of Llama 4; pass the model's config.json.
    """
    given = Fields(values, source)
    _check_sizes(given)
    config: dict[str, Any] = {ours: values[name] for name, ours in _NAMES.items() if values.get(name) is not None}
    lengths = [values[name] for name in _LENGTHS if values.get(name) is not None]
    if lengths:
        config["max_position_embeddings"] = lengths[0]
    config.setdefault("num_key_value_heads", given.integer("n_heads"))
    config |= _family(given, given.integer("n_layers", max=LAYERS_MAX))
    if given.given("quantization_config") is not None:
        config["quantization_config"] = values["quantization_config"]
    elif given.given("quantization") is not None:
        config["quantization_config"] = _quantization(given)
    return config if given.given("vision_encoder") is None else _with_tower(config, given.inner("vision_encoder"))


def _check_sizes(given: Fields) -> None:
    """Raise ConfigError for an invalid size, by its name in the file."""
    for name in ("dim", "n_heads", "n_kv_heads", "head_dim", "hidden_dim"):
        if given.given(name) is not None:
            given.integer(name)
    if given.given("tied_embeddings") is not None:
        given.flag("tied_embeddings")


def _refuse_unread(given: Fields, read: Collection[str]) -> None:
    """Raise UnsupportedOption for a field that is neither read nor without effect; null means a missing field."""
    for name in given:
        value = given.given(name)
        is_known = name in read or name in _WITHOUT_EFFECT or (name in _FIXED and value == _FIXED[name])
        if value is not None and not is_known:
            raise UnsupportedOption(
                f"{given.source}: {given.describe(name)}, which is not read from a params.json; pass the model's "
                "config.json instead"
            )


def _quantization(given: Fields) -> Mapping[str, Any]:
    """Return the `quantization_config`, which some files have under the name `quantization`."""
    quantised = given.inner("quantization")
    if quantised.given("quant_method") is not None:
        return dict(given.value("quantization"))
    weights = quantised.given("qformat_weight")
    return {"quant_method": "fp8" if weights == "fp8_e4m3" else weights}


def _family(given: Fields, layers: int) -> dict[str, Any]:
    """Return the type of a model and the fields that it alone has."""
    if given.given("kv_lora_rank") is not None:
        _refuse_unread(given, {*_COMMON, *_LATENT, "moe"})
        return {"model_type": "deepseek_v3", "num_key_value_heads": None} | _of_latents(given)
    if given.given("moe") is not None:
        _refuse_unread(given, {*_COMMON, "moe", "sliding_window"})
        return {"model_type": "mixtral", "sliding_window": given.given("sliding_window")} | _of_mixtral(given)
    if given.given("multiple_of") is not None:
        _refuse_unread(given, {*_COMMON, "multiple_of", "ffn_dim_multiplier"})
        return {"model_type": "llama", "intermediate_size": _width_of_llama(given), **_tie_of_llama(given, layers)}
    _refuse_unread(given, {*_COMMON, "sliding_window"})
    window = given.given("sliding_window")
    if not isinstance(window, list | tuple):
        return {"model_type": "mistral", "sliding_window": window}
    sizes = [each for each in window if each is not None]
    if not sizes or not isinstance(sizes[0], int) or any(each != sizes[0] for each in sizes):
        given.refuse(f"{given.describe('sliding_window')}; it must list null and one number of tokens")
    kinds = [FULL if window[layer % len(window)] is None else SLIDING for layer in range(layers)]
    return {"model_type": "ministral", "sliding_window": sizes[0], "layer_types": kinds}


def _of_mixtral(given: Fields) -> dict[str, Any]:
    """Return the fields of experts in layers with keys and values."""
    moe = given.inner("moe")
    _refuse_unread(moe, ("num_experts", "num_experts_per_tok"))
    return {
        "num_local_experts": moe.integer("num_experts"),
        "num_experts_per_tok": moe.given("num_experts_per_tok"),
    }


def _of_latents(given: Fields) -> dict[str, Any]:
    """Return the fields of latent attention and of its experts."""
    config = {name: given.given(name) for name in _LATENT}
    if given.given("yarn") is not None:
        yarn = given.inner("yarn")
        yarn.defaults = {"apply_scale": True}
        mscale = 1.0 if yarn.flag("apply_scale") else 0.0
        config["rope_scaling"] = {"rope_type": "yarn", "factor": yarn.number("factor"), "mscale_all_dim": mscale}
    if given.given("moe") is None:
        return config | {"n_routed_experts": None}
    moe = given.inner("moe")
    moe.defaults = {"num_shared_experts": 0, "first_k_dense_replace": 0}
    _refuse_unread(moe, {"num_experts", "num_experts_per_tok", "expert_hidden_dim", *moe.defaults})
    return config | {
        "n_routed_experts": moe.integer("num_experts"),
        "n_shared_experts": moe.integer("num_shared_experts", min=0),
        "moe_intermediate_size": moe.integer("expert_hidden_dim"),
        "first_k_dense_replace": moe.integer("first_k_dense_replace", min=0),
    }


def _width_of_llama(given: Fields) -> int:
    """Return the width of an MLP: two thirds of four times the hidden size, scaled and rounded up."""
    width = 8 * given.integer("dim") // 3
    if given.given("ffn_dim_multiplier") is not None:
        width = given.scaled(width, "ffn_dim_multiplier")
    multiple = given.integer("multiple_of")
    return multiple * ceil_div(width, multiple)


def _tie_of_llama(given: Fields, layers: int) -> dict[str, bool]:
    """Return the tie of embedding and head; a file that has `tied_embeddings` decides."""
    if given.given("tied_embeddings") is not None:
        return {}
    sizes = (given.given("dim"), layers, given.given("vocab_size"))
    return {"tie_word_embeddings": sizes in _TIED_LLAMAS}


def _with_tower(config: Mapping[str, Any], tower: Fields) -> dict[str, Any]:
    """Return a model of text and images with a Pixtral tower."""
    if tower.given("adapter_bias") not in (None, True, False):
        tower.refuse(f"{tower.describe('adapter_bias')}; it must be true or false")
    sides = {"image_size": tower.given("max_image_size") or tower.given("image_size")}
    vision = {"model_type": "pixtral", **{name: tower.given(name) for name in _TOWER}, **sides}
    is_merged = tower.given("mm_projector_id") == "patch_merge"
    if tower.given("mm_projector_id") not in (None, "", "patch_merge"):
        raise UnsupportedOption(
            f"{tower.source}: {tower.name('mm_projector_id')} is {shown(tower.given('mm_projector_id'))}; expected "
            "'patch_merge' or none: pass the model's config.json instead"
        )
    whole = {
        "model_type": "mistral3" if is_merged else "llava",
        "multimodal_projector_bias": tower.given("adapter_bias") is True,
        "spatial_merge_size": tower.given("spatial_merge_size"),
        "vision_config": {name: value for name, value in vision.items() if value is not None},
    }
    whole |= {name: config[name] for name in ("quantization_config", "tie_word_embeddings") if name in config}
    return whole | {"text_config": dict(config)}
