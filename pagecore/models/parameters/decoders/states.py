"""Parameters of layers with recurrent states, from the planes of the state and the flags of the config.

Source: the modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.layers.states.kinds import kimi_fields
from pagecore.models.parameters.counting.tally import Kind, Split, Tally
from pagecore.models.parameters.decoders.remote_states import (
    add_delta_rule_of_jet,
    add_lightning_of_ling,
    add_lightning_of_minicpm,
    add_mamba_of_plamo,
)
from pagecore.models.parameters.decoders.rwkv_xlstm import add_rwkv, add_xlstm
from pagecore.storage import StateSpec
from pagecore.storage.checks import ceil_div

__all__ = ["STATE_LAYERS"]

Adder = Callable[[Tally, Fields, StateSpec], None]


def _convolution(tally: Tally, spec: StateSpec, bias: bool = False) -> int:
    """Add a depthwise convolution; return its channels."""
    channels, kept = spec.planes[0].shape
    tally.add(channels * (kept + 1 + bias), Kind.OTHER, Split.TENSOR)
    return channels


def _nothing(_tally: Tally, _fields: Fields, _spec: StateSpec) -> None:
    """Add nothing: the state is counted with the attention of its layer."""


def _delta_rule(tally: Tally, fields: Fields, spec: StateSpec) -> None:
    hidden, channels = fields.integer("hidden_size"), _convolution(tally, spec)
    heads, value_dim, _ = spec.planes[1].shape
    tally.linear(hidden, channels + heads * value_dim, name="in_proj_qkvz")
    tally.linear(hidden, 2 * heads, name="in_proj_ba")
    tally.add(2 * heads, Kind.OTHER, Split.TENSOR)
    tally.norm(value_dim)
    tally.linear(heads * value_dim, hidden, name="out_proj")


def _kimi_delta_rule(tally: Tally, fields: Fields, spec: StateSpec) -> None:
    hidden, channels = fields.integer("hidden_size"), _convolution(tally, spec)
    heads, dim, _ = spec.planes[1].shape
    width = heads * dim
    tally.linear(hidden, channels, name="q_proj")
    # The gate of forgetting has low rank, and so has that of the output, except in Kimi K3.
    inner = kimi_fields(fields) if "linear_attn_config" in fields.defaults else None
    is_full = inner is not None and inner.switch("use_full_rank_gate", False)
    tally.linear(hidden, dim, copies=2 - is_full, split=Split.COPY, name="f_a_proj")
    tally.linear(dim, width, copies=2 - is_full, name="f_b_proj")
    if is_full:
        tally.linear(hidden, width, name="g_proj")
    tally.linear(hidden, heads, name="b_proj")
    tally.add(width + heads, Kind.OTHER, Split.TENSOR)
    tally.norm(dim)
    tally.linear(width, hidden, name="o_proj")


def _state_of_ling(tally: Tally, fields: Fields, spec: StateSpec) -> None:
    if len(spec.planes) == 1:
        add_lightning_of_ling(tally, fields, spec)
        return
    hidden, channels = fields.integer("hidden_size"), _convolution(tally, spec)
    heads, dim, _ = spec.planes[1].shape
    width = heads * dim
    tally.linear(hidden, channels, name="q_proj")
    tally.linear(hidden, width, copies=2, name="g_proj")
    tally.linear(hidden, heads, name="b_proj")
    tally.add(width + heads, Kind.OTHER, Split.TENSOR)
    tally.norm(dim)
    tally.linear(width, hidden, name="o_proj")


def _state_of_solar(tally: Tally, fields: Fields, spec: StateSpec) -> None:
    """Add Kimi delta attention, whose gates may have the rank of the heads' width."""
    (_state_of_ling if fields.flag("kda_use_full_proj") else _kimi_delta_rule)(tally, fields, spec)


def _lightning(tally: Tally, fields: Fields, spec: StateSpec) -> None:
    hidden, (heads, dim, _) = fields.integer("hidden_size"), spec.planes[0].shape
    width = heads * dim
    tally.linear(hidden, 3 * width, name="qkv_proj")
    tally.linear(hidden, width, name="output_gate")
    tally.linear(width, hidden, name="out_proj")
    tally.norm(width)


def _recurrent_unit(tally: Tally, fields: Fields, spec: StateSpec) -> None:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    width = _convolution(tally, spec, bias=True)
    tally.linear(hidden, width, copies=2, bias=True, name="linear_y")
    tally.linear(width, hidden, bias=True, name="linear_out")
    # Each head has a block of both gates; every channel has a bias of both, and a rate of decay.
    tally.add(2 * width * (width // heads) + 3 * width, Kind.OTHER, Split.TENSOR)


def _mamba_1(rank_field: str, conv_bias: str, proj_bias: str, has_norms: bool = False) -> Adder:
    def add(tally: Tally, fields: Fields, spec: StateSpec) -> None:
        hidden, has_bias = fields.integer("hidden_size"), fields.flag(proj_bias)
        channels = _convolution(tally, spec, fields.flag(conv_bias))
        state = spec.planes[1].shape[-1]
        automatic = fields.given(rank_field) in (None, "auto")
        rank = ceil_div(hidden, 16) if automatic else fields.integer(rank_field)
        tally.linear(hidden, 2 * channels, bias=has_bias, name="in_proj")
        tally.linear(channels, rank + 2 * state, name="x_proj")
        tally.linear(rank, channels, bias=True, name="dt_proj")
        tally.add(channels * (state + 1), Kind.OTHER, Split.TENSOR)
        tally.linear(channels, hidden, bias=has_bias, name="out_proj")
        if has_norms:
            tally.norm(rank + 2 * state)

    return add


def _mamba_2(conv_bias: str, proj_bias: str, norm: str = "", output_bias: str = "") -> Adder:
    def add(tally: Tally, fields: Fields, spec: StateSpec) -> None:
        hidden, has_bias = fields.integer("hidden_size"), fields.flag(proj_bias)
        channels = _convolution(tally, spec, not conv_bias or fields.flag(conv_bias))
        heads, dim, _ = spec.planes[1].shape
        tally.linear(hidden, heads * dim + channels + heads, bias=has_bias, name="in_proj")
        tally.add(3 * heads, Kind.OTHER, Split.TENSOR)
        if not norm or fields.flag(norm):
            tally.add(heads * dim, Kind.OTHER, Split.TENSOR)
        has_output_bias = fields.flag(output_bias or proj_bias)
        tally.linear(heads * dim, hidden, bias=has_output_bias, name="out_proj")

    return add


def _short_convolution(tally: Tally, fields: Fields, spec: StateSpec) -> None:
    hidden, has_bias = fields.integer("hidden_size"), fields.flag("conv_bias")
    _convolution(tally, spec, has_bias)
    tally.linear(hidden, 3 * hidden, bias=has_bias, name="in_proj")
    tally.linear(hidden, hidden, bias=has_bias, name="out_proj")


_OF_MAMBA = _mamba_1("time_step_rank", "use_conv_bias", "use_bias")
_NAMED = _mamba_2("mamba_conv_bias", "mamba_proj_bias")

STATE_LAYERS: Mapping[str, Adder] = {
    "qwen3_next": _delta_rule,
    "qwen3_5_text": _delta_rule,
    "qwen3_5_moe_text": _delta_rule,
    **dict.fromkeys(("qwen4_exp_text", "qwen3_8_flash_next_text"), _delta_rule),
    "lara_mini": _delta_rule,
    "jet_nemotron": add_delta_rule_of_jet,
    "kimi_linear": _kimi_delta_rule,
    "glm5_next_text": _kimi_delta_rule,
    "solar_open2": _state_of_solar,
    **dict.fromkeys(("inkling_model", "inkling_text", "inkling2_text", "inkling2_loop_text", "zaya"), _nothing),
    "nemotron_h": _mamba_2("use_conv_bias", "use_bias"),
    "granitemoehybrid": _NAMED,
    "falcon_h1": _mamba_2("mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm", "projectors_bias"),
    "jamba": _mamba_1("mamba_dt_rank", "mamba_conv_bias", "mamba_proj_bias", has_norms=True),
    "bamba": _NAMED,
    "zamba2": _mamba_2("", "add_bias_linear"),
    "olmo_hybrid": _delta_rule,
    "zamba": _mamba_1("mamba_dt_rank", "mamba_conv_bias", "mamba_proj_bias"),
    "lfm3": _short_convolution,
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
    "minimax": _lightning,
    "minimax_text_01": _lightning,
    "minimax_m1": _lightning,
    "bailing_hybrid": _state_of_ling,
    "bailing_moe_linear": add_lightning_of_ling,
    "minicpm_sala": add_lightning_of_minicpm,
    "plamo2": add_mamba_of_plamo,
    "recurrent_gemma": _recurrent_unit,
    "mamba": _OF_MAMBA,
    "falcon_mamba": _OF_MAMBA,
    "mamba2": _mamba_2("use_conv_bias", "use_bias"),
    "rwkv": add_rwkv,
    "xlstm": add_xlstm,
}
