"""`PagedCache` for models whose last layers share keys, whose layers differ, and for decoders of encoder-decoders."""

import pytest

from tests.capabilities import require

torch = require("torch")
transformers = require("transformers")

from pagecore.errors import ShapeError, UnsupportedOption  # noqa: E402
from pagecore.interop.transformers import PagedCache  # noqa: E402
from tests.passing import passing  # noqa: E402

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 16,
    "max_position_embeddings": 256,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GEMMA = SIZES | {"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "global_head_dim": 32}


def model_of(model_type, **sizes):
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"needs transformers with {model_type}")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompts():
    ids = torch.randint(3, 99, (2, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    return ids * mask, {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("model_type", "sizes", "stored"),
    [
        ("gemma3n_text", GEMMA | {"num_kv_shared_layers": 2, "laurel_rank": 4}, 4),
        ("gemma4_text", GEMMA | {"num_kv_shared_layers": 2}, 4),
        ("gemma4_unified_text", GEMMA | {"num_kv_shared_layers": 4}, 2),
        ("gemma4_unified_text", GEMMA | {"num_kv_shared_layers": 0}, 6),
    ],
)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_tokens_equal_those_of_the_dynamic_cache(model_type, sizes, stored, options):
    model = model_of(model_type, **sizes)
    ids, given = prompts()
    expected = model.generate(ids, **given, **options)
    model.set_attn_implementation("pagecore")
    cache = PagedCache(model, num_blocks=64)
    assert len(cache.layers) == stored
    assert torch.equal(model.generate(ids, **passing(cache), **given, **options), expected)


_LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_LOOPS = {"n_input_layers": 2, "n_recurrent_layers": 3, "n_output_layers": 1, "n_recurrent_loops": 3}
LARA = {name: value for name, value in SIZES.items() if name != "intermediate_size"}


@pytest.mark.parametrize(
    ("model_type", "sizes", "stored"),
    [
        ("dory", SIZES | _LOOPS, 12),
        ("dory", SIZES | _LOOPS | {"n_recurrent_loops": 1}, 6),
        ("lara_mini", LARA | {"num_experts": 4, "layer_types": None} | _LINEAR | _EXPERTS, 6),
    ],
)
def test_tokens_of_layers_of_several_passes_and_kinds(model_type, sizes, stored):
    model = model_of(model_type, **sizes, initializer_range=0.3)
    ids, given = prompts()
    expected = model.generate(ids, **given)
    model.set_attn_implementation("pagecore")
    cache = PagedCache(model, num_blocks=128, block_size=4)
    assert len(cache.layers) == stored
    assert torch.equal(model.generate(ids, **passing(cache), **given), expected)
    cache.kv.check_invariants()


def test_loops_that_read_cached_keys_themselves_are_refused():
    model = model_of("dory", **SIZES, **_LOOPS, recurrent_kv_cache_mode="last_loop")
    model.set_attn_implementation("pagecore")
    with pytest.raises(UnsupportedOption, match=r"recurrent_kv_cache_mode = .last_loop.*set it to .per_loop"):
        PagedCache(model, num_blocks=8)


def test_specs_are_those_of_the_layers_that_store_keys():
    model = model_of("gemma4_unified_text", **GEMMA | {"num_kv_shared_layers": 4})
    model.set_attn_implementation("pagecore")
    own = PagedCache(model, num_blocks=8)
    specs = [own.kv.spec(layer) for layer in range(2)]
    PagedCache(model, layers=specs, num_blocks=8)
    with pytest.raises(ShapeError, match="layers has 6 specs; expected 2, one for each layer of the model that stores"):
        PagedCache(model, layers=specs * 3, num_blocks=8)


@pytest.mark.parametrize("model_type", ["bart", "marian", "whisper"])
def test_decoders_have_the_layers_and_heads_of_the_decoder(model_type):
    sizes = {"vocab_size": 99, "d_model": 64, "encoder_layers": 1, "decoder_layers": 3, "pad_token_id": 0}
    sizes |= {"encoder_attention_heads": 8, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "bos_token_id": 1}
    model = model_of(model_type, **sizes, is_decoder=True, is_encoder_decoder=False, eos_token_id=None)
    ids, given = prompts()
    expected = model.generate(ids, use_cache=False, **given)  # DynamicCache counts the encoder's layers
    model.set_attn_implementation("pagecore")
    cache = PagedCache(model, num_blocks=64)
    assert torch.equal(model.generate(ids, **passing(cache), **given), expected)
