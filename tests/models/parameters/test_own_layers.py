"""Counts of parameters of recent decoders, compared with small models on torch's meta device."""

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import specs_from_config
from pagecore.models.parameters import count_parameters
from tests.capabilities import require
from tests.models.families.test_small_models import module_class
from tests.models.meta import on_meta_device
from tests.models.record_parameters import weights_in
from tests.together import together

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts": 6,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
LATENT |= {"index_n_heads": 4, "index_head_dim": 10, "index_topk": 16}
LINEAR = {"linear_num_heads": 4, "linear_head_dim": 8}
SHARED = {"indexer_types": ["full", "shared"] * 3}
WINDOWED = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_kv_lora_rank": 20, "swa_q_lora_rank": 28}
WINDOWED |= {"swa_head_dim": 14, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 6}
CASES = {
    "dots3_note_text": [LATENT | WINDOWED, LATENT | {"n_shared_experts": 2, "shared_experts_intermediate_size": 40}],
    "glm5_next_text": [
        LATENT | LINEAR | {"qk_rope_head_dim": 0, "head_dim": 0},
        LATENT | LINEAR | {"qk_rope_head_dim": 0, "hc_mult": 2, "index_kpool": 4, "attention_bias": True},
    ],
    "hy_v4": [LATENT, LATENT | {"hc_mult": 2, "n_shared_experts": 2} | SHARED],
    "mistral_large4_text": [
        LATENT | {"q_lora_rank": None},
        LATENT
        | {"q_lora_rank": None, "indexer_types": ["full", "full", "shared", "full", "full", "shared"]}
        | {"no_rope_layers": [1, 0, 0, 1, 1, 1], "kv_source_layers": [0, 1, 1, 3, 4, 4]},
    ],
    "step3p5": [
        {"n_routed_experts": 6, "num_key_value_heads": 2, "head_dim": 16},
        {"layer_types": ["full_attention", "sliding_attention"] * 3, "num_sliding_attention_heads": 12, "head_dim": 8}
        | {"num_key_value_heads": 4, "sliding_window": 9, "share_expert_dim": 40, "moe_layers_enum": "1,4"},
    ],
    "zaya": [
        {"head_dim": 16, "num_key_value_heads": 2},
        {"head_dim": 8, "cca_time1": 3, "router_hidden_size": 20, "attention_bias": True, "tie_word_embeddings": False}
        | {"lm_head_bias": True},
    ],
}


@pytest.mark.parametrize(
    ("model_type", "case"), [(name, n) for name, cases in CASES.items() for n in range(len(cases))]
)
def test_counts_equal_those_of_small_models(model_type, case):
    transformers = require("transformers")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers has no {model_type}")
    config = transformers.CONFIG_MAPPING[model_type](**SIZES | CASES[model_type][case])
    with on_meta_device():
        model = module_class(config)._from_config(config)
    written = config.to_dict()
    has_head = hasattr(model, "lm_head") or written["tie_word_embeddings"]
    expected = weights_in(model) + (0 if has_head else 101 * 64)
    assert count_parameters(written).total == expected
    stages = [range(0, 1), range(1, 6)]
    copied = 101 * 64 if written["tie_word_embeddings"] else 0
    assert sum(count_parameters(written, layers=each).total for each in stages) == expected + copied


def test_published_names_of_sizes_with_a_window_are_read():
    published = SIZES | LATENT | WINDOWED | {"model_type": "dots3_note_text", "first_k_dense_replace": 1}
    published |= {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 24}
    transformers = require("transformers")
    if "dots3_note_text" not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers has no dots3_note_text")
    config = transformers.CONFIG_MAPPING["dots3_note_text"](**published)
    with on_meta_device():
        model = module_class(config)._from_config(config)
    assert count_parameters(published).total == sum(each.numel() for each in model.parameters())


LLAMA_8B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
EAGLE_3 = LLAMA_8B | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}
SPECULATOR = {"model_type": "speculator_model", "speculators_model_type": "eagle3", "draft_vocab_size": 32000}
OUTPUT, MLP = 4096 * 4096, 3 * 4096 * 14336
QKV, FUSED, HEAD = 4096 * 6144, 3 * 4096 * 4096, 32000 * 4096
DRAFT = 2 * QKV + OUTPUT + MLP + 4 * 4096 + FUSED + HEAD


@together(
    ("config", "expected"),
    [
        (EAGLE_3, DRAFT),
        (SPECULATOR | {"transformer_layer_config": LLAMA_8B}, DRAFT),
        (EAGLE_3 | {"num_hidden_layers": 2}, DRAFT + QKV + OUTPUT + MLP + 3 * 4096),
        (EAGLE_3 | {"draft_vocab_size": None}, DRAFT + (128256 - 32000) * 4096),
        (EAGLE_3 | {"eagle_config": {"use_aux_hidden_state": False}}, DRAFT - FUSED),
        (EAGLE_3 | {"norm_before_fc": True}, DRAFT + 3 * 4096),
        (EAGLE_3 | {"target_hidden_size": 5120}, DRAFT + 3 * 1024 * 4096 + 128256 * 4096),
        (EAGLE_3 | {"attention_bias": True}, DRAFT + 6144 + 4096),
        (LLAMA_8B | {"architectures": ["EagleLlamaForCausalLM"]}, QKV + OUTPUT + MLP + 4096 + 2 * 4096 * 4096),
    ],
)
def test_drafts_of_the_eagle_kind_share_the_embedding_of_their_model(config, expected):
    assert count_parameters(config).total == expected
    specs = specs_from_config(config)
    assert {(spec.num_kv_heads, spec.head_dim) for spec in specs} == {(8, 128)}


def test_drafts_of_other_layers_are_refused():
    eagle = SPECULATOR | {"speculators_model_type": "eagle", "transformer_layer_config": LLAMA_8B}
    latents = {
        "model_type": "deepseek_v3",
        **SIZES,
        **LATENT,
        "index_topk": None,
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    }
    for config in (eagle, latents):
        with pytest.raises(UnsupportedOption, match=r"an EAGLE draft of .*expected layers of a Llama: pass weights="):
            count_parameters(config)
    with pytest.raises(UnsupportedOption, match="is one stage; leave layers out"):
        count_parameters(EAGLE_3, layers=range(1))


@together(
    ("change", "read", "more"),
    [
        ({}, 5 * 4096, 0),
        ({"target_hidden_size": 2048}, 5 * 2048, 0),
        ({"dflash_config": {"mask_token_id": 7}}, 2 * 4096, 0),
        ({"dflash_config": {"use_aux_hidden_state": False}}, 0, 0),
        ({"use_aux_hidden_state": False}, 0, 0),
        ({"eagle_config": {"use_aux_hidden_state": False}, "use_aux_hidden_state": True}, 0, 0),
        ({"dflash_config": {"use_aux_hidden_state": True}, "eagle_config": {"use_aux_hidden_state": False}}, 8192, 0),
        ({"dflash_config": {"layer_ids": [1, 2, 3]}, "target_layer_ids": [4]}, 4096, 0),
        ({"dflash_config": {"layer_ids": [1, 2, 3]}, "eagle_config": {"layer_ids": [4]}}, 3 * 4096, 0),
        ({"eagle_aux_hidden_state_layer_ids": [4]}, 4096, 0),
        ({"dflash_config": {"attention_sink_bias": True}}, 2 * 4096, 2 * 32),
        ({"add_swa_attention_sink_bias": True}, 5 * 4096, 2 * 32),
        ({"dflash_config": {"attention_sink_bias": False}, "add_swa_attention_sink_bias": True}, 2 * 4096, 0),
        ({"draft_vocab_size": 32000}, 5 * 4096, HEAD),
        ({"draft_vocab_size": 151936, "attention_bias": True}, 5 * 4096, 2 * (6144 + 4096)),
    ],
)
def test_dflash_drafts_read_layers_of_their_model_and_share_its_embedding_and_head(change, read, more):
    config = {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "hidden_size": 4096, "vocab_size": 151936}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config |= {"intermediate_size": 14336, "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]}} | change
    layers = 2 * (QKV + OUTPUT + MLP + 2 * 4096 + 2 * 128) + 2 * 4096
    assert count_parameters(config).total == layers + read * 4096 + more
    assert {(spec.num_kv_heads, spec.head_dim) for spec in specs_from_config(config)} == {(8, 128)}


def test_dflash_drafts_with_other_layers_are_refused():
    config = LLAMA_8B | {"dflash_config": {"target_layer_ids": [1]}}
    with pytest.raises(UnsupportedOption, match=r"a DFlash draft of llama, .*expected layers of a qwen3"):
        count_parameters(config)
