"""Structure of the layers of GPT-2 and decoders of its time.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.traits import Settled, Traits, biased_traits
from pagecore.models.parameters.structures.common_traits import BIASED

__all__ = ["GPT"]


def _width_or_four_times(fields: Fields, name: str = "intermediate_size") -> int:
    """Return the width of the MLP: a field, or four times the hidden size."""
    return 4 * fields.integer("hidden_size") if fields.value(name) is None else fields.integer(name)


def _four_times(fields: Fields) -> Settled:
    return {"width": _width_or_four_times(fields)}


def _bloom(fields: Fields) -> Settled:
    """A norm follows the embedding."""
    hidden = fields.integer("hidden_size")
    return {"width": 4 * hidden, "first": 2 * hidden}


def _mpt(fields: Fields) -> Settled:
    return {"width": 4 * fields.integer("hidden_size")}


def _gpt_neox_japanese(fields: Fields) -> Settled:
    """Only the attention of the last layer has a bias."""
    hidden = fields.integer("hidden_size")
    return {"width": fields.integer("intermediate_multiple_size") * hidden, "last": hidden}


def _falcon(fields: Fields) -> Settled:
    """Attention and MLP share a norm, unless they have one each."""
    separate = fields.value("num_ln_in_parallel_attn")
    if separate is None:
        separate = 2 if fields.flag("new_decoder_architecture") else 1
    both = separate == 2 or not fields.flag("parallel_attn")
    return {"width": _width_or_four_times(fields), "norms": 2 if both else 1}


def _opt(fields: Fields) -> Settled:
    """Embeddings may be narrower than the layers, and norms may have no parameters."""
    hidden, has_weights = fields.integer("hidden_size"), fields.flag("layer_norm_elementwise_affine")
    width = hidden if fields.value("word_embed_proj_dim") is None else fields.integer("word_embed_proj_dim")
    projection = hidden * width * (width != hidden)
    ends = has_weights and fields.flag("do_layer_norm_before") and not fields.flag("_remove_final_layer_norm")
    return {
        "norms": 2 * has_weights,
        "has_last_norm": ends,
        "embedding_width": width,
        "first": projection,
        "last": projection,
    }


def _gpt(settle: Callable[[Fields], Settled] | None = _four_times, **different: object) -> Traits:
    """Return the traits of GPT-2 with some differences."""
    common: dict[str, object] = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "norm_bias", "is_tied"), True)
    common |= {"is_gated": False, "aliases": {"intermediate_size": "n_inner"}, "settle": settle}
    common["defaults"] = {"intermediate_size": None}
    return Traits(**{**common, **different})  # type: ignore[arg-type]


_GPT_J = _gpt(qkv_bias=False, output_bias=False, norms=1, is_tied=False, has_head_bias=True)
_OPT_DEFAULTS: Mapping[str, object] = {
    **dict.fromkeys(("enable_bias", "layer_norm_elementwise_affine", "do_layer_norm_before"), True),
    "_remove_final_layer_norm": False,
    "word_embed_proj_dim": None,
}
_FALCON_DEFAULTS: Mapping[str, object] = {
    "bias": False,
    "intermediate_size": None,
    "num_ln_in_parallel_attn": None,
    "parallel_attn": True,
}

GPT: Mapping[str, Traits] = {
    "biogpt": _gpt(None, aliases={}, defaults={}, has_positions=True, position_rows=2),
    "bloom": _gpt(_bloom, aliases={}),
    "codegen": _GPT_J,
    "ctrl": _gpt(None, aliases={"intermediate_size": "dff"}, defaults={}, has_head_bias=True),
    "falcon": _gpt(
        _falcon,
        qkv_bias="bias",
        output_bias="bias",
        mlp_bias="bias",
        aliases={"intermediate_size": "ffn_hidden_size"},
        defaults=_FALCON_DEFAULTS,
    ),
    "gpt2": Traits(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        is_gated=False,
        is_tied=True,
        has_positions=True,
        aliases={"intermediate_size": "n_inner"},
    ),
    "gpt_bigcode": _gpt(has_positions=True),
    "gpt_neo": _gpt(qkv_bias=False, has_positions=True, aliases={}),
    "gpt_neox": biased_traits(mlp_bias=True, norm_bias=True, is_gated=False, defaults=BIASED),
    "gpt_neox_japanese": _gpt(
        _gpt_neox_japanese,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        aliases={},
        defaults={"intermediate_multiple_size": 4},
    ),
    "gptj": _GPT_J,
    "mpt": _gpt(_mpt, qkv_bias=False, output_bias=False, mlp_bias=False, norm_bias=False, aliases={}),
    "openai-gpt": _gpt(_mpt, aliases={}, has_positions=True, has_last_norm=False),
    "opt": _gpt(
        _opt,
        qkv_bias="enable_bias",
        output_bias="enable_bias",
        mlp_bias="enable_bias",
        aliases={"intermediate_size": "ffn_dim"},
        defaults=_OPT_DEFAULTS,
        has_positions=True,
        position_rows=2,
    ),
    "xglm": _gpt(None, aliases={"intermediate_size": "ffn_dim"}, defaults={}),
}
