"""Structure of the layers of decoders of BERT's kin.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.traits import Settled, Traits

__all__ = ["BERT"]


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

BERT: Mapping[str, Traits] = {
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
