"""Parameters of Qwen4 with hashed n-grams, compared with small models on torch's meta device."""

import pytest

from pagecore.models import ConfigError
from pagecore.models.parameters import count_parameters
from tests.capabilities import require
from tests.models.record_parameters import count

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 16,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 3,
    "hc_count": 2,
    "hc_lowrank": 8,
    "ngram_vocab_size_base": 31,
    "make_ngram_vocab_size_divisible_by": 8,
    "ple_layer_ids": [2],
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}


def made(**options):
    transformers = require("transformers")
    require("torch")
    config = transformers.AutoConfig.for_model("qwen4_exp", text_config=SIZES | options)
    config.vision_config.depth = 2
    return config


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ple_layer_ids": [3, 1, 3], "ngram_size": 4, "heads_per_ngram": 2, "ple_embed_dim": 18},
        {"ple_conv_kernel_size": 2, "ngram_vocab_size_base": 1_000, "make_ngram_vocab_size_divisible_by": 1},
    ],
)
def test_counts_equal_those_of_transformers(options):
    config = made(**options)
    assert count_parameters(config.to_dict()).total == count(config)


def test_the_table_of_the_published_size_has_sixteen_primes_above_twenty_million():
    text = SIZES | {"model_type": "qwen4_exp_text", "ngram_vocab_size_base": 20_000_000, "hidden_size": 2560}
    text |= {"make_ngram_vocab_size_divisible_by": 128, "hc_count": 4}
    rows = -(-320_001_446 // 128) * 128
    added = count_parameters(text).total - count_parameters(text | {"ple_layer_ids": []}).total
    assert added == rows * 160 + 2560 * (4 + 1) * 2560 + (3 + 4) * 4 * 2560


def test_stages_have_the_tables_of_their_layers():
    text = SIZES | {"model_type": "qwen4_exp_text", "ple_layer_ids": [1, 3]}
    stages = [count_parameters(text, layers=each).total for each in (range(1), range(1, 4))]
    assert sum(stages) == count_parameters(text).total


def test_heads_that_do_not_divide_the_embedding_are_refused():
    with pytest.raises(ConfigError, match="ple_embed_dim is 60; it must be a multiple of the 16 heads of n-grams"):
        count_parameters(SIZES | {"model_type": "qwen4_exp_text", "ple_embed_dim": 60})
