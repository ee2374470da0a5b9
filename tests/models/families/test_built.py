"""Specs of families without recorded attributes, compared with small models on torch's meta device."""

import re
from pathlib import Path

import numpy as np
import pytest

from pagecore import Alias, AttentionSpec, LatentSpec, PagedKVCache, StateSpec, TensorParallel, UnsupportedOption
from pagecore.cache.layers.groups import arrange
from pagecore.models import ConfigError, read_model_config, specs_from_config
from pagecore.models.encoders.bart_t5 import ENCODER_DECODERS
from pagecore.models.encoders.cross_attention import COMPOSED, CROSS_DECODERS
from pagecore.models.encoders.mllama import MLLAMA
from pagecore.models.families.bert import BERT
from pagecore.models.families.registry import FAMILIES
from pagecore.models.layers.sharing import moved
from pagecore.models.multimodal.text_fields import ANY_TEXT_MODEL, TEXT_FIELDS, TEXT_MODELS, THINKERS, VERSIONED
from pagecore.models.parameters import count_parameters
from pagecore.serving.budget import DeviceOptions
from pagecore.serving.planner import plan_model
from tests.capabilities import require
from tests.models.meta import on_meta_device

ENCODERS = re.compile("audio|vision|visual")
GEMMA_3N = {
    "model_type": "gemma3n_text",
    "hidden_size": 2048,
    "num_hidden_layers": 30,
    "num_kv_shared_layers": 10,
    "intermediate_size": 8192,
}
MINIMAX = {"model_type": "minimax_text_01", "hidden_size": 6144, "head_dim": 128, "num_hidden_layers": 80}
MINIMAX |= {"num_attention_heads": 64, "num_key_value_heads": 8, "attn_type_list": ([0] * 7 + [1]) * 10}


def build(config):
    """Return the model of text on torch's meta device."""
    transformers = require("transformers")
    config._attn_implementation = "eager"
    with on_meta_device():
        return transformers.AutoModelForCausalLM.from_config(config)


def config_of(model_type, **sizes):
    return require("transformers").AutoConfig.for_model(model_type, **sizes)


def modules(model, *names):
    """Return the modules, in the order of layers, that have all of the given attributes."""
    return [module for module in model.modules() if all(hasattr(module, name) for name in names)]


# -- layers that share keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("gemma3n_text", {"num_hidden_layers": 10, "num_kv_shared_layers": 4, "intermediate_size": 96}),
        ("gemma3n_text", {"num_hidden_layers": 10, "num_kv_shared_layers": 0, "num_key_value_heads": 1}),
        ("gemma4_text", {"num_hidden_layers": 12, "num_kv_shared_layers": 5, "use_double_wide_mlp": True}),
        ("gemma4_unified_text", {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "attention_k_eq_v": True}),
    ],
)
def test_last_layers_read_the_keys_of_earlier_ones(model_type, sizes):
    config = config_of(model_type, hidden_size=64, vocab_size=101, **sizes)
    model, specs = build(config), specs_from_config(config.to_dict())
    layers = modules(model, "is_kv_shared_layer")
    assert [isinstance(spec, Alias) for spec in specs] == [layer.is_kv_shared_layer for layer in layers]
    # transformers reads those that the last layer of the same type has stored.
    stored = {layer.layer_type: layer.layer_idx for layer in layers if not layer.is_kv_shared_layer}
    for spec, layer in zip(specs, layers, strict=True):
        if layer.is_kv_shared_layer:
            assert spec == Alias(stored[layer.layer_type])
        else:
            assert spec.num_kv_heads * spec.head_dim == layer.k_proj.out_features
            assert spec.num_query_heads * spec.head_dim == layer.q_proj.out_features
            assert (spec.window, spec.scale) == (layer.sliding_window, layer.scaling)
    assert count_parameters(config.to_dict()).total == sum(each.numel() for each in model.parameters())


def test_a_cache_of_gemma_3n_stores_what_is_not_shared():
    specs = specs_from_config(GEMMA_3N)
    assert specs[20:25] == [Alias(18)] * 4 + [Alias(19)]
    assert [group.num_layers for group in arrange(specs, None, TensorParallel())[1]] == [16, 4]
    cache = PagedKVCache(layers=specs, num_blocks=8, block_size=16)
    assert np.shares_memory(cache.key(24), cache.key(19))
    plan = plan_model(GEMMA_3N, memory="1GiB", context=8192)
    assert [(group.num_layers, group.spec.window) for group in plan.memory.groups] == [(16, 512), (4, None)]


def test_stages_keep_layers_that_share_keys_together():
    model = read_model_config(GEMMA_3N)
    assert model.specs_of_stage(range(18, 22)) == (*model.layers[18:20], Alias(0), Alias(0))
    assert model.specs_of_stage(range(30)) == model.layers
    with pytest.raises(UnsupportedOption, match="layer 20 reads the keys and values of layer 18, which is in another"):
        plan_model(GEMMA_3N, device_memory="80GiB", options=DeviceOptions(pipeline_stages=3))


def test_a_draft_that_shares_keys_reads_its_own():
    options = DeviceOptions(draft_model=GEMMA_3N)
    whole = plan_model(GEMMA_3N, device_memory="80GiB", options=options)
    assert [group.num_layers for group in whole.memory.groups] == [32, 8]
    specs = specs_from_config(GEMMA_3N)
    assert moved(specs, 30)[20] == Alias(48)
    assert moved(specs, 30)[:20] == tuple(specs[:20])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_kv_shared_layers": 30}, "num_kv_shared_layers is 30; it must be below num_hidden_layers, 30"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1"),
        ({"num_kv_shared_layers": 26}, "no layer before layer 4 has the window of layer 4, None"),
    ],
)
def test_numbers_of_sharing_layers_that_no_model_has(change, words):
    with pytest.raises(ConfigError, match=words):
        specs_from_config(GEMMA_3N | change)


# -- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{}, {"head_dim": 16, "num_key_value_heads": 4, "layer_types": None}])
def test_lightning_attention_of_minimax(sizes):
    config = config_of("minimax", hidden_size=64, num_attention_heads=8, num_hidden_layers=4, vocab_size=101, **sizes)
    model, specs = build(config), specs_from_config(config.to_dict())
    lightning = modules(model, "slope_rate")
    kinds = [kind == "linear_attention" for kind in config.layer_types]
    assert [isinstance(spec, StateSpec) for spec in specs] == kinds
    states = [spec for spec in specs if isinstance(spec, StateSpec)]
    for spec, layer in zip(states, lightning, strict=True):
        (plane,) = spec.planes
        assert plane.shape == (layer.num_attention_heads, layer.head_dim, layer.head_dim)
        assert spec.chunk == layer.block_size
    assert count_parameters(config.to_dict()).total == sum(each.numel() for each in model.parameters())


def test_published_minimax_lists_its_layers_as_numbers():
    specs = specs_from_config(MINIMAX)
    assert [isinstance(spec, StateSpec) for spec in specs] == ([True] * 7 + [False]) * 10
    assert specs[0].planes[0].shape == (64, 128, 128)
    with pytest.raises(ConfigError, match=r"attn_type_list.*must list 0 or 1 for each of the 80 layers"):
        specs_from_config(MINIMAX | {"attn_type_list": [0, 1]})


@pytest.mark.parametrize(
    "sizes", [{}, {"short_conv_kernel_size": 3, "head_dim": 24, "n_shared_experts": 2, "attention_bias": True}]
)
def test_delta_rule_and_latents_of_ling(sizes):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 101} | sizes
    config = config_of("bailing_hybrid", num_hidden_layers=7, num_local_experts=4, pad_token_id=0, **sizes)
    model, specs = build(config), specs_from_config(config.to_dict())
    assert [isinstance(spec, LatentSpec) for spec in specs] == [layer == 5 for layer in range(7)]
    states = [spec for spec in specs if isinstance(spec, StateSpec)]
    for spec, layer in zip(states, modules(model, "forget_gate"), strict=True):
        conv, temporal = spec.planes
        assert conv.shape == (layer.conv1d.in_channels, layer.conv1d.kernel_size[0] - 1)
        assert temporal.shape == (layer.num_heads, layer.head_dim, layer.head_dim)
    (latent,) = modules(model, "kv_b_proj")
    assert (specs[5].latent_dim, specs[5].scale) == (latent.kv_lora_rank, pytest.approx(latent.scaling))
    assert count_parameters(config.to_dict()).total == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("sizes", [{}, {"lru_width": 96, "num_key_value_heads": 1, "conv1d_width": 3}])
def test_recurrent_units_of_gemma(sizes):
    config = config_of("recurrent_gemma", hidden_size=64, num_attention_heads=4, num_hidden_layers=5, **sizes)
    model, specs = build(config), specs_from_config(config.to_dict())
    assert [isinstance(spec, StateSpec) for spec in specs] == [True, True, False, True, True]
    states = [spec for spec in specs if isinstance(spec, StateSpec)]
    for spec, layer in zip(states, modules(model, "rg_lru"), strict=True):
        conv, temporal = spec.planes
        assert conv.shape == (layer.conv_1d.in_channels, layer.conv_1d.kernel_size[0] - 1)
        assert temporal.shape == tuple(layer.rg_lru.recurrent_param.shape)
    (attention,) = modules(model, "k_proj")
    assert specs[2].num_kv_heads == attention.num_key_value_heads
    assert specs[2].window == config.attention_window_size
    assert count_parameters(config.to_dict()).total == sum(each.numel() for each in model.parameters())
    with pytest.raises(ConfigError, match=r"block_types is .*; it must list 'recurrent' and 'attention'"):
        specs_from_config(config.to_dict() | {"block_types": ["mamba"]})


# -- decoders of BERT's kin, and text models of multimodal models ------------------------------------------------------


@pytest.mark.parametrize("model_type", sorted(BERT))
def test_decoders_of_the_kin_of_bert(model_type):
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "vocab_size": 101, "pad_token_id": 0}
    if model_type == "xmod":
        sizes["languages"] = ["en"]
    config = config_of(model_type, is_decoder=True, intermediate_size=16, **sizes)
    specs = specs_from_config(config.to_dict())
    keys = [module.key.out_features for module in modules(build(config), "query", "key", "value")]
    assert [spec.num_kv_heads * spec.head_dim for spec in specs] == keys == [48, 48]
    with pytest.raises(UnsupportedOption, match="is_decoder is false, so each token attends to later ones"):
        specs_from_config(config.to_dict() | {"is_decoder": False})
    fewest = specs_from_config({"model_type": model_type, "is_decoder": True})
    assert len(fewest) == config_of(model_type).num_hidden_layers


@pytest.mark.parametrize(
    ("whole", "layers"),
    [
        ("ernie4_5_vl_moe", 28),
        ("glm4v_moe", 46),
        ("granite_docling", 28),
        ("molmo2", 36),
        ("paddleocr_vl", 18),
        ("qwen2_5_omni_thinker", 28),
        ("qwen3_omni_moe_thinker", 28),
        ("cosmos3_edge", 28),
        ("glm_ocr", 16),
    ],
)
def test_text_models_of_multimodal_models(whole, layers):
    transformers = require("transformers")
    config = config_of(whole)
    for name in ("num_experts", "moe_num_experts", "n_routed_experts"):
        if hasattr(config.text_config, name):
            setattr(config.text_config, name, 2)  # slow to build, and not part of attention
    model_of = transformers.AutoModelForMultimodalLM
    with on_meta_device():
        model = model_of.from_config(config)
    attending = [
        module
        for name, module in model.named_modules()
        if hasattr(module, "layer_idx") and hasattr(module, "scaling") and not ENCODERS.search(name)
    ]
    specs = specs_from_config(config.to_dict())
    assert len(specs) == len(attending) == layers
    for spec, module in zip(specs, attending, strict=True):
        assert isinstance(spec, AttentionSpec)
        assert (spec.scale or spec.head_dim**-0.5) == pytest.approx(module.scaling)
        assert spec.head_dim == module.head_dim
        if hasattr(module, "k_proj"):
            assert spec.num_kv_heads * spec.head_dim == module.k_proj.out_features
            assert spec.num_query_heads * spec.head_dim == module.q_proj.out_features


def test_a_multimodal_model_of_any_type_has_the_specs_of_its_text_model():
    text = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    text["num_key_value_heads"] = 2
    expected = specs_from_config(text)
    for config in (
        {"model_type": "got_ocr2", "text_config": text},
        {"model_type": "not_yet_known", "text_config": text, "vision_config": {}},
    ):
        assert specs_from_config(config) == expected
    spoken = {"model_type": "qwen2_5_omni", "thinker_config": {"model_type": "qwen2_5_omni_thinker"}}
    spoken["thinker_config"]["text_config"] = text | {"model_type": "qwen2_5_omni_text"}
    assert len(specs_from_config(spoken)) == 3
    with pytest.raises(UnsupportedOption, match='model_type is "not_yet_known", which is unknown'):
        specs_from_config({"model_type": "not_yet_known", "text_config": text | {"model_type": "nor_this"}})


def test_index_keys_of_ax_k2():
    config = config_of("axk2", hidden_size=64, num_hidden_layers=2, n_routed_experts=4)
    model, specs = build(config), specs_from_config(config.to_dict())
    for spec, module in zip(specs, modules(model, "kv_b_proj"), strict=True):
        assert (spec.latent_dim, spec.rope_dim) == (module.kv_lora_rank, module.qk_rope_head_dim)
        assert spec.index_dim == module.indexer.wk.out_features
        assert spec.scale == pytest.approx(module.scaling)


def test_the_page_of_models_lists_every_type():
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    listed = set(re.findall(r"`([A-Za-z0-9_.-]+)`", page))
    with_encoder = {*ENCODER_DECODERS, *CROSS_DECODERS, *COMPOSED, *MLLAMA}
    assert {*FAMILIES, *with_encoder, *ANY_TEXT_MODEL, *TEXT_FIELDS, *TEXT_MODELS, *THINKERS, *VERSIONED} <= listed
