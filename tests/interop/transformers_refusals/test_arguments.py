"""Arguments of a pass and of PagedCache that are refused by name, and leave the cache unchanged."""

from __future__ import annotations

import copy
import pickle

import pytest

from pagecore.errors import NotEnoughMemory, PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption
from tests.interop.families import NUM_LAYERS, make_cache, prompts, torch
from tests.interop.test_fuzz import foreign_tensors
from tests.interop.transformers_refusals.kit import run
from tests.ops.test_fuzz import attempt
from tests.passing import passing

from pagecore.interop.transformers import PagedCache  # isort: skip  # after families, which skips


def test_options_of_the_paged_cache_are_checked(model):
    for options, error in (
        ({"num_blocks": 1}, ShapeError),
        ({"memory": 1000}, NotEnoughMemory),
        ({"num_blocks": 9, "memory": "1GiB"}, ShapeError),
        ({"num_blocks": 9, "eviction_policy": "best"}, UnsupportedOption),
    ):
        with pytest.raises(error):
            PagedCache(model, **options)


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
