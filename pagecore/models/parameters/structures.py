"""Structure of the layers of each family, from Llama on; `earlier` has those before.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.models.fields import Fields
from pagecore.models.parameters.traits import Experts, Settled, Traits, biased_traits

__all__ = ["TRAITS", "half_as_wide"]

_BIASED: Mapping[str, object] = {"attention_bias": True}
_LLAMA = biased_traits(mlp_bias="mlp_bias")
_QWEN_2 = Traits(qkv_bias=True)
_QWEN_3 = biased_traits(qk_norm="head")
_QWEN_3_MOE = biased_traits(qk_norm="head", experts=Experts(rule="step"))
_GLM = Traits(qkv_bias="attention_bias")
_GLM_4 = Traits(qkv_bias="attention_bias", norms=4)
_GEMMA_2 = biased_traits(norms=4, is_tied=True)
_GEMMA_3 = replace(_GEMMA_2, qk_norm="head")
_GEMMA_4 = replace(_GEMMA_3, shared_projection_field="attention_k_eq_v")
_SHARED = Experts("n_routed_experts", shared="n_shared_experts", rule="after")
_DEEPSEEK = Traits(experts=_SHARED, qkv_bias="attention_bias", output_bias="attention_bias")
_QWEN_NEXT_EXPERTS = Experts(shared="shared_expert_intermediate_size", rule="step", has_shared_gate=True)
_QWEN_NEXT = biased_traits(qk_norm="head", has_gated_queries=True)
_QWEN_NEXT_MOE = biased_traits(qk_norm="head", has_gated_queries=True, experts=_QWEN_NEXT_EXPERTS)
_OLMO = biased_traits(qk_norm="width")
_ERNIE = Traits(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", is_tied=True)
_GRANITE_MOE = biased_traits(experts=Experts("num_local_experts", "intermediate_size"))
_MAMBA = Traits(norms=1, is_tied=True)

_BAILING_EXPERTS = Experts(shared="num_shared_experts", rule="after")
_MINIMAX = Traits(experts=Experts("num_local_experts", "intermediate_size"))


def half_as_wide(fields: Fields) -> Settled:
    """The field has the width of the gate and the projection next to it together."""
    return {"width": fields.integer("intermediate_size") // 2}


def _one_norm_if_parallel(fields: Fields) -> Settled:
    """Attention and MLP of a layer read one norm if they are computed side by side."""
    return {"norms": 1 if fields.flag("use_parallel_residual") else 2}


TRAITS: Mapping[str, Traits] = {
    "llama": _LLAMA,
    "qwen2": _QWEN_2,
    "qwen2_moe": Traits(qkv_bias="qkv_bias", experts=_QWEN_NEXT_EXPERTS, defaults={"qkv_bias": True}),
    "qwen3": _QWEN_3,
    "qwen3_moe": _QWEN_3_MOE,
    "mistral": Traits(),
    "ministral": Traits(),
    "mixtral": Traits(experts=Experts("num_local_experts", "intermediate_size")),
    "gemma": biased_traits(is_tied=True),
    "gemma2": _GEMMA_2,
    "gemma3_text": _GEMMA_3,
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
    "phi3": Traits(),
    "gpt_neox": biased_traits(mlp_bias=True, norm_bias=True, is_gated=False, defaults=_BIASED),
    "gpt_oss": biased_traits(
        experts=Experts("num_local_experts", "intermediate_size", has_biases=True), defaults=_BIASED
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
    "glm": _GLM,
    "glm4": _GLM_4,
    "glm4_moe": Traits(qkv_bias="attention_bias", qk_norm="head", qk_norm_field="use_qk_norm", experts=_SHARED),
    "glm4v_text": Traits(qkv_bias="attention_bias", norms=4, defaults=_BIASED),
    "qwen2_vl_text": _QWEN_2,
    "qwen2_5_vl_text": _QWEN_2,
    "qwen3_vl_text": _QWEN_3,
    "qwen3_vl_moe_text": _QWEN_3_MOE,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "llama4_text": biased_traits(
        experts=Experts("num_local_experts", "intermediate_size", shared="intermediate_size", rule="interleaved"),
        dense_width="intermediate_size_mlp",
    ),
    "starcoder2": Traits(
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        norm_bias=True,
        is_gated=False,
        is_tied=True,
        defaults={"use_bias": True},
    ),
    "cohere": biased_traits(norms=1, is_tied=True, qk_norm="heads", qk_norm_field="use_qk_norm"),
    "cohere2": biased_traits(norms=1, is_tied=True),
    "granite": _LLAMA,
    "seed_oss": Traits(
        qkv_bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias", defaults=_BIASED
    ),
    "minimax_m2": Traits(qk_norm="width", experts=Experts("num_local_experts", "intermediate_size")),
    "gemma3n_text": replace(
        _GEMMA_3,
        defaults={
            "intermediate_size": 16384,
            "vocab_size": 262400,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "altup_num_inputs": 4,
            "laurel_rank": 64,
            "enable_moe_block": False,
        },
    ),
    "gemma4_unified_text": _GEMMA_4,
    "gemma4_text": replace(
        _GEMMA_4,
        defaults={
            "enable_moe_block": False,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
        },
    ),
    "mimo_v2_flash": Traits(
        qkv_bias="attention_bias",
        experts=Experts("n_routed_experts", rule="after"),
        defaults={"first_k_dense_replace": 1},
    ),
    "deepseek_v2": replace(_DEEPSEEK, mlp_bias="mlp_bias"),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "axk1": biased_traits(experts=Experts("n_routed_experts", shared="n_shared_experts", rule="after", has_norm=True)),
    "glm4_moe_lite": _DEEPSEEK,
    "minicpm3": biased_traits(mlp_bias="mlp_bias"),
    "mistral4": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "longcat_flash": biased_traits(aliases={"intermediate_size": "ffn_hidden_size"}),
    "youtu": biased_traits(is_tied=True),
    "qwen3_next": _QWEN_NEXT_MOE,
    "qwen3_5_text": _QWEN_NEXT,
    "qwen3_5_moe_text": _QWEN_NEXT_MOE,
    "minimax": _MINIMAX,
    "minimax_text_01": _MINIMAX,
    "minimax_m1": _MINIMAX,
    "bailing_hybrid": biased_traits(
        head_gate=True,
        can_tie=False,
        experts=_BAILING_EXPERTS,
        defaults={"first_k_dense_replace": 2, "num_shared_experts": 1, "q_lora_rank": None},
    ),
    "recurrent_gemma": Traits(
        qkv_bias="attention_bias", output_bias=True, mlp_bias=True, is_tied=True, settle=half_as_wide
    ),
    "kimi_linear": Traits(can_tie=False, experts=Experts(shared="num_shared_experts", rule="after")),
    "nemotron_h": Traits(
        mlp_bias="mlp_bias",
        norms=1,
        can_tie=False,
        is_gated=False,
        experts=Experts("n_routed_experts", shared="moe_shared_expert_intermediate_size", inputs="moe_latent_size"),
    ),
    "granitemoehybrid": biased_traits(
        experts=Experts("num_local_experts", "intermediate_size", shared="shared_intermediate_size")
    ),
    "falcon_h1": _LLAMA,
    "jamba": Traits(experts=Experts(width="intermediate_size", rule="period")),
    "bamba": _LLAMA,
    "zamba": Traits(
        is_tied=True, defaults={"mamba_dt_rank": "auto", "mamba_conv_bias": True, "mamba_proj_bias": False}
    ),
    "zamba2": Traits(is_tied=True, mlp_bias="add_bias_linear"),
    "lfm2": Traits(is_tied=True, qk_norm="head"),
    "lfm2_moe": Traits(is_tied=True, qk_norm="head", experts=Experts(rule="after", dense="num_dense_layers")),
    "lfm3": biased_traits(
        qk_norm="head",
        is_tied=True,
        post_norms="use_sandwich_norm",
        head_gate="use_attention_gate",
        defaults={"use_sandwich_norm": True, "use_attention_gate": True},
    ),
    "olmo_hybrid": _OLMO,
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": Traits(norms=1),
    "afmoe": biased_traits(
        norms=4,
        qk_norm="head",
        output_gate="gate_kind",
        experts=Experts(shared="num_shared_experts", rule="after", dense="num_dense_layers", has_score_bias=True),
        defaults={"gate_kind": "features"},
    ),
    "apertus": biased_traits(qk_norm="head", is_gated=False, activation=2),
    "arcee": biased_traits(mlp_bias="mlp_bias", is_gated=False),
    "cwm": _LLAMA,
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(
        _ERNIE,
        has_head_bias="use_bias",
        experts=Experts("moe_num_experts", shared="moe_num_shared_experts", rule="range", has_score_bias=True),
    ),
    "exaone4": Traits(qk_norm="head"),
    "flex_olmo": biased_traits(qk_norm="width", experts=Experts(width="intermediate_size")),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": biased_traits(
        experts=Experts("num_local_experts", "intermediate_size", shared="shared_intermediate_size")
    ),
    "helium": Traits(qkv_bias="attention_bias", mlp_bias="mlp_bias"),
    "hunyuan_v1_dense": biased_traits(qk_norm="head"),
    "internlm3": _LLAMA,
    "jais2": biased_traits(
        mlp_bias="mlp_bias", norm_bias=True, is_gated=False, defaults={"attention_bias": True, "mlp_bias": True}
    ),
    "ministral3": Traits(),
    "nanochat": biased_traits(norms=0, is_gated=False),
    "nemotron": biased_traits(mlp_bias="mlp_bias", norm_bias=True, is_gated=False),
    "olmo": biased_traits(norms=0),
    "olmoe": biased_traits(qk_norm="width", experts=Experts(width="intermediate_size")),
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
    "phimoe": biased_traits(
        norm_bias=True, has_head_bias="lm_head_bias", experts=Experts("num_local_experts", "intermediate_size")
    ),
    "smollm3": biased_traits(mlp_bias="mlp_bias", is_tied=True),
    "solar_open": Traits(qkv_bias="attention_bias", experts=Experts("n_routed_experts", shared="n_shared_experts")),
    "stablelm": Traits(
        qkv_bias="use_qkv_bias",
        norm_bias=True,
        qk_norm="heads",
        qk_norm_field="qk_layernorm",
        settle=_one_norm_if_parallel,
        defaults={"use_parallel_residual": False},
    ),
    "vaultgemma": biased_traits(is_tied=True),
    "aria_text": biased_traits(
        mlp_bias="mlp_bias",
        experts=Experts("moe_num_experts", "intermediate_size", shared="moe_num_shared_experts"),
        defaults={"moe_num_experts": 8, "moe_num_shared_experts": 2},
    ),
    "bitnet": biased_traits(norms=3, has_mlp_norm=True),
    "cohere2_moe": biased_traits(
        norms=1,
        is_tied=True,
        experts=Experts(width="intermediate_size", shared="num_shared_experts", rule="after"),
        dense_width="prefix_dense_intermediate_size",
        defaults={"first_k_dense_replace": 0, "num_shared_experts": 0, "prefix_dense_intermediate_size": None},
    ),
    "dots1": biased_traits(qk_norm="head", experts=_SHARED, defaults={"first_k_dense_replace": 0}),
    "exaone_moe": Traits(
        qk_norm="head",
        experts=Experts(shared="num_shared_experts", rule="after"),
        defaults={"first_k_dense_replace": 1, "num_shared_experts": 1},
    ),
    "granite_swa": biased_traits(mlp_bias="mlp_bias", is_tied=True),
    "granitemoe_swa": biased_traits(
        experts=Experts("num_local_experts", "intermediate_size", shared="shared_intermediate_size"),
        defaults={"shared_intermediate_size": 0},
    ),
    "hunyuan_v1_moe": biased_traits(
        qk_norm="head", experts=Experts(width="intermediate_size", shared="intermediate_size")
    ),
    "hy_v3": biased_traits(
        mlp_bias="mlp_bias",
        qk_norm="head",
        experts=Experts(shared="num_shared_experts", rule="after"),
        defaults={"first_k_dense_replace": 1, "num_shared_experts": 1},
    ),
    "hyperclovax": biased_traits(mlp_bias="mlp_bias", post_norms="use_post_norm", defaults={"use_post_norm": True}),
    "iquestcoder": _LLAMA,
    "jetmoe": Traits(
        is_tied=True,
        has_query_experts=True,
        experts=Experts("num_local_experts", "intermediate_size", has_output_bias=True),
    ),
    "kolibri1": Traits(norms=4, qk_norm="head", experts=Experts(shared="shared_expert_intermediate_size")),
    "laguna": biased_traits(
        qk_norm="head",
        output_gate="gating",
        experts=Experts(shared="shared_expert_intermediate_size", rule="after", has_score_bias=True),
        defaults={"first_k_dense_replace": 1, "gating": True},
    ),
    "mellum": biased_traits(qk_norm="head", experts=Experts()),
    "minimax_m3_vl_text": Traits(
        qk_norm="head",
        experts=Experts("num_local_experts", "intermediate_size", shared="shared_intermediate_size"),
        dense_width="dense_intermediate_size",
    ),
}
