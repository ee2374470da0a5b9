"""Bytes of quantised checkpoints: scales of every matrix, and modules that stay unquantised."""

import math
from dataclasses import replace

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models.parameters import Kind, count_parameters, weight_format
from pagecore.models.parameters.weights.excluded_modules import names_module
from tests.models.parameters.test_count import DEEPSEEK, LLAMA, config_of
from tests.together import together

GPT_OSS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.mark.parametrize(("name", "nbytes"), [("gpt-oss-20b", 13_761_264_768), ("gpt-oss-120b", 65_248_815_744)])
def test_bytes_equal_those_of_published_checkpoints(name, nbytes):
    config = config_of(name) | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": GPT_OSS}}
    assert weight_format(config).nbytes(count_parameters(config)) == nbytes


def test_bytes_of_deepseek_v3_in_blocks_of_float8():
    config = config_of("deepseek-v3") | DEEPSEEK
    found = weight_format(config)
    assert (found.group, found.scale_bits) == ((128, 128), 32)
    copied = 2 * 129280 * 7168 * 2  # the file of the layer for further tokens has an embedding and a head of its own
    # All 163 files have 688,586,727,753 bytes, headers of some 73 KB each included.
    total = found.nbytes(count_parameters(config, mtp=True)) + copied
    assert 0 < 688_586_727_753 - total < 163 * 80_000


@together(
    ("quantised", "words"),
    [
        ({"quant_method": "auto-round", "bits": 5}, "bits is 5, whose bytes are unknown"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "fp8"}, 'data_type is "fp8"'),
        (
            {
                "quant_method": "auto-round",
                "bits": 4,
                "extra_config": {"lm_head": {"bits": 16}, "layers.0": {"bits": 8}},
            },
            "extra_config is",
        ),
        ({"quant_method": "hqq", "quant_config": {"self_attn.q_proj": {"nbits": 4}}}, "quant_config is"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": "4"}}}, 'nbits is "4"'),
        ({"quant_method": "torchao", "quant_type": "autoquant"}, 'quant_type is "autoquant"'),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": ["x"]}}}, "quant_type is"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "FPXWeightOnlyConfig"}}}, "quant_type is"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config is",
        ),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, 'format is "marlin-24"'),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"targets": ["Conv2d"], "weights": {"num_bits": 8}}},
            },
            "config_groups.a.targets is",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "x"}}}},
            'config_groups.a.weights.type is "x"',
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 5}}}, "bits is 5"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": 3}}, "dynamic is"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False}, "load_in_4bit is false"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers is missing"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "X"}}}, 'quant_algo is "X"'),
    ],
)
def test_quantisations_whose_bytes_are_unknown(quantised, words):
    with pytest.raises(UnsupportedOption, match=f"quantization_config.*{words}"):
        weight_format(SMALL | {"quantization_config": quantised})


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj", r"layers\.0\.self_attn\.q"])
def test_modules_of_auto_round_with_16_bits_keep_their_dtype(name):
    quantised = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {name: {"bits": 16}}}
    config = SMALL | {"quantization_config": quantised}
    assert weight_format(config).count_unquantised(count_parameters(config)) == 320 * 320


def by_hand(sides, code_bits, group, scale_bits, each=0, inputs_bits=0):
    """Return the bytes of matrices of ``outputs x inputs``, one after another."""
    total = 0
    for outputs, inputs in sides:
        rows, columns = group[0] or outputs, group[1] or inputs
        groups = math.ceil(outputs / rows) * math.ceil(inputs / columns)
        total += outputs * inputs * code_bits + groups * scale_bits + each + inputs * inputs_bits
    return total // 8


# No side is a multiple of 128.
SMALL = LLAMA | {"num_hidden_layers": 2, "hidden_size": 320, "intermediate_size": 744, "num_attention_heads": 10}
SMALL |= {"num_key_value_heads": 5, "vocab_size": 1000}
ATTENTION = [(320, 320), (160, 320), (160, 320), (320, 320)]
MLP = [(744, 320), (744, 320), (320, 744)]
HQQ = {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}, "scale_quant_params": None}


def torchao(name, **options):
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_version": 1, "_data": options}}}


def quark(dtype, scheme, **options):
    weights = {"dtype": dtype, "qscheme": scheme, **options}
    return {"quant_method": "quark", "global_quant_config": {"weight": weights, "input_tensors": None}}


INT4 = {"weights": {"type": "int", "num_bits": 4, "group_size": 32}}
CHANNEL = {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
INT4_OF_64 = {"weights": {"type": "int", "num_bits": 4, "group_size": 64, "symmetric": False, "actorder": "group"}}


def compressed(*groups, ignore=("lm_head",), **others):
    """Return a config of compressed-tensors with a group for each (group, targets)."""
    named = {f"group_{number}": group | {"targets": targets} for number, (group, targets) in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": list(ignore), **others}


@pytest.mark.parametrize(
    ("quantised", "layout"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (8, (128, 128), 32)),
        ({"quant_method": "fp8"}, (8, (0, 0), 32)),
        ({"quant_method": "fbgemm_fp8"}, (8, (1, 0), 32)),
        ({"quant_method": "awq", "bits": 4, "group_size": 40}, (4, (1, 40), 20)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 40}, (4, (1, 40), 20, 0, 32)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, (8, (1, 0), 24, 0, 32)),
        (compressed((INT4, ["Linear"])), (4, (1, 32), 16)),
        (compressed((CHANNEL, ["Linear"])), (8, (1, 0), 16)),
        (compressed((INT4_OF_64, ["Linear"])), (4, (1, 64), 20, 0, 32)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, (4, (1, 16), 8, 64)),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, (4, (1, 16), 8, 32)),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 40}, (4, (1, 40), 8, 32)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, (8, (0, 0), 32, 32)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, (8, (1, 0), 32)),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "data_type": "int"}, (4, (1, 128), 20)),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp"}, (4, (1, 32), 8)),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 16, "data_type": "nv_fp4"}, (4, (1, 16), 8, 32)),
        ({"quant_method": "hqq", "quant_config": HQQ, "skip_modules": ["lm_head"]}, (4, (1, 64), 32)),
        (quark("fp8_e4m3", "per_tensor"), (8, (0, 0), 32)),
        (quark("fp8_e4m3", "per_channel"), (8, (1, 0), 32)),
        (quark("fp4", "per_group", group_size=32), (4, (1, 32), 8)),
        (quark("uint4", "per_group", group_size=40), (4, (1, 40), 20)),
        (quark("int8", "per_channel"), (8, (1, 0), 32)),
        (torchao("Int4WeightOnlyConfig", group_size=64), (4, (1, 64), 32)),
        (torchao("Int8WeightOnlyConfig", group_size=None), (8, (1, 0), 16)),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, (4, (1, 128), 32)),
        (
            {"quant_method": "torchao", "quant_type": "int4_weight_only", "quant_type_kwargs": {"group_size": 32}},
            (4, (1, 32), 32),
        ),
        (torchao("Float8DynamicActivationFloat8WeightConfig", granularity=[{"_type": "PerRow"}]), (8, (1, 0), 32)),
    ],
)
def test_scales_of_every_matrix_are_counted(quantised, layout):
    config = SMALL | {"quantization_config": quantised}
    parameters = count_parameters(config)
    others = parameters.total - parameters.of_kind(Kind.LINEAR)
    assert weight_format(config).nbytes(parameters) == by_hand(2 * (ATTENTION + MLP), *layout) + 2 * others


_INT4, _CHANNEL, _INT4_OF_64 = (4, (1, 32), 16), (8, (1, 0), 16), (4, (1, 64), 20, 0, 32)
_DOWN = "re:.*down_proj$"


@together(
    ("quantised", "attention", "ups", "downs"),
    [
        (compressed((INT4, [_DOWN]), (CHANNEL, ["Linear"])), _CHANNEL, _CHANNEL, _INT4),
        (compressed((CHANNEL, ["Linear"]), (INT4, [_DOWN])), _CHANNEL, _CHANNEL, _INT4),
        (compressed((INT4, ["re:.*mlp.*"])), None, _INT4, _INT4),
        (compressed((INT4, ["re:.*mlp.*"]), ({"weights": None}, ["re:.*k_proj"])), None, _INT4, _INT4),
        (compressed((INT4, ["Linear"]), ignore=("lm_head", "re:.*self_attn.*")), None, _INT4, _INT4),
        (
            compressed((INT4_OF_64, ["re:.*mlp.*"]), (CHANNEL, ["re:.*self_attn.*"]), ignore=["lm_head", _DOWN]),
            _CHANNEL,
            _INT4_OF_64,
            None,
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {f"+:{_DOWN[3:]}": {"bits": 8}}},
            _INT4_OF_64,
            _INT4_OF_64,
            (8, (1, 64), 24, 0, 32),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {r".*self_attn.*": {"group_size": 64}, "-:.*down": {}}},
            _INT4_OF_64,
            (4, (1, 0), 20, 0, 32),
            None,
        ),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    f"model.layers.{n}.{name}": {"quant_algo": algorithm}
                    for n in range(2)
                    for name, algorithm in (("self_attn", "FP8"), ("mlp.gate_proj", "NVFP4"), ("mlp.up_proj", "NVFP4"))
                },
            },
            (8, (0, 0), 32, 32),
            (4, (1, 16), 8, 64),
            None,
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    "model.layers.0.mlp.down_proj": {"quant_algo": None},
                    "model.layers.0.mlp": {"quant_algo": "FP8"},
                    "model.layers.1.mlp.gate_proj": {"quant_algo": "FP8"},
                    "model.layers.1.mlp.up_proj": {"quant_algo": "FP8"},
                    "model.layers.1.mlp.down_proj": {"quant_algo": "NO_QUANT"},
                    "model.layers.0.self_attn": {"quant_algo": "no_quant"},
                },
            },
            None,
            (8, (0, 0), 32, 32),
            None,
        ),
    ],
)
def test_modules_with_formats_of_their_own(quantised, attention, ups, downs):
    config = SMALL | {"quantization_config": quantised}
    parameters = count_parameters(config)
    others = parameters.total - parameters.of_kind(Kind.LINEAR)
    expected = 2 * others
    for sides, layout in ((ATTENTION, attention), (MLP[:2], ups), (MLP[2:], downs)):
        expected += 2 * (by_hand(sides, *layout) if layout else 2 * sum(a * b for a, b in sides))
    assert weight_format(config).nbytes(parameters) == expected


def test_modelopt_lists_a_quantised_head():
    config = SMALL | {"tie_word_embeddings": False}
    parameters = count_parameters(config)
    layers = {f"model.layers.{n}.mlp": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for n in range(2)}
    head = {"lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    sizes = [
        weight_format(
            config | {"quantization_config": {"quant_algo": "MIXED_PRECISION", "quantized_layers": each}}
        ).nbytes(parameters)
        for each in (layers, layers | head)
    ]
    assert parameters.head > 0
    assert sizes[0] - sizes[1] == parameters.head * 23 // 16


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_algo": "NO_QUANT"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": None}, "b": {"quant_algo": "NO_QUANT"}},
        },
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8", "kv_cache_quantized_layers": {}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "kv_cache_scheme": "NVFP4", "config_groups": {}},
        {"quantization": {"kv_cache_quant_algo": "FP8"}},
        *(
            {
                "quant_method": f"modelopt_{method}",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": None}, "b": {"quant_algo": "NO_QUANT"}},
            }
            for method in ("mixed", "fp4")
        ),
        {"quant_method": "modelopt_fp4", "quant_algo": "NO_QUANT"},
    ],
)
def test_weights_that_modelopt_leaves_as_they_are(quantised):
    assert weight_format(SMALL | {"quantization_config": quantised}) == weight_format(SMALL)


_EXPERTS = "model.layers.0.mlp.experts"
_NONE, _FP8, _NVFP4 = ({"quant_algo": each} for each in (None, "FP8", "NVFP4"))


@pytest.mark.parametrize(
    "experts",
    [
        {f"{_EXPERTS}.0": _NONE, f"{_EXPERTS}.1": _FP8},
        {f"{_EXPERTS}.1": _FP8, f"{_EXPERTS}.0": _NONE},
        {f"{_EXPERTS}.0": _FP8, f"{_EXPERTS}.1": _NONE},
        {f"{_EXPERTS}.0": _FP8, f"{_EXPERTS}.1": _NVFP4},
        {f"{_EXPERTS}.0": _NVFP4 | {"group_size": 16}, f"{_EXPERTS}.1": _NVFP4 | {"group_size": 32}},
        {f"{_EXPERTS}.1": _FP8},
        {f"{_EXPERTS}.12.down_proj": _FP8, f"{_EXPERTS}.0.up_proj": _FP8},
    ],
)
@pytest.mark.parametrize("method", ["modelopt", "modelopt_mixed"])
def test_experts_of_a_layer_with_other_formats_are_refused(experts, method):
    quantised = {"quant_method": method, "quant_algo": "MIXED_PRECISION", "quantized_layers": experts}
    with pytest.raises(UnsupportedOption, match=r"quantized_layers has other options for .*; pass weights= one of"):
        weight_format(SMALL | {"quantization_config": quantised})


def test_experts_of_a_layer_are_counted_as_the_first_one():
    layers = {f"{_EXPERTS}.{number}": {"quant_algo": each} for number, each in enumerate(("FP8", "fp8", "FP8"))}
    layers |= {
        f"model.layers.1.mlp.experts.{number}": {"quant_algo": each} for number, each in enumerate((None, "none"))
    }
    quantised = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    found = weight_format(SMALL | {"quantization_config": quantised})
    assert [name for name, _ in found.modules] == [f"{_EXPERTS}.0"]
    assert found.unquantised == ("model.layers.1.mlp.experts.0",)


@pytest.mark.parametrize("layers", [["a"], {7: _FP8}, {"a": "FP8"}, 8, None])
def test_modules_of_modelopt_that_are_not_an_object_of_objects_are_refused(layers):
    quantised = {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    with pytest.raises(UnsupportedOption, match=r"quantized_layers .*; pass weights= one of"):
        weight_format(SMALL | {"quantization_config": quantised})


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        (compressed((CHANNEL, ["Linear"]), ignore=()), 8),
        (compressed((CHANNEL, ["Linear"])), 16),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "lm_head": True}, 8),
    ],
)
def test_an_output_head_may_be_quantised(quantised, bits):
    config = SMALL | {"tie_word_embeddings": False}
    parameters = count_parameters(config)
    found = weight_format(config | {"quantization_config": quantised})
    left = replace(found, head_bits=0).nbytes(parameters) - found.nbytes(parameters)
    assert left == 1000 * 320 * (16 - bits) // 8


@together(
    ("listed", "left"),
    [
        ({"modules_to_not_convert": ["self_attn"]}, 2 * ATTENTION),
        ({"exclude": ["lm_head", "*self_attn*"]}, 2 * ATTENTION),
        ({"modules_to_not_convert": ["model.layers.1.mlp"]}, MLP),
        ({"modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]}, 2 * ATTENTION),
        ({"ignored_layers": ["model.layers.0.mlp.down_proj"]}, MLP[2:]),
        ({"ignore": ["lm_head", "re:.*self_attn.*"]}, 2 * ATTENTION),
        ({"ignore": ["re:model[.]layers[.]0[.].*"]}, ATTENTION + MLP),
        ({"exclude_modules": ["model.layers.0*", "lm_head"]}, ATTENTION + MLP),
        ({"dynamic": {"-:.*[.]down_proj": {}, "+:.*": {"bits": 8}}}, 2 * MLP[2:]),
        ({"ignore": ["re:*broken(", 5]}, []),
        ({}, []),
    ],
)
def test_modules_that_stay_unquantised_keep_their_dtype(listed, left):
    config = SMALL | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], **listed}}
    parameters = count_parameters(config)
    others = parameters.total - parameters.of_kind(Kind.LINEAR)
    stored = 2 * (ATTENTION + MLP)
    for each in left:
        stored.remove(each)
    expected = by_hand(stored, 8, (128, 128), 32) + 2 * sum(a * b for a, b in left) + 2 * others
    assert weight_format(config).nbytes(parameters) == expected
    assert weight_format(config).count_unquantised(parameters) == sum(a * b for a, b in left)


def test_ranks_share_scales():
    config = SMALL | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 40}}
    parameters, found = count_parameters(config), weight_format(config)
    norms = 5 * 320
    whole = found.nbytes(parameters)
    assert found.nbytes(parameters, 5) == math.ceil((whole - 2 * norms) / 5) + 2 * norms


@together(
    ("pattern", "expected"),
    [
        ("self_attn", True),
        ("attn", False),
        ("model.layers.1", True),
        ("model.layers.11", False),
        ("language_model.model.layers.1.self_attn", True),
        ("model.layers.*.self_attn*", True),
        ("*.q_proj", True),
        ("*.k_proj", False),
        ("re:.*layers[.]1[.].*q_proj$", True),
        ("re:q_proj", False),
    ],
)
def test_patterns(pattern, expected):
    assert names_module(pattern, "model.layers.1.self_attn.q_proj") is expected


HYBRID = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
HYBRID |= {"vocab_size": 50, "head_dim": 16}
NEMOTRON = HYBRID | {"model_type": "nemotron_h", "hybrid_override_pattern": "M*-E", "num_hidden_layers": 4}
NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12, "n_routed_experts": 3}
NEMOTRON |= {"moe_intermediate_size": 20, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 28}
QWEN_3_5 = HYBRID | {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 2, "num_experts": 3}
QWEN_3_5 |= {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "linear_num_key_heads": 2}
QWEN_3_5 |= {"linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10}
QWEN_3_5 |= {"layer_types": ["linear_attention", "full_attention"]}
MIXTRAL = HYBRID | {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 3}
PHI_3 = HYBRID | {"model_type": "phi3", "num_hidden_layers": 2}


@together(
    ("config", "listed", "left"),
    [
        (NEMOTRON, ["backbone.layers.0.mixer.in_proj"], 64 * (2 * 128 + 2 * 2 * 12 + 8)),
        (NEMOTRON, ["backbone.layers.1.mixer.q_proj", "backbone.layers.2.mixer.up_proj"], 64 * 64 + 64 * 96),
        (NEMOTRON, ["re:.*mixer[.]shared_experts[.].*"], 2 * 64 * 28),
        (NEMOTRON, ["backbone.layers.3.mixer.experts.*"], 3 * 2 * 64 * 20),
        (QWEN_3_5, ["model.language_model.layers.0.linear_attn.in_proj_b"], 64 * 2 * 4),
        (QWEN_3_5, ["*linear_attn.in_proj_qkv"], 64 * (2 * 2 * 6 + 2 * 4 * 10)),
        (QWEN_3_5, ["mlp.shared_expert"], 2 * 3 * 64 * 28),
        (MIXTRAL, ["re:.*block_sparse_moe[.]experts[.]\\d+[.]w2"], 2 * 3 * 64 * 96),
        (PHI_3, ["model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"], 64 * 128 + 64 * 192),
    ],
)
def test_modules_have_the_names_of_the_checkpoints_of_their_family(config, listed, left):
    config = config | {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": listed}}
    assert weight_format(config).count_unquantised(count_parameters(config)) == left
