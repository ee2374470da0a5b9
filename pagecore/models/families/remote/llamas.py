"""Further families whose code is published together with their weights, with the layers of Llama or GPT-2.

Source: the configuration and modeling files of tencent/Tencent-Hunyuan-Large, microsoft/Phi-3-small-8k-instruct,
inclusionAI/Ling-mini-2.0, sarvamai/sarvam-30b, Tele-AI/TeleChat2-7B, pfnet/plamo-3-nict-8b-base, ByteDance/Ouro-1.4B,
IQuestLab/IQuest-Coder-V1-40B-Loop-Instruct, stepfun-ai/Step-Audio-EditX, inceptionai/jais-13b,
FreedomIntelligence/openPangu-Embedded-7B-V1.1, upstage/solar-pro-preview-instruct, allenai/Molmo-7B-D-0924, and the
models of vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.models.config_files.fields import Fields
from pagecore.models.families.common_fields import DIMS_OF_128, GROUPED, QWEN
from pagecore.models.families.family import Family, Heads, count_layers
from pagecore.models.families.full_attention import HUNYUAN
from pagecore.models.families.gpt import GPT_2_NAMES
from pagecore.models.layers.windows import layers_above
from pagecore.storage.checks import LAYERS_MAX

__all__ = ["REMOTE_LLAMAS", "passes_over_layers"]


def _scale_of_phi_3_small(fields: Fields, head_dim: int, _layer: int) -> float | None:
    """Return the scale of muP, which divides by the dim instead of its root."""
    return fields.number("mup_attn_multiplier") / head_dim if fields.flag("mup_use_scaling") else None


def _scale_of_jais(fields: Fields, head_dim: int, _layer: int) -> float | None:
    return 1.0 / head_dim if fields.flag("mup_scale_qk_dot_by_d") else None


def passes_over_layers(name: str, default: int) -> Family:
    """Return a family whose stack of layers is passed several times; each pass stores keys and values of its own."""

    def layers(fields: Fields) -> int:
        own = count_layers(fields)
        passes = fields.integer(name, max=LAYERS_MAX)
        if own * passes > LAYERS_MAX:
            fields.refuse(f"{fields.describe(name)}; times num_hidden_layers, {own}, it must be at most {LAYERS_MAX}")
        return own * passes

    return Family({**GROUPED, name: default}, count_layers=layers)


def _slides_after_the_first_pass(fields: Fields, layer: int) -> bool:
    return layer >= fields.integer("num_hidden_layers")


def _all_but_every_nth(fields: Fields, layer: int) -> bool:
    return (layer + 1) % fields.integer("sliding_window_pattern") != 0


def _window_of_plamo(fields: Fields) -> int:
    """Return the window: `window_size`, or the first entry of the list `sliding_window` that is not null."""
    listed = fields.given("interleaved_sliding_window") or fields.given("sliding_window")
    if not isinstance(listed, list | tuple):
        return fields.integer("sliding_window" if fields.given("sliding_window") is not None else "window_size")
    sizes = {each for each in listed if each is not None}
    if len(sizes) != 1 or type(next(iter(sizes))) is not int or next(iter(sizes)) < 1:
        fields.refuse(f"{fields.describe('sliding_window')}; it must list null and one number of tokens")
    return int(sizes.pop())


def _heads_of_step(fields: Fields, heads: Heads, _layer: int, _slides: bool) -> Heads:
    """Return the groups of keys and values: `num_attention_groups`, else `num_key_value_heads`, else 1."""
    names = ("num_attention_groups", "num_key_value_heads")
    name = next((each for each in names if fields.given(each) is not None), None)
    return replace(heads, kv_heads=1) if name is None else replace(heads, kv_heads=fields.integer(name), kv_field=name)


_PHI_3_SMALL: Mapping[str, object] = {
    "num_key_value_heads": 8,
    "mup_use_scaling": True,
    "mup_attn_multiplier": 1.0,
}
_LOOP = passes_over_layers("loop_num", 2)
_PLAMO_3: Mapping[str, object] = {
    **DIMS_OF_128,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "window_size": 2048,
    "sliding_window_pattern": 8,
    "layer_types": None,
}
# Its file has a window, which no engine applies: all layers attend to all preceding tokens.
_SOLAR: Mapping[str, object] = {**GROUPED, "sliding_window": None}
_TELECHAT = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "max_position_embeddings": "seq_length"}
_BAILING = Family(QWEN, layers_above)

REMOTE_LLAMAS: Mapping[str, Family] = {
    **dict.fromkeys(("aquila", "internlm", "openpangu_dense", "orion", "PanguEmbedded"), Family(GROUPED)),
    **dict.fromkeys(("skywork", "telechat3", "xverse", "Yi"), Family(GROUPED)),
    "bailing_moe_v2": _BAILING,
    "hunyuan": HUNYUAN,
    "iquestloopcoder": replace(
        _LOOP,
        defaults={**_LOOP.defaults, "sliding_window": 64},
        slides=_slides_after_the_first_pass,
        aliases={"sliding_window": "loop_window_size"},
    ),
    "molmo": Family(GROUPED),
    "jais": Family({"mup_scale_qk_dot_by_d": False}, scale=_scale_of_jais, aliases=GPT_2_NAMES),
    "ouro": passes_over_layers("total_ut_steps", 4),
    "phi3small": Family(_PHI_3_SMALL, scale=_scale_of_phi_3_small),
    "plamo3": Family(_PLAMO_3, _all_but_every_nth, window=_window_of_plamo),
    "sarvam_moe": _BAILING,
    "solar": Family(_SOLAR),
    "step1": Family({"num_key_value_heads": None}, heads=_heads_of_step),
    "telechat": Family(GROUPED, aliases=_TELECHAT),
}
