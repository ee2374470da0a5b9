"""Decoders from before Llama: fields that decide heads, windows and parameters."""

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import ConfigError, read_model_config, specs_from_config
from pagecore.models.families.registry import FAMILIES
from pagecore.models.parameters import Kind, count_parameters
from tests.capabilities import require
from tests.models.earlier import EARLIER_CONFIGS, EARLIER_TYPES, FALCON_7B, GPT_NEO, MODERN_BERT, MPT_7B, STARCODER
from tests.together import together

SMALL = {"vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "pad_token_id": 0}
VARIANTS = [
    ("biogpt", {"intermediate_size": 88, "max_position_embeddings": 50}),
    ("bloom", {"tie_word_embeddings": False}),
    ("codegen", {"n_inner": 100, "tie_word_embeddings": True}),
    ("ctrl", {"dff": 72, "n_positions": 30}),
    (
        "dbrx",
        {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
            "ffn_config": {"moe_num_experts": 5, "ffn_hidden_size": 40},
        },
    ),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 100}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True}),
    ("falcon", {"parallel_attn": False, "tie_word_embeddings": False}),
    ("falcon", {"multi_query": False, "num_ln_in_parallel_attn": 2}),
    ("gpt_bigcode", {"n_inner": 100, "n_positions": 40}),
    ("gpt_bigcode", {"multi_query": False, "tie_word_embeddings": False}),
    ("gpt_neo", {"intermediate_size": 100, "attention_types": [[["local"], 3]], "max_position_embeddings": 40}),
    ("gpt_neox_japanese", {"intermediate_multiple_size": 3, "tie_word_embeddings": False}),
    ("gptj", {"n_inner": 100, "rotary_dim": 8}),
    ("modernbert-decoder", {"norm_bias": True, "classifier_bias": True, "attention_bias": True, "mlp_bias": True}),
    ("modernbert-decoder", {"decoder_bias": False, "tie_word_embeddings": False, "intermediate_size": 100}),
    ("mpt", {"tie_word_embeddings": False}),
    ("openai-gpt", {"n_positions": 40}),
    ("opt", {"ffn_dim": 100, "enable_bias": False, "word_embed_proj_dim": 48}),
    ("opt", {"ffn_dim": 100, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False}),
    ("opt", {"ffn_dim": 100, "do_layer_norm_before": False, "max_position_embeddings": 40}),
    ("xglm", {"ffn_dim": 100, "tie_word_embeddings": False}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_counts_of_variants_equal_those_of_transformers(model_type, changes):
    transformers = require("transformers")
    from tests.models.record_parameters import count

    # transformers derives fields of some families before it renames the common names of sizes.
    names = FAMILIES[model_type].aliases if model_type in ("dbrx", "gpt_bigcode") else {}
    sizes = {names.get(name, name): value for name, value in SMALL.items()}
    config = transformers.AutoConfig.for_model(model_type, **sizes, **changes)
    assert count_parameters(config.to_dict()).total == count(config)


def test_every_counted_family_has_a_variant():
    assert {name for name, _ in VARIANTS} == EARLIER_TYPES - {"phi4_multimodal"}


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({}, 1),
        ({"num_kv_heads": 71}, 1),
        ({"multi_query": False}, 71),
        ({"new_decoder_architecture": True}, 71),
        ({"new_decoder_architecture": True, "num_kv_heads": 1, "multi_query": False}, 1),
    ],
)
def test_key_value_heads_of_falcon(changes, kv_heads):
    assert {spec.num_kv_heads for spec in specs_from_config(FALCON_7B | changes)} == {kv_heads}


def test_local_layers_of_gpt_neo():
    specs = specs_from_config(EARLIER_CONFIGS["gpt-neo with other layers"])
    assert [spec.window for spec in specs] == [None, None, 17, 17, 17, 17]


def test_a_window_of_modernbert_is_half_of_local_attention_or_that_given():
    assert [spec.window for spec in specs_from_config(MODERN_BERT)[:4]] == [None, 64, 64, None]
    given = specs_from_config(MODERN_BERT | {"sliding_window": 40})
    assert [spec.window for spec in given[:4]] == [None, 40, 40, None]


def test_alibi_stores_nothing():
    for config in (FALCON_7B, MPT_7B | {"attn_config": {"alibi": False}}):
        assert specs_from_config(config | {"alibi": True}) == specs_from_config(config)


def test_fuyu_has_the_layers_of_its_text_model_in_either_form():
    flat = EARLIER_CONFIGS["fuyu-8b"]
    text = {name: value for name, value in flat.items() if name not in ("model_type", "patch_size", "num_channels")}
    nested = {"model_type": "fuyu", "torch_dtype": "bfloat16", "patch_size": 30, "text_config": text}
    assert read_model_config(nested) == read_model_config(flat)
    assert count_parameters(nested).counts == count_parameters(flat).counts
    assert count_parameters(flat).of_kind(Kind.VISION) == (3 * 30 * 30 + 1) * 4096


def test_phi_4_multimodal_without_encoders_has_the_layers_of_phi_3():
    config = EARLIER_CONFIGS["phi-4-multimodal"]
    counted = count_parameters(config)
    assert counted.counts == count_parameters(config | {"model_type": "phi3"}).counts
    assert counted.of_kind(Kind.VISION) == 0


@together(
    ("config", "error", "words"),
    [
        (FALCON_7B | {"new_decoder_architecture": True, "num_kv_heads": 8}, ConfigError, "num_kv_heads is 8; it must"),
        (FALCON_7B | {"multi_query": False, "num_kv_heads": 1}, ConfigError, "must equal num_attention_heads, 71"),
        (FALCON_7B | {"num_key_value_heads": 8}, UnsupportedOption, "attends as if it were 1"),
        (STARCODER | {"num_key_value_heads": 48}, UnsupportedOption, "attends as if it were 1"),
        (STARCODER | {"add_cross_attention": True}, UnsupportedOption, "add_cross_attention is true"),
        (STARCODER | {"hidden_size": 4096}, ConfigError, "n_embd is 6144, but hidden_size is 4096"),
        (GPT_NEO | {"attention_types": [[["global", "local"], 11]]}, ConfigError, "each of the 24 layers"),
        (GPT_NEO | {"attention_types": [[["global", "near"], 12]]}, ConfigError, "must name 'global' or 'local'"),
        (GPT_NEO | {"attention_types": 12}, ConfigError, "attention_types is 12; it must list pairs"),
        (GPT_NEO | {"window_size": 0}, ConfigError, "window_size is 0"),
        (MPT_7B | {"attn_config": {"prefix_lm": True}}, UnsupportedOption, r"attn_config.prefix_lm is true, but mpt"),
        (MPT_7B | {"attn_config": {"attn_type": "multiquery_attention"}}, UnsupportedOption, "attn_config.attn_type"),
        (MPT_7B | {"attn_config": {"softmax_scale": "1"}}, ConfigError, "attn_config.softmax_scale is"),
        (MPT_7B | {"attn_config": 3}, ConfigError, "attn_config is 3; it must be an object"),
        (EARLIER_CONFIGS["dbrx"] | {"attn_config": {"kv_n_heads": 7}}, ConfigError, "attn_config.kv_n_heads is 7; it"),
        (MODERN_BERT | {"local_attention": 1}, ConfigError, "local_attention is 1"),
        (MODERN_BERT | {"local_attention": None}, ConfigError, "local_attention is null"),
    ],
)
def test_fields_without_a_meaning_are_refused_by_name(config, error, words):
    with pytest.raises(error, match=words):
        specs_from_config(config)
