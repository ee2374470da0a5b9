"""Bytes of quantised checkpoints: scales of every matrix, and modules that stay unquantised."""

import math

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models.parameters import Kind, count_parameters, weight_format
from pagecore.models.parameters.weights.excluded_modules import names_module
from tests.models.parameters.test_count import DEEPSEEK, LLAMA, config_of

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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    ("quantised", "layout"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (8, (128, 128), 32)),
        ({"quant_method": "fp8"}, (8, (0, 0), 32)),
        ({"quant_method": "fbgemm_fp8"}, (8, (1, 0), 32)),
        ({"quant_method": "awq", "bits": 4, "group_size": 40}, (4, (1, 40), 20)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 40}, (4, (1, 40), 20, 0, 32)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, (8, (1, 0), 24, 0, 32)),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": INT4}}, (4, (1, 32), 16)),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": CHANNEL}}, (8, (1, 0), 16)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, (4, (1, 16), 8, 64)),
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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
