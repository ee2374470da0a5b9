"""Counts of parameters, compared with models that transformers builds (see `record_parameters.py`), and their bytes."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import ConfigError, read_model_config
from pagecore.models.families.registry import FAMILIES
from pagecore.models.families.speech import SPEECH
from pagecore.models.parameters import WEIGHT_FORMATS, Kind, count_parameters, vision_tower, weight_format
from pagecore.models.parameters.structures.registry import STRUCTURES
from tests.capabilities import require
from tests.models.meta import on_meta_device
from tests.models.published import PUBLISHED
from tests.together import together

# Models of remote code or of engines, whose parameters are not known.
UNCOUNTED = {"alice_ai", "dory", "gigachat3_5"}
UNCOUNTED |= {
    "interns2_mobius_text",
    "k2_horizon",
    "moondream3_text",
}
UNCOUNTED |= {"nemotron_h_puzzle", "step5", "xllm"}
SPEAKING = {"coarse_acoustics", "csm", "csm_depth_decoder_model", "higgs_audio_v2", "kyutai_speech_to_text", "moshi"}
SPEAKING |= {"musicgen_melody_decoder", "semantic", "step3p5"}
FOLDER = Path(__file__).parents[1]
RECORDED = json.loads((FOLDER / "parameters.json").read_text())
WRITTEN = json.loads((FOLDER / "attended.json").read_text()) | json.loads((FOLDER / "stored.json").read_text())
LLAMA = json.loads((FOLDER / "llama-3.1-8b.json").read_text())
DEEPSEEK = json.loads((FOLDER / "deepseek-v3.json").read_text())


def config_of(name):
    case = WRITTEN.get(name)
    return RECORDED[name]["config"] if case is None else case["to_dict_adds"] | case["to_diff_dict"]


@together("name", RECORDED)
def test_counts_equal_those_of_transformers(name):
    expected = RECORDED[name]["parameters"]
    if name == "longcat-flash":
        # transformers gives the experts that return their input the weights of a gate; published checkpoints do not.
        expected -= 28 * 256 * 2 * 2048 * 6144
    assert count_parameters(config_of(name)).total == expected


def test_every_family_is_counted():
    assert set(STRUCTURES) == set(FAMILIES) - UNCOUNTED - ({*SPEECH} - SPEAKING)


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("rwkv", {"hidden_size": 48, "num_hidden_layers": 2, "attention_hidden_size": 32}),
        ("rwkv", {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 100}),
        ("xlstm", {"hidden_size": 128, "num_heads": 4, "num_hidden_layers": 2}),
        ("xlstm", {"hidden_size": 128, "num_hidden_layers": 1, "weight_mode": "fused", "use_bias": True}),
        ("xlstm", {"num_hidden_layers": 1, "use_bias": True, "add_out_norm": False, "ffn_proj_factor": 1.3}),
    ],
)
def test_models_without_attention_are_counted_as_transformers_builds_them(model_type, sizes):
    transformers = require("transformers")
    config = transformers.AutoConfig.for_model(model_type, **sizes, vocab_size=101)
    with on_meta_device():
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = count_parameters(config.to_dict())
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    layers = range(config.num_hidden_layers)
    stages = [count_parameters(config.to_dict(), layers=range(n, n + 1)).total for n in layers]
    assert sum(stages) == counted.total


@pytest.mark.parametrize("name", ["qk_dim_factor", "v_dim_factor", "ffn_proj_factor"])
@pytest.mark.parametrize("factor", [1e8, 1e308])
def test_widths_of_xlstm_past_the_largest_integer_are_refused(name, factor):
    config = {"model_type": "xlstm", "hidden_size": 128, "num_heads": 4, "num_hidden_layers": 1, "vocab_size": 101}
    with pytest.raises(ConfigError, match=rf"{name} is .*; times 128 it must be at most 2147483647"):
        count_parameters(config | {name: factor, "use_bias": False})


# Models of remote code, with the numbers of parameters of their weights.
REMOTE_FILES = {
    "glm-4-9b": (
        {"model_type": "chatglm", "num_layers": 40, "ffn_hidden_size": 13696, "padded_vocab_size": 151552}
        | {"add_qkv_bias": True, "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 128},
        9_399_951_360,
    ),
    "arctic": (
        {"model_type": "arctic", "hidden_size": 7168, "num_attention_heads": 56, "num_key_value_heads": 8}
        | {"num_hidden_layers": 35, "intermediate_size": 4864, "num_local_experts": 128, "vocab_size": 32000}
        | {"moe_layer_frequency": 1, "parallel_attn_mlp_res": True},
        # By hand: the model card has 480B.
        35 * (128 * (3 * 7168 * 4864 + 7168) + 5 * 7168 * 7168 + 2 * 7168 * 1024 + 3 * 7168) + 64001 * 7168,
    ),
    "baichuan2-7b": (
        {"model_type": "baichuan", "num_hidden_layers": 32, "intermediate_size": 11008, "vocab_size": 125696},
        7_505_973_248,
    ),
    "internlm2-7b": (
        {"model_type": "internlm2", "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 92544}
        | {"num_key_value_heads": 8, "bias": False},
        7_737_708_544,
    ),
    "deepseek-moe-16b": (
        {"model_type": "deepseek", "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 28}
        | {"intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2}
        | {"first_k_dense_replace": 1, "vocab_size": 102400},
        16_375_728_128,
    ),
    "minicpm-2b": (
        {"model_type": "minicpm", "hidden_size": 2304, "num_attention_heads": 36, "num_hidden_layers": 40}
        | {"intermediate_size": 5760, "vocab_size": 122753, "tie_word_embeddings": True},
        2_724_880_896,
    ),
    # Without the layer that predicts further tokens: 210,790,400 of the 7,833,409,536 parameters of the weights.
    "mimo-7b": (
        {"model_type": "mimo", "num_hidden_layers": 36, "num_key_value_heads": 8, "intermediate_size": 11008}
        | {"vocab_size": 151680, "num_nextn_predict_layers": 1},
        7_622_619_136,
    ),
    "qwen-7b": (
        {"model_type": "qwen", "num_hidden_layers": 32, "intermediate_size": 22016, "vocab_size": 151936},
        7_721_324_544,
    ),
    # By hand: the model card has 16B, of which 1.4B are active.
    "ling-mini-2.0": (
        {"model_type": "bailing_moe", "hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16}
        | {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 5120, "moe_intermediate_size": 512}
        | {"num_experts": 256, "num_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 157184}
        | {"use_qk_norm": True, "use_qkv_bias": False, "use_bias": False, "sliding_window": 4096},
        2 * 157184 * 2048
        + 20 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 2 * 128 + 2 * 2048)
        + 3 * 2048 * 5120
        + 19 * (257 * 3 * 2048 * 512 + 2048 * 256)
        + 2048,
    ),
    "step-3": (
        {"model_type": "step3_text", "hidden_size": 7168, "num_attention_heads": 64, "num_attention_groups": 1}
        | {"head_dim": 256, "share_q_dim": 2048, "num_hidden_layers": 61, "intermediate_size": 18432}
        | {"moe_num_experts": 48, "moe_intermediate_size": 5120, "share_expert_dim": 5120, "vocab_size": 128815}
        | {"moe_layers_enum": ",".join(map(str, range(4, 60)))},
        316_294_538_240,  # computed by hand: the model card has 316B
    ),
    "exaone-3.5-7.8b": (
        {"model_type": "exaone", "num_layers": 32, "intermediate_size": 14336, "vocab_size": 102400}
        | {"num_key_value_heads": 8},
        7_818_448_896,
    ),
}


def block(n_heads_in_group, ffn_mult, **ffn):
    """Return a block of Nemotron-NAS; without heads in a group it has no attention."""
    attention = {"n_heads_in_group": n_heads_in_group, "no_op": n_heads_in_group is None, "window_length": None}
    return {"attention": attention | {"replace_with_linear": False}, "ffn": {"ffn_mult": ffn_mult} | ffn}


def test_blocks_of_nemotron_nas():
    blocks = [block(8, 5.25), block(None, 2.625), block(16, 1.0), block(8, None, no_op=True), block(None, 0.5)]
    blocks[4]["attention"] |= {"no_op": False, "replace_with_linear": True}
    blocks[4]["ffn"] |= {"replace_with_linear": True}
    config = {"model_type": "nemotron-nas", "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 5}
    config |= {"block_configs": blocks, "vocab_size": 128256, "num_key_value_heads": None, "intermediate_size": None}
    model = read_model_config(config)
    assert model.specs_by_layer == ((0,), (), (1,), (2,), ())
    assert [(spec.num_query_heads, spec.num_kv_heads, spec.head_dim) for spec in model.layers] == [
        (64, 8, 128), (64, 4, 128), (64, 8, 128)
    ]  # fmt: skip
    attention = [2 * 8192 * 8192 + 2 * 8192 * kv_heads * 128 for kv_heads in (8, 4, 8)]
    widths = [28672, 14336, 5632]
    expected = sum(attention) + 3 * 8192 * sum(widths) + 2 * 8192 * 8192 + (8 + 1) * 8192 + 2 * 128256 * 8192
    counted = count_parameters(config)
    assert counted.total == expected
    stages = [count_parameters(config, layers=range(n, n + 1)).total for n in range(5)]
    assert sum(stages) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_configs": None}, "block_configs is null; it must list an object for each of num_hidden_layers, 1"),
        ({"block_configs": [{"attention": 1}]}, r"block_configs\[0\] must be an object with the objects attention"),
        ({"block_configs": [block(7, 1.0)]}, "attention.n_heads_in_group is 7; it must divide num_attention_heads"),
        ({"block_configs": [block("8", 1.0)]}, 'n_heads_in_group is "8"; it must be an integer'),
        ({"block_configs": [block(8, None)]}, r"block_configs\[0\].ffn.ffn_mult is null; it must be a finite number"),
    ],
)
def test_blocks_that_no_nemotron_nas_has(change, words):
    config = {"model_type": "nemotron-nas", "hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 1}
    with pytest.raises(ConfigError, match=words):
        count_parameters(config | {"vocab_size": 99, "block_configs": [block(8, 1.0)]} | change)
    with pytest.raises(
        UnsupportedOption, match=r"block_configs\[0\].ffn.moe is {.*not counted; pass weights= in bytes"
    ):
        count_parameters(config | {"vocab_size": 99, "block_configs": [block(8, 1.0, moe={"num_local_experts": 4})]})
    windowed = block(8, 1.0)
    windowed["attention"]["window_length"] = 16
    with pytest.raises(UnsupportedOption, match="window_length is 16, which is not supported"):
        read_model_config(config | {"block_configs": [windowed]})


@together("name", REMOTE_FILES)
def test_models_of_remote_code_are_counted(name):
    config, expected = REMOTE_FILES[name]
    config = {"hidden_size": 4096, "num_attention_heads": 32, "tie_word_embeddings": False, **config}
    assert count_parameters(config).total == expected


def test_counts_of_published_files():
    assert count_parameters(FOLDER / "llama-3.1-8b.json").total == 8_030_261_248
    small = LLAMA | {"tie_word_embeddings": True}
    assert count_parameters(small).total == 8_030_261_248 - 128256 * 4096
    assert count_parameters(LLAMA | {"attention_bias": True, "mlp_bias": True}).total == 8_030_261_248 + 32 * (
        4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("llama", {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True}),
        ("gemma3_text", {"head_dim": 24, "num_key_value_heads": 1}),
        ("qwen3_moe", {"num_experts": 6, "moe_intermediate_size": 40, "mlp_only_layers": [1], "head_dim": 16}),
        (
            "deepseek_v3",
            {"num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 24, "first_k_dense_replace": 2},
        ),
        ("jamba", {"num_experts": 4, "num_key_value_heads": 2, "mamba_expand": 3}),
    ],
)
def test_other_sizes_equal_models_that_transformers_builds_now(model_type, sizes):
    transformers = require("transformers")
    general = {"vocab_size": 129, "hidden_size": 96, "intermediate_size": 168, "num_hidden_layers": 5}
    config = transformers.AutoConfig.for_model(model_type, **{**general, "num_attention_heads": 4, **sizes})
    with on_meta_device():
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert count_parameters(config.to_dict()).total == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (LLAMA, "vocab_size"),
        (LLAMA, "intermediate_size"),
        (DEEPSEEK | {"vocab_size": 9, "intermediate_size": 9, "moe_intermediate_size": 9}, "first_k_dense_replace"),
        (PUBLISHED["qwen3-30b-a3b"] | {"vocab_size": 9}, "moe_intermediate_size"),
    ],
)
def test_a_missing_size_is_named(config, field):
    config = {name: value for name, value in config.items() if name != field}
    with pytest.raises(ConfigError, match=f"{field} is missing; add it"):
        count_parameters(config)


@together("listed", [3, "x", [None], [1.0], True])
@together(("name", "field"), [("qwen3-30b-a3b", "mlp_only_layers"), ("llama-4-scout", "moe_layers")])
def test_layers_with_experts_are_listed_by_number(name, field, listed):
    config = config_of(name)
    text = config.get("text_config", config)
    sizes = {"vocab_size": 9, "moe_intermediate_size": 8, "intermediate_size_mlp": 8, field: listed}
    changed = {**text, **sizes}
    with pytest.raises(ConfigError, match=f"{field} is .*; it must be a list of layer numbers"):
        count_parameters(config | {"text_config": changed} if "text_config" in config else changed)


def test_a_tower_of_an_unknown_type_is_refused():
    config = config_of("qwen2.5-vl-7b") | {"vision_config": {"model_type": "eye", "hidden_size": 8}}
    with pytest.raises(UnsupportedOption, match=r'vision_config\.model_type is "eye", a vision tower that is unknown'):
        count_parameters(config)


@pytest.mark.parametrize("part", ["visual_tokenizer_config", "vit_config", "audio_encoder_config"])
def test_parts_of_unknown_models_are_not_left_out_of_a_count(part):
    text = {**LLAMA, "quantization_config": None}
    config = {"model_type": "unheard_of", "llm_config": text, part: {}, "quantization_config": {"bits": 4}}
    assert count_parameters(config).total == count_parameters(LLAMA).total
    with pytest.raises(UnsupportedOption, match=f'"unheard_of", which is unknown, and has a {part}, whose'):
        count_parameters(config | {part: {"hidden_size": 8}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mm_vision_tower", "openai/clip-vit-large-patch14-336"),
        ("vision_encoder", "vit_so400m_patch14_siglip_384.webli"),
        ("timm_model_ids", ["vit_large_patch14_reg4_dinov2.lvd142m"]),
        ("visual", {"layers": 48}),
        ("audio_model_id", "openai/whisper-large-v3-turbo"),
        ("vision_tower_cfg", {"hidden_size": 1152}),
        ("vlm_config", {"vision_config": {}}),
    ],
)
def test_encoders_that_are_named_only_are_not_left_out_of_a_count(field, value):
    count_parameters(LLAMA | {field: None})
    with pytest.raises(UnsupportedOption, match=f"{field} is .*, whose parameters cannot be counted: remove {field}"):
        count_parameters(LLAMA | {field: value})


def test_sizes_of_vision_towers():
    qwen = vision_tower(config_of("qwen2.5-vl-7b"))
    assert (qwen.layers, qwen.hidden, qwen.width, qwen.frames, qwen.text_hidden) == (32, 1280, 3420, 2, 3584)
    assert (qwen.patches(1024), qwen.tokens(1024)) == (74 * 74, 1369)
    assert (vision_tower(config_of("gemma-3-4b")).tokens(896), vision_tower(LLAMA)) == (256, None)
    assert vision_tower(config_of("qwen3-vl-4b")).depths == 4


def test_ranks_share_matrices_and_copy_norms():
    parameters = count_parameters(LLAMA)
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    ends, norms = 2 * 128256 * 4096, 65 * 4096
    for ranks in (1, 2, 8):
        assert parameters.on_rank(ranks) == {
            Kind.LINEAR: layers // ranks,
            Kind.EMBEDDING: ends // ranks,
            Kind.OTHER: norms,
        }
    # 8 heads of keys and values over 16 ranks: each rank holds a copy of one.
    shared = 32 * (2 * 4096 * 4096 + 3 * 4096 * 14336) // 16 + 32 * 2 * 4096 * 1024 // 8
    assert parameters.on_rank(16)[Kind.LINEAR] == shared
    # Two groups of data-parallel attention: attention over 4 of the 8 ranks.
    grouped = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024) // 4 + 32 * 3 * 4096 * 14336 // 8
    assert parameters.on_rank(8, data_parallel=2)[Kind.LINEAR] == grouped


QUANTISED = [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8 + Fraction(32, 128 * 128)),
    ({"quant_method": "fp8"}, "fp8", 8),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", 4 + Fraction(20, 128)),
    ({"quant_method": "awq", "bits": 4, "group_size": 64}, "int4", 4 + Fraction(20, 64)),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8", 8),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", 8),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4", Fraction(9, 2)),
    ({"quant_method": "mxfp4"}, "mxfp4", Fraction(17, 4)),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", Fraction(9, 2)),
    ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, "fp8", 8),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4, "group_size": 128}}},
        },
        "int4",
        4 + Fraction(16, 128),
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
        },
        "fp8",
        8,
    ),
]


@together(("quantised", "name", "bits"), QUANTISED)
def test_formats_of_checkpoints(quantised, name, bits):
    found = weight_format(LLAMA | {"quantization_config": quantised})
    assert (found.name, found.bits, found.other_bits, found.is_quantised) == (name, bits, 16, True)


def test_bytes_of_formats():
    parameters = count_parameters(LLAMA)
    matrices = parameters.of_kind(Kind.LINEAR)
    others = parameters.total - matrices
    assert weight_format(LLAMA).nbytes(parameters) == 2 * 8_030_261_248
    assert weight_format(LLAMA, "float32").nbytes(parameters) == 4 * 8_030_261_248
    assert weight_format(LLAMA, "fp8").nbytes(parameters) == matrices + 2 * others
    assert weight_format(LLAMA, "nvfp4").nbytes(parameters) == matrices * 9 // 16 + 2 * others
    assert weight_format(LLAMA | {"torch_dtype": "float32"}, "fp8").nbytes(parameters) == matrices + 4 * others


def test_mxfp4_applies_to_experts_only():
    config = config_of("gpt-oss-20b") | {"quantization_config": {"quant_method": "mxfp4"}}
    parameters = count_parameters(config)
    experts = parameters.of_kind(Kind.EXPERT)
    assert experts == 24 * 32 * 3 * 2880 * 2880
    expected = experts * 17 // 32 + 2 * (parameters.total - experts)
    assert weight_format(config).nbytes(parameters) == expected


@pytest.mark.parametrize(
    ("change", "weights", "reason"),
    [
        ({}, "fp7", 'weights is "fp7"; use'),
        ({"quantization_config": {"quant_method": "gguf"}}, "auto", 'quant_method is "gguf", whose bytes are unknown'),
        ({"quantization_config": {"quant_method": "gptq", "bits": "few"}}, "auto", "bits is"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "auto", "config_groups is missing"),
    ],
)
def test_unknown_formats_are_refused_by_name(change, weights, reason):
    with pytest.raises(UnsupportedOption, match=reason):
        weight_format(LLAMA | change, weights)
    assert "bfloat16" in WEIGHT_FORMATS
