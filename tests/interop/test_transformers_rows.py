"""Rows of PagedCache: repeat, select, crop, undo after failures, and lifetimes of caches and models."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from pagecore.errors import OutOfBlocks, OutOfRows, ShapeError, UnsupportedDtype, UnsupportedOption
from tests.interop.families import EOS, left_padded, make_cache, make_model, prompts, torch, transformers
from tests.interop.generations import KINDS_OF_ATTENTION, WINDOWED, Failure, expect, failing, num_cached, run
from tests.passing import passing
from tests.thinning import in_turn

# ---- rows


def test_rows_change_only_by_repeat_select_and_begin():
    model, ids = make_model("llama"), prompts(2, 9)
    cache = make_cache(model)
    text = torch.tensor(run(model, ids, cache))
    with torch.no_grad():
        with pytest.raises(ShapeError, match=r"4 rows and the cache 2.*batch_repeat_interleave"):
            model(text[:, -1:].repeat(2, 1), **passing(cache))
        with pytest.raises(ShapeError, match="1 rows and the cache 2"):
            model(text[:1, -1:], **passing(cache))
    cache.batch_repeat_interleave(2)
    repeated = torch.cat([text.repeat_interleave(2, dim=0), prompts(4, 2, seed=4)], dim=1)
    assert run(model, repeated, cache) == expect(model, repeated)
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert cache.get_seq_length() == 9 + 8 + 2 + 7
    cache.reorder_cache(torch.tensor([1, 1]))
    with pytest.raises(ShapeError, match="rows 0 to 1"):
        cache.batch_select_indices(torch.tensor([2]))
    for repeats in (0, -1):
        with pytest.raises(ShapeError, match=f"repeats is {repeats}; it must be at least 1"):
            cache.batch_repeat_interleave(repeats)
    assert cache.kv.num_sequences == 2
    cache.kv.check_invariants()
    cache.reset()
    assert cache.kv.num_sequences == 0
    assert run(model, prompts(3), cache) == expect(model, prompts(3))


def test_selecting_no_rows_resets_the_cache():
    model, ids = make_model("llama"), prompts(2, 9)
    cache = make_cache(model)
    run(model, ids, cache)
    cache.batch_select_indices(torch.zeros(0, dtype=torch.long))
    assert (cache.get_seq_length(), cache.kv.num_sequences) == (0, 0)
    assert run(model, prompts(3), cache) == expect(model, prompts(3))


def test_row_indices_must_be_integers():
    model = make_model("llama")
    cache = make_cache(model)
    run(model, prompts(), cache)
    for indices in ([0], torch.tensor([0.5]), torch.tensor([True, False])):
        with pytest.raises(UnsupportedDtype, match=r"indices is .*; it must be a torch tensor of integers \[rows\]"):
            cache.batch_select_indices(indices)
    assert cache.kv.num_sequences == 2


def test_a_pass_over_computed_columns_raises():
    model, ids = make_model("llama"), prompts()
    cache = make_cache(model)
    run(model, ids, cache)
    cache.crop(7)
    with torch.no_grad():
        with pytest.raises(ShapeError, match=r"position 0 again.*reset\(\)"):
            model(ids, position_ids=torch.arange(7)[None], **passing(cache))
        with pytest.raises(ShapeError, match=r"it must be \(2, 14\).*reset\(\)"):
            model(ids, attention_mask=torch.ones(2, 7), **passing(cache))
    cache.crop(-1)
    assert run(model, ids, cache) == expect(model, ids)


def test_too_many_rows_raise_before_anything_runs():
    model, ids = make_model("llama"), prompts()
    cache = make_cache(model, max_sequences=5)
    with pytest.raises(OutOfRows, match=r"6 rows, but only 5 of 5 rows are free.*max_sequences"):
        run(model, ids, cache, num_beams=3)
    assert cache.kv.num_sequences == 0
    assert run(model, ids, cache, num_beams=2) == expect(model, ids, num_beams=2)


# ---- cropping


@WINDOWED
def test_columns_of_the_last_pass_can_be_cropped(family):
    model, ids = make_model(family), prompts(2, 20)
    with torch.no_grad():
        for kept, argument in ((17, -3), (17, 17), (12, -8), (20, 0)):
            cache = make_cache(model)
            model(ids[:, :12], **passing(cache))
            model(ids[:, 12:], **passing(cache))
            cache.crop(argument)
            assert cache.get_seq_length() == kept
            rest = torch.cat([ids[:, kept:], prompts(2, 3, seed=1)], dim=1)
            got = model(rest, **passing(cache)).logits
            whole = model(torch.cat([ids[:, :kept], rest], dim=1)).logits[:, kept:]
            torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)
            cache.kv.check_invariants()


def test_columns_of_the_last_pass_can_be_cropped_one_after_another():
    """A window keeps the keys of all of them until the next pass begins."""
    model, ids = make_model("mistral"), prompts(2, 25)
    cache = make_cache(model, block_size=1)
    with torch.no_grad():
        model(ids[:, :20], **passing(cache))
        model(ids[:, 20:], **passing(cache))
        for kept in (24, 22, 20):
            cache.crop(kept)
            assert cache.get_seq_length() == kept
        got = model(ids[:, 20:], **passing(cache)).logits
        torch.testing.assert_close(got, model(ids).logits[:, 20:], rtol=1e-4, atol=1e-4)
    cache.kv.check_invariants()


def test_a_first_pass_of_equal_rows_can_be_cropped():
    model, ids = make_model("llama"), prompts(1, 10).repeat(3, 1)
    cache = make_cache(model)
    with torch.no_grad():
        model(ids, **passing(cache))
        cache.crop(-4)
        got = model(prompts(3, 5), **passing(cache)).logits
        whole = model(torch.cat([ids[:, :6], prompts(3, 5)], dim=1)).logits[:, 6:]
        torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)
        cache.crop(-11)
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(ids, **passing(cache)).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_cropping_to_keys_that_a_window_has_freed_raises_and_changes_nothing():
    model, ids = make_model("gemma3"), prompts(2, 20)
    mask = left_padded(ids, 12)  # row 0 has fewer tokens than would remain in row 1
    cache = make_cache(model)
    text = torch.tensor(run(model, ids, cache, mask))
    with pytest.raises(UnsupportedOption, match="window of 8"):
        cache.crop(-8)
    assert cache.get_seq_length() == 27
    with pytest.raises(ShapeError, match="28 columns, but the cache has 27"):
        cache.crop(-28)
    mask = torch.cat([mask, torch.ones(2, 8, dtype=mask.dtype)], dim=1)
    assert run(model, text, cache, mask) == expect(model, text, mask)
    cache.kv.check_invariants()


# ---- failures leave the cache unchanged


@WINDOWED
def test_running_out_of_blocks_leaves_a_usable_cache(family):
    model, ids = make_model(family), prompts(2, 10)
    cache = make_cache(model, num_blocks=8, prefix_cache=False)
    with pytest.raises(OutOfBlocks):
        run(model, ids, cache, max_new_tokens=30)
    length = cache.get_seq_length()
    assert 10 < length < 40
    with torch.no_grad(), pytest.raises(OutOfBlocks):
        model(prompts(2, 9), **passing(cache))
    assert cache.get_seq_length() == length
    cache.kv.check_invariants()
    cache.batch_select_indices(torch.tensor([1]))
    with torch.no_grad():
        model(prompts(1, 3), **passing(cache))
    cache.reset()
    assert run(model, ids, cache, max_new_tokens=3) == expect(model, ids, max_new_tokens=3)
    with pytest.raises(ShapeError, match=r"60 tokens; a row holds at most 28: .*max_tokens_per_sequence or num_blocks"):
        run(model, prompts(2, 60), make_cache(model, num_blocks=8))


@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
@WINDOWED
def test_a_pass_that_raises_is_undone(family, error):
    model, ids = make_model(family), prompts(2, 10)
    cache = make_cache(model)
    with failing(model, error), pytest.raises(error):
        run(model, ids, cache)
    assert cache.get_seq_length() == 0
    assert run(model, prompts(3), transformers.DynamicCache(config=model.config)) == expect(model, prompts(3))
    text = torch.tensor(run(model, ids, cache))
    with failing(model, error), pytest.raises(error):
        run(model, text, cache)
    assert cache.get_seq_length() == 17
    assert run(model, text, cache) == expect(model, text)
    cache.kv.check_invariants()


def test_a_first_pass_that_raises_stays_in_its_namespace():
    model, ids = make_model("llama"), prompts(2, 20)
    cache = make_cache(model)
    cache.begin(ids, namespace="adapter")
    with failing(model, Failure), pytest.raises(Failure):
        run(model, ids, cache)
    assert run(model, ids, cache) == expect(model, ids)
    assert cache.begin(ids) == 0
    assert cache.begin(ids, namespace="adapter") == 16


SEVERAL = [{}, {"num_beams": 4}, {"num_return_sequences": 3, "do_sample": True}]


@pytest.mark.parametrize(("family", "options", "reused"), in_turn(KINDS_OF_ATTENTION, SEVERAL, over=[[0, 16]]), ids=str)
def test_a_pass_that_raises_leaves_the_rows_of_begin(family, options, reused):
    model, ids, few = make_model(family), prompts(1, 20), {"max_new_tokens": 4}
    expected, expected_of_beams = expect(model, ids, **few), expect(model, ids, num_beams=2, **few)
    cache = make_cache(model)
    if reused:
        run(model, ids, cache, **few)
    assert cache.begin(ids) == reused
    used = cache.kv.stats().num_used_blocks
    other = ids.clone()
    other[0, 18] += 1
    for _ in range(2):
        with failing(model, Failure), pytest.raises(Failure):
            run(model, ids, cache, **options)
        assert (cache.kv.num_sequences, cache.kv.stats().num_used_blocks) == (1, used)
        with pytest.raises(ShapeError, match="token 18 of a row is"):
            run(model, other, cache, **options)
    assert run(model, ids, cache, num_beams=2, **few) == expected_of_beams
    cache.begin(ids)
    with failing(model, Failure), pytest.raises(Failure):
        run(model, ids, cache, **options)
    assert run(model, ids, cache, **few) == expected
    cache.kv.check_invariants()


def test_a_pass_that_raises_does_not_prevent_publishing():
    model, ids = make_model("llama"), prompts(2, 12)
    embeddings = model.get_input_embeddings()(ids).detach()
    cache = make_cache(model, max_sequences=1)
    with torch.no_grad():
        with pytest.raises(OutOfRows):
            model(inputs_embeds=embeddings, **passing(cache))
        model(ids[:1], **passing(cache))
        assert cache.begin(ids[:1]) == 8
        with failing(model, Failure), pytest.raises(Failure):
            model(inputs_embeds=embeddings[:1, 8:], **passing(cache))
        model(ids[:1, 8:], **passing(cache))
    assert num_cached(cache) == 3


# ---- caches and models


def test_hooks_are_removed_with_the_cache():
    model = make_model("llama", seed=7)
    make_cache(model)
    gc.collect()
    base = model.base_model
    before = len(base._forward_hooks), len(base._forward_pre_hooks), len(base._forward_hooks_always_called)
    cache = make_cache(model)
    run(model, prompts(), cache)
    assert len(base._forward_hooks) == before[0] + 1
    gone = weakref.ref(cache), weakref.ref(cache.kv)
    layer = cache.layers[0]
    del cache
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert (len(base._forward_hooks), len(base._forward_pre_hooks), len(base._forward_hooks_always_called)) == before
    with pytest.raises(UnsupportedOption, match="was deleted"):
        layer.get_seq_length()


def test_a_model_is_freed_while_its_cache_lives():
    model = transformers.LlamaForCausalLM(make_model("llama").config)
    cache = make_cache(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(UnsupportedOption, match="which was deleted"):
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)


def test_a_base_model_whose_model_was_deleted_raises():
    model = transformers.LlamaForCausalLM(make_model("llama").config)
    cache = make_cache(model)
    base = model.base_model
    del model
    gc.collect()
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedOption, match=r"a LlamaModel runs.*which was deleted; make a PagedCache"),
    ):
        base(prompts(), **passing(cache))


def test_caches_of_one_model_are_independent():
    model = make_model("gemma3")
    ids = [prompts(2, 9), prompts(3, 5, seed=1)]
    caches = [make_cache(model), make_cache(model), transformers.DynamicCache(config=model.config)]
    texts = [ids[0], ids[1], ids[0]]
    for _ in range(3):
        texts = [
            torch.tensor(run(model, *pair, max_new_tokens=4, eos_token_id=None))
            for pair in zip(texts, caches, strict=True)
        ]
    for text, given in zip(texts, [*ids, ids[0]], strict=True):
        assert text.tolist() == expect(model, given, max_new_tokens=12, eos_token_id=None)


def test_threads_with_their_own_caches_are_independent():
    model = make_model("gemma3")
    ids = [prompts(2, 9, seed=seed) for seed in range(3)]
    expected = [expect(model, given, max_new_tokens=16) for given in ids]
    caches = [make_cache(model), make_cache(model), transformers.DynamicCache(config=model.config)]
    got = {}

    def generate(index):
        got[index] = run(model, ids[index], caches[index], max_new_tokens=16)

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[index] for index in range(3)] == expected


def test_rows_end_at_their_own_end_of_text():
    model = make_model("llama")
    ids = prompts(4, 6)
    options = {"eos_token_id": list(range(60, EOS)), "max_new_tokens": 30}
    assert run(model, ids, make_cache(model), **options) == expect(model, ids, **options)


def test_lengths_and_sizes_of_the_cache_and_its_layers():
    model, ids = make_model("gemma3"), prompts()
    cache = make_cache(model)
    assert (cache.get_seq_length(), len(cache), cache.is_initialized, cache.is_compileable) == (0, 3, True, False)
    assert cache.is_sliding == [True, False, True]
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **passing(cache),
        max_new_tokens=5,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert all(out[name] is cache for name in passing(cache))
    assert [cache.get_seq_length(layer) for layer in range(3)] == [11] * 3
    assert [layer.get_seq_length() for layer in cache.layers] == [11] * 3
    assert cache.get_mask_sizes(3, 0) == (14, 0)
    assert cache.get_max_cache_shape() == cache.layers[0].get_max_cache_shape() == -1
