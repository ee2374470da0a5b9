"""DeepSeek V2 and V3 with latents in a PagedCache, compared with a DynamicCache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagecore import AttentionSpec, LatentSpec, errors
from tests.capabilities import require

torch, transformers = require("torch"), require("transformers")
torch.set_num_threads(1)  # the models are too small to gain from threads

VOCABULARY = 97
FIELDS = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 96,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}


def make_model(name: str, **changes: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**(FIELDS | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def make_cache(model: Any, **options: Any) -> Any:
    from pagecore.interop.transformers import PagedCache

    model.set_attn_implementation("pagecore")
    return PagedCache(model, **{"num_blocks": 200, "block_size": 4} | options)


def prompts(rows: int = 3, columns: int = 21) -> tuple[Any, Any]:
    """Return random ids with left padding of different lengths."""
    rng = np.random.default_rng(0)
    ids = rng.integers(2, 96, (rows, columns))
    mask = np.arange(columns)[None] >= rng.integers(0, 9, rows)[:, None]
    return torch.from_numpy(np.where(mask, ids, 0)), torch.from_numpy(mask.astype(np.int64))


MODELS = [
    ("DeepseekV2", {}),
    ("DeepseekV3", {}),
    ("DeepseekV3", {"rope_parameters": YARN}),
    ("DeepseekV3", {"q_lora_rank": None}),
]


@pytest.mark.parametrize(("name", "changes"), MODELS)
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}, {"num_beams": 3}])
def test_tokens_are_those_of_a_dynamic_cache(name, changes, options):
    model = make_model(name, **changes)
    ids, mask = prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": 24, "min_new_tokens": 24, **options}
    torch.manual_seed(7)
    expected = model.generate(ids, past_key_values=transformers.DynamicCache(), **arguments)
    cache = make_cache(model)
    assert isinstance(cache.kv.spec(0), LatentSpec)
    torch.manual_seed(7)
    got = model.generate(ids, past_key_values=cache, **arguments)
    assert got.tolist() == expected.tolist()


def test_logits_of_a_prompt_and_its_continuation():
    model = make_model("DeepseekV3")
    ids, mask = prompts()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, past_key_values=transformers.DynamicCache()).logits
        cache = make_cache(model)
        first = model(ids[:, :13], attention_mask=mask[:, :13], past_key_values=cache).logits
        second = model(ids[:, 13:], attention_mask=mask, past_key_values=cache).logits
    got = torch.cat([first, second], 1)
    seen = mask.bool()
    torch.testing.assert_close(got[seen], expected[seen], rtol=2e-4, atol=2e-4)


def test_prefixes_are_reused():
    model = make_model("DeepseekV2")
    ids = torch.from_numpy(np.random.default_rng(3).integers(2, 96, (1, 30)))
    cache = make_cache(model)
    expected = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert cache.begin(ids) >= 28
    assert model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False).tolist() == expected.tolist()


def test_latents_can_be_quantised():
    model = make_model("DeepseekV3")
    ids, mask = prompts()
    base = make_cache(model).kv.spec(0)
    cache = make_cache(model, layers=[base.with_format("float8_e4m3fn")] * 3)
    got = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert got.shape == (3, 25)


def test_a_replaced_projection_is_refused():
    model = make_model("DeepseekV3")
    ids, mask = prompts()
    cache = make_cache(model)
    attention = model.model.layers[0].self_attn

    class Adapter(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    attention.kv_b_proj = Adapter(attention.kv_b_proj)
    with pytest.raises(errors.UnsupportedOption, match="kv_b_proj of the DeepseekV3Attention is a Adapter"):
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)


def test_specs_of_expanded_keys_are_refused_by_a_model_that_passes_latents():
    model = make_model("DeepseekV3")
    ids, mask = prompts()
    cache = make_cache(model, layers=[AttentionSpec(4, 24, 12, dtype="float32", num_query_heads=4)] * 3)
    with pytest.raises(errors.ShapeError):
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)


def test_earlier_versions_store_expanded_keys(monkeypatch):
    from pagecore.interop.transformers import specs

    model = make_model("DeepseekV3")
    monkeypatch.setattr(specs.transformers, "__version__", "5.15.0")
    assert (
        specs.specs_of_model(model.config, "float32")
        == [AttentionSpec(4, 24, 12, dtype="float32", num_query_heads=4)] * 3
    )
