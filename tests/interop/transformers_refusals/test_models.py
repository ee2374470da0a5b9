"""Models that PagedCache refuses by name: unsupported layers, configs, options and attention of their own."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from pagecore import AttentionSpec, specs_from_config
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from tests.interop.families import NUM_LAYERS, dynamic_cache, make_cache, make_model, prompts, torch, transformers
from tests.interop.transformers_refusals.kit import SPEC, run

from pagecore.interop.transformers import PagedCache  # isort: skip  # after families, which skips
from pagecore.interop.transformers.layers.specs import specs_of_model  # isort: skip


@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_layer_has_no_tensors(cache, name):
    layer = cache.layers[1]
    with pytest.raises(UnsupportedOption, match=f"layer 1 of a paged cache was asked for a tensor of its {name}"):
        getattr(layer, name)
    with pytest.raises(UnsupportedOption, match=rf"was given a tensor of {name}, .* write them with update\(\)"):
        setattr(layer, name, torch.zeros(1))


def test_another_attention_implementation_raises_with_the_call_that_sets_it(model):
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedOption, match=r"'sdpa'; call model.set_attn_implementation\(\"pagecore\"\)"):
        PagedCache(model, num_blocks=9)
    cache = make_cache(model)
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedOption, match=r"'eager'; call model.set_attn_implementation"):
        run(model, prompts(), cache)
    model.set_attn_implementation("pagecore")
    assert run(model, prompts(), cache).shape[:2] == (2, 7)


@pytest.mark.parametrize(
    ("layers", "says"),
    [([SPEC] * 3, "3 specs; expected 2"), ([], "0 specs")],
)
def test_a_wrong_number_of_layers_raises(model, layers, says):
    with pytest.raises(ShapeError, match=says):
        make_cache(model, layers=layers)


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        (AttentionSpec(4, 16, dtype="float32"), ShapeError, "axis 1 must have length 4: the heads of key_cache"),
        (AttentionSpec(2, 8, dtype="float32"), ShapeError, "axis 2 must have length 8: the head_dim of key_cache"),
        (
            AttentionSpec(2, 16, dtype="float32", window=5),
            UnsupportedOption,
            "window of None, but its spec .* window 5",
        ),
        (AttentionSpec(2, 16, dtype="float32", num_query_heads=2), ShapeError, "heads"),
    ],
)
def test_specs_that_do_not_match_the_model_raise_in_the_first_pass(model, spec, error, says):
    cache = make_cache(model, layers=[spec] * NUM_LAYERS)
    with pytest.raises(error, match=says):
        run(model, prompts(), cache)
    assert (cache.get_seq_length(), cache.kv.num_sequences) == (0, 0)


def test_running_another_model_with_the_cache_raises(model, cache):
    for other in (make_model("llama", seed=1), make_model("qwen3"), make_model("gpt_neox")):
        other.set_attn_implementation("pagecore")
        with pytest.raises(UnsupportedOption, match="model of the cache, a LlamaForCausalLM; make a PagedCache"):
            run(other, prompts(), cache)
    assert run(model, prompts(), cache).shape[:2] == (2, 7)


def test_a_model_that_runs_fewer_layers_raises(model, cache):
    layers = model.base_model.layers
    count = model.config.num_hidden_layers
    try:
        model.config.num_hidden_layers = 1
        with pytest.raises(UnsupportedOption, match="layer 1 of the model stored no keys"):
            run(model, prompts(), cache)
    finally:
        model.config.num_hidden_layers = count
    assert len(layers) == 2
    assert (cache.get_seq_length(), cache.kv.num_sequences) == (0, 0)


def test_a_model_that_runs_more_layers_raises(model):
    count = model.config.num_hidden_layers
    try:
        model.config.num_hidden_layers = 1
        cache = make_cache(model)
    finally:
        model.config.num_hidden_layers = count
    with pytest.raises(UnsupportedOption, match=r"layer 1 of the model stores keys, .* layers \[0\] that do; make"):
        run(model, prompts(), cache)
    assert (cache.get_seq_length(), cache.kv.num_sequences) == (0, 0)


def test_a_layer_that_does_not_attend_to_its_paged_keys_raises(model, cache):
    """A layer with another attention implementation only attends to the new keys."""
    attend = model.base_model.layers[1].self_attn
    attend.config = copy.copy(attend.config)
    attend.config._attn_implementation = "sdpa"
    try:
        with pytest.raises(UnsupportedOption, match="layer 1 of the model did not attend to its paged keys"):
            run(model, prompts(), cache)
    finally:
        attend.config = model.config
    assert cache.kv.num_sequences == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kv_lora_rank": 16}, r"the unheard_of has latent attention \(kv_lora_rank = 16\).*; use another cache"),
        (
            {"layer_types": ["full_attention", "conv"] * 2},
            r"has convolution states \(layer_types\[1\] = 'conv'\).*; use another cache",
        ),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": None}, "sliding_window = None"),
        ({"attention_chunk_size": 8}, r"has chunked attention \(attention_chunk_size = 8\)"),
        ({"num_attention_heads": None}, r"num_attention_heads = None.*pass layers=\[AttentionSpec"),
    ],
)
def test_a_config_of_unsupported_or_unknown_attention_raises(fields, says):
    usual = {"model_type": "unheard_of", "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    assert len(specs_of_model(SimpleNamespace(**usual), "float32")) == 4
    with pytest.raises(UnsupportedOption, match=says):
        specs_of_model(SimpleNamespace(**usual | fields), "float32")


@pytest.mark.parametrize("model_type", ["deepseek_v4", "diffllama", "doge", "git", "paligemma", "sdar"])
def test_a_model_whose_layers_are_stored_and_not_attended_raises(model_type):
    fields = {"model_type": model_type, "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    config = SimpleNamespace(**fields, to_dict=lambda: fields)
    with pytest.raises(UnsupportedOption, match=f"the {model_type} has .*, which a PagedCache does not support"):
        specs_of_model(config, "float32")


def test_a_model_with_rows_next_to_attention_raises():
    fields = {"model_type": "minimax_m3_vl_text", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    fields |= {"layer_types": ["minimax_m3_sparse"] * 2}
    with pytest.raises(UnsupportedOption, match="selects keys with an indexer, whose keys a PagedCache does not store"):
        specs_of_model(SimpleNamespace(**fields, to_dict=lambda: fields), "float32")


def test_a_model_with_layers_that_attend_to_images_raises():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    fields = {"vocab_size": 30, "num_hidden_layers": 2, "cross_attention_layers": [1], "pad_token_id": 0}
    mllama = transformers.MllamaForCausalLM(transformers.models.mllama.MllamaTextConfig(**sizes, **fields))
    mllama.set_attn_implementation("pagecore")
    with pytest.raises(UnsupportedOption, match=r"mllama_text_model has cross attention to images.*use another cache"):
        PagedCache(mllama, num_blocks=9)
    layers = specs_from_config(mllama.config.to_dict(), dtype="float32")
    with pytest.raises(UnsupportedOption, match=r"layer 1 of the MllamaForCausalLM attends to images .*another cache"):
        PagedCache(mllama, layers=layers, num_blocks=9)


def test_a_config_with_a_field_that_differs_between_layers_raises():
    class Differing(SimpleNamespace):
        @property
        def head_dim(self):
            raise RuntimeError("ambiguous")

    config = Differing(model_type="unheard_of", num_hidden_layers=4, num_attention_heads=4, hidden_size=64)
    with pytest.raises(UnsupportedOption, match=r"head_dim in the config of the unheard_of differs.*; pass layers="):
        specs_of_model(config, "float32")


def test_models_other_than_decoders_raise(model):
    config = transformers.BartConfig(
        vocab_size=30,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    )
    bart = transformers.BartForConditionalGeneration(config)
    bart.set_attn_implementation("pagecore")
    with pytest.raises(UnsupportedOption, match="has an encoder"):
        PagedCache(bart, layers=[SPEC], num_blocks=9)
    with pytest.raises(UnsupportedOption, match=r"expected a PreTrainedModel.*get_base_model\(\)"):
        PagedCache(torch.nn.Sequential(model), num_blocks=9)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 30}
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**sizes, intermediate_size=16),
        transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=30, add_cross_attention=True),
    )
    pair = transformers.EncoderDecoderModel(both)
    pair.set_attn_implementation("pagecore")
    with pytest.raises(UnsupportedOption, match="the EncoderDecoderModel has an encoder"):
        PagedCache(pair, num_blocks=9)


def test_dropout_raises():
    config = copy.deepcopy(make_model("llama").config)
    config.attention_dropout = 0.5
    model = transformers.LlamaForCausalLM(config).train()
    cache = make_cache(model)
    with pytest.raises(UnsupportedOption, match=r"dropout is 0.5.*model.eval\(\)"):
        run(model, prompts(), cache)
    model.eval()
    run(model, prompts(), cache)


def test_models_that_repeat_their_keys_raise():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 8}
    config = transformers.JetMoeConfig(vocab_size=30, intermediate_size=16, num_local_experts=2, **sizes)
    model = transformers.JetMoeForCausalLM(config)
    model.set_attn_implementation("pagecore")
    with pytest.raises(UnsupportedOption, match=r"the JetMoeForCausalLM repeats keys and values after storing them"):
        PagedCache(model, num_blocks=9)


def test_models_with_attention_code_of_their_own_raise():
    config = transformers.MptConfig(vocab_size=30, d_model=16, n_heads=2, n_layers=1)
    mpt = transformers.MptForCausalLM(config)
    mpt.set_attn_implementation("pagecore")
    with pytest.raises(UnsupportedOption, match=r"MptForCausalLM computes attention by code of its own.*another cache"):
        PagedCache(mpt, layers=[SPEC], num_blocks=9)


def test_a_cache_of_another_dtype_casts_and_a_float64_model_raises():
    model = make_model("llama")
    cache = make_cache(model, layers=[AttentionSpec(2, 16, dtype="bfloat16", num_query_heads=4)] * NUM_LAYERS)
    expected = run(model, prompts(), dynamic_cache(model))
    model.set_attn_implementation("pagecore")
    torch.testing.assert_close(run(model, prompts(), cache), expected, rtol=0.05, atol=0.05)
    double = transformers.LlamaForCausalLM(model.config).double()
    with pytest.raises(UnsupportedDtype, match="float64"):
        make_cache(double)
    with pytest.raises(UnsupportedDtype, match=r"the keys are torch.float64; run the model in"):
        run(double, prompts(), make_cache(double, layers=[SPEC] * NUM_LAYERS))
