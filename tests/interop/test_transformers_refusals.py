"""Errors of PagedCache: unsupported models, passes and arguments raise with a remedy and leave the cache unchanged."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pagecore import AttentionSpec, specs_from_config
from pagecore.errors import NotEnoughMemory, PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption
from tests.interop.families import NUM_LAYERS, dynamic_cache, make_cache, make_model, prompts, torch, transformers
from tests.interop.test_fuzz import foreign_tensors
from tests.ops.test_fuzz import attempt
from tests.passing import passing

from pagecore.interop.transformers import PagedCache  # isort: skip  # after families, which skips
from pagecore.interop.transformers.layers import attention  # isort: skip
from pagecore.interop.transformers.layers.specs import specs_of_model  # isort: skip

SPEC = AttentionSpec(2, 16, dtype="float32", num_query_heads=4)
OWN_MASK = "uses a mask of its own"


def run(model, ids, cache, **options):
    with torch.no_grad():
        return model(ids, **passing(cache), **options).logits


@pytest.fixture
def model():
    model = make_model("llama")
    model.set_attn_implementation("pagecore")  # tests share the model
    return model


@pytest.fixture
def cache(model):
    return make_cache(model)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_layer_has_no_tensors(cache, name):
    layer = cache.layers[1]
    with pytest.raises(UnsupportedOption, match=f"layer 1 of a paged cache was asked for a tensor of its {name}"):
        getattr(layer, name)
    with pytest.raises(UnsupportedOption, match=rf"was given a tensor of {name}, .* write them with update\(\)"):
        setattr(layer, name, torch.zeros(1))


# ---- models


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


def test_options_of_the_paged_cache_are_checked(model):
    for options, error in (
        ({"num_blocks": 1}, ShapeError),
        ({"memory": 1000}, NotEnoughMemory),
        ({"num_blocks": 9, "memory": "1GiB"}, ShapeError),
        ({"num_blocks": 9, "eviction_policy": "best"}, UnsupportedOption),
    ):
        with pytest.raises(error):
            PagedCache(model, **options)


# ---- forward passes


def test_gradients_raise_with_a_remedy(model, cache):
    with pytest.raises(UnsupportedOption, match=r"require grad.*torch.no_grad\(\)"):
        model(prompts(), **passing(cache))
    assert cache.kv.num_sequences == 0
    with torch.inference_mode():
        model(prompts(), **passing(cache))
    assert cache.get_seq_length() == 7


@pytest.mark.parametrize(
    ("mask", "error", "says"),
    [
        (
            lambda: torch.ones(2, 1, 7, 7),
            UnsupportedOption,
            r"of shape \(2, 1, 7, 7\); pass the padding mask",
        ),
        (lambda: {"full_attention": None}, UnsupportedOption, "a dict; pass the padding mask"),
        (lambda: torch.ones(2, 8), ShapeError, r"\(2, 8\); it must be \(2, 7\)"),
        (lambda: torch.ones(1, 7), ShapeError, r"\(1, 7\); it must be \(2, 7\)"),
    ],
    ids=["whole", "dict", "wide", "one row"],
)
def test_masks_other_than_padding_masks_raise(model, cache, mask, error, says):
    with pytest.raises(error, match=says):
        run(model, prompts(), cache, attention_mask=mask())
    assert cache.kv.num_sequences == 0


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"input_ids": prompts().numpy()}, UnsupportedDtype, r"input_ids is a ndarray; it must be a torch tensor of"),
        (
            {"input_ids": prompts().float()},
            UnsupportedDtype,
            r"input_ids is torch.float32; .* integers \[batch, columns",
        ),
        ({"attention_mask": prompts().numpy()}, UnsupportedDtype, "attention_mask is a ndarray; it must be a torch"),
        ({"position_ids": prompts().numpy()}, UnsupportedDtype, "position_ids is a ndarray; it must be a torch"),
        ({"position_ids": prompts().float()}, UnsupportedDtype, "position_ids is torch.float32"),
        ({"position_ids": torch.arange(7).repeat(3, 1)}, ShapeError, "position_ids has 3 rows and the forward pass 2"),
        (
            {"position_ids": torch.tensor(3)},
            ShapeError,
            r"position_ids is of shape \(\); it must be \[batch, columns\]",
        ),
        ({"position_ids": torch.arange(2)}, ShapeError, r"position_ids is of shape \(2,\); .* of 7 columns"),
        (
            {"input_ids": prompts().to_sparse()},
            UnsupportedDtype,
            r"input_ids has the layout torch.sparse_coo; pass inp",
        ),
        ({"attention_mask": torch.ones(2, 7).to_sparse()}, UnsupportedDtype, r"attention_mask has the layout"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else None,
)
def test_ids_masks_and_positions_of_other_types_raise_by_name(model, cache, given, error, says):
    with pytest.raises(error, match=says), torch.no_grad():
        model(**{"input_ids": prompts()} | given, **passing(cache))
    if "position_ids" not in given:
        with pytest.raises(error, match=says):
            cache.begin(**{"input_ids": prompts()} | given)
    assert cache.kv.num_sequences == 0


@pytest.mark.parametrize(
    ("embeddings", "error", "says"),
    [
        ([[1.0]], UnsupportedDtype, r"inputs_embeds is a list; it must be a torch tensor \[batch, columns, dim\]"),
        (torch.zeros(2, 7), ShapeError, r"inputs_embeds is of shape \(2, 7\); it must be \[batch, columns, dim\]"),
        (torch.zeros(1, 2, 64).to_sparse(), UnsupportedDtype, "inputs_embeds has the layout torch.sparse_coo"),
    ],
    ids=["list", "ids", "sparse"],
)
def test_embeddings_of_other_types_raise_by_name(model, cache, embeddings, error, says):
    run(model, prompts(), cache)
    with pytest.raises(error, match=says), torch.no_grad():
        model(inputs_embeds=embeddings, **passing(cache))
    with pytest.raises(error, match=says):
        model.generate(inputs_embeds=embeddings, **passing(cache))
    assert (cache.get_seq_length(), cache.kv.num_sequences) == (7, 2)


def test_the_mask_of_generate_is_a_tensor(model, cache):
    run(model, prompts(), cache)
    with pytest.raises(UnsupportedDtype, match="attention_mask is a list; it must be a torch tensor"):
        model.generate(prompts(), attention_mask=[[1] * 7] * 2, **passing(cache))
    assert cache.kv.num_sequences == 2


def test_a_device_other_than_that_of_the_model_is_refused(model):
    for device in ("cuda", "cpu", 3):
        with pytest.raises(
            UnsupportedOption, match=r"device is .*, but the cache of a model is on its device, cpu; le"
        ):
            make_cache(model, device=device)


@pytest.mark.parametrize("value", [True, torch.tensor(True)])
def test_a_truth_value_is_not_a_number_of_columns_or_rows(model, cache, value):
    run(model, prompts(), cache)
    with pytest.raises(UnsupportedOption, match=r"tokens_to_remove is .*; expected an integer"):
        cache.crop(value)
    with pytest.raises(ShapeError, match=r"repeats is .*; expected an integer of at least 1"):
        cache.batch_repeat_interleave(value)
    assert (cache.get_seq_length(), cache.kv.num_sequences) == (7, 2)


def test_a_mask_that_hides_computed_columns_raises(model, cache):
    ids, mask = prompts(), torch.ones(2, 7)
    run(model, ids, cache, attention_mask=mask)
    with pytest.raises(ShapeError, match=r"\(2, 3\); it must be \(2, 10\): the cache holds 7 columns"):
        run(model, prompts(2, 3), cache, attention_mask=torch.ones(2, 3))
    other = torch.ones(2, 10)
    other[0, 0] = 0
    with pytest.raises(UnsupportedOption, match="marks other columns as padding"):
        run(model, prompts(2, 3), cache, attention_mask=other)
    assert cache.get_seq_length() == 7
    run(model, prompts(2, 3), cache, attention_mask=torch.ones(2, 10))


def test_a_pass_without_new_columns_raises(model, cache):
    with pytest.raises(UnsupportedOption, match="neither input_ids nor inputs_embeds"):
        model.base_model(**passing(cache))
    with pytest.raises(ShapeError, match="no new columns"):
        run(model, torch.zeros(2, 0, dtype=torch.long), cache)
    with pytest.raises(ShapeError, match="shape"):
        cache.begin(torch.zeros(7, dtype=torch.long))


def test_an_update_outside_of_a_pass_raises(model, cache):
    key = torch.zeros(2, 2, 7, 16)
    for use in (cache.update, lambda key, value, layer: cache.layers[layer].update(key, value)):
        with pytest.raises(UnsupportedOption, match="outside of a forward pass"):
            use(key, key, 0)
    run(model, prompts(), cache)
    with pytest.raises(UnsupportedOption, match="outside of a forward pass"):
        cache.update(key, key, 0)
    assert cache.get_seq_length() == 7


def test_dropout_raises():
    config = copy.deepcopy(make_model("llama").config)
    config.attention_dropout = 0.5
    model = transformers.LlamaForCausalLM(config).train()
    cache = make_cache(model)
    with pytest.raises(UnsupportedOption, match=r"dropout is 0.5.*model.eval\(\)"):
        run(model, prompts(), cache)
    model.eval()
    run(model, prompts(), cache)


def test_models_with_softcap_or_sinks_raise_without_a_paged_cache():
    for family, name in (("gemma2", "softcap"), ("gpt_oss", "sinks")):
        model = make_model(family)
        make_cache(model)
        with pytest.raises(UnsupportedOption, match=rf"attends with {name}.*pass a PagedCache"):
            model.generate(prompts(), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("softcap", "softcap.*: pass a PagedCache, or call model.set"),
        ("s_aux", r"sinks \(s_aux\).*: pass a PagedCache, or call model.set"),
        ("sinks", "sinks .*not support sinks: call model.set"),
        ("block_indices", "block_indices .*not support block_indices: call model.set"),
    ],
)
def test_options_that_sdpa_would_ignore_raise_without_a_paged_cache(name, says):
    query = torch.zeros(1, 2, 1, 16)
    with pytest.raises(UnsupportedOption, match=rf"attends with {says}"):
        attention._attention(torch.nn.Module(), query, query, query, None, **{name: query})


def test_options_of_attention_that_paged_attention_does_not_support_raise(model, cache):
    key = torch.zeros(1, 2, 1, 16)
    attention.mark_stored(key, key, attention.StoredKeys(None, 0))
    base = {"module": torch.nn.Module(), "query": key, "key": key, "value": key, "attention_mask": None}
    for options, says in (
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "attention_mask"),
        *(
            ({name: key}, name)
            for name in ("position_bias", "sinks", "indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k")
        ),
        ({"is_causal": False}, "is_causal"),
        ({"output_attentions": True}, "output_attentions.*eager"),
    ):
        with pytest.raises(UnsupportedOption, match=says):
            attention._attention(**base | options)


def causal(*_):
    return True


@pytest.mark.parametrize(
    "options",
    [
        {"use_vmap": True},
        {"allow_is_causal_skip": False},
        {"mask_function": causal},
    ],
    ids=" ".join,
)
def test_masks_other_than_causal_and_window_masks_raise(options):
    columns = attention.Columns(7, [None, 8], made := set())
    with pytest.raises(UnsupportedOption, match=rf"{OWN_MASK}.*windows and chunks of the cache's layers \(\[8\]\)"):
        attention._mask(kv_length=columns, **options)
    assert attention._mask(kv_length=columns) is None
    assert attention._mask(kv_length=columns, local_size=8, mask_function=causal) is None
    assert made == {None, 8}


def test_a_mask_of_another_window_raises_when_a_layer_attends_with_it():
    """A model also makes masks for windows that no layer has."""
    model = make_model("mistral")
    cache = make_cache(model, layers=[SPEC] * NUM_LAYERS)
    with pytest.raises(
        UnsupportedOption, match=rf"{OWN_MASK}.*a chunk of 8 keys.*specs that have the model's windows and chunks"
    ):
        run(model, prompts(), cache)
    assert cache.kv.num_sequences == 0
    moe = make_model("qwen2_moe")  # has a window of 0, but no sliding-window layer
    assert run(moe, prompts(), make_cache(moe)).shape[:2] == (2, 7)


def test_a_mask_that_is_that_of_other_layers_raises_when_a_layer_attends():
    """All layers of the model have one mask with a window, and its attention is not passed the window."""
    model = make_model("phimoe")
    window = make_cache(model).kv.spec(0)
    assert (window.window, run(model, prompts(), make_cache(model)).shape[:2]) == (8, (2, 7))
    cache = make_cache(model, layers=[window, replace(window, window=None)])
    with pytest.raises(UnsupportedOption, match="layer 1 attends with a window of 8, but its spec in the cache has"):
        run(model, prompts(), cache)
    assert cache.kv.num_sequences == 0


def test_a_layer_that_chooses_its_mask_by_its_own_window_raises_for_specs_of_other_layers():
    """The attention of the model is passed no window; its module has one."""
    model = make_model("qwen2_moe_windows")
    kv = make_cache(model).kv
    specs = [kv.spec(layer) for layer in range(3)]
    assert [spec.window for spec in specs] == [8, None, 8]
    cache = make_cache(model, layers=[specs[1], specs[0], specs[2]])
    with pytest.raises(UnsupportedOption, match="layer 0 attends with a window of 8, but its spec in the cache has"):
        run(model, prompts(), cache)
    assert cache.kv.num_sequences == 0


def test_values_that_a_model_changes_after_storing_them_raise(model, cache):
    attend = model.base_model.layers[1].self_attn
    interface = transformers.AttentionInterface()

    def halved(module, query, key, value, mask, **options):
        return attention._attention(module, query, key, 0.5 * value, mask, **options)

    interface.register("halved", halved)
    attend.config = copy.copy(attend.config)
    attend.config._attn_implementation = "halved"
    try:
        with pytest.raises(UnsupportedOption, match=r"values that it computed.*use another cache"):
            run(model, prompts(), cache)
    finally:
        attend.config = model.config
    assert cache.kv.num_sequences == 0


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


def test_generate_with_use_cache_false_raises(model, cache):
    with pytest.raises(ShapeError, match=r"position 0 again.*use_cache=True|mask has shape.*reset\(\)"):
        model.generate(prompts(), **passing(cache), use_cache=False, max_new_tokens=4)
    cache.kv.check_invariants()


def test_copying_and_pickling_raise_with_an_alternative(cache):
    for use in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(UnsupportedOption, match=r"call cache.begin\(input_ids\)"):
            use(cache)


def test_a_second_cache_in_a_call_raises(model, cache):
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(prompts(), **passing(cache), cache_implementation="static", max_new_tokens=2)


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


@pytest.mark.filterwarnings("ignore")  # torch warns about sparse tensors
@pytest.mark.parametrize(
    "method", ["begin", "attention_mask", "crop", "batch_select_indices", "batch_repeat_interleave"]
)
def test_foreign_arguments_of_the_cache_raise_typed_errors(model, method):
    cache = make_cache(model)
    cache.begin(prompts())
    calls = {"attention_mask": lambda value: cache.begin(prompts(), value)}
    for value in foreign_tensors():
        attempt(method, calls.get(method, getattr(cache, method, None)), {}, [], value)
    cache.kv.check_invariants()


def test_layers_other_than_a_list_of_specs_raise(model):
    for layers in (3, "text", {}, iter([]), [None] * NUM_LAYERS, ["a", "b"]):
        with pytest.raises(PagecoreError):
            make_cache(model, layers=layers)
