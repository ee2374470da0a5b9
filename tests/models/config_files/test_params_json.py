"""Files named params.json, of Mistral and Meta: compared with the config.json of the same models."""

import json

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import ConfigError, read_model_config
from pagecore.models.parameters import Kind, count_parameters, weight_format
from pagecore.storage import AttentionSpec, LatentSpec
from tests.models.published import PUBLISHED
from tests.together import together

MISTRAL = {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8}
MISTRAL |= {"norm_eps": 1e-05, "vocab_size": 32000, "rope_theta": 10000.0}
LLAMA = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 1024}
LLAMA |= {"ffn_dim_multiplier": 1.3, "norm_eps": 1e-05, "rope_theta": 500000.0}
LLAMA_1B = LLAMA | {"dim": 2048, "n_layers": 16, "ffn_dim_multiplier": 1.5, "multiple_of": 256}
LLAMA_3B = LLAMA | {"dim": 3072, "n_layers": 28, "n_heads": 24, "ffn_dim_multiplier": 1.0, "multiple_of": 256}
NEMO = {"dim": 5120, "n_layers": 40, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8}
NEMO |= {"vocab_size": 131072, "rope_theta": 1e9}
TOWER = {"hidden_size": 1024, "num_channels": 3, "image_size": 1024, "patch_size": 16, "rope_theta": 10000.0}
TOWER |= {"intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "adapter_bias": True}


@together(
    ("params", "total"),
    [
        (MISTRAL | {"sliding_window": 4096}, 7_241_732_096),
        (MISTRAL | {"moe": {"num_experts": 8, "num_experts_per_tok": 2}}, 46_702_792_704),
        (LLAMA, 8_030_261_248),
        (
            LLAMA | {"n_kv_heads": None, "vocab_size": 32000, "multiple_of": 256, "ffn_dim_multiplier": None},
            6_738_415_616,
        ),
        (LLAMA_1B, 1_235_814_400),
        (LLAMA_1B | {"tied_embeddings": False}, 1_235_814_400 + 128256 * 2048),
        (LLAMA_3B, 3_212_749_824),
        (NEMO, 12_247_782_400),
        (NEMO | {"vision_encoder": TOWER}, 12_682_739_712),
    ],
)
def test_parameters_are_those_of_the_published_weights(params, total):
    assert count_parameters(params).total == total


def test_specs_are_those_of_the_config_json():
    assert read_model_config(LLAMA).layers == read_model_config(PUBLISHED["llama-3-8b"]).layers
    mistral = read_model_config(MISTRAL | {"sliding_window": 4096, "max_seq_len": 32768})
    assert mistral.layers == read_model_config(PUBLISHED["mistral-7b-v0.1"]).layers
    assert mistral.max_length == 32768
    assert read_model_config(MISTRAL).layers[0].window is None


def test_a_listed_window_repeats_over_the_layers():
    params = MISTRAL | {"n_layers": 6, "sliding_window": [None, 32768, 32768, 32768]}
    assert [spec.window for spec in read_model_config(params).layers] == [None, *[32768] * 3, None, 32768]
    with pytest.raises(ConfigError, match=r"sliding_window is \[null, 4, 8\]; it must list null and one number"):
        read_model_config(MISTRAL | {"sliding_window": [None, 4, 8]})


def test_latent_attention_with_experts():
    moe = {"num_experts": 16, "num_experts_per_tok": 4, "expert_hidden_dim": 512, "num_shared_experts": 1}
    params = {"dim": 1024, "n_layers": 4, "n_heads": 16, "n_kv_heads": 16, "hidden_dim": 4096, "vocab_size": 1000}
    params |= {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48}
    params |= {"moe": moe | {"first_k_dense_replace": 1}, "yarn": {"factor": 16.0, "apply_scale": False}}
    layers = read_model_config(params, dtype="bfloat16").layers
    assert layers == (LatentSpec(64, 16, 16, scale=48**-0.5, dtype="bfloat16"),) * 4
    assert count_parameters(params).of_kind(Kind.EXPERT) == 3 * 16 * 3 * 1024 * 512


def test_a_folder_with_a_params_json_alone(tmp_path):
    path = tmp_path / "params.json"
    path.write_text(json.dumps(MISTRAL | {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}))
    expected = AttentionSpec(8, 128, num_query_heads=32, dtype="bfloat16")
    assert read_model_config(tmp_path).layers == read_model_config(path).layers == (expected,) * 32
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config.json: model_type is missing"):
        read_model_config(tmp_path)


def test_bad_fields_are_named():
    for name in ("n_heads", "dim", "hidden_dim", "head_dim"):
        with pytest.raises(ConfigError):
            count_parameters(MISTRAL | {name: -1})
    with pytest.raises(ConfigError, match="n_heads is missing"):
        read_model_config({"dim": 4096, "n_layers": 32})
    with pytest.raises(ConfigError, match=r"moe.expert_hidden_dim is missing"):
        read_model_config(NEMO | {"kv_lora_rank": 64, "moe": {"num_experts": 2}})
    with pytest.raises(UnsupportedOption, match=r"multimodal is .*; pass the model's config.json"):
        read_model_config(NEMO | {"multimodal": {"whisper_model_args": {}}})
    with pytest.raises(UnsupportedOption, match=r"vision_encoder.mm_projector_id is \"qformer\""):
        read_model_config(NEMO | {"vision_encoder": TOWER | {"mm_projector_id": "qformer"}})


@together(
    ("params", "field"),
    [
        (LLAMA | {"attention_chunk_size": 8192}, "attention_chunk_size is 8192"),  # Llama 4
        (LLAMA | {"moe_args": {"num_experts": 16}}, "moe_args is {"),
        (LLAMA | {"vision_num_cross_attention_layers": 8}, "vision_num_cross_attention_layers is 8"),
        (LLAMA | {"quantization_args": {"group_size": 256}}, "quantization_args is {"),
        (LLAMA | {"sliding_window": 4096}, "sliding_window is 4096"),
        (MISTRAL | {"kv_lora_rank": 512, "n_routed_experts": 256}, "n_routed_experts is 256"),
        (MISTRAL | {"use_biases": True}, "use_biases is true"),
        (MISTRAL | {"causal": False}, "causal is false"),
        (MISTRAL | {"ffn_dim_multiplier": 1.3}, "ffn_dim_multiplier is 1.3"),
        (MISTRAL | {"moe": {"num_experts": 8, "route_every_n": 2}}, "moe.route_every_n is 2"),
        (MISTRAL | {"moe": {"num_experts": 8, "num_shared_experts": 1}}, "moe.num_shared_experts is 1"),
    ],
)
def test_a_field_that_is_not_read_is_refused(params, field):
    with pytest.raises(UnsupportedOption, match=rf"^config: {field}.*not read from a params.json; pass the model's"):
        read_model_config(params)


def test_fields_without_effect_and_null_are_accepted():
    harmless = {"use_biases": False, "causal": True, "attention_chunk_size": None, "yarn": {"factor": 16.0}}
    harmless |= {"llama_4_scaling": {"beta": 0.1}, "max_batch_size": 1}
    assert read_model_config(MISTRAL | harmless).layers == read_model_config(MISTRAL).layers
    moe = {"num_experts": 8, "route_every_n": 1, "num_shared_experts": 0, "routed_scale": 1.0}
    assert count_parameters(MISTRAL | {"moe": moe}).of_kind(Kind.EXPERT) == 32 * 8 * 3 * 4096 * 14336


def test_both_names_of_a_quantisation_are_read():
    packed = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    expected = weight_format(PUBLISHED["mistral-7b-v0.1"] | {"quantization_config": packed})
    assert weight_format(MISTRAL | {"quantization": packed}) == expected
    assert weight_format(MISTRAL | {"quantization_config": packed}) == expected
    assert expected.bits != 16


@together(
    ("change", "message"),
    [
        ({"dim": "4096"}, 'dim is "4096"; it must be an integer'),
        ({"n_kv_heads": 0}, "n_kv_heads is 0; it must be an integer"),
        ({"tied_embeddings": "yes"}, 'tied_embeddings is "yes"; it must be true or false'),
        ({"quantization": "fp8"}, 'quantization is "fp8"; it must be an object'),
        ({"quantization_config": "fp8"}, 'quantization_config is "fp8"; it must be an object'),
        ({"moe": 8}, "moe is 8; it must be an object"),
        ({"kv_lora_rank": 64, "yarn": "x"}, 'yarn is "x"; it must be an object'),
        ({"kv_lora_rank": 64, "yarn": {"apply_scale": True}}, "yarn.factor is missing"),
        ({"sliding_window": [None, [4]]}, r"sliding_window is \[null, \[4\]\]; it must list null and one number"),
        ({"sliding_window": []}, r"sliding_window is \[\]; it must list null and one number"),
    ],
)
def test_an_invalid_field_is_refused_by_its_name_in_the_file(change, message):
    with pytest.raises(ConfigError, match=message):
        read_model_config(MISTRAL | change)
