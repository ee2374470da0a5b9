"""Structure of the layers of families whose layers all attend to all preceding tokens.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.traits import Experts, Settled, Traits, biased_traits
from pagecore.models.parameters.structures.common_traits import BIASED, LLAMA, OLMO, QWEN_3, QWEN_3_MOE, SHARED_EXPERTS

__all__ = ["FULL_ATTENTION"]

_GLM = Traits(qkv_bias="attention_bias", defaults=BIASED)
_GLM_4 = Traits(qkv_bias="attention_bias", norms=4, defaults=BIASED)
_ERNIE = Traits(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", is_tied=True)
_GRANITE_MOE = biased_traits(experts=Experts("num_local_experts", "intermediate_size"))


def _one_norm_if_parallel(fields: Fields) -> Settled:
    """Attention and MLP of a layer read one norm if they are computed side by side."""
    return {"norms": 1 if fields.flag("use_parallel_residual") else 2}


def _molmo(fields: Fields) -> Settled:
    """The embedding has rows of its own for tokens of images."""
    rows = fields.integer("additional_vocab_size", min=0)
    return {"first": rows * fields.integer("hidden_size")}


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


def _hrm(fields: Fields) -> Settled:
    """A vector is the first state of the lower stack."""
    return {"first": fields.integer("hidden_size")}


def _rows_of_apertus(fields: Fields) -> Settled:
    """The head has rows of text alone if a file gives their number."""
    return {"head_rows": "" if fields.value("output_vocab_size") is None else "output_vocab_size"}


def _weights_in_stacks(fields: Fields, layer: int) -> int:
    """Return the layer of two stacks, the lower one first, whose weights are used by a layer of a pass."""
    listed = "num_layers_per_stack" if fields.given("num_layers_per_stack") is not None else "num_hidden_layers"
    size, lower = fields.integer(listed), fields.integer("L_cycles")
    is_upper = layer // size % (lower + 1) == lower
    return layer % size + size * is_upper


FULL_ATTENTION: Mapping[str, Traits] = {
    "apertus": biased_traits(qk_norm="head", is_gated=False, activation=2),
    "apertus1p5_text": biased_traits(
        qk_norm="head", is_gated=False, activation=2, settle=_rows_of_apertus, defaults={"output_vocab_size": None}
    ),
    "arcee": biased_traits(mlp_bias="mlp_bias", is_gated=False),
    "aria_text": biased_traits(
        mlp_bias="mlp_bias",
        experts=Experts("moe_num_experts", "intermediate_size", shared="moe_num_shared_experts"),
        defaults={"moe_num_experts": 8, "moe_num_shared_experts": 2},
    ),
    "bitnet": biased_traits(norms=3, has_mlp_norm=True),
    "cohere": biased_traits(norms=1, is_tied=True, qk_norm="heads", qk_norm_field="use_qk_norm"),
    "cosmos3_edge_text": biased_traits(mlp_bias="mlp_bias", is_gated=False),
    "dbrx": Traits(
        experts=Experts("ffn_config.moe_num_experts", "ffn_config.ffn_hidden_size"),
        defaults={"ffn_config.moe_num_experts": 4, "ffn_config.ffn_hidden_size": 3584},
    ),
    "emu3_text_model": biased_traits(mlp_bias="mlp_bias"),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(
        _ERNIE,
        has_head_bias="use_bias",
        experts=Experts("moe_num_experts", shared="moe_num_shared_experts", rule="range", score_biases=1),
        defaults={"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
    ),
    "flex_olmo": biased_traits(qk_norm="width", experts=Experts(width="intermediate_size")),
    "gemma": biased_traits(is_tied=True),
    "glm": _GLM,
    "glm4": _GLM_4,
    "glm4_moe": Traits(qkv_bias="attention_bias", qk_norm="head", qk_norm_field="use_qk_norm", experts=SHARED_EXPERTS),
    "glm4v_moe_text": Traits(
        qkv_bias="attention_bias", experts=SHARED_EXPERTS, defaults={**BIASED, "first_k_dense_replace": 1}
    ),
    "glm4v_text": Traits(qkv_bias="attention_bias", norms=4, defaults=BIASED),
    "glm_image_text": Traits(
        qkv_bias="attention_bias",
        norms=4,
        can_tie=False,
        head_rows="vision_vocab_size",
        defaults={**BIASED, "vision_vocab_size": 16512},
    ),
    "glm_ocr_text": Traits(qkv_bias="attention_bias", norms=4),
    "granite": LLAMA,
    "granite4_vision_text": biased_traits(mlp_bias="mlp_bias"),
    "granite_docling_text": biased_traits(mlp_bias="mlp_bias", is_tied=True),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": biased_traits(
        experts=Experts("num_local_experts", "intermediate_size", shared="shared_intermediate_size")
    ),
    "helium": Traits(qkv_bias="attention_bias", mlp_bias="mlp_bias"),
    "hrm_text": biased_traits(
        norms=0,
        mlp_bias="mlp_bias",
        output_gate="gate_kind",
        settle=_hrm,
        weights_of_layer=_weights_in_stacks,
        defaults={"gate_kind": "features"},
    ),
    "hunyuan_v1_dense": biased_traits(qk_norm="head"),
    "hunyuan_v1_moe": biased_traits(
        qk_norm="head", experts=Experts(width="intermediate_size", shared="intermediate_size")
    ),
    "hunyuan_vl_text": biased_traits(qk_norm="head", is_tied=True),
    "hy_v3": biased_traits(
        mlp_bias="mlp_bias",
        qk_norm="head",
        experts=Experts(shared="num_shared_experts", rule="after"),
        defaults={"first_k_dense_replace": 1, "num_shared_experts": 1},
    ),
    "hyperclovax": biased_traits(mlp_bias="mlp_bias", post_norms="use_post_norm", defaults={"use_post_norm": True}),
    "internlm3": LLAMA,
    "iquestcoder": LLAMA,
    "jais2": biased_traits(
        mlp_bias="mlp_bias", norm_bias=True, is_gated=False, defaults={"attention_bias": True, "mlp_bias": True}
    ),
    "jetmoe": Traits(
        is_tied=True,
        has_query_experts=True,
        experts=Experts("num_local_experts", "intermediate_size", has_output_bias=True),
    ),
    "kosmos_2_5_text_model": _kosmos(_kosmos_2_5),
    "kosmos_2_text_model": _kosmos(_kosmos_2),
    "llama": LLAMA,
    "minimax_m2": Traits(qk_norm="width", experts=Experts("num_local_experts", "intermediate_size")),
    "minimax_m3_vl_text": Traits(
        qk_norm="head",
        experts=Experts("num_local_experts", "intermediate_size", shared="shared_intermediate_size"),
        dense_width="dense_intermediate_size",
    ),
    "molmo2_text": Traits(
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_field="use_qk_norm",
        settle=_molmo,
        defaults={"use_qk_norm": True, "additional_vocab_size": 128},
        aliases={"attention_bias": "qkv_bias"},
    ),
    "nanochat": biased_traits(norms=0, is_gated=False),
    "nemotron": biased_traits(mlp_bias="mlp_bias", norm_bias=True, is_gated=False),
    "olmo": biased_traits(norms=0),
    "olmo2": OLMO,
    "olmoe": biased_traits(qk_norm="width", experts=Experts(width="intermediate_size")),
    "paddleocr_vl_text": Traits(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", is_tied=True),
    "persimmon": Traits(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        is_gated=False,
        qk_norm="head",
        qk_norm_field="qk_layernorm",
        defaults={"qk_layernorm": True},
    ),
    "phi": Traits(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norms=1,
        norm_bias=True,
        is_gated=False,
        has_head_bias=True,
        qk_norm="head",
        qk_norm_field="qk_layernorm",
    ),
    "qwen3_vl_moe_text": QWEN_3_MOE,
    "qwen3_vl_text": QWEN_3,
    "seed_oss": Traits(
        qkv_bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias", defaults=BIASED
    ),
    "solar_open": Traits(qkv_bias="attention_bias", experts=Experts("n_routed_experts", shared="n_shared_experts")),
    "stablelm": Traits(
        qkv_bias="use_qkv_bias",
        norm_bias=True,
        qk_norm="heads",
        qk_norm_field="qk_layernorm",
        settle=_one_norm_if_parallel,
        defaults={"use_parallel_residual": False},
    ),
}
