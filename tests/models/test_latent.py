"""Specs of models with latent attention: published configs, their bytes, transformers' own scale, refusals."""

from __future__ import annotations

import copy
import math

import pytest

from pagecore import ConfigError, LatentSpec, errors, specs_from_config
from pagecore.models import read_model_config
from pagecore.serving.planner import plan_memory
from tests.models.published import LATENT

V3 = LATENT["deepseek-v3"]


def test_deepseek_v3():
    model = read_model_config(V3)
    mscale = 0.1 * math.log(40) + 1
    assert model.layers == (LatentSpec(512, 64, 128, scale=192**-0.5 * mscale**2),) * 61
    assert model.max_length == 163840


def test_deepseek_v2_lite():
    specs = specs_from_config(LATENT["deepseek-v2-lite"], dtype="float32")
    mscale = 0.0707 * math.log(40) + 1
    assert specs == [LatentSpec(512, 64, 16, scale=192**-0.5 * mscale**2, dtype="float32")] * 27


def test_scale_without_yarn():
    plain = {name: value for name, value in V3.items() if name != "rope_scaling"}
    for rope in ({}, {"rope_parameters": {"rope_type": "default", "mscale_all_dim": 1.0}}, {"rope_scaling": None}):
        assert specs_from_config(plain | rope)[0].scale == 192**-0.5


@pytest.mark.parametrize(("format", "blocks"), [(None, 2387), ("fp8_ds_mla", 4192), ("nvfp4_ds_mla", 7813)])
def test_blocks_of_a_budget(format, blocks):
    specs = [spec.with_format(format) for spec in specs_from_config(V3)]
    plan = plan_memory(specs, 10 * 2**30, block_size=64, context=4096)
    assert plan.groups[0].bytes_per_block == 61 * 64 * specs[0].planes[0].nbytes
    assert 10 * 2**30 // plan.groups[0].bytes_per_block == blocks


@pytest.mark.parametrize("name", LATENT)
def test_transformers_has_the_same_scale(name):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch = pytest.importorskip("torch", reason="needs torch")
    given = {key: value for key, value in LATENT[name].items() if key not in ("architectures", "torch_dtype")}
    given |= {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "n_routed_experts": 8}
    given |= {"vocab_size": 16, "first_k_dense_replace": 1}
    config = transformers.AutoConfig.for_model(**copy.deepcopy(given))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    module = model.model.layers[0].self_attn
    for form in (given, config.to_dict(), config.to_diff_dict()):
        spec = specs_from_config(form)[0]
        assert spec.scale == pytest.approx(module.scaling, rel=1e-12)
        assert (spec.latent_dim, spec.rope_dim) == (module.kv_lora_rank, module.qk_rope_head_dim)
        assert spec.num_query_heads == module.num_heads


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"kv_lora_rank": 0}, ConfigError, "kv_lora_rank is 0"),
        ({"num_key_value_heads": 8}, errors.UnsupportedOption, "num_key_value_heads is 8"),
        ({"sliding_window": 128}, errors.UnsupportedOption, "sliding_window is 128"),
        ({"index_topk": 2048}, errors.UnsupportedOption, "index_topk is 2048"),
        ({"rope_scaling": 4}, ConfigError, "rope_scaling is 4"),
        ({"rope_scaling": {"type": "yarn", "mscale_all_dim": "x"}}, ConfigError, "mscale_all_dim"),
    ],
)
def test_refusals(changes, error, words):
    with pytest.raises(error) as raised:
        specs_from_config(V3 | changes)
    assert words in str(raised.value)


def test_sinks_are_refused():
    with pytest.raises(errors.UnsupportedOption, match="no sinks"):
        specs_from_config(V3, sinks=[[0.0]])
