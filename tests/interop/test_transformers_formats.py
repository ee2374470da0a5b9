"""PagedCache with a quantised format: logits near those of the model's dtype, and the same tokens with every reuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagecore import AttentionSpec
from pagecore.arrays.dtypes.formats import FORMATS
from pagecore.errors import UnsupportedOption
from tests.interop.families import dynamic_cache, left_padded, make_cache, make_model, prompts, torch
from tests.interop.generations import run
from tests.interop.hybrids import make_hybrid
from tests.passing import passing

from pagecore.interop.transformers import PagedCache  # isort: skip  # after families, which skips

# Relative error of the logits; random models have no outliers, and their attention is nearly uniform.
BOUNDS = {"int8_token": 0.02, "float8_e5m2": 0.15, "nvfp4": 0.4, "int4_token": 0.4, "fp4_block16": 0.4}


def logits(model, ids, mask, cache):
    with torch.no_grad():
        return model(ids, attention_mask=mask, **passing(cache)).logits[mask.bool()].float()


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "mxfp8"])  # needs a head dim of 32
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_are_near_those_of_the_models_dtype(family, format):
    model, ids = make_model(family), prompts(columns=30)
    mask = left_padded(ids)
    expected = logits(model, ids, mask, dynamic_cache(model))
    cache = make_cache(model, format=format)
    got = logits(model, ids, mask, cache)
    assert 0 < (got - expected).norm() / expected.norm() < BOUNDS.get(format, 0.08)
    assert cache.kv.spec(0).format == format


@pytest.mark.parametrize("keys", [None, "float8_token"])
def test_values_may_have_another_format_than_keys(keys):
    model, ids = make_model("llama"), prompts(columns=30)
    mask = left_padded(ids)
    expected = logits(model, ids, mask, dynamic_cache(model))
    cache = make_cache(model, format=keys, value_format="int8_token")
    got = logits(model, ids, mask, cache)
    assert 0 < (got - expected).norm() / expected.norm() < 0.08
    assert (cache.kv.spec(0).format, cache.kv.spec(0).value_format) == (keys, "int8_token")
    both = logits(model, ids, mask, make_cache(model, format="int8_token"))
    assert (got - expected).norm() < (both - expected).norm() or keys


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_keys_and_values_with_a_format_may_be_rotated(family):
    model, ids = make_model(family), prompts(columns=30)
    mask = left_padded(ids)
    expected = logits(model, ids, mask, dynamic_cache(model))
    rotations = {"key_rotation": "hadamard", "value_rotation": "hadamard"}
    cache = make_cache(model, format="int8_token", **rotations)
    got = logits(model, ids, mask, cache)
    assert 0 < (got - expected).norm() / expected.norm() < BOUNDS["int8_token"]
    spec = cache.kv.spec(0)
    assert (spec.key_rotation, spec.value_rotation) == ("hadamard", "hadamard")
    fresh = run(model, ids, make_cache(model, format="int8_token", **rotations), num_beams=3)
    cache.reset()
    cache.begin(ids)
    assert run(model, ids, cache, num_beams=3) == fresh
    cache.kv.check_invariants()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beams_and_reused_prefixes_give_the_tokens_of_a_fresh_cache(family):
    model, ids = make_model(family), prompts()
    cache = make_cache(model, format="int8_token")
    fresh = run(model, ids, cache, num_beams=3)
    cache.reset()
    cache.begin(ids)
    assert run(model, ids, cache, num_beams=3) == fresh
    cache.kv.check_invariants()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_later_passes_and_beams_see_sealed_blocks(family):
    model, ids = make_model(family), prompts(columns=60)
    mask = left_padded(ids)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, **passing(dynamic_cache(model))).logits
    sealed = {"format": "kivi4", "group_size": 16, "block_size": 16, "residual": 5}
    plain = [make_cache(model).kv.spec(layer) for layer in range(model.config.num_hidden_layers)]
    layers = [spec if spec.window else replace(spec, **sealed) for spec in plain]
    cache = make_cache(model, layers=layers, block_size=16)
    cut = 45
    with torch.no_grad():
        model(ids[:, :cut], attention_mask=mask[:, :cut], **passing(cache))
        got = model(ids[:, cut:], attention_mask=mask, **passing(cache)).logits
    assert any(sequence.num_sealed_tokens for sequence in cache.kv.sequences.values())
    assert 0 < (got - expected[:, cut:]).norm() / expected[:, cut:].norm() < 0.2
    cache.reset()
    run(model, ids, cache, num_beams=3)
    cache.reset()
    assert cache.begin(ids) % 16 == 0
    run(model, ids, cache, num_beams=3)
    cache.kv.check_invariants()


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_a_hybrid_model_reads_sealed_blocks_next_to_its_states(family):
    model, ids = make_hybrid(family), prompts(columns=60)
    plain = make_cache(model).kv
    specs = [spec for spec in map(plain.spec, range(plain.num_layers)) if isinstance(spec, AttentionSpec)]
    sealed = {"format": "kivi4", "group_size": 16, "block_size": 16, "residual": 5}
    layers = [replace(spec, **sealed) for spec in specs]
    cache = make_cache(model, layers=layers, block_size=16, chunk=16, interval=16)
    reference = dynamic_cache(model)
    parts = [slice(0, 45), slice(45, 46), slice(46, 47)]
    with torch.no_grad():
        expected = torch.cat([model(ids[:, part], **passing(reference)).logits for part in parts], dim=1)
        model.set_attn_implementation("pagecore")
        got = torch.cat([model(ids[:, part], **passing(cache)).logits for part in parts], dim=1)
    assert all(sequence.num_sealed_tokens == 32 for sequence in cache.kv.sequences.values())
    assert 0 < (got - expected).norm() / expected.norm() < 0.2
    cache.reset()
    assert cache.begin(ids) == 32
    run(model, ids, cache, num_beams=3, max_new_tokens=9)
    cache.reset()
    cache.kv.check_invariants()


def test_a_format_of_sealed_blocks_is_that_of_a_hybrid_models_attention():
    model, ids = make_hybrid("zamba2"), prompts(columns=190)
    cache = make_cache(model, format="kivi4", block_size=None, chunk=32)
    run(model, ids, cache, max_new_tokens=2)
    assert {each.num_sealed_tokens for each in cache.kv.sequences.values()} == {32}
    assert cache.kv.block_size == 32
    cache.reset()
    assert cache.begin(ids) == 32


def test_a_format_beside_layers_is_refused():
    model = make_model("llama")
    model.set_attn_implementation("pagecore")
    layers = [PagedCache(model, num_blocks=8).kv.spec(0)] * model.config.num_hidden_layers
    with pytest.raises(UnsupportedOption, match="format is 'nvfp4', and layers are given"):
        PagedCache(model, layers=layers, format="nvfp4", num_blocks=8)
    with pytest.raises(UnsupportedOption, match="value_format is 'nvfp4', and layers are given"):
        PagedCache(model, layers=layers, value_format="nvfp4", num_blocks=8)
    with pytest.raises(UnsupportedOption, match="key_rotation is 'hadamard', and layers are given; give their specs"):
        PagedCache(model, layers=layers, key_rotation="hadamard", num_blocks=8)
    with pytest.raises(UnsupportedOption, match=r"key_rotation is .hadamard., but no layer stores keys in a format"):
        PagedCache(model, key_rotation="hadamard", num_blocks=8)
    with pytest.raises(UnsupportedOption, match="key_rotation is 'fourier'; use 'hadamard'"):
        PagedCache(model, format="int8_token", key_rotation="fourier", num_blocks=8)
    with pytest.raises(UnsupportedOption, match="format is 'fp7'; use one of float8_e4m3fn"):
        PagedCache(model, format="fp7", num_blocks=8)
    with pytest.raises(UnsupportedOption, match="value_format is 'fp7'; use one of float8_e4m3fn"):
        PagedCache(model, value_format="fp7", num_blocks=8)
