"""Structure of the layers of further families whose code is published together with their weights.

Source: as for `pagecore.models.families.remote.llamas` and `hybrids`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Tally
from pagecore.models.parameters.counting.traits import Experts, Settled, Traits, biased_traits
from pagecore.models.parameters.structures.common_traits import LLAMA
from pagecore.storage import Alias

__all__ = ["REMOTE_LLAMAS", "weights_of_pass"]


def _hunyuan(fields: Fields) -> Settled:
    """Experts are as wide as a dense MLP unless they have a width of their own; one expert is a dense MLP."""
    count = fields.given("num_experts")
    if count is None or (isinstance(count, int) and count <= 1):
        return {"experts": None}
    has_own = fields.given("moe_intermediate_size") is not None
    has_shared = bool(fields.given("use_mixed_mlp_moe"))
    return {
        "experts": Experts(
            width="moe_intermediate_size" if has_own else "intermediate_size",
            shared="num_shared_expert" if has_shared else "",
            shared_width="intermediate_size",
        )
    }


def _key_norm_of_hunyuan(tally: Tally, fields: Fields, specs: Sequence[Any], _layer: int) -> None:
    """Add the norm that a layer applies to keys that an earlier layer has stored."""
    if any(isinstance(spec, Alias) for spec in specs) and fields.flag("use_qk_norm"):
        tally.norm(next(spec.head_dim for spec in specs if not isinstance(spec, Alias)))


def weights_of_pass(fields: Fields, layer: int) -> int:
    """Return the layer of the first pass whose weights a layer uses."""
    return layer % fields.integer("num_hidden_layers")


def _exit_gate_of_ouro(fields: Fields) -> Settled:
    """The gate that decides on another pass reads the hidden state."""
    return {"last": fields.integer("hidden_size") + 1}


def _gates_of_loop(tally: Tally, fields: Fields, _specs: Sequence[Any], _layer: int) -> None:
    """Add the gate between the attention of the first pass and that of another."""
    heads = fields.integer("num_attention_heads")
    tally.add(heads * (fields.integer("hidden_size") // heads + 1))


def _jais(fields: Fields) -> Settled:
    learned = fields.value("position_embedding_type") == "learned"
    return {"is_gated": fields.given("activation_function") == "swiglu", "has_positions": learned}


def _telechat(tally: Tally, fields: Fields, _specs: Sequence[Any], _layer: int) -> None:
    """Add the bias of the last projection of an MLP, the only one with a bias."""
    tally.add(fields.integer("hidden_size"))


# The tower of Molmo, which its config does not describe: a ViT-L of 23 layers with 577 positions for patches of 14, and
# the attention that pools the outputs of two layers.
_TOWER_OF_MOLMO = (
    23 * (4 * 1024 * 1025 + 4096 * 1025 + 1024 * 4097 + 4 * 1024)
    + (3 * 14**2 + 577 + 1 + 2) * 1024
    + 3 * 1024 * 2049
    + 1024 * 1025
    + 2 * 2048
)


def _molmo(fields: Fields) -> Settled:
    """The embedding and the head may have further rows, the embedding those of images; the projector is an MLP."""
    hidden, width = fields.integer("hidden_size"), fields.integer("intermediate_size") // 2
    padded = 0
    if fields.value("embedding_size") is not None:
        padded = max(0, fields.integer("embedding_size") - fields.integer("vocab_size")) * hidden
    projector = 2 * 1024 * width + width * hidden
    return {"width": width, "first": padded + 128 * hidden + _TOWER_OF_MOLMO + projector, "last": padded}


def _param(fields: Fields) -> Settled:
    """A field may have the width of all shared experts together."""
    name = "moe_shared_expert_intermediate_size"
    shared = "num_shared_experts" if fields.given(name) is None else name
    return {"experts": Experts(shared=shared, rule="after")}


_BAILING = Traits(
    qkv_bias="use_qkv_bias",
    output_bias="use_bias",
    qk_norm="head",
    qk_norm_field="use_qk_norm",
    experts=Experts(shared="num_shared_experts", rule="after"),
    defaults={"first_k_dense_replace": 0, "num_shared_experts": 0},
)
_HUNYUAN = biased_traits(
    mlp_bias="mlp_bias", qk_norm="head", qk_norm_field="use_qk_norm", settle=_hunyuan, add_to_layer=_key_norm_of_hunyuan
)
_BIASED = Traits(qkv_bias="bias", output_bias="bias", defaults={"bias": True})

REMOTE_LLAMAS: Mapping[str, Traits] = {
    **dict.fromkeys(("aquila", "skywork", "xverse", "Yi"), Traits()),
    **dict.fromkeys(("internlm", "openpangu_dense", "PanguEmbedded"), _BIASED),
    "bailing_moe_linear": replace(
        _BAILING, defaults={"first_k_dense_replace": 1, "num_shared_experts": 1, "use_qk_norm": True}
    ),
    **dict.fromkeys(("bailing_moe", "bailing_moe_v2"), _BAILING),
    "hunyuan": _HUNYUAN,
    "iquestloopcoder": replace(LLAMA, weights_of_layer=weights_of_pass, add_to_layer=_gates_of_loop),
    "jais": Traits(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        is_tied=True,
        settle=_jais,
        defaults={"position_embedding_type": "learned", "intermediate_size": None},
        aliases={"intermediate_size": "n_inner"},
    ),
    "molmo": Traits(
        qkv_bias="qkv_bias",
        qk_norm="width",
        qk_norm_field="attention_layer_norm",
        settle=_molmo,
        defaults={"qkv_bias": False, "attention_layer_norm": False, "embedding_size": None},
    ),
    "orion": Traits(norm_bias=True),
    "ouro": Traits(norms=4, weights_of_layer=weights_of_pass, settle=_exit_gate_of_ouro),
    "param2moe": replace(_BAILING, settle=_param, defaults={"first_k_dense_replace": 1, "num_shared_experts": 1}),
    "phi3small": Traits(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        is_tied=True,
        defaults={"intermediate_size": 14336},
        aliases={"intermediate_size": "ff_intermediate_size"},
    ),
    "plamo2": Traits(norms=4, qk_norm="width", is_tied=True),
    "plamo3": Traits(norms=4, qk_norm="head", is_tied=True),
    "sarvam_moe": replace(
        _BAILING,
        defaults={"first_k_dense_replace": 1, "num_shared_experts": 1, "use_qk_norm": True},
        # Names in files that transformers has written.
        aliases={"num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias"},
    ),
    "solar": LLAMA,
    "step1": biased_traits(mlp_bias="mlp_bias", is_tied=True),
    "telechat": Traits(output_bias=True, add_to_layer=_telechat, aliases={"intermediate_size": "ffn_hidden_size"}),
    "telechat3": LLAMA,
}
