"""Families with latent attention (MLA), and the specs of their layers.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pagecore.arrays import DType
from pagecore.errors import UnsupportedOption
from pagecore.models.fields import Fields, shown
from pagecore.models.unserved import FULL
from pagecore.storage import LatentSpec
from pagecore.storage.checks import LAYERS_MAX

__all__ = ["LATENT_FAMILIES", "latent_layers"]

# Defaults of the fields of each family, besides num_hidden_layers and num_attention_heads, which are required.
_DEEPSEEK: Mapping[str, object] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "num_key_value_heads": None,
    "max_position_embeddings": None,
    "rope_parameters": None,
    "rope_scaling": None,
}
LATENT_FAMILIES: Mapping[str, Mapping[str, object]] = {"deepseek_v2": _DEEPSEEK, "deepseek_v3": _DEEPSEEK}
_UNREAD = (
    "sliding_window",
    "attn_logit_softcapping",
    "attention_chunk_size",
    "index_topk",
    "use_bidirectional_attention",
)


def latent_layers(fields: Fields, model_type: str, dtype: DType) -> tuple[LatentSpec, ...]:
    """Return the spec of each layer of a model with latent attention.

    Parameters
    ----------
    fields : Fields
        Fields of the text model; their defaults are replaced by those of the family.
    model_type : str
        One of `LATENT_FAMILIES`.
    dtype : DType
        Dtype of the latents.

    Raises
    ------
    ConfigError
        A field is missing or invalid.
    UnsupportedOption
        A field that would change the cache or the attention, and that the family does not read.
    """
    fields.defaults = LATENT_FAMILIES[model_type]
    num_layers = fields.integer("num_hidden_layers", max=LAYERS_MAX)
    heads = fields.integer("num_attention_heads")
    _refuse_unread(fields, model_type, num_layers, heads)
    rope_dim = fields.integer("qk_rope_head_dim")
    spec = LatentSpec(
        fields.integer("kv_lora_rank"),
        rope_dim,
        heads,
        scale=(fields.integer("qk_nope_head_dim") + rope_dim) ** -0.5 * _mscale(fields) ** 2,
        dtype=dtype,
    )
    return (spec,) * num_layers


def _mscale(fields: Fields) -> float:
    """Return the factor of queries and keys that YaRN prescribes; 1 without it."""
    name = "rope_parameters" if fields.given("rope_parameters") is not None else "rope_scaling"
    if fields.given(name) is None:
        return 1.0
    rope = fields.inner(name)
    rope.defaults = {"rope_type": None, "type": None, "mscale_all_dim": 0.0, "factor": 1.0}
    kind = rope.given("rope_type") or rope.given("type") or "default"
    mscale = 0.0 if rope.given("mscale_all_dim") is None else rope.number("mscale_all_dim")
    if kind == "default" or mscale == 0.0:
        return 1.0
    factor = rope.number("factor")
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _refuse_unread(fields: Fields, model_type: str, num_layers: int, heads: int) -> None:
    implied: dict[str, object] = dict.fromkeys(_UNREAD)
    implied |= {"layer_types": [FULL] * num_layers, "num_key_value_heads": heads, "is_causal": True}
    for name, value in implied.items():
        if fields.given(name) not in (None, False, value):
            raise UnsupportedOption(
                f"{fields.source}: {fields.describe(name)}, but {model_type} attends as if it were {shown(value)}; "
                "set it so, or leave it out"
            )
