"""Counts of parameters of text models of multimodal models, recent decoders and decoders of BERT's kin.

Small models of transformers on torch's meta device are the reference. A text model without an output head has one in
the model around it.
"""

import pytest

from pagecore.models.parameters import Kind, count_parameters
from pagecore.models.parameters.structures.bert import BERT
from pagecore.models.parameters.structures.registry import STRUCTURES
from pagecore.serving.planner import plan_model
from tests.capabilities import require
from tests.models.built import COUNTED_TEXT
from tests.models.families.test_small_models import module_class
from tests.models.meta import config_for, on_meta_device

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
KOSMOS = {"embed_dim": 64, "attention_heads": 8, "layers": 3, "ffn_dim": 40, "vocab_size": 101}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
OF_FAMILY = {
    "hy_v4_vl_text": {
        **LATENT,
        "index_n_heads": 4,
        "index_head_dim": 8,
        "rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 1, 0]},
    },
    "axk2": {**LATENT, "index_n_heads": 4, "index_head_dim": 8, "num_key_value_heads": 8, "n_shared_experts": 2},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 4,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "hunyuan_vl_text": {"head_dim": 8},
}
VARIANTS = {
    "apertus1p5_text": {"output_vocab_size": 70, "attention_bias": True},
    "glm4v_moe_text": {"n_shared_experts": 2, "attention_bias": False},
    "granite4_vision_text": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "molmo2_text": {"additional_vocab_size": 7, "qkv_bias": True, "head_dim": 16},
    "paddleocr_vl_text": {"use_bias": True, "head_dim": 16},
    "flint": {"shared_expert_intermediate_size": 40},
    "axk2": {"gated_norm_rank": 5, "v_head_dim": 12},
    "beam": {"head_dim": 12},
}
OF_BERT = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 32}
OF_BERT |= {"vocab_size": 101, "pad_token_id": 0, "is_decoder": True, "max_position_embeddings": 40}
BERT_VARIANTS = {
    "electra": {"embedding_size": 20},
    "ernie": {"use_task_id": True},
    "rembert": {"input_embedding_size": 20, "output_embedding_size": 28},
    "roc_bert": {"enable_shape": False, "pronunciation_embed_dim": 24},
    "roformer": {"embedding_size": 20},
    "xmod": {"languages": ["en_XX", "de_DE"], "adapter_layer_norm": True},
}


def built(config):
    """Return the parameters of a text model and of its output head."""
    with on_meta_device():
        model = module_class(config)._from_config(config)
    count, written = sum(each.numel() for each in model.parameters()), config.to_dict()
    tied = written.get("tie_word_embeddings")
    tied = STRUCTURES[written["model_type"]].is_tied if tied is None else tied
    has_head = hasattr(model, "lm_head")
    return count + (0 if has_head or tied else config.vocab_size * config.hidden_size)


@pytest.mark.parametrize("is_varied", [False, True], ids=["", "varied"])
@pytest.mark.parametrize("model_type", COUNTED_TEXT)
def test_text_models_of_small_models(model_type, is_varied):
    if is_varied and model_type not in VARIANTS:
        return
    sizes = KOSMOS if model_type.startswith("kosmos") else SIZES | OF_FAMILY.get(model_type, {})
    sizes = sizes | (VARIANTS[model_type] if is_varied else {})
    config = config_for(model_type, **sizes)
    assert count_parameters(config.to_dict()).total == built(config)


@pytest.mark.parametrize("is_varied", [False, True], ids=["", "varied"])
@pytest.mark.parametrize("model_type", sorted(BERT))
def test_decoders_of_the_kin_of_bert(model_type, is_varied):
    transformers = require("transformers")
    sizes = OF_BERT | (BERT_VARIANTS.get(model_type, {}) if is_varied else {})
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    with on_meta_device():
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert count_parameters(config.to_dict()).total == sum(each.numel() for each in model.parameters())


def test_null_is_the_first_two_layers_without_experts_in_flint():
    flint = {"model_type": "flint", "hidden_size": 8, "intermediate_size": 48, "moe_intermediate_size": 16}
    flint |= {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    flint |= {"vocab_size": 11, "num_experts": 3, "shared_expert_intermediate_size": 24}
    listed = [count_parameters(flint | {"mlp_only_layers": layers}).total for layers in ([], [0, 1])]
    dense, sparse = 3 * 8 * 48, 8 * 3 + 3 * 3 * 8 * 16 + 3 * 8 * 24
    assert listed[0] - listed[1] == 2 * (sparse - dense)
    assert count_parameters(flint | {"mlp_only_layers": None}).total == listed[1]
    assert count_parameters(flint).total == listed[1]


def test_published_sizes():
    bert = {"model_type": "bert", "is_decoder": True, "hidden_size": 768, "num_hidden_layers": 12}
    bert |= {"num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 30522, "type_vocab_size": 2}
    assert count_parameters(bert | {"max_position_embeddings": 512}).total == 109_514_298
    plan = plan_model(bert | {"max_position_embeddings": 512}, device_memory="4GiB", context=512)
    assert plan.device.parameters == 109_514_298
    # Without its vision tower GLM-4.5V is the text model of GLM-4.5-Air, without norms of queries and keys.
    glm = {"model_type": "glm4v_moe_text", "attention_bias": True, "hidden_size": 4096, "intermediate_size": 10944}
    glm |= {"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_hidden_layers": 46}
    glm |= {"first_k_dense_replace": 1, "head_dim": 128, "num_attention_heads": 96, "num_key_value_heads": 8}
    air = count_parameters(glm | {"model_type": "glm4_moe", "vocab_size": 151552, "use_qk_norm": False})
    found = count_parameters({"model_type": "glm4v_moe", "text_config": glm | {"vocab_size": 151552}})
    assert found.counts == air.counts
    assert found.of_kind(Kind.EXPERT) == 45 * 128 * 3 * 4096 * 1408


@pytest.mark.parametrize(
    ("model_type", "whole", "text", "is_tied"),
    [
        ("llava", False, True, True),  # files of version 4 say it inside text_config
        ("llava_onevision", False, True, True),
        ("qwen2_5_vl", False, True, True),
        ("llava_onevision", True, False, True),
        ("llava_onevision", False, False, False),
        ("llava_next", False, True, False),
        ("qwen2_audio", True, True, False),
        ("voxtral", True, None, False),
        ("blip-2", True, False, False),
        ("blip-2", False, True, True),
    ],
)
def test_the_part_of_a_config_that_ties_the_head(model_type, whole, text, is_tied):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 101}
    sizes |= {"num_key_value_heads": 4, "max_position_embeddings": 30}
    sizes |= {"model_type": "opt", "ffn_dim": 80} if model_type == "blip-2" else {"intermediate_size": 72}
    config = {"model_type": model_type, "tie_word_embeddings": whole}
    counted = count_parameters(config | {"text_config": sizes | {"tie_word_embeddings": text}})
    assert counted.head == (0 if is_tied else 101 * 64)
