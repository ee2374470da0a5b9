"""Bytes of checkpoints with codebooks, trellises and grids, computed by hand."""

import math
from fractions import Fraction
from pathlib import Path

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models.parameters import Kind, count_parameters, weight_format
from tests.models.parameters.test_weights import ATTENTION, MLP, SMALL, by_hand
from tests.together import together

SPQR = {"a.dense_weights.shape": 6400, "a.row_offsets.shape": 21, "a.col_vals.shape": 900, "a.in_perm.shape": [160]}
SIDES = 2 * (ATTENTION + MLP)
LLAMA_2_7B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
LLAMA_2_7B |= {"num_attention_heads": 32, "vocab_size": 32000, "torch_dtype": "float16"}
VPTQ = {"vector_lens": [-1, 8], "num_centroids": [-1, 65536], "num_res_centroids": [-1, 256], "group_num": 1}
VPTQ |= {"outlier_size": 0, "enable_norm": True, "enable_perm": True, "group_size": -1}


def bytes_of(quantised, config=SMALL):
    """Return the bytes of the weights, and those of what is not in a matrix of a layer."""
    config = config | {"quantization_config": quantised}
    parameters = count_parameters(config)
    others = parameters.total - parameters.of_kind(Kind.LINEAR)
    return weight_format(config).nbytes(parameters), 2 * others


@together(
    ("quantised", "layout"),
    [
        ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, (8, (1, 32), 8)),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, (8, (1, 32), 8)),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, (8, (128, 128), 32)),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, (8, (1, 0), 32)),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "group_size": 32}}},
                "ignore": ["lm_head"],
            },
            (8, (1, 32), 8),
        ),
        ({"quant_method": "eetq", "weights": "int8"}, (8, (1, 0), 16)),
        ({"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}, (2, (0, 0), 16)),
        ({"quant_method": "metal", "bits": 4, "group_size": 64}, (4, (1, 64), 32)),
        ({"quant_method": "quanto", "weights": "int4"}, (4, (1, 128), 32)),
        ({"quant_method": "quanto"}, (8, (1, 0), 16)),
        ({"quant_method": "fp_quant", "forward_dtype": "mxfp4"}, (4, (1, 32), 8)),
        ({"quant_method": "fouroversix", "dtype": "nvfp4"}, (4, (1, 16), 8, 64)),
        ({"quant_method": "higgs", "bits": 4, "group_size": 256}, (4, (1, 256), 16, 16 * (16 + 2 * 256))),
        # Codes of eight inputs, and a codebook of 65,536 vectors for each matrix.
        ({"quant_method": "vptq", "config_for_layers": {"a": VPTQ}}, (0, (8, 1), 24, (65536 + 256) * 128, 48)),
        ({"quant_method": "exl2", "bits": 4.25}, (4.25, (1, 0), 0)),
        ({"quant_method": "sinq", "nbits": 4, "group_size": 64, "method": "sinq"}, (4, (1, 64), 32, 0, 16)),
        ({"quant_method": "sinq", "nbits": 3, "group_size": 128}, (3.2, (1, 128), 32, 0, 16)),
    ],
)
def test_codes_and_scales_of_every_matrix_are_counted(quantised, layout):
    found, others = bytes_of(quantised)
    assert found == math.ceil(by_hand(SIDES, *layout)) + others


@pytest.mark.parametrize(
    ("sizes", "bits"),
    [
        ({"in_group_size": 8, "num_codebooks": 1, "nbits_per_codebook": 16}, (8, 16, 65536 * 8 * 16)),
        ({"in_group_size": 8, "num_codebooks": 2, "nbits_per_codebook": 8}, (8, 16, 2 * 256 * 8 * 16)),
        ({"in_group_size": 16, "num_codebooks": 1, "nbits_per_codebook": 12}, (16, 16, 4096 * 16 * 16)),
    ],
)
def test_additive_codes_have_codebooks_and_a_scale_of_each_output(sizes, bits):
    group, code, book = bits
    expected = sum(math.ceil(inputs / group) * outputs * code + book + outputs * 16 for outputs, inputs in SIDES)
    found, others = bytes_of({"quant_method": "aqlm", **sizes})
    assert found == expected // 8 + others


def test_bytes_of_llama_2_with_additive_codes_are_those_of_the_model_card():
    """The model card of Llama-2-7b-AQLM-2Bit-1x16 has 2.4 GB, in gigabytes of 10^9 bytes."""
    unquantised = ["model.embed_tokens.weight", "lm_head.weight"]
    quantised = {"quant_method": "aqlm", "in_group_size": 8, "linear_weights_not_to_quantize": unquantised}
    assert sum(bytes_of(quantised, LLAMA_2_7B)[:1]) == 2_381_422_592


def test_a_head_has_bits_of_its_own():
    head, codes = 1000 * 320, sum(a * b for a, b in SIDES)
    found, others = bytes_of(
        {"quant_method": "exl2", "bits": 4.25, "head_bits": 6}, SMALL | {"tie_word_embeddings": False}
    )
    assert found == math.ceil(codes * 4.25 / 8) + others - head * 10 // 8
    tied, rest = bytes_of({"quant_method": "exl2", "bits": 4.25, "head_bits": 6}, SMALL | {"tie_word_embeddings": True})
    assert tied == math.ceil(codes * 4.25 / 8) + rest
    signs = sum(2 * (a + b) for a, b in SIDES)
    trellis, others = bytes_of({"quant_method": "exl3", "bits": 3.5, "head_bits": 6})
    assert trellis == math.ceil(codes * 3.5 / 8) + signs + others - head * 10 // 8


def test_a_module_that_is_not_quantised_is_named_with_or_without_its_weight():
    named = {"linear_weights_not_to_quantize": ["model.layers.0.self_attn.q_proj.weight"]}
    config = SMALL | {"quantization_config": {"quant_method": "aqlm", **named}}
    assert weight_format(config).count_unquantised(count_parameters(config)) == 320 * 320


@together(
    ("quantised", "words"),
    [
        ({"quant_method": "gguf"}, 'quant_method is "gguf"'),
        ({"quant_method": "spqr"}, "shapes is missing"),
        ({"quant_method": "spqr", "shapes": {"a.col_vals.shape": 3}}, "shapes is"),
        ({"quant_method": "spqr", "shapes": {"a.dense_weights.shape": "3"}}, "shapes is"),
        ({"quant_method": "spqr", "shapes": SPQR, "bits": 4}, "bits is 4"),
        ({"quant_method": "sinq", "nbits": 5}, "nbits is 5"),
        ({"quant_method": "sinq", "tiling_mode": "2D"}, 'tiling_mode is "2D"'),
        ({"quant_method": "aqlm", "nbits_per_codebook": 17}, "nbits_per_codebook is 17"),
        ({"quant_method": "aqlm", "in_group_size": "8"}, 'in_group_size is "8"'),
        ({"quant_method": "aqlm", "num_codebooks": 0}, "num_codebooks is 0"),
        ({"quant_method": "vptq"}, "config_for_layers is missing"),
        ({"quant_method": "vptq", "config_for_layers": {"a": 3}}, "config_for_layers is"),
        (
            {"quant_method": "vptq", "config_for_layers": {"a": VPTQ, "b": VPTQ | {"vector_lens": [-1, 6]}}},
            "config_for_l",
        ),
        ({"quant_method": "vptq", "config_for_layers": {"a": VPTQ | {"outlier_size": 8}}}, "outlier_size is 8"),
        ({"quant_method": "vptq", "config_for_layers": {"a": VPTQ | {"num_centroids": [-1]}}}, "num_centroids is"),
        ({"quant_method": "exl2"}, "bits is missing"),
        ({"quant_method": "exl3", "bits": 0}, "bits is 0"),
        ({"quant_method": "exl3", "bits": float("nan")}, "bits is NaN"),
        ({"quant_method": "exl3", "bits": 4, "head_bits": True}, "head_bits is true"),
        ({"quant_method": "exl3", "bits": 4, "scope": "experts_only"}, 'scope is "experts_only"'),
        ({"quant_method": "bitnet", "quantization_mode": "online"}, 'quantization_mode is "online"'),
        ({"quant_method": "quanto", "weights": "int3"}, 'weights is "int3"'),
        ({"quant_method": "eetq", "weights": "int4"}, 'weights is "int4"'),
        ({"quant_method": "metal", "bits": 3}, "bits is 3"),
        ({"quant_method": "higgs", "bits": True}, "bits is true"),
        ({"quant_method": "mxfp8", "moe_quant_algo": "NVFP4"}, 'moe_quant_algo is "NVFP4"'),
        ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, "weight_block_size is"),
        ({"quant_method": "fp_quant", "pseudoquantization": True}, "pseudoquantization is true"),
        ({"quant_method": "fouroversix", "dtype": "fp8"}, 'dtype is "fp8"'),
    ],
)
def test_methods_whose_bytes_are_unknown(quantised, words):
    with pytest.raises(
        UnsupportedOption, match=rf"quantization_config.*{words}.*whose bytes are unknown; pass weights="
    ):
        weight_format(SMALL | {"quantization_config": quantised})


def test_arrays_of_spqr_have_the_lengths_in_the_config():
    found, others = bytes_of({"quant_method": "spqr", "shapes": SPQR})
    elements = sum(outputs * inputs for outputs, inputs in SIDES)
    assert found == math.ceil(elements * (8 * 6400 + 4 * (21 + 900 + 160)) / (16 * 6400)) + others


@pytest.mark.parametrize(
    ("name", "block", "size"),
    [("q4_0", 18, 32), ("q8_0", 34, 32), ("q2_k", 84, 256), ("q3_k", 110, 256), ("q4_k", 144, 256), ("q6_k", 210, 256)],
)
def test_blocks_of_gguf_have_the_bytes_of_its_types(name, block, size):
    parameters = count_parameters(SMALL)
    embedded = parameters.of_kind(Kind.EMBEDDING)
    others = 2 * (parameters.total - parameters.of_kind(Kind.LINEAR) - embedded)
    expected = sum(
        outputs * math.ceil(inputs / size) * block - (-inputs % size) * outputs * int(name[1]) // 8
        for outputs, inputs in SIDES
    )
    # The output head has six bits or more, and so has an embedding that is the head.
    head = max(Fraction(block, size), Fraction(210, 256)) * (parameters.head or embedded)
    table = Fraction(block, size) * (embedded - parameters.head if parameters.head else 0)
    assert weight_format(SMALL, name).nbytes(parameters) == math.ceil(expected + others + head + table)


@pytest.mark.parametrize(("name", "tensors"), [("q4_0", 4_652_843_008), ("q8_0", 8_532_402_176)])
def test_a_gguf_file_quantises_embedding_and_head(name, tensors):
    """The published files of Llama 3.1 8B have 8 MB more: 4.66 and 8.54 GB, with the tokenizer and norms in float32."""
    llama = Path(__file__).parents[1] / "llama-3.1-8b.json"
    assert weight_format(llama, name).nbytes(count_parameters(llama)) == tensors


@pytest.mark.parametrize("name", ["tie_word_embeddings", "vision_config", "audio_config"])
def test_fields_of_other_types_are_refused(name):
    from pagecore.models import ConfigError

    config = SMALL | {"model_type": "llama"} | {name: "x"}
    with pytest.raises(ConfigError, match=f'{name} is "x"; it must be'):
        count_parameters(config)
