"""The format that a checkpoint's config asks for."""

import json
from pathlib import Path

import pytest

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.models import ConfigError, read_model_config, specs_from_config
from pagecore.models.cache_format import with_rotations
from pagecore.models.parameters import weight_format
from pagecore.storage import LatentSpec
from tests.models.published import PUBLISHED
from tests.together import together

LLAMA = PUBLISHED["llama-3-8b"]
MAMBA = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2}
WHISPER = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 2}
FP8 = {"dynamic": False, "num_bits": 8, "strategy": "tensor", "symmetric": True, "type": "float"}


def formats(config, **options):
    return {spec.format for spec in specs_from_config(config, **options)}


def asking(**fields):
    return LLAMA | {"quantization_config": fields}


@together(
    ("fields", "expected"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}, "float8_e4m3fn"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8 | {"strategy": "attn_head"}}, "float8_e4m3fn"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8 | {"strategy": "token"}}, "float8_token"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}}, "int8_token"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "int", "strategy": "token"}}, "int4_token"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float", "group_size": 16}}, "nvfp4"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            "float8_e4m3fn",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}, "float8_e4m3fn"),
        ({"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}, "float8_e4m3fn"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        ({"quantization": {"kv_cache_quant_algo": None}}, None),
        ({"quant_method": "fp8", "kv_cache_dtype": "fp8_e4m3"}, "float8_e4m3fn"),
        ({"quant_method": "fp8", "kv_cache_dtype": "fp8_e5m2"}, "float8_e5m2"),
        ({"quant_method": "fp8", "kv_cache_dtype": "auto"}, None),
        ({"kv_cache_dtype": "nvfp4"}, "nvfp4"),
        ({"kv_cache_dtype": "nvfp4_4over6"}, "nvfp4_4over6"),
        ({"kv_cache_dtype": "mxfp8"}, "mxfp8"),
        ({"kv_cache_dtype": "fp4_mx_block16"}, "fp4_block16"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "float8_token"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "int8_token"),
        ({"kv_cache_dtype": "int4_per_token_head"}, "int4_token"),
        ({"kv_cache_dtype": "int8_token"}, "int8_token"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "kv_cache_scheme": "FP8"}, "float8_e4m3fn"),
        ({"quant_method": "modelopt", "kv_cache_scheme": "NO_QUANT"}, None),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8", "kv_cache_quantized_layers": {}}, "float8_e4m3fn"),
        ({"quant_method": "modelopt", "kv_cache_quantized_layers": {}}, None),
    ],
)
def test_the_config_decides_the_format(fields, expected):
    assert formats(asking(**fields)) == {expected}


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_cache_scheme": {"num_bits": 8, "type": "int", "strategy": "tensor"}},
        {"kv_cache_scheme": FP8 | {"dynamic": True}},
        {"kv_cache_scheme": FP8 | {"num_bits": 6}},
        {"kv_cache_scheme": {"num_bits": 4, "type": "float", "group_size": 32}},
        {"kv_cache_scheme": "int8"},
        {"quant_method": "modelopt", "kv_cache_scheme": "INT8_KV"},
        {"quant_method": "fp8", "kv_cache_scheme": "dynamic"},
        {"kv_cache_quant_algo": "INT8"},
        {"quant_method": "fp8", "kv_cache_dtype": "int8"},
        {"quant_method": "fp8", "kv_cache_dtype": ["nvfp4"]},
        {"kv_cache_quant_algo": ["FP8"]},
        {"quantization": {"kv_cache_quant_algo": "W4A8"}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "MIXED_PRECISION"},
        {"quant_method": "modelopt", "kv_cache_quantized_layers": {"model.layers.0.self_attn": {"quant_algo": "X"}}},
        {"quant_method": "modelopt", "kv_cache_quantized_layers": {"model.norm": {"quant_algo": "FP8"}}},
        {"quant_method": "modelopt", "kv_cache_quantized_layers": ["model.layers.0.self_attn"]},
        {"quant_method": "modelopt", "kv_cache_quantized_layers": []},
        {"quant_method": "modelopt", "kv_cache_quantized_layers": {7: {"quant_algo": "FP8"}}},
        {"quant_method": "modelopt", "kv_cache_quantized_layers": {None: {"quant_algo": "FP8"}}},
        *(
            {"quant_method": "modelopt", "kv_cache_quantized_layers": {f"model.layers.0.{name}": {"quant_algo": "FP8"}}}
            for name in ("mlp.down_proj", "post_attention_layernorm", "self_attn_layer_norm")
        ),
    ],
)
def test_a_scheme_that_no_format_stores_is_refused_unless_a_format_is_passed(fields):
    with pytest.raises(
        UnsupportedOption,
        match=r"config: quantization_config.*kv_cache.*[;:] pass format= one of float8.*, or None for the model",
    ):
        specs_from_config(asking(**fields))
    assert formats(asking(**fields), format="int8_token") == {"int8_token"}
    assert formats(asking(**fields), format=None) == {None}


OUTPUT = {"output_tensors": {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor"}}
INT8 = {"output_tensors": {"dtype": "int8", "is_dynamic": False}}
FLOAT8 = "float8_e4m3fn"
GROUP = {"export": {"kv_cache_group": ["*k_proj", "*v_proj"]}}
GROUPS = {"export": {"kv_cache_group": ["*layers.[0-9].k_proj", "*layers.[0-9].v_proj"]}}
SELF = {"export": {"kv_cache_group": ["*self_attn.k_proj", "*self_attn.v_proj"]}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({**GROUP, "layer_quant_config": {"*k_proj": OUTPUT, "*v_proj": OUTPUT, "*o_proj": INT8}}, "float8_e4m3fn"),
        ({"kv_cache_quant_config": {"*k_proj": OUTPUT, "*v_proj": OUTPUT}}, "float8_e4m3fn"),
        ({**GROUP, "layer_quant_config": {"model.0.k_proj": OUTPUT, "model.0.v_proj": OUTPUT}}, "float8_e4m3fn"),
        ({"export": {"kv_cache_group": []}, "kv_cache_quant_config": {"*kv_b_proj": OUTPUT}}, "float8_e4m3fn"),
        ({"export": {"kv_cache_group": []}, "layer_quant_config": {"*k_proj": INT8}}, None),
        ({**GROUPS, "layer_quant_config": {"*layers.[0-9].k_proj": OUTPUT, "*layers.[0-9].v_proj": OUTPUT}}, FLOAT8),
        (
            {**GROUPS, "layer_quant_config": {"*": INT8, **dict.fromkeys(GROUPS["export"]["kv_cache_group"], OUTPUT)}},
            FLOAT8,
        ),
        ({**SELF, "layer_quant_config": {"*o_proj": INT8, "*k_proj": OUTPUT, "*v_proj": OUTPUT, "*": INT8}}, FLOAT8),
        ({"kv_cache_quant_config": {}}, None),
        ({}, None),
    ],
)
def test_outputs_of_projections_in_a_config_of_quark(fields, expected):
    assert formats(asking(quant_method="quark", **fields)) == {expected}


@pytest.mark.parametrize(
    "fields",
    [
        {**GROUP, "layer_quant_config": {"*k_proj": INT8, "*v_proj": INT8}},
        {**GROUP, "layer_quant_config": {"*k_proj": OUTPUT, "*v_proj": INT8}},
        {**GROUP, "layer_quant_config": {"*k_proj": OUTPUT}},
        {**GROUP, "layer_quant_config": {"*k_proj": OUTPUT, "*v_proj": OUTPUT, "a.0.k_proj": INT8}},
        {**SELF, "layer_quant_config": {"*": INT8, "*k_proj": OUTPUT, "*v_proj": OUTPUT}},
        {**GROUP, "layer_quant_config": {"a.k_proj": OUTPUT, "b.k_proj": INT8, "a.v_proj": OUTPUT}},
        {"kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3", "is_dynamic": True}}}},
        {"kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}}},
        GROUP,
    ],
)
def test_a_config_of_quark_that_no_format_stores_is_refused(fields):
    with pytest.raises(UnsupportedOption, match="which no format stores; pass format= one of float8"):
        specs_from_config(asking(quant_method="quark", **fields))


def test_a_config_of_early_compressed_tensors():
    asked = {"compression_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}}
    assert formats(LLAMA | asked) == {"float8_e4m3fn"}
    assert formats(LLAMA | asked | {"quantization_config": {"quant_method": "fp8"}}) == {None}
    with pytest.raises(ConfigError, match="compression_config is 8; it must be an object"):
        specs_from_config(LLAMA | {"compression_config": 8})


def test_a_config_of_tensorrt_llm_or_mlx():
    asked = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    assert formats(LLAMA | asked) == {"float8_e4m3fn"}
    assert weight_format(LLAMA | asked).name == "fp8"
    mlx = LLAMA | {"quantization": {"group_size": 64, "bits": 4}}
    assert formats(mlx) == {None}
    with pytest.raises(UnsupportedOption, match=r"config: quantization.quant_method .*; pass weights="):
        weight_format(mlx)
    for read in (specs_from_config, weight_format):
        with pytest.raises(ConfigError, match=r"quantization is .*fp8.*; it must be an object, or null"):
            read(LLAMA | {"quantization": "fp8"})


@pytest.mark.parametrize("scheme", [None, "FP8"])
@pytest.mark.parametrize("method", [{}, {"quant_method": "modelopt"}])
def test_an_algorithm_that_is_null_leaves_the_weights_unquantised(method, scheme, tmp_path):
    asked = {"quant_algo": None, "kv_cache_quant_algo": scheme}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": asked}))
    nested, plain = {"quantization_config": {**method, "quantization": asked}}, {"quantization_config": method | asked}
    for config in (LLAMA | {"quantization": asked}, LLAMA | nested, LLAMA | plain, tmp_path):
        assert weight_format(config) == weight_format(LLAMA)
        assert formats(config) == {scheme and "float8_e4m3fn"}


def test_a_flag_of_the_first_qwen_for_quantised_keys_is_refused():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "kv_channels": 16}
    qwen = {"model_type": "qwen", "use_cache_quantization": False, **sizes}
    assert formats(qwen) == {None}
    qwen["use_cache_quantization"] = True
    with pytest.raises(UnsupportedOption, match="config: use_cache_quantization is true, which no format stores; pass"):
        specs_from_config(qwen)
    assert formats(qwen, format="int8_token") == {"int8_token"}


ASKED = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


def folder_with(path, config, quantization=ASKED):
    (path / "config.json").write_text(json.dumps(config))
    (path / "hf_quant_config.json").write_text(json.dumps(quantization))
    return path


def test_the_file_of_modelopt_next_to_a_config(tmp_path):
    folder = folder_with(tmp_path, LLAMA)
    assert formats(folder) == formats(folder / "config.json") == {"float8_e4m3fn"}
    assert weight_format(folder) == weight_format(LLAMA | {"quantization_config": ASKED})
    folder_with(tmp_path, LLAMA, 8)
    with pytest.raises(ConfigError, match=r"hf_quant_config.json holds 8; expected a JSON object"):
        specs_from_config(folder)
    assert formats(folder, format=None) == {None}


def test_a_config_that_describes_its_formats_precedes_the_file_of_modelopt(tmp_path):
    assert formats(folder_with(tmp_path, asking(quant_method="modelopt", quant_algo="FP8"))) == {None}
    assert formats(folder_with(tmp_path, LLAMA | {"quantization": {"quant_algo": "NVFP4"}})) == {None}
    assert weight_format(tmp_path).name == "nvfp4"
    gemma = PUBLISHED["gemma-3-4b"]
    tower = {"vision_config": gemma["vision_config"] | {"quantization_config": {"quant_method": "fp8"}}}
    assert formats(folder_with(tmp_path, gemma | tower)) == {"float8_e4m3fn"}


def test_messages_name_the_file_of_modelopt(tmp_path):
    folder_with(tmp_path, LLAMA, {"quantization": {"quant_algo": "X", "kv_cache_quant_algo": "INT8"}})
    with pytest.raises(UnsupportedOption, match=r"/hf_quant_config.json: quantization.kv_cache_quant_algo is .INT8."):
        specs_from_config(tmp_path)
    with pytest.raises(UnsupportedOption, match=r"/hf_quant_config.json: quantization.quant_algo is .X."):
        weight_format(tmp_path)


def test_a_multimodal_config_may_ask_at_either_level():
    gemma = PUBLISHED["gemma-3-4b"]
    asked = {"quantization_config": {"kv_cache_scheme": FP8}}
    assert formats(gemma | asked) == {"float8_e4m3fn"}
    assert formats(gemma | {"text_config": gemma["text_config"] | asked}) == {"float8_e4m3fn"}


def test_bytes_and_errors_of_a_format():
    plain, fp8, fp4 = (specs_from_config(LLAMA, format=name)[0] for name in (None, "float8_token", "nvfp4"))
    assert [sum(plane.nbytes for plane in spec.planes) for spec in (plain, fp8, fp4)] == [4096, 2112, 1152]
    with pytest.raises(UnsupportedOption, match="format is 'fp7'; use one of float8_e4m3fn"):
        specs_from_config(LLAMA, format="fp7")
    with pytest.raises(ShapeError, match="head_dim is 24; format 'nvfp4' needs a multiple of 16"):
        specs_from_config(LLAMA | {"head_dim": 24}, format="nvfp4")


@pytest.mark.parametrize("given", ["fp8", 8, ["fp8"], True])
def test_a_quantization_config_that_is_not_an_object_is_refused(given):
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config["quantization_config"] = given
    for read in (read_model_config, weight_format):
        with pytest.raises(ConfigError, match=r"quantization_config is .*; it must be an object, or null"):
            read(config)
    nested = {"model_type": "llava", "text_config": config}
    with pytest.raises(ConfigError, match=r"text_config.quantization_config is"):
        read_model_config(nested)
    assert read_model_config(config, format=None).layers[0].format is None


VALUES = "int4_token"


def test_values_may_have_another_format_than_keys():
    for format in (None, "float8_e4m3fn"):
        specs = specs_from_config(LLAMA, format=format, value_format=VALUES)
        assert {(spec.format, spec.value_format) for spec in specs} == {(format, VALUES)}
        assert len({id(spec) for spec in specs}) == 1
    assert specs_from_config(LLAMA, format=VALUES, value_format=VALUES) == specs_from_config(LLAMA, format=VALUES)
    asked = specs_from_config(asking(kv_cache_scheme=FP8), value_format="nvfp4")
    assert {(spec.format, spec.value_format) for spec in asked} == {("float8_e4m3fn", "nvfp4")}


def test_only_layers_with_keys_and_values_have_a_format_of_values():
    whisper = specs_from_config({"model_type": "whisper", **WHISPER}, value_format=VALUES)
    assert {(type(spec).__name__, spec.value_format) for spec in whisper} == {
        ("AttentionSpec", VALUES),
        ("CrossSpec", VALUES),
    }
    config = json.loads((Path(__file__).parent / "qwen3-next-80b-a3b.json").read_text())
    hybrid = read_model_config(config, value_format=VALUES)
    assert {getattr(spec, "value_format", "a state") for spec in hybrid.layers} == {VALUES, "a state"}
    assert hybrid.specs_by_layer == read_model_config(config).specs_by_layer


@pytest.mark.parametrize(
    ("config", "value_format", "reason"),
    [
        ("deepseek-v3.json", VALUES, "value_format is .int4_token., but the layers store latents; leave it out"),
        (MAMBA, VALUES, "the layers store no keys and values; leave it out"),
        ("llama-3.1-8b.json", "fp7", "value_format is 'fp7'; use one of float8_e4m3fn"),
        ("llama-3.1-8b.json", "none", "value_format is 'none'; use one of float8_e4m3fn"),
        ("llama-3.1-8b.json", 4, "value_format is 4"),
    ],
)
def test_a_format_of_values_that_cannot_be_is_refused(config, value_format, reason):
    given = Path(__file__).parent / config if isinstance(config, str) else config
    with pytest.raises(UnsupportedOption, match=reason):
        specs_from_config(given, value_format=value_format)


def test_sealed_formats_leave_layers_with_short_windows_plain():
    config = PUBLISHED["gemma-3-1b"]
    for values in (None, "kivi4"):
        specs = specs_from_config(config, format="kivi2", value_format=values)
        assert {(spec.window, spec.format, spec.value_format) for spec in specs} == {
            (512, None, None),
            (None, "kivi2", values),
        }
    wide = specs_from_config(LLAMA | {"model_type": "mistral", "sliding_window": 4096}, format="kivi4")
    assert {(spec.window, spec.format, spec.tail.window) for spec in wide} == {(4096, "kivi4", 129)}


ROTATED = {
    "key_rotation": {"key_rotation": "hadamard", "value_rotation": None},
    "value_rotation": {"key_rotation": None, "value_rotation": "hadamard"},
}


def test_rotations_are_of_the_layers_that_store_a_format():
    both = {"key_rotation": "hadamard", "value_rotation": "hadamard"}
    specs = specs_from_config(LLAMA, format="int4_token", **both)
    assert {(spec.key_rotation, spec.value_rotation) for spec in specs} == {("hadamard", "hadamard")}
    assert specs[0] is specs[1]
    values = specs_from_config(LLAMA, value_format="int4_token", value_rotation="hadamard")
    assert {(spec.format, spec.key_rotation, spec.value_rotation) for spec in values} == {(None, None, "hadamard")}
    asked = specs_from_config(asking(kv_cache_scheme=FP8), key_rotation="hadamard")
    assert {(spec.format, spec.key_rotation) for spec in asked} == {("float8_e4m3fn", "hadamard")}
    with pytest.raises(UnsupportedOption, match=r"key_rotation is .hadamard., but no layer stores keys in a format"):
        specs_from_config(LLAMA, value_format="int4_token", key_rotation="hadamard")
    with pytest.raises(UnsupportedOption, match=r"value_rotation is .fourier.; use .hadamard."):
        specs_from_config(LLAMA, format="int4_token", value_rotation="fourier")
    with pytest.raises(UnsupportedOption, match=r"key_rotation is .fourier.; use .hadamard."):
        specs_from_config(LLAMA, key_rotation="fourier")  # the name is checked first
    for side in ("key_rotation", "value_rotation"):
        with pytest.raises(UnsupportedOption, match="the layers store latents, which have no rotations; leave it out"):
            with_rotations([LatentSpec(64, 16, 4, scale=0.1, format="float8_e4m3fn")], **ROTATED[side], who="a model")
