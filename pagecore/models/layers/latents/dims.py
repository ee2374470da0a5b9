"""Latent attention (MLA) of a config: dims of the stored latents, and the scale of the scores.

Source: the modeling files of DeepSeek-V2 and DeepSeek-V3, and of their kin, in transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pagecore.arrays import DType
from pagecore.models.config_files.fields import Fields
from pagecore.storage import LatentSpec

__all__ = ["latent_spec"]


def latent_spec(
    fields: Fields,
    heads: int,
    dtype: DType,
    format: str | None,
    *,
    rope_min: int = 1,
    checks_heads: bool = True,
    rotates: bool = True,
) -> LatentSpec:
    """Return the spec of every layer of a family with latent attention.

    `rope_min` is the least dim of the rotary part. A family that does not read `num_key_value_heads` in these layers
    passes `checks_heads` False, and one that rotates no part of queries and keys passes `rotates` False: the parameters
    of a rotary embedding do not change its scores.

    Raises
    ------
    ConfigError
        An invalid dim or rotary embedding, or fewer key-value heads than query heads.
    PagecoreError
        As `LatentSpec`, for a format that does not store latents of these dims.
    """
    given = fields.value("num_key_value_heads") if checks_heads else None
    if given is not None and fields.integer("num_key_value_heads") != heads:
        fields.refuse(
            f"{fields.describe('num_key_value_heads')}; it must equal {fields.name('num_attention_heads')}, {heads}, "
            "because latent attention computes a key and a value for every head"
        )
    rope_dim = fields.integer("qk_rope_head_dim", min=rope_min)
    mscale = _mscale(fields) if rotates else 1.0
    scale = (fields.integer("qk_nope_head_dim") + rope_dim) ** -0.5 * mscale * mscale
    if not math.isfinite(scale):
        fields.refuse(f"the rotary embedding multiplies the scores by {scale}; correct its mscale_all_dim and factor")
    spec = LatentSpec(
        fields.integer("kv_lora_rank"),
        rope_dim,
        heads,
        scale=scale,
        dtype=dtype,
    )
    return spec if format is None else spec.with_format(format)


def _mscale(fields: Fields) -> float:
    """Return the factor of YaRN that queries and keys are both multiplied by; 1 without one."""
    rope = _rope(fields)
    if rope is None or (rope.given("rope_type") or rope.given("type") or "default") == "default":
        return 1.0
    rope.defaults = {"mscale_all_dim": 0.0}
    if rope.given("mscale_all_dim") is None:
        return 1.0
    strength = rope.number("mscale_all_dim")
    factor = rope.number("factor") if strength else 1.0
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def _rope(fields: Fields) -> Fields | None:
    """Return the parameters of the rotary embedding; older files call them rope_scaling, which takes precedence."""
    for name in ("rope_scaling", "rope_parameters"):
        given = fields.given(name)
        if given is None:
            given = fields.defaults.get(name)  # transformers replaces null by the family's default
        if given is not None and not isinstance(given, Mapping):
            fields.refuse(f"{fields.describe(name)}; it must be an object")
        if given:
            return Fields(given, fields.source, fields.name(name))
    return None
