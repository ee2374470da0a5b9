"""Latent attention of DeepSeek and its kin: PagedCache stores latents, and reads them without expanding them."""

from __future__ import annotations

import copy
import gc
import pickle
from types import SimpleNamespace

import pytest

from pagecore import AttentionSpec, LatentSpec
from pagecore.errors import ShapeError, UnsupportedOption
from tests.interop.families import (
    FAMILIES,
    NUM_LAYERS,
    dynamic_cache,
    left_padded,
    make_cache,
    make_model,
    prompts,
    torch,
)
from tests.interop.generations import compiled, computed, expect, run
from tests.models.published import LLAMA_4_SCOUT, PUBLISHED
from tests.passing import passing

from pagecore.interop.transformers.inputs.arguments import CACHES  # isort: skip  # after families, which skips
from pagecore.interop.transformers.layers import latents  # isort: skip
from pagecore.interop.transformers.layers.specs import specs_of_model  # isort: skip

LATENT_FAMILIES = [
    "deepseek_v2",
    "deepseek_v3",
    "minicpm3",
    "youtu",
    "glm4_moe_lite",
    "mistral4",
    "axk1",
    "longcat_flash",
]
EVERY_FAMILY = pytest.mark.parametrize("family", LATENT_FAMILIES)


def fresh(family="deepseek_v3", dtype="float32", **fields):
    """Return a model of its own, with changed fields of its config."""
    config = copy.deepcopy(make_model(family).config)
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(1)
    return type(make_model(family))(config).eval().to(getattr(torch, dtype))


def logits(model, ids, cache, **options):
    with torch.no_grad():
        return model(ids, **passing(cache), **options).logits


@EVERY_FAMILY
def test_rows_of_the_cache_are_the_latents_that_the_model_computes(family):
    model, ids = make_model(family), prompts(1, 11)
    reference = dynamic_cache(model)
    logits(model, ids, reference)
    cache = make_cache(model)
    logits(model, ids, cache)
    cache.reset()
    module = next(each for each in model.modules() if hasattr(each, "kv_b_proj"))
    for layer, expected in enumerate(reference.layers):
        spec = cache.kv.spec(layer)
        assert spec.scale == pytest.approx(module.scaling, rel=1e-12)
        assert (spec.latent_dim, spec.rope_dim) == (expected.keys.shape[-1], expected.values.shape[-1]) == (16, 4)
        rows = torch.from_dlpack(cache.kv.plane("latent", layer))[1:].reshape(-1, 20)
        written = torch.cat([expected.keys, expected.values], dim=-1)[0, 0]
        # A cached prefix holds whole blocks; their ids ascend in a new pool.
        torch.testing.assert_close(rows[:11], written, rtol=1e-5, atol=1e-6)


def test_latents_take_fewer_bytes_than_expanded_keys():
    model = make_model("deepseek_v3")
    cache = make_cache(model, num_blocks=9)
    expanded = make_cache(model, num_blocks=9, layers=[AttentionSpec(4, 12, 12, dtype="float32")] * NUM_LAYERS)
    assert expanded.kv.nbytes / cache.kv.nbytes == 4 * (12 + 12) / (16 + 4)


@EVERY_FAMILY
def test_begin_reuses_the_latents_of_a_prefix(family):
    model, ids = make_model(family), prompts(2, 13)
    few = {"max_new_tokens": 4}
    expected = expect(model, ids, **few)
    cache = make_cache(model)
    assert run(model, ids, cache, **few) == expected
    assert cache.begin(ids) == 12
    with computed(model) as columns:
        assert run(model, ids, cache, **few) == expected
    assert columns[0] == 1


@pytest.mark.parametrize("format", ["float8_e4m3fn", "fp8_ds_mla", "nvfp4"])
def test_latents_in_a_quantised_format(format):
    bound = {"float8_e4m3fn": 0.05, "fp8_ds_mla": 0.05, "nvfp4": 0.2}[format]
    model = fresh(dtype="bfloat16", kv_lora_rank=512, qk_rope_head_dim=64, head_dim=64, qk_head_dim=72)
    ids = prompts(columns=30)
    mask = left_padded(ids)
    expected = logits(model, ids, dynamic_cache(model), attention_mask=mask).float()
    cache = make_cache(model, format=format, block_size=16)
    assert cache.kv.spec(0).format == ("nvfp4_ds_mla" if format == "nvfp4" else format)
    got = logits(model, ids, cache, attention_mask=mask).float()
    error = (got - expected)[mask.bool()].norm() / expected[mask.bool()].norm()
    assert 1e-4 < error < bound


class Expanded(torch.nn.Module):
    """Attention as in transformers before 5.15.1: it caches the keys and values of every head."""

    def __init__(self, of):
        super().__init__()
        self.of, self.config, self.layer_idx, self.is_causal = of, of.config, of.layer_idx, True
        self.num_key_value_groups = 1

    def forward(self, hidden_states, position_embeddings, attention_mask, **options):
        of = self.of
        cache = next((options.pop(name) for name in CACHES if name in options), None)
        batch, columns, _ = hidden_states.shape
        query = of.q_b_proj(of.q_a_layernorm(of.q_a_proj(hidden_states))).view(batch, columns, of.num_heads, -1)
        joint = of.kv_a_proj_with_mqa(hidden_states)
        latent = of.kv_a_layernorm(joint[..., : of.kv_lora_rank])
        expanded = of.kv_b_proj(latent).view(batch, columns, of.num_heads, -1).transpose(1, 2)
        rope = joint[:, None, :, of.kv_lora_rank :]
        nope, turned = query.transpose(1, 2).split([of.qk_nope_head_dim, of.qk_rope_head_dim], dim=-1)
        turned, rope = rotated(turned, *position_embeddings), rotated(rope, *position_embeddings)
        query = torch.cat([nope, turned], dim=-1)
        key = torch.cat([expanded[..., : of.qk_nope_head_dim], rope.expand(-1, of.num_heads, -1, -1)], dim=-1)
        value = expanded[..., of.qk_nope_head_dim :]
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

        interface = modeling.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, modeling.eager_attention_forward
        )
        attended, weights = interface(self, query, key, value, attention_mask, scaling=of.scaling, **options)
        return of.o_proj(attended.reshape(batch, columns, -1)), weights


def rotated(array, cos, sin):
    """Rotate interleaved pairs."""
    half = cos.shape[-1] // 2
    cos, sin, even, odd = cos[:, None, :, :half], sin[:, None, :, :half], array[..., 0::2], array[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


@pytest.fixture
def expanded(monkeypatch):
    """Return a model whose attention has no method that expands latents."""
    model = fresh()
    for layer in model.base_model.layers:
        layer.self_attn = Expanded(layer.self_attn)
    monkeypatch.delattr(type(model.base_model.layers[0].self_attn.of), "expand_kv")
    return model


def test_a_model_that_caches_expanded_keys_stores_them(expanded):
    ids = prompts(2, 9)
    mask = left_padded(ids)
    expected = expect(expanded, ids, mask, num_beams=2)
    cache = make_cache(expanded)
    spec = cache.kv.spec(0)
    assert (spec.num_kv_heads, spec.head_dim, spec.v_head_dim) == (4, 12, 12)
    assert spec.scale == pytest.approx(expanded.base_model.layers[0].self_attn.of.scaling, rel=1e-12)
    assert run(expanded, ids, cache, mask, num_beams=2) == expected


def test_specs_of_the_other_kind_raise_in_the_first_pass(expanded):
    spec = LatentSpec(16, 4, 4, scale=0.3, dtype="float32")
    cache = make_cache(expanded, layers=[spec] * NUM_LAYERS)
    with pytest.raises(ShapeError, match=r"layer 0 stores 4 heads of 12 and 12 numbers.*AttentionSpec\(4, 12, 12"):
        logits(expanded, prompts(), cache)
    assert cache.kv.num_sequences == 0
    model = make_model("deepseek_v3")
    cache = make_cache(model, layers=[AttentionSpec(4, 12, 12, dtype="float32")] * NUM_LAYERS)
    with pytest.raises(ShapeError, match="the heads of key_cache"):
        logits(model, prompts(), cache)
    cache = make_cache(model, layers=[LatentSpec(8, 4, 4, scale=0.3, dtype="float32")] * NUM_LAYERS)
    with pytest.raises(ShapeError, match="layer 0 stores 1 heads of 16 and 4 numbers"):
        logits(model, prompts(), cache)


class Quantised(torch.nn.Linear):
    def forward(self, given):
        return super().forward(given)


@pytest.mark.parametrize(
    ("projection", "says"),
    [
        (lambda linear: Quantised(16, linear.out_features, bias=False), "is a Quantised of torch.float32"),
        (lambda linear: torch.nn.Linear(16, linear.out_features), "is a Linear of torch.float32"),
        (torch.nn.Sequential, "is a Sequential"),
        (lambda linear: torch.nn.Linear(16, linear.out_features, bias=False).double(), "is a Linear of torch.float64"),
    ],
)
def test_a_projection_that_is_not_a_plain_linear_layer_raises(projection, says):
    model = fresh()
    attention = model.base_model.layers[1].self_attn
    attention.kv_b_proj = projection(attention.kv_b_proj)
    cache = make_cache(model)
    with pytest.raises(UnsupportedOption, match=f"kv_b_proj of layer 1 {says}.*merge adapters and dequantise"):
        logits(model, prompts(), cache)
    assert (cache.get_seq_length(), cache.kv.num_sequences) == (0, 0)


def test_a_projection_of_other_sizes_raises():
    model = fresh()
    attention = model.base_model.layers[1].self_attn
    attention.kv_b_proj = torch.nn.Linear(16, 4 * 8, bias=False)
    with pytest.raises(ShapeError, match="layer 1 has a kv_b_proj of 32 x 16 and queries of 4 heads of 12 numbers"):
        logits(model, prompts(), make_cache(model))


def test_a_layer_of_another_implementation_raises():
    model = fresh()
    attention = model.base_model.layers[1].self_attn
    cache = make_cache(model)
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedOption, match="layer 1 of the model did not attend to its paged keys"):
        logits(model, prompts(), cache)


def test_other_caches_and_passes_are_not_affected():
    model, ids = fresh(), prompts()
    expected = logits(model, ids, dynamic_cache(model))
    first = make_cache(model)
    model.set_attn_implementation("pagecore")
    torch.testing.assert_close(logits(model, ids, None), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(model, ids, first), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(model, ids, dynamic_cache(model)), expected, rtol=0, atol=0)


def test_modules_are_restored_with_their_last_cache():
    model = fresh()
    modules = [layer.self_attn for layer in model.base_model.layers]
    first, second = make_cache(model), make_cache(model)
    assert all("expand_kv" in module.__dict__ for module in modules)
    del first
    gc.collect()
    assert all("expand_kv" in module.__dict__ for module in modules)
    del second
    gc.collect()
    assert not any("expand_kv" in module.__dict__ or module in latents._holders for module in modules)


def test_copies_of_a_model_expand_with_their_own_weights():
    model, ids = fresh(), prompts()
    expected = logits(model, ids, dynamic_cache(model))
    cache = make_cache(model)
    module = model.base_model.layers[0].self_attn
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        copied.kv_b_proj.weight.data.zero_()
        key, _ = copied.expand_kv(torch.ones(1, 1, 3, 16), torch.ones(1, 1, 3, 4))
        assert not key[..., :8].any()
    torch.testing.assert_close(logits(model, ids, cache), expected, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_gives_equal_tokens():
    """A Llama compiles passes of several columns, too: each number of columns is traced for seconds."""
    model, ids = fresh("youtu", num_hidden_layers=1), prompts()
    expected, cache = expect(model, ids, max_new_tokens=4), make_cache(model)
    logits(model, ids[:, :-1], cache)
    with compiled(model), computed(model) as columns:
        assert run(model, ids, cache, max_new_tokens=4) == expected
    assert columns == [1] * 4


def test_every_family_with_latents_is_compared():
    assert set(LATENT_FAMILIES) <= set(FAMILIES)


def test_a_model_with_an_indexer_is_refused_by_name():
    config = SimpleNamespace(model_type="deepseek_v32", to_dict=lambda: PUBLISHED["deepseek-v3.2"])
    with pytest.raises(UnsupportedOption, match=r"deepseek_v32 selects keys with an indexer.*use another cache"):
        specs_of_model(config, "bfloat16")


def test_the_layers_of_llama_4_have_chunks_or_see_all_keys():
    config = SimpleNamespace(model_type="llama4_text", to_dict=lambda: LLAMA_4_SCOUT["text_config"])
    chunks = [spec.chunk for spec in specs_of_model(config, "bfloat16")]
    assert chunks == [8192, 8192, 8192, None] * 12
