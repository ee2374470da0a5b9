"""Masks and options of attention that a paged cache does not serve raise, instead of being ignored."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from pagecore.errors import UnsupportedOption
from tests.interop.families import NUM_LAYERS, make_cache, make_model, prompts, torch, transformers
from tests.interop.transformers_refusals.kit import SPEC, run

from pagecore.interop.transformers.layers import attention  # isort: skip

OWN_MASK = "uses a mask of its own"


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
