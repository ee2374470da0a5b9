"""Parameters of families whose code is published with their weights: of published sizes, computed by hand."""

import pytest

from pagecore import UnsupportedOption
from pagecore.models import ConfigError
from pagecore.models.parameters import count_parameters, weight_format
from tests.together import together


def mlp(hidden, width):
    return 3 * hidden * width


def attention(hidden, heads, kv_heads, dim):
    return 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim


HUNYUAN_LARGE = {
    "model_type": "hunyuan",
    "cla_share_factor": 2,
    "hidden_size": 6400,
    "intermediate_size": 18304,
    "num_attention_heads": 80,
    "num_experts": 16,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "num_shared_expert": 1,
    "tie_word_embeddings": True,
    "use_cla": True,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "vocab_size": 128512,
}
RING = {"model_type": "bailing_moe_linear", "head_dim": 128, "num_experts": 256, "vocab_size": 157184}
RING |= {"num_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
RING_MINI = RING | {"hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512}
RING_MINI |= {"num_attention_heads": 16, "num_hidden_layers": 20, "layer_group_size": 5}
RING_FLASH = RING | {"hidden_size": 4096, "intermediate_size": 9216, "moe_intermediate_size": 1024}
RING_FLASH |= {"num_attention_heads": 32, "num_hidden_layers": 32, "layer_group_size": 8}


def ring(hidden, heads, layers, group, width, expert):
    """Return the parameters of a Ring with lightning attention in all but the last layer of each group."""
    full = layers // group
    norms = 2 * 128 + 2 * hidden
    lightning = 5 * hidden * heads * 128 + heads * 128
    experts = 257 * mlp(hidden, expert) + 256 * hidden
    layered = full * attention(hidden, heads, 4, 128) + (layers - full) * lightning + layers * norms
    return layered + mlp(hidden, width) + (layers - 1) * experts + 2 * 157184 * hidden + hidden


JET_PARTS = {"swa": {"window_size": 1152}, "jet": {"num_heads": 6, "head_dim": 256, "expand_v": 2.0, "conv_size": 4}}
JET_PARTS["jet"]["dconv_generator_reduction"] = 8
DEEPSEEK_V4 = {"model_type": "deepseek_v4", "hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 43}
DEEPSEEK_V4 |= {"compress_ratios": [0, 0, *[4, 128] * 20, 4], "moe_intermediate_size": 2048, "n_routed_experts": 256}
DEEPSEEK_V4 |= {"q_lora_rank": 1024, "o_lora_rank": 1024, "vocab_size": 129280}

# Of each: the config, the parameters, and what the model card has.
CASES = {
    "hunyuan-large": (  # 389B
        HUNYUAN_LARGE,
        64 * (17 * mlp(6400, 18304) + 16 * 6400 + 2 * 6400 * 6400 + 2 * 6400 + 2 * 80)
        + 32 * 2 * 6400 * 640
        + 128512 * 6400
        + 6400,
    ),
    "ring-mini-linear-2.0": (RING_MINI, ring(2048, 16, 20, 5, 5120, 512)),  # 16.4B
    "ring-flash-linear-2.0": (RING_FLASH, ring(4096, 32, 32, 8, 9216, 1024)),  # 104B
    "phi-3-small": (
        {"model_type": "phi3small", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"vocab_size": 100352},
        7_392_272_384,
    ),
    "jais-13b": (  # 13B
        {"model_type": "jais", "n_embd": 5120, "n_head": 40, "n_layer": 40, "n_inner": 13653, "vocab_size": 84992}
        | {"activation_function": "swiglu", "position_embedding_type": "alibi"},
        40 * (4 * 5120 * 5120 + mlp(5120, 13653) + 9 * 5120 + 2 * 13653) + 84992 * 5120 + 2 * 5120,
    ),
    "ouro-1.4b": (  # 1.4B
        {"model_type": "ouro", "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24}
        | {"intermediate_size": 5632, "vocab_size": 49152},
        24 * (4 * 2048 * 2048 + mlp(2048, 5632) + 4 * 2048) + 2 * 49152 * 2048 + 2048 + 2049,
    ),
    "internlm-7b": (
        {"model_type": "internlm", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"intermediate_size": 11008, "vocab_size": 103168},
        7_321_948_160,
    ),
    "telechat2-7b": (
        {"model_type": "telechat", "hidden_size": 4096, "n_head": 32, "n_layer": 30, "ffn_hidden_size": 12288}
        | {"vocab_size": 131072},
        30 * (4 * 4096 * 4096 + mlp(4096, 12288) + 4 * 4096) + 2 * 131072 * 4096 + 4096,
    ),
    "plamo-2-8b": (  # 9.1B
        {"model_type": "plamo2", "hidden_size": 4096, "hidden_size_per_head": 128, "num_attention_heads": 32}
        | {"num_hidden_layers": 32, "num_key_value_heads": 4, "mamba_num_heads": 64, "intermediate_size": 16384}
        | {"vocab_size": 100000},
        32 * (mlp(4096, 16384) + 4 * 4096)
        + 16 * (attention(4096, 32, 4, 128) + 36 * 128)
        + 16 * (3 * 4096 * 8192 + 4 * 8192 + 8192 * (256 + 128) + 256 * 64 + 3 * 64 + 256 + 128)
        + 100000 * 4096
        + 4096,
    ),
    "plamo-3-8b": (
        {"model_type": "plamo3", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"num_key_value_heads": 4, "intermediate_size": 16384, "vocab_size": 107520},
        32 * (attention(4096, 32, 4, 128) + mlp(4096, 16384) + 4 * 4096 + 2 * 128) + 107520 * 4096 + 4096,
    ),
    "iquest-coder-40b-loop": (  # 40B
        {"model_type": "iquestloopcoder", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 80}
        | {"num_key_value_heads": 8, "intermediate_size": 27648, "vocab_size": 76800},
        80 * (attention(5120, 40, 8, 128) + mlp(5120, 27648) + 2 * 5120 + 40 * 129) + 2 * 76800 * 5120 + 5120,
    ),
    "openpangu-ultra-moe-718b": (
        {"model_type": "pangu_ultra_moe", "hidden_size": 7680, "num_attention_heads": 128, "num_hidden_layers": 61}
        | {"attention_q_lora_dim": 1536, "attention_kv_lora_dim": 512, "attention_qk_dim": 128, "num_dense_layers": 3}
        | {"attention_qk_rope_dim": 64, "attention_v_dim": 128, "num_routed_experts": 256, "num_shared_experts": 1}
        | {"intermediate_size": 18432, "moe_intermediate_size": 2048, "sandwich_norm": True, "vocab_size": 153600},
        61 * (7680 * (1536 + 576) + 1536 + 512 + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7680 + 4 * 7680)
        + 3 * mlp(7680, 18432)
        + 58 * (257 * mlp(7680, 2048) + 256 * 7680)
        + 2 * 153600 * 7680
        + 7680,
    ),
    "solar-pro-preview": (  # 22.1B
        {"model_type": "solar", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 64}
        | {"num_key_value_heads": 10, "intermediate_size": 17920, "vocab_size": 32128, "sliding_window": 2047},
        64 * (attention(5120, 40, 10, 128) + mlp(5120, 17920) + 2 * 5120) + 2 * 32128 * 5120 + 5120,
    ),
    "sarvam-105b": (
        {"model_type": "sarvam_mla", "hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 32}
        | {"intermediate_size": 16384, "moe_intermediate_size": 2048, "num_experts": 128, "v_head_dim": 128}
        | {"vocab_size": 262144},
        32 * (4096 * 64 * 192 + 4096 * 576 + 512 + 512 * 64 * 256 + 64 * 128 * 4096 + 2 * 4096)
        + mlp(4096, 16384)
        + 31 * (129 * mlp(4096, 2048) + 128 * 4096)
        + 2 * 262144 * 4096
        + 4096,
    ),
    "jet-nemotron-2b": (
        {"model_type": "jet_nemotron", "hidden_size": 1536, "num_attention_heads": 12, "num_hidden_layers": 4}
        | {"num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True}
        | {"layer_types": ["jet", "attn", "jet", "swa"], "efficient_attention_config": JET_PARTS},
        2 * (attention(1536, 12, 2, 128) + 12 * 128 + 2 * 2 * 128)
        + 2 * (1536 * (2 * 1536 + 2 * 3072 + 12) + 1536 * 384 + 384 * 4 * 3072 + 4 * 3072 + 12 + 512 + 3072 * 1536)
        + 4 * (mlp(1536, 8960) + 2 * 1536)
        + 151936 * 1536
        + 1536,
    ),
    "nanbeige": (
        {"model_type": "nanbeige", "hidden_size": 3072, "num_attention_heads": 48, "num_hidden_layers": 22}
        | {"num_key_value_heads": 8, "intermediate_size": 10752, "vocab_size": 166144, "num_loops": 2},
        22 * (attention(3072, 48, 8, 64) + mlp(3072, 10752) + 2 * 3072) + 2 * 166144 * 3072 + 3072,
    ),
    "spark-2.5": (
        {"model_type": "spark2_5", "hidden_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 28}
        | {"num_key_value_heads": 2, "intermediate_size": 6656, "vocab_size": 133120},
        28 * (attention(2048, 8, 2, 256) + 2048 * 8 + mlp(2048, 6656) + 2 * 2048) + 2 * 133120 * 2048 + 2048,
    ),
    "molmo-7b-d": (
        {"model_type": "molmo", "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28}
        | {"num_key_value_heads": 4, "intermediate_size": 37888, "vocab_size": 152064, "qkv_bias": True},
        8_021_025_280,
    ),
    "solar-open-2": (  # 250B
        {"model_type": "solar_open2", "hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 48}
        | {"gqa_layers": list(range(0, 48, 4)), "n_routed_experts": 320, "n_shared_experts": 1, "vocab_size": 196608}
        | {"moe_intermediate_size": 1280, "intermediate_size": 10240},
        12 * (attention(4096, 64, 8, 128) + 4096 * 8192)
        + 36 * (4 * 4096 * 8192 + 2 * 128 * (4096 + 8192) + 4096 * 64 + 4 * 3 * 8192 + 8192 + 64 + 128)
        + 48 * (321 * mlp(4096, 1280) + 320 * 4096 + 2 * 4096)
        + 2 * 196608 * 4096
        + 4096,
    ),
    "deepseek-v4-flash": (DEEPSEEK_V4, 284_332_230_231),  # 284B
    "mimo-v2.5-pro": (  # 1.02T
        {"model_type": "mimo_v2", "hidden_size": 6144, "num_attention_heads": 128, "num_hidden_layers": 70}
        | {"num_key_value_heads": 8, "swa_num_key_value_heads": 8, "head_dim": 192, "v_head_dim": 128}
        | {"hybrid_layer_pattern": [0] + [1] * 69, "moe_layer_freq": [0] + [1] * 69, "sliding_window": 128}
        | {"intermediate_size": 16384, "moe_intermediate_size": 2048, "n_routed_experts": 384, "vocab_size": 152576},
        70 * (6144 * (128 * 192 + 8 * 192 + 8 * 128 + 128 * 128) + 2 * 6144)
        + 69 * (128 + 384 * mlp(6144, 2048) + 384 * 6144)
        + mlp(6144, 16384)
        + 2 * 152576 * 6144
        + 6144,
    ),
}


@together("name", CASES)
def test_parameters_of_published_sizes(name):
    config, expected = CASES[name]
    assert count_parameters(config).total == expected


@pytest.mark.parametrize("name", ["ring-mini-linear-2.0", "hunyuan-large", "plamo-2-8b"])
def test_stages_have_all_parameters(name):
    config, expected = CASES[name]
    layers = config["num_hidden_layers"]
    untied = config | {"tie_word_embeddings": False}
    head = 0 if name.startswith("ring") else config["vocab_size"] * config["hidden_size"]
    stages = [range(0, layers // 2), range(layers // 2, layers)]
    assert sum(count_parameters(untied, layers=stage).total for stage in stages) == expected + head


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"use_mixed_mlp_moe": False}, -64 * mlp(6400, 18304)),
        ({"num_shared_expert": 2}, 64 * mlp(6400, 18304)),
        ({"moe_intermediate_size": 3072}, 64 * 16 * (mlp(6400, 3072) - mlp(6400, 18304))),
        ({"num_experts": 1}, -64 * (16 * mlp(6400, 18304) + 16 * 6400)),
        ({"use_qk_norm": False}, -64 * 2 * 80),
        ({"use_cla": False}, 32 * 2 * 6400 * 640),
    ],
)
def test_experts_of_hunyuan(change, difference):
    assert count_parameters(HUNYUAN_LARGE | change).total - count_parameters(HUNYUAN_LARGE).total == difference
    with pytest.raises(ConfigError, match=r"num_shared_expert is \[1\]"):
        count_parameters(HUNYUAN_LARGE | {"num_shared_expert": [1]})


def test_tables_of_ngrams_are_counted():
    config = {"model_type": "longcat_flash_ngram", "hidden_size": 48, "num_layers": 2, "num_attention_heads": 4}
    config |= {"vocab_size": 100, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 24, "n_routed_experts": 6}
    config |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    tables = {"ngram_vocab_size_ratio": 3, "emb_split_num": 2, "emb_neighbor_num": 4}
    rows = sum(3 * 100 + 2 * number + 1 for number in range(6))
    difference = count_parameters(config | tables).total - count_parameters(config).total
    assert difference == 8 * rows + 6 * 8 * 48


@pytest.mark.parametrize(
    ("model_type", "kin"),
    [
        ("Dream", "qwen2"),
        ("sdar", "qwen3"),
        ("sdar_moe", "qwen3_moe"),
        ("interns1_pro_text", "qwen3_moe"),
        ("qwen3_asr_text", "qwen3"),
        ("teleflm", "llama"),
        ("llada2_moe", "qwen3"),
        ("param2moe", "qwen3"),
    ],
)
def test_models_with_the_layers_of_others(model_type, kin):
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    config |= {"head_dim": 16, "intermediate_size": 96, "vocab_size": 100, "num_experts": 0, "use_qk_norm": True}
    expected = count_parameters(config | {"model_type": kin}).total
    assert count_parameters(config | {"model_type": model_type}).total == expected


def test_gates_of_solar_may_have_biases_and_the_width_of_the_heads():
    solar, total = CASES["solar-open-2"]
    ungated = count_parameters(solar | {"use_gqa_gate": False}).total
    assert total - ungated == 12 * 4096 * 8192
    assert count_parameters(solar | {"use_gqa_gate_bias": True}).total - total == 12 * 8192
    wide = count_parameters(solar | {"kda_use_full_proj": True}).total
    assert wide - total == 36 * (2 * 4096 * 8192 - 2 * 128 * (4096 + 8192))


def test_shared_experts_of_param_may_have_a_width_together():
    config = {"model_type": "param2moe", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    config |= {"moe_intermediate_size": 24, "num_experts": 4, "num_shared_experts": 2, "intermediate_size": 96}
    config |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100}
    layers = 3 * (attention(64, 4, 2, 16) + 2 * 64) + mlp(64, 96) + 2 * (4 * mlp(64, 24) + 4 * 64)
    ends = 2 * 100 * 64 + 64
    assert count_parameters(config).total == layers + 2 * mlp(64, 48) + ends
    together = config | {"moe_shared_expert_intermediate_size": 40}
    assert count_parameters(together).total == layers + 2 * mlp(64, 40) + ends


def test_the_draft_of_deepseek_v4_has_a_window_and_joins_its_streams():
    hidden, layer = 4096, DEEPSEEK_V4 | {"num_hidden_layers": 1, "compress_ratios": [0]}
    ends = count_parameters(DEEPSEEK_V4 | {"num_hidden_layers": 2, "compress_ratios": [0, 0]}).total
    one = ends - count_parameters(layer).total
    draft = count_parameters(DEEPSEEK_V4, mtp=True).total - count_parameters(DEEPSEEK_V4).total
    assert draft == one + 2 * hidden**2 + 3 * hidden + 4 * (4 * hidden + 1) + 1


def test_experts_of_deepseek_v4_have_a_format_of_their_own():
    experts = 43 * 256 * 3 * 4096 * 2048
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    parameters = count_parameters(DEEPSEEK_V4)
    eight, four = (
        weight_format(DEEPSEEK_V4 | quantised | {"expert_dtype": kind}).nbytes(parameters) for kind in ("fp8", "fp4")
    )
    assert eight - four == experts + experts * 4 // 128**2 - experts * 17 // 32
    with pytest.raises(UnsupportedOption, match='expert_dtype is "int2", whose bytes are unknown'):
        weight_format(DEEPSEEK_V4 | quantised | {"expert_dtype": "int2"})


def test_modules_of_quantised_deepseek_v4_have_the_names_of_engines():
    matrices = 43 * 256 * 3
    experts, shared = matrices * 4096 * 2048, 43 * 3 * 4096 * 2048
    # q_a_proj and kv_proj, which vLLM joins, q_b_proj, and both parts of the output's projection.
    attention = 43 * (4096 * 1024 + 4096 * 512 + 1024 * 64 * 512 + 64 * 512 * 1024 + 8 * 1024 * 4096)
    listed = {f"layers.{layer}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for layer in range(43)}
    four = {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}
    eight = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}
    groups = {
        "group_0": eight | {"targets": ["re:.*attn.*(fused_wqa_wkv|wq_b|wo_a|wo_b)$"], "format": "float-quantized"},
        "group_1": four | {"targets": ["re:.*ffn.*(gate|up|down)_proj$"], "format": "nvfp4-pack-quantized"},
    }
    parameters = count_parameters(DEEPSEEK_V4)
    modelopt = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    joint = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": []}
    found = [
        weight_format(DEEPSEEK_V4 | {"quantization_config": each}).nbytes(parameters) for each in (modelopt, joint)
    ]
    plain, indexed = 2 * parameters.total, 21 * 1024 * 64 * 128
    assert found[0] == plain - experts * 23 // 16 + matrices * 8
    quantised = attention + indexed
    assert found[1] == pytest.approx(plain - (experts + shared) * 23 / 16 - quantised * (1 - 2 / 128**2), rel=1e-5)


def test_lightning_attention_of_ling_2_5_is_counted():
    ling = RING_MINI | {"model_type": "bailing_hybrid", "group_norm_size": 4, "use_qk_norm": True}
    ling |= {"num_hidden_layers": 5, "v_head_dim": 128, "q_lora_rank": None}
    heads, hidden = 16, 2048
    latent = hidden * heads * 192 + hidden * 576 + 512 + 512 * heads * 256 + heads * 128 * hidden
    lightning = 5 * hidden * heads * 128 + heads * 128 + 2 * 128
    experts = 4 * (257 * mlp(hidden, 512) + 256 * hidden)
    ends = mlp(hidden, 5120) + 5 * 2 * hidden + 2 * 157184 * hidden + hidden
    assert count_parameters(ling).total == latent + 4 * lightning + experts + ends


def test_the_draft_of_mimo_7b():
    """The weights have 7,833,409,536 parameters, as their index says."""
    mimo = {"model_type": "mimo", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 36}
    mimo |= {"num_key_value_heads": 8, "intermediate_size": 11008, "vocab_size": 151680, "num_nextn_predict_layers": 1}
    assert count_parameters(mimo, mtp=True).total == 7_833_409_536


# As vLLM builds its layers.
@pytest.mark.parametrize("flags", [(True, True, True, True), (False, True, False, True), (True, False, True, False)])
def test_minicpm_sala_has_lightning_layers_of_their_own_heads(flags):
    gated, output_gated, normed, qk_normed = flags
    config = {"model_type": "minicpm_sala", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101}
    config |= {"mixer_types": ["minicpm4", "lightning", "lightning-attn"], "lightning_nh": 6, "lightning_nkv": 3}
    config |= {"lightning_head_dim": 12, "tie_word_embeddings": False, "attention_bias": False, "qk_norm": qk_normed}
    config |= {"attn_use_output_gate": gated, "use_output_gate": output_gated, "use_output_norm": normed}
    attention = (2 + gated) * 128 * 64 + 2 * 32 * 64
    lightning = (2 + output_gated) * 72 * 64 + 2 * 36 * 64 + 72 * normed + 2 * 12 * qk_normed
    layers = attention + 2 * lightning + 3 * (3 * 64 * 96 + 2 * 64)
    assert count_parameters(config).total == layers + 2 * 101 * 64 + 64
