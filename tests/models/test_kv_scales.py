"""Scales of keys and values that a checkpoint keeps with its weights."""

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import ConfigError, KVScales, read_kv_scales, read_model_config, specs_from_config
from pagecore.storage import AttentionSpec, CrossSpec, LatentSpec
from tests.models.published import PUBLISHED
from tests.models.scale_files import pair, written
from tests.together import together

LLAMA = PUBLISHED["llama-3-8b"] | {"num_hidden_layers": 2}
DEEPSEEK = Path(__file__).parent / "deepseek-v3.json"
FP8 = "float8_e4m3fn"
WEIGHTS = {"model.embed_tokens.weight": np.ones((4, 4), np.float32), "model.layers.0.mlp.down_proj.weight_scale": 3.0}


@together(
    ("key", "value"),
    [
        ("model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"),
        ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.v_proj.v_scale"),
        ("model.layers.0.self_attn.k_proj.output_scale", "model.layers.0.self_attn.v_proj.output_scale"),
        ("model.layers.0.self_attn.qkv_proj.k_scale", "model.layers.0.self_attn.qkv_proj.v_scale"),
        ("backbone.layers.0.mixer.k_proj.k_scale", "backbone.layers.0.mixer.v_proj.v_scale"),
        ("model.language_model.layers.0.self_attn.k_scale", "model.language_model.layers.0.self_attn.v_scale"),
        ("transformer.h.0.attn.k_scale", "transformer.h.0.attn.v_scale"),
        ("layers.0.attention.k_scale", "layers.0.attention.v_scale"),
        ("decoder.block.0.layer.0.SelfAttention.k_scale", "decoder.block.0.layer.0.SelfAttention.v_scale"),
        ("decoder.block.0.layer.0.SelfAttention.k.k_scale", "decoder.block.0.layer.0.SelfAttention.v.v_scale"),
        (
            "decoder.block.0.layer.0.SelfAttention.k.output_scale",
            "decoder.block.0.layer.0.SelfAttention.v.output_scale",
        ),
    ],
)
def test_names_of_scales(key, value, tmp_path):
    others = {
        "model.layers.0.self_attn.q_scale": 7.0,
        "model.layers.0.self_attn.q_proj.output_scale": 7.0,
        "model.layers.0.self_attn.k_proj.input_scale": 7.0,
        "mtp.layers.0.self_attn.k_scale": 7.0,
        f"model.layers.{'9' * 5000}.self_attn.k_scale": 7.0,
    }
    file = written(tmp_path / "model.safetensors", WEIGHTS | others | {key: 0.5, value: [0.25]})
    assert read_kv_scales(file) == read_kv_scales(tmp_path) == {0: KVScales(0.5, 0.25)}


def test_one_scale_of_both_and_layers_in_order(tmp_path):
    tensors = {f"model.layers.{layer}.self_attn.kv_scale": layer + 1.0 for layer in (10, 9, 0)}
    found = read_kv_scales(written(tmp_path / "a.safetensors", tensors))
    assert list(found.items()) == [(layer, KVScales(layer + 1.0, layer + 1.0)) for layer in (0, 9, 10)]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_scales_of_heads_in_every_dtype(dtype, tmp_path):
    key = np.array([0.5, 0.75, 1.5, 3.0], dtype if dtype != "bfloat16" else ml_dtypes.bfloat16)
    file = written(tmp_path / "a.safetensors", pair(0, key.reshape(4, 1, 1), key[::-1].copy()))
    assert read_kv_scales(file) == {0: KVScales((0.5, 0.75, 1.5, 3.0), (3.0, 1.5, 0.75, 0.5))}


@pytest.mark.parametrize(
    "other",
    [
        "model.mtp.layers.0.self_attn.k_scale",
        "model.layers.2.mtp_block.layers.0.self_attn.k_scale",
        "model.visual.blocks.0.attn.k_scale",
        "vision_tower.vision_model.encoder.layers.0.self_attn.k_scale",
        "audio_tower.layers.0.self_attn.k_scale",
        "model.encoder.layers.0.self_attn.k_scale",
        "model.layers.0.encoder_attn.k_scale",
        "encoder.block.0.layer.0.SelfAttention.k_scale",
        "encoder.block.0.layer.0.SelfAttention.k.output_scale",
        "decoder.block.0.layer.1.EncDecAttention.k_scale",
        "decoder.block.0.layer.1.EncDecAttention.k.output_scale",
    ],
)
def test_other_parts_of_a_model_are_not_read(other, tmp_path):
    written(tmp_path / "model.safetensors", pair(0) | {other: 7.0})
    assert read_kv_scales(tmp_path) == {0: KVScales(0.5, 0.25)}


@pytest.mark.parametrize("model", ["transformer.encoder", "model.decoder", "thinker.model", "model.language_model"])
def test_names_of_text_models(model, tmp_path):
    names = {name.replace("model.", f"{model}.", 1): scale for name, scale in pair(0).items()}
    assert read_kv_scales(written(tmp_path / "a.safetensors", names)) == {0: KVScales(0.5, 0.25)}


def test_only_files_that_the_index_gives_for_scales_are_opened(tmp_path):
    written(tmp_path / "model-00002-of-00002.safetensors", pair(1))
    names = dict.fromkeys(pair(1), "model-00002-of-00002.safetensors")
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"} | names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_kv_scales(tmp_path) == {1: KVScales(0.5, 0.25)}


def test_tensors_are_read_from_the_files_that_an_index_gives(tmp_path):
    key, value = pair(0)
    index = tmp_path / "model.safetensors.index.json"
    written(tmp_path / "a.safetensors", {key: 0.5, value: 7.0})
    written(tmp_path / "b.safetensors", {key: 7.0, value: 0.25})
    written(tmp_path / "c.safetensors", {value: 0.25})
    index.write_text(json.dumps({"weight_map": {key: "a.safetensors", value: "b.safetensors"}}))
    assert read_kv_scales(tmp_path) == {0: KVScales(0.5, 0.25)}
    index.write_text(json.dumps({"weight_map": {key: "c.safetensors", value: "c.safetensors"}}))
    with pytest.raises(ConfigError, match=r"index.json names c.safetensors for .*k_scale, which does not have it; "):
        read_kv_scales(tmp_path)


def test_files_without_an_index_are_joined(tmp_path):
    for layer in range(2):
        written(tmp_path / f"{layer}.safetensors", pair(layer, value=layer + 1))
    assert read_kv_scales(tmp_path) == {0: KVScales(0.5, 1.0), 1: KVScales(0.5, 2.0)}
    written(tmp_path / "2.safetensors", pair(0))
    with pytest.raises(ConfigError, match=r"k_scale is in .*0.safetensors and in .*2.safetensors; pass the path"):
        read_kv_scales(tmp_path)


def test_a_file_of_scaling_factors(tmp_path):
    ranks = {"0": {"1": 0.5, "0": 0.25}, "1": {"0": 0.25, "1": 0.5}}
    file = tmp_path / "kv_cache_scales.json"
    file.write_text(json.dumps({"model_type": "llama", "kv_cache": {"dtype": FP8, "scaling_factor": ranks}}))
    assert read_kv_scales(file) == {0: KVScales(0.25, 0.25), 1: KVScales(0.5, 0.5)}


def test_specs_have_the_scales_of_their_layers(tmp_path):
    heads = tuple((np.arange(8) + 1.0).tolist())
    written(tmp_path / "model.safetensors", pair(1) | pair(0, np.array(heads)) | pair(2, 9.0))
    plain = specs_from_config(LLAMA, format=FP8)
    expected = [
        replace(plain[0], key_scale=heads, value_scale=0.25),
        replace(plain[1], key_scale=0.5, value_scale=0.25),
    ]
    assert specs_from_config(LLAMA, format=FP8, kv_scales=tmp_path) == expected
    assert specs_from_config(LLAMA, format=FP8, kv_scales={0: (heads, 0.25), 1: [0.5, 0.25]}) == expected
    (only,) = {spec.key_scale for spec in specs_from_config(LLAMA, format=FP8, kv_scales={1: (0.5, 1)})[1:]}
    assert only == 0.5
    mixed = specs_from_config(LLAMA, format=FP8, value_format="nvfp4", kv_scales={0: (heads, 0.001)})[0]
    assert (mixed.key_scale, mixed.value_scale, mixed.value_format) == (heads, 0.001, "nvfp4")


@pytest.mark.parametrize(("layer", "scales"), [(80, (0.5, 0.5)), (2, (0.5, 0.25)), (5, (None, "x"))])
def test_layers_that_the_model_does_not_have_are_refused(layer, scales):
    with pytest.raises(ConfigError, match=f"kv_scales has layer {layer}; the model has 2 layers, numbered from 0"):
        specs_from_config(LLAMA, format=FP8, kv_scales={0: (0.5, 0.25), layer: scales})


def test_a_file_of_scaling_factors_for_a_larger_model_is_refused(tmp_path):
    file = tmp_path / "kv_cache_scales.json"
    file.write_text(json.dumps({"kv_cache": {"dtype": FP8, "scaling_factor": {"0": {"0": 0.5, "2": 0.5}}}}))
    with pytest.raises(ConfigError, match="kv_scales has layer 2; the model has 2 layers"):
        specs_from_config(LLAMA, format=FP8, kv_scales=file)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "whisper", "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 2},
        {"model_type": "bart", "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 2},
        {"model_type": "t5", "d_model": 64, "d_kv": 32, "num_layers": 2, "num_heads": 2},
    ],
)
def test_self_attention_of_a_decoder_with_an_encoder_has_the_scales(config):
    specs = specs_from_config(config, format=FP8, kv_scales={0: (0.5, 0.25)})
    given = [(type(spec), spec.key_scale, spec.value_scale) for spec in specs]
    assert given == [
        (AttentionSpec, 0.5, 0.25),
        (AttentionSpec, 1.0, 1.0),
        (CrossSpec, 1.0, 1.0),
        (CrossSpec, 1.0, 1.0),
    ]


def test_layers_without_specs_of_their_own():
    gemma = {"model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 30, "num_kv_shared_layers": 10}
    shared = specs_from_config(gemma, format=FP8, kv_scales=dict.fromkeys(range(30), (0.5, 0.25)))
    assert [getattr(spec, "key_scale", None) for spec in shared] == [0.5] * 20 + [None] * 10
    latents = specs_from_config(DEEPSEEK, format=FP8, kv_scales={0: (0.5, None), 1: (0.25, 7)})
    assert [(type(spec), spec.key_scale) for spec in latents[:3]] == [
        (LatentSpec, 0.5),
        (LatentSpec, 0.25),
        (LatentSpec, 1.0),
    ]
    config = json.loads((Path(__file__).parent / "qwen3-next-80b-a3b.json").read_text())
    hybrid = read_model_config(config, format=FP8, kv_scales={3: (0.5, 0.25)})
    assert [getattr(spec, "key_scale", None) for spec in hybrid.layers[2:5]] == [None, 0.5, None]
    with pytest.raises(
        UnsupportedOption, match=r"kv_scales has layer 2, which stores no keys and values; use dataclass"
    ):
        read_model_config(config, format=FP8, kv_scales={2: (0.5, 0.25)})
