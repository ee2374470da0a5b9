"""Parameters of DeepSeek-V4.1-Flash, by the tensors of its checkpoint."""

import pytest

from pagecore.models import ConfigError, read_model_config
from pagecore.models.parameters import Kind, count_parameters, mtp_specs, vision_tower, weight_format

TEXT = {
    "model_type": "deepseek_v41_text",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "vocab_size": 129280,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2304,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384_006_168, 384_016_682],
    "engram_head_dim": 256,
    "engram_n_heads": 8,
    "engram_max_ngram_size": 4,
    "hc_mult": 4,
    "num_nextn_predict_layers": 3,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
}
VISION = {
    "num_hidden_layers": 32,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "patch_size": 14,
    "downsample_ratio": 3,
}
QUANTISED = {"quant_method": "fp8", "weight_block_size": [32, 32], "expert_dtype": "fp4"}
FLASH = {"model_type": "deepseek_v41", "text_config": TEXT, "vision_config": VISION, "quantization_config": QUANTISED}
# safetensors.total of the checkpoint, and the part of its three draft layers.
TOTAL, DRAFT = 763_205_315_794, 14_225_362_530


def test_counts_equal_the_tensors_of_the_checkpoint():
    assert count_parameters(FLASH).total == TOTAL - DRAFT
    assert count_parameters(FLASH, mtp=True).total == TOTAL
    assert count_parameters(FLASH).of_kind(Kind.VISION) == 485_268_480
    assert count_parameters(TEXT).total == TOTAL - DRAFT - 485_268_480


def test_stages_have_their_layers():
    stages = [count_parameters(FLASH, layers=each).total for each in (range(14), range(14, 21), range(21, 40))]
    assert sum(stages) == TOTAL - DRAFT
    assert min(stages[:2]) > 98 * 10**9  # tables


def test_a_draft_has_windows_of_its_own():
    layers = read_model_config(FLASH).layers
    assert [(spec.window, spec.latent_dim) for spec in mtp_specs(FLASH, layers)] == [(128, 512)] * 3
    without = TEXT | {"dspark_n_routed_experts": None}
    more = 3 * (384 - 128) * (3 * 5120 * 2304 + 5120 + 2)
    assert count_parameters(without, mtp=True).total == count_parameters(TEXT, mtp=True).total + more


def test_experts_have_four_bits_and_tables_eight():
    stored = weight_format(FLASH).nbytes(count_parameters(FLASH, mtp=True))
    assert abs(stored / 510.29e9 - 1) < 0.02  # files of the checkpoint


def test_the_tower_merges_nine_patches():
    tower = vision_tower(FLASH)
    assert (tower.layers, tower.merge, tower.tokens(1344)) == (32, 3, 1024)
    assert vision_tower(FLASH | {"vision_config": VISION | {"downsample_ratio": 2}}).merge == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"engram_num_embeddings": [1]}, "engram_num_embeddings is .*; it must have a number for each of 2"),
        ({"engram_layer_ids": "1"}, "engram_layer_ids is .*; it must be a list"),
        ({"index_source_layer_ids": None}, "index_source_layer_ids"),
        ({"compress_ratios": None}, "compress_ratios"),
    ],
)
def test_fields_that_a_count_needs_are_named(change, reason):
    with pytest.raises(ConfigError, match=reason):
        count_parameters(TEXT | change)


def test_layers_without_ngrams_are_counted():
    tables = (384_006_168 + 384_016_682) * 256 + 314_654_720
    assert count_parameters(TEXT).total - count_parameters(TEXT | {"engram_layer_ids": None}).total == tables
