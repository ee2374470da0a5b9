"""Formats of single layers, and of values apart from keys, that a checkpoint's config asks for."""

import json
from pathlib import Path

import pytest

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.models import specs_from_config
from tests.models.test_cache_format import LLAMA, WHISPER, asking, formats

T5 = {"num_heads": 2, "d_kv": 16, "num_layers": 2}
LAYERED = {"quant_method": "modelopt", "kv_cache_schema_version": 1}


def both(config, **options):
    return [(spec.format, spec.value_format) for spec in specs_from_config(config, **options)]


@pytest.mark.parametrize(
    "fields",
    [
        {"quant_method": "fp8", "kv_cache_dtype": "fp8_k_nvfp4_v"},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8_K_NVFP4_V"},
        {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "fp8_k_nvfp4_v"}},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": "FP8_K_NVFP4_V"},
    ],
)
def test_values_may_have_a_format_of_their_own_in_a_config(fields):
    assert set(both(asking(**fields))) == {("float8_e4m3fn", "nvfp4")}
    assert set(both(asking(**fields), value_format="int4_token")) == {("float8_e4m3fn", "int4_token")}
    assert set(both(asking(**fields), format="mxfp8")) == {("mxfp8", None)}
    latents = json.loads((Path(__file__).parent / "deepseek-v3.json").read_text())
    latents["quantization_config"] = fields
    expected = (
        r"config: quantization_config\..*kv_cache_.*, which stores values as nvfp4, but the layers store latents.*; "
    )
    with pytest.raises(UnsupportedOption, match=expected + "pass format= one of"):
        specs_from_config(latents)
    with pytest.raises(UnsupportedOption, match=r"value_format is .nvfp4., but the layers store latents; leave it out"):
        specs_from_config(latents, value_format="nvfp4")
    assert formats(latents, format="float8_e4m3fn") == {"float8_e4m3fn"}
    narrow = asking(**fields) | {"head_dim": 24}
    with pytest.raises(ShapeError, match="format 'nvfp4' needs a multiple of 16"):
        specs_from_config(narrow)
    assert set(both(narrow, value_format="float8_e4m3fn")) == {("float8_e4m3fn", None)}
    layered = asking(**LAYERED, kv_cache_quantized_layers={"model.layers.1.self_attn": "FP8_K_NVFP4_V"})
    given = both(layered | {"head_dim": 24}, value_format="float8_e4m3fn")
    assert given[:2] == [(None, "float8_e4m3fn"), ("float8_e4m3fn", None)]


@pytest.mark.parametrize("algorithm", ["NO_QUANT", "none", None])
def test_an_algorithm_may_be_none(algorithm):
    fields = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": algorithm}
    assert formats(asking(**fields)) == {None}


def test_layers_may_have_formats_of_their_own():
    algorithms = ["FP8", "NVFP4", "FP8_K_NVFP4_V", "NO_QUANT", "fp8"]
    layers = {f"model.layers.{number}.self_attn": {"quant_algo": each} for number, each in enumerate(algorithms)}
    others = {"model.visual.blocks.0.attn", "mtp.layers.0.self_attn", "model.layers.999.self_attn"}
    layers |= {name: {"quant_algo": "NVFP4"} for name in others}
    expected = [("float8_e4m3fn", None), ("nvfp4", None), ("float8_e4m3fn", "nvfp4"), (None, None)]
    expected += [("float8_e4m3fn", None)] + [(None, None)] * (LLAMA["num_hidden_layers"] - 5)
    fields = {"kv_cache_quant_algo": "MIXED_PRECISION", "kv_cache_quantized_layers": layers}
    for config in (asking(**LAYERED, **fields), asking(quantization=fields)):
        assert both(config) == expected
        specs = specs_from_config(config)
        assert specs[0] is specs[4]
        assert len({id(spec) for spec in specs}) == 4
        assert set(both(config, format="int8_token")) == {("int8_token", None)}
    one = {
        "kv_cache_quant_algo": "FP8",
        "kv_cache_quantized_layers": {"model.layers.1.self_attn": {"quant_algo": "FP8"}},
    }
    assert both(asking(**LAYERED, **one))[:3] == [(None, None), ("float8_e4m3fn", None), (None, None)]


def test_layers_with_latents_may_have_formats_of_their_own():
    latents = json.loads((Path(__file__).parent / "deepseek-v3.json").read_text())
    names = {"model.layers.0.self_attn": {"quant_algo": "FP8"}, "model.layers.1.self_attn": {"quant_algo": "NVFP4"}}
    config = latents | {"quantization_config": LAYERED | {"kv_cache_quantized_layers": names}}
    assert [spec.format for spec in specs_from_config(config)[:3]] == ["float8_e4m3fn", "nvfp4_ds_mla", None]
    names["model.layers.1.self_attn"]["quant_algo"] = "FP8_K_NVFP4_V"
    with pytest.raises(UnsupportedOption, match="layer 1: its values would be stored as nvfp4, but it stores latents"):
        specs_from_config(config)


def test_groups_that_do_not_divide_the_dim_of_a_layer_are_refused_by_layer():
    names = {"model.layers.1.self_attn": {"quant_algo": "NVFP4"}}
    config = asking(**LAYERED, kv_cache_quantized_layers=names) | {"head_dim": 24}
    with pytest.raises(ShapeError, match="config: layer 1: head_dim is 24; format 'nvfp4' needs a multiple of 16"):
        specs_from_config(config)


def test_the_attention_of_a_layer_that_crosses_has_a_format_of_its_own():
    whisper, t5 = {"model_type": "whisper", **WHISPER}, {"model_type": "t5", **T5}
    layers = {"model.decoder.layers.0.self_attn": "FP8", "model.decoder.layers.0.encoder_attn": "NVFP4"}
    layers |= {"model.decoder.layers.1.encoder_attn": "FP8_K_NVFP4_V", "model.encoder.layers.1.self_attn": "NVFP4"}
    blocks = {"decoder.block.0.layer.0.SelfAttention": "FP8", "decoder.block.0.layer.1.EncDecAttention": "NVFP4"}
    blocks |= {
        "decoder.block.1.layer.1.EncDecAttention": "FP8_K_NVFP4_V",
        "encoder.block.1.layer.0.SelfAttention": "FP8",
    }
    for config, names in ((whisper, layers), (t5, blocks)):
        asked = {"quantization_config": LAYERED | {"kv_cache_quantized_layers": names}}
        expected = [("float8_e4m3fn", None), (None, None), ("nvfp4", None), ("float8_e4m3fn", "nvfp4")]
        assert both(config | asked) == expected


def test_names_of_attention_of_other_families_and_of_its_projections():
    for name in ("attn", "attention", "self_attention", "mixer", "self_attn.attn", "SelfAttention", "temporal_block"):
        layers = {f"model.layers.1.{name}": "FP8"}
        assert both(asking(**LAYERED, kv_cache_quantized_layers=layers))[:2] == [(None, None), ("float8_e4m3fn", None)]
    layers = {"model.layers.1.self_attn.k_proj": "FP8", "model.layers.1.self_attn.v_proj": "FP8"}
    assert formats(asking(**LAYERED, kv_cache_quantized_layers=layers)) == {None, "float8_e4m3fn"}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            {"model.layers.0.self_attn": "FP8", "draft.layers.0.self_attn": "NVFP4"},
            "other formats for .draft.layers.0.self_attn. than for .model.layers.0.self_attn., which share a cache",
        ),
        ({"model.layers.0.mlp.down_proj": "FP8"}, "down_proj.; expected the name of the attention of a layer"),
        ({"model.layers.0.self_attn": "INT8"}, "self_attn. with the algorithm .INT8.; expected one of FP8, NVFP4"),
        ({7: "FP8"}, "the key 7; expected the name of a module"),
    ],
)
def test_layers_without_a_clear_format_are_refused(layers, message):
    message = f"config: quantization_config.kv_cache_quantized_layers has .*{message}.*; pass format= one of"
    with pytest.raises(UnsupportedOption, match=message):
        specs_from_config(asking(**LAYERED, kv_cache_quantized_layers=layers))
