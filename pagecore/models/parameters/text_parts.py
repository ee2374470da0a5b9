"""Structure of the layers of text models of multimodal models, of recent decoders, and of decoders of BERT's kin.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagecore.models.fields import Fields
from pagecore.models.parameters.traits import Experts, Settled, Traits, biased_traits

__all__ = ["BERT_TRAITS", "TEXT_TRAITS"]

_BIASED: Mapping[str, object] = {"attention_bias": True}
# A gate of the width of the queries, whatever a config says.
_GATED = {"gate_kind": "features"}
_SHARED = Experts("n_routed_experts", shared="n_shared_experts", rule="after")


def _molmo(fields: Fields) -> Settled:
    """The embedding has rows of its own for tokens of images."""
    rows = fields.integer("additional_vocab_size", min=0)
    return {"first": rows * fields.integer("hidden_size")}


def _voxtral(fields: Fields) -> Settled:
    """Each layer has a norm that is conditioned on the delay."""
    return {"activation": 2 * fields.integer("ada_rms_norm_t_cond_dim") * fields.integer("hidden_size")}


def _ax_k2(fields: Fields) -> Settled:
    """The norm before attention has a gate of low rank."""
    return {"activation": 2 * fields.integer("hidden_size") * fields.integer("gated_norm_rank")}


def _beam(fields: Fields) -> Settled:
    """The gate of attention has a bias for each head."""
    return {"activation": fields.integer("num_attention_heads")}


def _kosmos_2(fields: Fields) -> Settled:
    """Norms inside attention and MLP have biases."""
    return {"activation": fields.integer("intermediate_size") + 2 * fields.integer("hidden_size")}


def _kosmos_2_5(fields: Fields) -> Settled:
    """The norm inside the MLP has a bias; two segments are embedded."""
    return {"activation": fields.integer("intermediate_size"), "first": 2 * fields.integer("hidden_size")}


def _kosmos(settle: Callable[[Fields], Settled]) -> Traits:
    return Traits(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        is_gated=False,
        has_mlp_norm=True,
        is_tied=True,
        aliases={"intermediate_size": "ffn_dim"},
        settle=settle,
    )


TEXT_TRAITS: Mapping[str, Traits] = {
    "axk2": biased_traits(
        has_gated_queries=True,
        experts=Experts("n_routed_experts", shared="n_shared_experts", rule="after", gate_rank="gated_norm_rank"),
        settle=_ax_k2,
        defaults={"gated_norm_rank": 16, "first_k_dense_replace": 1},
    ),
    "beam": biased_traits(
        norms=4,
        qk_norm="head",
        output_gate="gate_kind",
        experts=Experts(rule="after"),
        settle=_beam,
        defaults={**_GATED, "first_k_dense_replace": 3},
    ),
    "cohere_compass_text": biased_traits(norms=1, is_tied=True),
    "cosmos3_edge_text": biased_traits(is_gated=False),
    "emu3_text_model": biased_traits(mlp_bias="mlp_bias"),
    "flint": biased_traits(
        qk_norm="head",
        experts=Experts(shared="shared_expert_intermediate_size", rule="after"),
        defaults={"first_k_dense_replace": 2, "shared_expert_intermediate_size": 1024},
    ),
    "glm4v_moe_text": Traits(
        qkv_bias="attention_bias", experts=_SHARED, defaults={**_BIASED, "first_k_dense_replace": 1}
    ),
    "glm_ocr_text": Traits(qkv_bias="attention_bias", norms=4),
    "granite4_vision_text": biased_traits(mlp_bias="mlp_bias"),
    "granite_docling_text": biased_traits(mlp_bias="mlp_bias", is_tied=True),
    "hunyuan_vl_text": biased_traits(qk_norm="head", is_tied=True),
    "kosmos_2_5_text_model": _kosmos(_kosmos_2_5),
    "kosmos_2_text_model": _kosmos(_kosmos_2),
    "molmo2_text": Traits(
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_field="use_qk_norm",
        settle=_molmo,
        defaults={"use_qk_norm": True, "additional_vocab_size": 128},
        aliases={"attention_bias": "qkv_bias"},
    ),
    "muse_glimmer_text": Traits(norms=4, output_gate="gate_kind", defaults=_GATED),
    "paddleocr_vl_text": Traits(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", is_tied=True),
    "qwen2_5_omni_text": Traits(qkv_bias=True),
    "qwen3_omni_moe_text": biased_traits(qk_norm="head", experts=Experts(rule="step")),
    "voxtral_realtime_text": Traits(settle=_voxtral, defaults={"ada_rms_norm_t_cond_dim": 32}),
}


def _embedded(fields: Fields, *, has_norm: bool = True, extra: int = 0) -> int:
    """Return the parameters of the embedding besides words and positions: types of tokens, further rows and a norm."""
    width = fields.integer("hidden_size")
    return (fields.integer("type_vocab_size") + extra + 2 * has_norm) * width


def _head(fields: Fields) -> int:
    """Return the parameters of a layer and a norm before the output head."""
    hidden = fields.integer("hidden_size")
    return hidden * hidden + 3 * hidden


def _bert(fields: Fields) -> Settled:
    return {"first": _embedded(fields), "last": _head(fields)}


def _bert_generation(fields: Fields) -> Settled:
    return {"first": 2 * fields.integer("hidden_size")}


def _ernie(fields: Fields) -> Settled:
    """Types of tasks may be embedded."""
    tasks = fields.integer("task_type_vocab_size") if fields.flag("use_task_id") else 0
    return {"first": _embedded(fields, extra=tasks), "last": _head(fields)}


def _norm_after_the_layers(fields: Fields) -> Settled:
    """A norm follows the layers, not the embedding."""
    return {"first": _embedded(fields, has_norm=False), "last": _head(fields)}


def _big_bird(fields: Fields) -> Settled:
    """A pooling layer follows the layers."""
    hidden = fields.integer("hidden_size")
    return {"first": _embedded(fields), "last": _head(fields) + hidden * hidden + hidden}


def _rembert(fields: Fields) -> Settled:
    """Embeddings of inputs and outputs have widths of their own."""
    hidden, inputs = fields.integer("hidden_size"), fields.integer("input_embedding_size")
    outputs = fields.integer("output_embedding_size")
    rows = fields.integer("type_vocab_size") + fields.integer("max_position_embeddings") + 2
    return {
        "embedding_width": inputs,
        "first": rows * inputs + inputs * hidden + hidden,
        "last": hidden * outputs + 3 * outputs + fields.integer("vocab_size") * (outputs - inputs),
    }


def _roc_bert(fields: Fields) -> Settled:
    """Shapes and pronunciations of characters are embedded, too, and projected together."""
    hidden, width, first = fields.integer("hidden_size"), 0, _embedded(fields)
    for name in ("pronunciation", "shape"):
        dim = fields.integer(f"{name}_embed_dim")
        first += fields.integer(f"{name}_vocab_size") * dim
        width += dim * fields.flag(f"enable_{name}")
    if fields.flag("concat_input"):
        first += (hidden + width) * hidden + hidden
    return {"first": first, "last": _head(fields)}


def _xmod(fields: Fields) -> Settled:
    """Each layer has an adapter for each language."""
    hidden, listed = fields.integer("hidden_size"), fields.value("languages")
    if not isinstance(listed, list | tuple):
        fields.refuse(f"{fields.describe('languages')}; it must list languages")
    width = int(hidden // fields.number("adapter_reduction_factor")) if fields.number("adapter_reduction_factor") else 0
    adapter = 2 * hidden * width + width + hidden
    norms = 2 * hidden * fields.flag("adapter_layer_norm")
    return {"first": _embedded(fields), "last": _head(fields), "activation": len(listed) * adapter + norms}


def _electra(fields: Fields) -> Settled:
    """Embeddings may be narrower than the layers; a layer projects them back before the output head."""
    hidden, width = fields.integer("hidden_size"), fields.integer("embedding_size")
    types = fields.integer("type_vocab_size")
    positions = fields.integer("max_position_embeddings") * width
    projected = width * hidden + hidden if width != hidden else 0
    return {
        "embedding_width": width,
        "first": (types + 2) * width + positions + projected,
        "last": hidden * width + 3 * width,
    }


def _roformer(fields: Fields) -> Settled:
    """Positions are computed, and kept as parameters."""
    hidden = fields.integer("hidden_size")
    width = fields.integer("embedding_size") if fields.value("embedding_size") is not None else hidden
    projected = width * hidden + hidden if width != hidden else 0
    positions = fields.integer("max_position_embeddings") * (hidden // fields.integer("num_attention_heads"))
    return {
        "embedding_width": width,
        "first": (fields.integer("type_vocab_size") + 2) * width + projected + positions,
        "last": hidden * width + 3 * width,
    }


_SIZES: Mapping[str, object] = {
    "type_vocab_size": 2,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "use_task_id": False,
    "task_type_vocab_size": 3,
    "embedding_size": None,
}
_REMBERT = {**_SIZES, "input_embedding_size": 256, "output_embedding_size": 1664, "vocab_size": 250300}
_ROC_BERT = {
    **_SIZES,
    **dict.fromkeys(("enable_pronunciation", "enable_shape", "concat_input"), True),
    "pronunciation_embed_dim": 768,
    "pronunciation_vocab_size": 910,
    "shape_embed_dim": 512,
    "shape_vocab_size": 24858,
}
_XMOD = {**_SIZES, "languages": ("en_XX",), "adapter_reduction_factor": 2, "adapter_layer_norm": False}


def _kin_of_bert(settle: Callable[[Fields], Settled], **different: object) -> Traits:
    """Return the traits of BERT with some differences."""
    common: dict[str, object] = dict.fromkeys(
        ("qkv_bias", "output_bias", "mlp_bias", "norm_bias", "is_tied", "has_head_bias", "has_positions"), True
    )
    common |= {"is_gated": False, "has_last_norm": False, "settle": settle}
    common["defaults"] = _SIZES
    return Traits(**{**common, **different})  # type: ignore[arg-type]


_BERT = _kin_of_bert(_bert)
BERT_TRAITS: Mapping[str, Traits] = {
    **dict.fromkeys(("bert", "camembert", "data2vec-text", "roberta", "xlm-roberta"), _BERT),
    "big_bird": _kin_of_bert(_big_bird),
    "bert-generation": _kin_of_bert(_bert_generation, defaults={"intermediate_size": 4096, "vocab_size": 50358}),
    "electra": _kin_of_bert(_electra, has_positions=False),
    "ernie": _kin_of_bert(_ernie),
    "megatron-bert": _kin_of_bert(_norm_after_the_layers, has_last_norm=True),
    "roberta-prelayernorm": _kin_of_bert(_bert, has_last_norm=True),
    "rembert": _kin_of_bert(_rembert, has_positions=False, can_tie=False, defaults=_REMBERT),
    "roc_bert": _kin_of_bert(_roc_bert, defaults=_ROC_BERT),
    "roformer": _kin_of_bert(_roformer, has_positions=False),
    "xlm-roberta-xl": _kin_of_bert(_norm_after_the_layers, has_last_norm=True),
    "xmod": _kin_of_bert(_xmod, defaults=_XMOD),
}
