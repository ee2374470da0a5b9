"""Models whose latent layers differ, or whose attention keeps a state, compared with the caches of small models."""

import pytest

from pagecore import Alias, AttentionSpec, ConfigError, LatentSpec, PagedKVCache, StateSpec, UnsupportedOption
from pagecore.models import read_model_config, specs_from_config
from pagecore.serving.planner import plan_model
from tests.capabilities import require
from tests.models.families.test_small_caches import GROUPED, LATENT
from tests.passing import passing
from tests.together import together

MISTRAL = {name: value for name, value in LATENT.items() if name != "q_lora_rank"} | {"num_hidden_layers": 5}
GLM = {**LATENT, "qk_rope_head_dim": 0, "num_hidden_layers": 5, "hc_mult": 2, "index_kpool": 2}
GLM |= {"linear_num_heads": 3, "linear_head_dim": 8}
ZAYA = {**GROUPED, "num_experts": 4, "moe_intermediate_size": 8, "router_hidden_size": 16, "eos_token_id": 1}


def filled_cache(model_type, sizes):
    """Return the config and the layers of the cache of a small model after 7 tokens, and its attention modules."""
    transformers, torch = require("transformers"), require("torch")
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = transformers.AutoModel.from_config(config).eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(torch.randint(1, 30, (2, 7)), **passing(cache), use_cache=True)
    return config.to_dict(), cache.layers, [m for m in model.modules() if hasattr(m, "scaling")]


SHARED = {"kv_source_layers": [0, 1, 0, 3, 3], "indexer_types": ["full", "full", "shared", "full", "shared"]}


@pytest.mark.parametrize(
    "more", [{}, {"no_rope_layers": [1, 0, 1, 1, 0]}, {**SHARED, "no_rope_layers": [1, 1, 1, 0, 0]}]
)
def test_latents_of_mistral_large_4_with_and_without_a_rotary_part(more):
    config, layers, modules = filled_cache("mistral_large4_text", MISTRAL | more)
    specs = specs_from_config(config)
    assert specs_from_config({"model_type": "mistral_large4", "text_config": config}) == specs
    sources = more.get("kv_source_layers", range(5))
    for layer, (spec, held, module) in enumerate(zip(specs, layers, modules, strict=True)):
        if sources[layer] != layer:
            assert spec == Alias(sources[layer])
            continue
        assert (spec.latent_dim, spec.rope_dim) == (held.keys.shape[3], held.values.shape[3])
        assert (spec.num_query_heads, spec.scale) == (module.num_heads, pytest.approx(module.scaling))
        assert spec.index_dim == held.indexer_keys.shape[2]


def test_a_cache_of_mistral_large_4():
    """The published model: every fourth layer has no rotary part, and each stores index keys."""
    config = {"model_type": "mistral_large4_text", "hidden_size": 6144, "num_hidden_layers": 72}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 64}
    specs = specs_from_config(config)
    assert [spec.rope_dim for spec in specs[:8]] == [64, 64, 64, 0] * 2
    assert {spec.scale for spec in specs} == {128**-0.5}
    size = sum(plane.nbytes for spec in specs for plane in spec.planes)
    assert size == 54 * 576 * 2 + 18 * 512 * 2 + 72 * 132
    assert plan_model(config, "80GiB").memory.bytes_per_token == size
    assert PagedKVCache(specs, num_blocks=8, block_size=64, device="none").num_layers == 72


@together(
    ("changes", "error", "words"),
    [
        ({"kv_source_layers": [0]}, ConfigError, "must have one entry for each of 5 layers"),
        ({"kv_source_layers": [0, 1, 4, 3, 4]}, ConfigError, r"kv_source_layers\[2\] is 4; it must be 2 or an earlier"),
        ({"kv_source_layers": ["0", 1, 2, 3, 4]}, ConfigError, r'kv_source_layers\[0\] is "0"; it must be 0'),
        ({"kv_source_layers": [0, 0, 1, 3, 4]}, ConfigError, r"kv_source_layers\[2\] is 1; .* stores its own latents"),
        ({"kv_source_layers": [0, 1, 2, 0, 4]}, ConfigError, "only one of the two layers has a rotary part"),
        ({"kv_source_layers": [0, 0, 2, 3, 4]}, UnsupportedOption, "layer 1 reads the latents of another layer"),
        ({"no_rope_layers": [1, 1]}, ConfigError, "no_rope_layers"),
        ({"indexer_types": ["shared"] * 5}, ConfigError, "no layer before it has an indexer"),
        ({"layer_types": ["full_attention"] * 5}, UnsupportedOption, "indexed_attention"),
    ],
)
def test_layers_of_mistral_large_4_that_contradict_each_other_are_refused(changes, error, words):
    with pytest.raises(error, match=words):
        specs_from_config({"model_type": "mistral_large4_text", **MISTRAL, **changes})


@pytest.mark.parametrize(
    "more", [{}, {"layer_types": ["full_attention", "linear_attention"] * 2 + ["indexed_attention"]}]
)
def test_layers_of_glm_5_next_are_those_of_a_small_model(more):
    config, layers, modules = filled_cache("glm5_next_text", GLM | more)
    found = read_model_config(config)
    assert found.specs_by_layer == tuple((layer,) for layer in range(5))
    for spec, held in zip(found.layers, layers, strict=True):
        if isinstance(spec, StateSpec):
            conv, temporal = spec.planes
            assert (conv.shape[0], conv.shape[1] + 1) == held.conv_states[0].shape[1:]
            assert temporal.shape == held.recurrent_states[0].shape[1:]
            continue
        assert (spec.latent_dim, spec.rope_dim) == (held.keys.shape[3], held.values.shape[3]) == (16, 0)
        assert spec.index_dim == held.indexer_keys.shape[2] - 1  # the last number marks padding
        assert spec.scale == pytest.approx(modules[-1].scaling)
        assert {plane.name: str(plane.dtype) for plane in spec.planes} == {
            "latent": "bfloat16",
            "index_key": "bfloat16",
        }


def test_indexers_of_glm_5_next_are_those_of_layers_that_attend():
    config = {"model_type": "glm5_next_text", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 64}
    listed = ["shared", "shared", "shared", "full", "full", "full", "full", "shared"]
    specs = specs_from_config(config | {"indexer_types": listed})
    assert [spec.index_dim for spec in specs if isinstance(spec, LatentSpec)] == [256, None]
    with pytest.raises(ConfigError, match=r"indexer_types\[3\] is 'shared', but no layer before it has an indexer"):
        specs_from_config(config | {"indexer_types": ["full"] * 3 + ["shared"] + ["full"] * 4})


def test_glm_5_next_by_its_fewest_fields():
    config = {"model_type": "glm5_next", "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64}
    specs = specs_from_config(config)
    assert specs == specs_from_config(config | {"model_type": "glm5_next_text"})
    attending = [layer for layer, spec in enumerate(specs) if isinstance(spec, LatentSpec)]
    assert attending == list(range(3, 45, 4))
    assert sum(plane.nbytes for plane in specs[3].planes) == (512 + 2 * 128) * 2
    assert specs[0].nbytes == 3 * 64 * 128 * 3 * 2 + 64 * 128 * 128 * 4
    with pytest.raises(ConfigError, match="qk_rope_head_dim is 64; it must be 0"):
        specs_from_config(config | {"qk_rope_head_dim": 64})


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"cca_time0": 3, "cca_time1": 4},
        {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 4},
    ],
)
def test_layers_of_zaya_are_those_of_a_small_model(more):
    config, layers, modules = filled_cache("zaya", ZAYA | more)
    found = read_model_config(config)
    assert found.specs_by_layer == ((0, 1), (2, 3), (4, 5))
    for layer, held in enumerate(layers):
        attention, state = found.layers[2 * layer : 2 * layer + 2]
        assert isinstance(attention, AttentionSpec)
        assert (attention.num_kv_heads, attention.head_dim) == (held.keys.shape[1], held.keys.shape[3])
        assert attention.window == getattr(held, "sliding_window", None)
        assert attention.scale in (None, modules[layer].scaling)
        assert [plane.shape for plane in state.planes] == [
            held.conv_states[0].shape[1:],
            held.recurrent_states[0].shape[1:],
        ]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"cca_time0": 1, "cca_time1": 1}, ConfigError, "cca_time0 is 1 and cca_time1 is 1"),
        ({"num_key_value_heads": 1, "head_dim": 7}, ConfigError, "head_dim is 7 with 1 key-value heads"),
        ({"layer_types": ["hybrid", "full_attention", "hybrid"]}, UnsupportedOption, r"layer_types\[1\]"),
        ({"layer_types": ["hybrid_sliding"] * 3}, ConfigError, "sliding_window"),
    ],
)
def test_layers_of_zaya_that_cannot_be_stored_are_refused(changes, error, words):
    with pytest.raises(error, match=words):
        specs_from_config({"model_type": "zaya", **ZAYA, **changes})


def test_the_states_of_zaya_are_divided_among_ranks():
    state = specs_from_config({"model_type": "zaya", "hidden_size": 2048, "num_hidden_layers": 40})[1]
    assert [plane.shape for plane in state.planes] == [(1280, 2), (128,)]
    assert [plane.shape for plane in state.split(ranks=2)] == [(640, 2), (64,)]
