"""What a PagedCache keeps, shares, forgets and undoes between and within generations."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import contextmanager

import pytest

from pagecore.errors import OutOfBlocks, OutOfRows, ShapeError, UnsupportedDtype, UnsupportedOption
from tests.interop.families import (
    EOS,
    dynamic_cache,
    left_padded,
    make_cache,
    make_model,
    prompts,
    torch,
    transformers,
)

WINDOWED = pytest.mark.parametrize("family", ["llama", "gemma3"])


def run(model, ids, cache, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 8, "do_sample": False} | options
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **options).tolist()


def expect(model, ids, mask=None, **options):
    """Without any cache of pagecore, and the model as it was."""
    expected = run(model, ids, dynamic_cache(model), mask, **options)
    model.set_attn_implementation("pagecore")
    return expected


def num_cached(cache):
    cache.reset()
    cache.kv.check_invariants()
    return cache.kv.stats().num_cached_blocks


@contextmanager
def computed(model):
    """Columns of each forward pass."""
    columns = []

    def count(_, arguments, options):
        columns.append((options.get("input_ids") if not arguments else arguments[0]).shape[1])

    hook = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    yield columns
    hook.remove()


# ---- beginning with what was computed before


@WINDOWED
def test_a_second_generation_computes_only_what_is_new(family):
    model, ids = make_model(family), prompts(1, 30)
    cache = make_cache(model)
    first = run(model, ids, cache)
    assert cache.begin(ids) == 28  # whole blocks of 4, and never the last token
    with computed(model) as columns:
        assert run(model, ids, cache) == first
    assert columns == [2] + 7 * [1]
    longer = torch.tensor(first)
    longer = torch.cat([longer, prompts(1, 3, seed=1)], dim=1)
    assert cache.begin(longer) == 36
    assert run(model, longer, cache) == expect(model, longer)


@WINDOWED
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}])
def test_rows_that_begin_alike_share_their_blocks(family, options):
    model, ids = make_model(family), prompts(1, 24).repeat(2, 1)
    ids[1, 20:] = prompts(1, 4, seed=2)
    cache = make_cache(model)
    run(model, ids[:1], cache, max_new_tokens=1)
    assert cache.begin(ids) == 20
    used = cache.kv.stats().num_used_blocks
    assert used == 5 * cache.kv.num_groups or family == "gemma3"
    torch.manual_seed(0)
    got = run(model, ids, cache, **options)
    torch.manual_seed(0)
    assert got == expect(model, ids, **options)
    cache.kv.check_invariants()


@WINDOWED
def test_padded_rows_begin_where_all_of_them_stand(family):
    """Rows reuse different numbers of blocks, and a window may have kept too little for the shorter."""
    model, ids = make_model(family), prompts(3, 26)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[1, :2] = 0, 0
    expected = expect(model, ids, mask)
    for seen in ([0], [2], [0, 1], [1, 2], [0, 1, 2]):
        cache = make_cache(model)
        for row in seen:
            one = ids[row][mask[row].bool()][None]
            cache.reset()
            run(model, one, cache, max_new_tokens=1)
        reused = cache.begin(ids, mask)
        assert reused > (2 if len(seen) == 3 else -1)
        assert run(model, ids, cache, mask) == expected
        cache.kv.check_invariants()


def test_equal_prompts_are_stored_once():
    model, ids = make_model("llama"), prompts(1, 16).repeat(5, 1)
    cache = make_cache(model)
    assert run(model, ids, cache, max_new_tokens=1) == expect(model, ids, max_new_tokens=1)
    assert cache.kv.stats().num_used_blocks == 4
    assert run(model, ids[:, :5], make_cache(model)) == expect(model, ids[:, :5])


def test_namespaces_share_nothing():
    model, ids = make_model("llama"), prompts(1, 20)
    cache = make_cache(model)
    cache.begin(ids, namespace="adapter a")
    run(model, ids, cache)
    assert cache.begin(ids, namespace="adapter b") == 0
    assert cache.begin(ids) == 0
    assert cache.begin(ids, namespace="adapter a") == 16


def test_clearing_forgets_the_rows_of_the_last_generation_too():
    model, ids = make_model("llama"), prompts(1, 20)
    cache = make_cache(model)
    run(model, ids, cache)
    assert cache.clear_prefix_cache() == 6  # 27 columns, in whole blocks of 4
    assert (cache.begin(ids), cache.kv.stats().num_cached_blocks) == (0, 0)
    assert make_cache(model, prefix_cache=False).clear_prefix_cache() == 0


def test_a_prompt_must_be_the_one_that_the_cache_began_with():
    model, ids = make_model("llama"), prompts(2, 12)
    cache = make_cache(model)
    cache.begin(ids)
    other = ids.clone()
    other[1, 5] += 1
    with pytest.raises(ShapeError, match="token 5 of a row is"):
        run(model, other, cache)
    assert run(model, ids, cache) == expect(model, ids)
    with pytest.raises(ShapeError, match="attention_mask has shape"):
        cache.begin(ids, torch.ones(2, 11))


def test_a_model_whose_keys_depend_on_the_length_publishes_nothing():
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    )
    model, ids = transformers.LlamaForCausalLM(config).eval(), prompts(2, 12)
    expected = expect(model, ids, max_new_tokens=12)
    cache = make_cache(model)
    assert not cache.kv.has_prefix_cache
    assert run(model, ids, cache, max_new_tokens=12) == expected
    assert cache.begin(ids) == 0
    with pytest.raises(UnsupportedOption, match="leave prefix_cache out"):
        make_cache(model, prefix_cache=True)


# ---- what is not known by its ids is not published


@WINDOWED
def test_embeddings_are_continued_and_publish_nothing(family):
    model, ids = make_model(family), prompts(2, 12)
    embeddings = model.get_input_embeddings()(ids).detach()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(inputs_embeds=embeddings, past_key_values=dynamic_cache(model), **options)
    cache = make_cache(model)
    got = model.generate(inputs_embeds=embeddings, past_key_values=cache, **options)
    assert got.tolist() == expected.tolist()
    assert [sequence.num_tokens for sequence in cache._generation.rows.sequences] == [0, 0]
    if family == "llama":
        cache.crop(-3)
        assert cache.get_seq_length() == 12 + 7 - 3
    assert num_cached(cache) == 0
    cache.begin(ids)  # known ids, and then embeddings in their place
    assert model.generate(inputs_embeds=embeddings, past_key_values=cache, **options).tolist() == expected.tolist()
    assert num_cached(cache) == 0


def test_ids_after_embeddings_are_not_taken_for_the_first_tokens():
    model, ids = make_model("llama"), prompts(1, 16)
    cache = make_cache(model)
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
        model(inputs_embeds=model.get_input_embeddings()(ids[:, 4:8]), past_key_values=cache)
        got = model(ids[:, 8:], past_key_values=cache).logits
        torch.testing.assert_close(got, model(ids).logits[:, 8:], rtol=1e-4, atol=1e-4)
    (sequence,) = cache._generation.rows.sequences
    assert (sequence.tokens.tolist(), sequence.num_computed_tokens) == (ids[0, :4].tolist(), 8)
    assert num_cached(cache) == 1


def test_more_than_ids_publishes_nothing_and_is_not_taken_for_equal():
    model, ids = make_model("gpt2"), prompts(1, 12).repeat(2, 1)
    types = torch.stack([torch.full((12,), 3), torch.full((12,), 4)])
    with torch.no_grad():
        expected = model(ids, token_type_ids=types, past_key_values=dynamic_cache(model)).logits
        cache = make_cache(model)
        got = model(ids, token_type_ids=types, past_key_values=cache).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert num_cached(cache) == 0


def test_a_model_of_images_publishes_what_is_text_alone():
    """Its base model is told of the ids, the decoder within of embeddings."""
    text = transformers.LlamaConfig(**make_model("llama").config.to_dict())
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=EOS - 1)
    model, ids = transformers.LlavaForConditionalGeneration(config).eval(), prompts(2, 12)
    ids[ids == EOS - 1] = 5
    expected = expect(model, ids)
    cache = make_cache(model)
    assert run(model, ids, cache) == expected
    cache.reset()
    with torch.no_grad():  # some versions of generate also say how the model would look at images
        model.base_model(ids, past_key_values=cache)
    assert cache.begin(ids) == 8
    assert run(model, ids, cache) == expected
    pictured = ids.clone()
    pictured[:, 2:6] = EOS - 1
    images = {"pixel_values": torch.randn(2, 3, 28, 28)}
    expected = expect(model, pictured, **images)
    cache = make_cache(model)
    assert run(model, pictured, cache, **images) == expected
    assert num_cached(cache) == 0


def test_other_positions_publish_nothing_and_do_not_follow_a_reused_prefix():
    model, ids = make_model("llama"), prompts(1, 12)
    positions = 3 * torch.arange(12)[None]
    with torch.no_grad():
        expected = model(ids, position_ids=positions, past_key_values=dynamic_cache(model)).logits
        cache = make_cache(model)
        got = model(ids, position_ids=positions, past_key_values=cache).logits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert num_cached(cache) == 0
        model(ids, past_key_values=cache)
        assert cache.begin(ids) == 8
        with pytest.raises(UnsupportedOption, match="position_ids that count"):
            model(ids[:, 8:], position_ids=positions[:, 8:], past_key_values=cache)
        model(ids[:, 8:], position_ids=torch.arange(8, 12)[None], past_key_values=cache)
    assert num_cached(cache) == 3


def test_padding_without_positions_publishes_nothing():
    """The model counts columns then: the keys of a padded row stand elsewhere than those of its tokens alone."""
    model, ids = make_model("llama"), prompts(1, 15)
    mask = left_padded(ids)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, past_key_values=dynamic_cache(model)).logits[:, 3:]
        cache = make_cache(model)
        got = model(ids, attention_mask=mask, past_key_values=cache).logits[:, 3:]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert num_cached(cache) == 0
        model(ids[:, 3:], past_key_values=cache)
        assert cache.begin(ids, mask) == 3 + 8
        with pytest.raises(UnsupportedOption, match="padding"):
            model(ids[:, 11:], attention_mask=mask, past_key_values=cache)


# ---- rows


def test_rows_change_only_by_being_repeated_chosen_or_begun():
    model, ids = make_model("llama"), prompts(2, 9)
    cache = make_cache(model)
    text = torch.tensor(run(model, ids, cache))
    with torch.no_grad():
        with pytest.raises(ShapeError, match=r"4 rows and the cache 2.*batch_repeat_interleave"):
            model(text[:, -1:].repeat(2, 1), past_key_values=cache)
        with pytest.raises(ShapeError, match="1 rows and the cache 2"):
            model(text[:1, -1:], past_key_values=cache)
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


def test_when_no_row_is_kept_the_cache_is_as_new():
    model, ids = make_model("llama"), prompts(2, 9)
    cache = make_cache(model)
    run(model, ids, cache)
    cache.batch_select_indices(torch.zeros(0, dtype=torch.long))
    assert (cache.get_seq_length(), cache.kv.num_sequences) == (0, 0)
    assert run(model, prompts(3), cache) == expect(model, prompts(3))


def test_rows_are_named_by_integers():
    model = make_model("llama")
    cache = make_cache(model)
    run(model, prompts(), cache)
    for indices in ([0], torch.tensor([0.5]), torch.tensor([True, False])):
        with pytest.raises(UnsupportedDtype, match=r"indices is .*; it must be a torch tensor of integers \[rows\]"):
            cache.batch_select_indices(indices)
    assert cache.kv.num_sequences == 2


def test_a_pass_over_columns_that_are_computed_already_is_refused():
    model, ids = make_model("llama"), prompts()
    cache = make_cache(model)
    run(model, ids, cache)
    cache.crop(7)
    with torch.no_grad():
        with pytest.raises(ShapeError, match=r"position 0 again.*reset\(\)"):
            model(ids, position_ids=torch.arange(7)[None], past_key_values=cache)
        with pytest.raises(ShapeError, match=r"it must be \(2, 14\).*reset\(\)"):
            model(ids, attention_mask=torch.ones(2, 7), past_key_values=cache)
    cache.crop(-1)
    assert run(model, ids, cache) == expect(model, ids)


def test_the_number_of_rows_is_refused_before_anything_runs():
    model, ids = make_model("llama"), prompts()
    cache = make_cache(model, max_sequences=5)
    with pytest.raises(OutOfRows, match=r"6 rows, and 5 of 5 are free.*max_sequences"):
        run(model, ids, cache, num_beams=3)
    assert cache.kv.num_sequences == 0
    assert run(model, ids, cache, num_beams=2) == expect(model, ids, num_beams=2)


# ---- cropping


@WINDOWED
def test_what_the_last_pass_brought_can_be_cropped_without_a_trace(family):
    model, ids = make_model(family), prompts(2, 20)
    with torch.no_grad():
        for kept, argument in ((17, -3), (17, 17), (12, -8), (20, 0)):
            cache = make_cache(model)
            model(ids[:, :12], past_key_values=cache)
            model(ids[:, 12:], past_key_values=cache)
            cache.crop(argument)
            assert cache.get_seq_length() == kept
            rest = torch.cat([ids[:, kept:], prompts(2, 3, seed=1)], dim=1)
            got = model(rest, past_key_values=cache).logits
            whole = model(torch.cat([ids[:, :kept], rest], dim=1)).logits[:, kept:]
            torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)
            cache.kv.check_invariants()


def test_a_first_pass_of_equal_rows_can_be_cropped():
    model, ids = make_model("llama"), prompts(1, 10).repeat(3, 1)
    cache = make_cache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.crop(-4)
        got = model(prompts(3, 5), past_key_values=cache).logits
        whole = model(torch.cat([ids[:, :6], prompts(3, 5)], dim=1)).logits[:, 6:]
        torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)
        cache.crop(-11)
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_cropping_what_a_window_gave_back_is_refused_and_changes_nothing():
    model, ids = make_model("gemma3"), prompts(2, 20)
    mask = left_padded(ids, 12)  # its row is shorter than what would be kept of the other
    cache = make_cache(model)
    text = torch.tensor(run(model, ids, cache, mask))
    with pytest.raises(UnsupportedOption, match="window of 8"):
        cache.crop(-8)
    assert cache.get_seq_length() == 27
    with pytest.raises(ShapeError, match="28 columns; the cache has 27"):
        cache.crop(-28)
    mask = torch.cat([mask, torch.ones(2, 8, dtype=mask.dtype)], dim=1)
    assert run(model, text, cache, mask) == expect(model, text, mask)
    cache.kv.check_invariants()


# ---- failures leave the cache as it was


@WINDOWED
def test_running_out_of_blocks_ends_a_generation_and_not_the_cache(family):
    model, ids = make_model(family), prompts(2, 10)
    cache = make_cache(model, num_blocks=8, prefix_cache=False)
    with pytest.raises(OutOfBlocks):
        run(model, ids, cache, max_new_tokens=30)
    stood = cache.get_seq_length()
    assert 10 < stood < 40
    with torch.no_grad(), pytest.raises(OutOfBlocks):
        model(prompts(2, 9), past_key_values=cache)
    assert cache.get_seq_length() == stood
    cache.kv.check_invariants()
    cache.batch_select_indices(torch.tensor([1]))
    with torch.no_grad():
        model(prompts(1, 3), past_key_values=cache)
    cache.reset()
    assert run(model, ids, cache, max_new_tokens=3) == expect(model, ids, max_new_tokens=3)
    with pytest.raises(ShapeError, match=r"60 tokens; a row holds at most 28: .*max_tokens_per_sequence or num_blocks"):
        run(model, prompts(2, 60), make_cache(model, num_blocks=8))


class Failure(Exception):
    pass


@contextmanager
def failing(model, error, layer=1):
    def fail(*_):
        raise error

    hook = model.base_model.layers[layer].register_forward_pre_hook(fail)
    yield
    hook.remove()


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


@WINDOWED
@pytest.mark.parametrize("reused", [0, 16])
@pytest.mark.parametrize("options", [{}, {"num_beams": 4}, {"num_return_sequences": 3, "do_sample": True}], ids=str)
def test_a_pass_that_raises_leaves_what_was_begun(family, reused, options):
    model, ids = make_model(family), prompts(1, 20)
    expected, expected_of_beams = expect(model, ids), expect(model, ids, num_beams=2)
    cache = make_cache(model)
    if reused:
        run(model, ids, cache)
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
    assert run(model, ids, cache, num_beams=2) == expected_of_beams
    cache.begin(ids)
    with failing(model, Failure), pytest.raises(Failure):
        run(model, ids, cache, **options)
    assert run(model, ids, cache) == expected
    cache.kv.check_invariants()


def test_a_refused_pass_leaves_what_is_known_by_its_ids():
    model, ids = make_model("llama"), prompts(2, 12)
    embeddings = model.get_input_embeddings()(ids).detach()
    cache = make_cache(model, max_sequences=1)
    with torch.no_grad():
        with pytest.raises(OutOfRows):
            model(inputs_embeds=embeddings, past_key_values=cache)
        model(ids[:1], past_key_values=cache)
        assert cache.begin(ids[:1]) == 8
        with failing(model, Failure), pytest.raises(Failure):
            model(inputs_embeds=embeddings[:1, 8:], past_key_values=cache)
        model(ids[:1, 8:], past_key_values=cache)
    assert num_cached(cache) == 3


# ---- caches and models


def test_hooks_go_with_the_cache():
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
    with pytest.raises(UnsupportedOption, match="gone"):
        layer.get_seq_length()


def test_a_model_is_freed_while_its_cache_lives():
    model = transformers.LlamaForCausalLM(make_model("llama").config)
    cache = make_cache(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(UnsupportedOption, match="which is gone"):
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)


def test_a_base_model_whose_model_is_gone_is_refused():
    model = transformers.LlamaForCausalLM(make_model("llama").config)
    cache = make_cache(model)
    base = model.base_model
    del model
    gc.collect()
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedOption, match=r"a LlamaModel runs.*which is gone; make a PagedCache"),
    ):
        base(prompts(), past_key_values=cache)


def test_caches_of_one_model_do_not_meet():
    model = make_model("gemma3")
    ids = [prompts(2, 9), prompts(3, 5, seed=1)]
    caches = [make_cache(model), make_cache(model), transformers.DynamicCache(config=model.config)]
    texts = [ids[0], ids[1], ids[0]]
    for _ in range(3):
        texts = [torch.tensor(run(model, *pair, max_new_tokens=4)) for pair in zip(texts, caches, strict=True)]
    for text, given in zip(texts, [*ids, ids[0]], strict=True):
        assert text.tolist() == expect(model, given, max_new_tokens=12)


def test_threads_with_caches_of_their_own_do_not_meet():
    model = make_model("gemma3")
    ids = [prompts(2, 9, seed=seed) for seed in range(3)]
    expected = [expect(model, given, max_new_tokens=16) for given in ids]
    caches = [make_cache(model), make_cache(model), transformers.DynamicCache(config=model.config)]
    got = {}

    def generate(place):
        got[place] = run(model, ids[place], caches[place], max_new_tokens=16)

    threads = [threading.Thread(target=generate, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[place] for place in range(3)] == expected


def test_generations_end_at_their_own_token():
    model = make_model("llama")
    ids = prompts(4, 6)
    options = {"eos_token_id": list(range(60, EOS)), "max_new_tokens": 30}
    assert run(model, ids, make_cache(model), **options) == expect(model, ids, **options)


def test_a_cache_says_how_much_it_holds():
    model, ids = make_model("gemma3"), prompts()
    cache = make_cache(model)
    assert (cache.get_seq_length(), len(cache), cache.is_initialized, cache.is_compileable) == (0, 4, True, False)
    assert cache.is_sliding == [True, False, True, False]
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=5,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert out.past_key_values is cache
    assert [cache.get_seq_length(layer) for layer in range(4)] == [11] * 4
    assert [layer.get_seq_length() for layer in cache.layers] == [11] * 4
    assert cache.get_mask_sizes(3, 0) == (14, 0)
    assert cache.get_max_cache_shape() == cache.layers[0].get_max_cache_shape() == -1
