"""One cache for many calls of `generate`, with whatever prompts: the tokens are those of a cache of their own."""

from __future__ import annotations

import copy
import gc

import pytest

from pagecore.errors import ShapeError
from tests.interop.families import EOS, PAD, dynamic_cache, left_padded, make_cache, make_model, prompts, torch
from tests.interop.test_transformers_cache import computed, expect, run

WINDOWED = pytest.mark.parametrize("family", ["llama", "gemma3"])
SHORT = {"max_new_tokens": 5}


def alone(model, ids, mask=None, **options):
    """Without any cache that has seen other prompts."""
    return expect(model, ids, mask, **SHORT | options)


def both_with(model, cache, ids, mask=None, **options):
    """Assert that `cache` changes nothing about the tokens, and return them."""
    expected = alone(model, ids, mask, **options)
    assert run(model, ids, cache, mask, **SHORT | options) == expected
    cache.kv.check_invariants()
    return torch.tensor(expected)


@WINDOWED
def test_the_same_prompt_again_and_other_prompts_begin_anew(family):
    model, ids = make_model(family), prompts(2, 14)
    cache = make_cache(model)
    for prompt in (ids, ids, prompts(2, 14, seed=1), ids[:, :3], ids[:, 3:], prompts(2, 60, seed=2), ids, ids[:1]):
        both_with(model, cache, prompt)


@WINDOWED
@pytest.mark.parametrize("column", [0, 9, 17])
def test_a_longer_prompt_goes_on_only_if_it_begins_with_every_token(family, column):
    model, ids = make_model(family), prompts(2, 14)
    cache = make_cache(model)
    text = torch.cat([both_with(model, cache, ids), prompts(2, 6, seed=1)], dim=1)
    with computed(model) as columns:
        run(model, text, cache, **SHORT)
    assert columns[0] == 7  # the last token of the answer, and the new ones
    cache.reset()
    run(model, ids, cache, **SHORT)
    text[1, column] = (text[1, column] + 1) % EOS
    both_with(model, cache, text)


def test_what_the_last_prompt_shares_with_the_next_is_not_computed_again():
    model, ids = make_model("llama"), prompts(1, 30)
    cache = make_cache(model)
    both_with(model, cache, ids)
    other = torch.cat([ids[:, :22], prompts(1, 8, seed=3)], dim=1)
    with computed(model) as columns:
        run(model, other, cache, **SHORT)
    assert columns[0] == 10  # whole blocks of 4 are shared


@WINDOWED
def test_padding_belongs_to_the_prompt(family):
    model, ids = make_model(family), prompts(2, 12)
    cache, mask = make_cache(model), left_padded(ids)
    text = both_with(model, cache, ids, mask)
    longer = torch.cat([text, prompts(2, 3, seed=1)], dim=1)
    seen = torch.cat([mask, torch.ones(2, 8, dtype=torch.long)], dim=1)
    both_with(model, cache, longer, seen)
    both_with(model, cache, ids, mask)
    both_with(model, cache, longer)  # the same ids, and none is padding now
    both_with(model, cache, ids, mask.flip(0))
    changed = ids.clone()
    changed[0, 0] += 1  # under the padding
    both_with(model, cache, torch.cat([changed, longer[:, 12:]], dim=1), seen)


def test_padding_that_generate_infers_is_what_it_infers():
    model, ids = make_model("llama"), prompts(2, 12)
    ids[0, :4] = PAD
    options = {"do_sample": False} | SHORT
    expected = model.generate(ids, past_key_values=dynamic_cache(model), **options).tolist()
    cache = make_cache(model)
    for _ in range(2):
        assert model.generate(ids, past_key_values=cache, **options).tolist() == expected
    text = torch.cat([torch.tensor(expected), prompts(2, 3, seed=1)], dim=1)
    expected = model.generate(text, past_key_values=dynamic_cache(model), **options).tolist()
    model.set_attn_implementation("pagecore")
    with computed(model) as columns:
        assert model.generate(inputs=text, past_key_values=cache, **options).tolist() == expected
    assert columns[0] == 4


@WINDOWED
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
def test_a_chat_with_beams_gives_what_it_gives_without_a_cache(family, options):
    """The rows of a cache end as the beams ended, of which only the best is the text that goes on."""
    model = make_model(family)
    cache, text = make_cache(model), prompts(2, 9)
    for turn in range(3):
        text = both_with(model, cache, text, **options)[:2]
        text = torch.cat([text, prompts(len(text), 3, seed=turn)], dim=1)
    both_with(model, cache, text)


def test_several_answers_go_on_one_by_one_and_together():
    model, ids = make_model("llama"), prompts(1, 10)
    cache = make_cache(model)
    torch.manual_seed(0)
    answers = torch.tensor(run(model, ids, cache, do_sample=True, num_return_sequences=3, **SHORT))
    text = torch.cat([answers, prompts(3, 4, seed=1)], dim=1)
    with computed(model) as columns:
        got = run(model, text, cache, **SHORT)
    assert (got, columns[0]) == (alone(model, text), 5)
    both_with(model, cache, text[1:2])
    both_with(model, cache, text)


@WINDOWED
def test_what_was_cropped_is_not_part_of_what_a_prompt_must_begin_with(family):
    model, ids = make_model(family), prompts(2, 14)
    cache = make_cache(model)
    text = both_with(model, cache, ids, max_new_tokens=1)
    cache.crop(-3)
    changed = torch.cat([ids[:, :11], prompts(2, 4, seed=1)], dim=1)
    with computed(model) as columns:
        got = run(model, changed, cache, **SHORT)
    assert (got, columns[0]) == (alone(model, changed), 4)
    both_with(model, cache, text)


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 3}], ids=" ".join)
@WINDOWED
def test_ways_to_generate_serve_a_cache_that_has_seen_other_prompts(family, options):
    model, ids = make_model(family), prompts(1, 14)
    cache = make_cache(model)
    text = ids
    for prompt in (ids, ids, prompts(1, 14, seed=1), ids[:, :9]):
        text = torch.tensor(alone(model, prompt))
        assert run(model, prompt, cache, **SHORT | options) == text.tolist()
    text = torch.cat([text, prompts(1, 4, seed=2)], dim=1)
    assert run(model, text, cache, **SHORT | options) == alone(model, text)
    cache.begin(ids)
    assert run(model, ids, cache, **SHORT | options) == alone(model, ids)
    cache.kv.check_invariants()


def test_drafts_of_an_assistant_serve_a_cache_that_has_seen_other_prompts():
    model, assistant = make_model("llama"), make_model("llama", seed=3)
    cache, text = make_cache(model), prompts(1, 14)
    for turn in range(3):
        expected = alone(model, text)
        assert run(model, text, cache, assistant_model=assistant, **SHORT) == expected
        text = torch.cat([torch.tensor(expected), prompts(1, 4, seed=turn)], dim=1)
    both_with(model, cache, prompts(1, 14, seed=5))


def test_a_prompt_that_was_computed_by_hand_is_known():
    model, ids = make_model("llama"), prompts(2, 14)
    cache = make_cache(model)
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache)
        model(ids[:, 6:10], past_key_values=cache)
    with computed(model) as columns:
        got = run(model, ids, cache, **SHORT)
    assert (got, columns[0]) == (alone(model, ids), 4)
    with torch.no_grad():
        cache.reset()
        model(prompts(2, 6, seed=1), past_key_values=cache)
    both_with(model, cache, ids)


def test_a_direct_call_goes_on_as_with_a_dynamic_cache():
    model, ids = make_model("llama"), prompts(2, 14)
    logits = []
    with torch.no_grad():
        for cache in (dynamic_cache(model), make_cache(model)):
            model.set_attn_implementation("pagecore" if logits else "eager")
            model(ids, past_key_values=cache)
            logits.append(model(ids, past_key_values=cache).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_embeddings_begin_anew_where_nothing_is_left_to_compute():
    model, ids = make_model("llama"), prompts(2, 12)
    cache = make_cache(model)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False} | SHORT
    for seed in (0, 0, 1):
        embeddings = model.get_input_embeddings()(prompts(2, 12, seed=seed)).detach()
        expected = model.generate(inputs_embeds=embeddings, past_key_values=dynamic_cache(model), **options)
        model.set_attn_implementation("pagecore")
        got = model.generate(inputs_embeds=embeddings, past_key_values=cache, **options)
        assert got.tolist() == expected.tolist()
    both_with(model, cache, ids)
    assert cache._generation.rows.sequences[0].num_tokens > 0


def test_new_tokens_behind_the_mask_of_a_whole_text_go_on():
    model, ids = make_model("llama"), prompts(2, 14)
    mask = left_padded(ids)
    expected = alone(model, ids, mask)
    cache = make_cache(model)
    with torch.no_grad():
        model(ids[:, :9], attention_mask=mask[:, :9], past_key_values=cache)
    got = model.generate(ids[:, 9:], attention_mask=mask, past_key_values=cache, do_sample=False, **SHORT)
    assert got[:, 5:].tolist() == [row[14:] for row in expected]


def test_prompts_that_begin_anew_stay_in_their_namespace():
    model, ids = make_model("llama"), prompts(1, 21)
    cache = make_cache(model)
    cache.begin(ids, namespace="adapter")
    both_with(model, cache, ids)
    both_with(model, cache, prompts(1, 21, seed=1))
    both_with(model, cache, prompts(1, 21, seed=1), prompt_lookup_num_tokens=2)
    both_with(model, cache, ids)
    assert cache.begin(ids) == 0
    assert cache.begin(prompts(1, 21, seed=1)) == 0
    assert cache.begin(prompts(1, 21, seed=1), namespace="adapter") == 20
    cache.reset()
    both_with(model, cache, prompts(1, 21, seed=2))
    assert cache.begin(prompts(1, 21, seed=2)) == 20


@pytest.mark.parametrize("column", [2, 11, 13])
def test_another_prompt_than_the_one_begun_is_refused_wherever_it_differs(column):
    model, ids = make_model("llama"), prompts(2, 14)
    cache = make_cache(model)
    run(model, ids, cache, **SHORT)
    assert cache.begin(ids) == 12
    other = ids.clone()
    other[1, column] = (other[1, column] + 1) % EOS
    with pytest.raises(ShapeError, match=r"prompt .*begin\(\) anew"):
        run(model, other, cache, **SHORT)
    with pytest.raises(ShapeError, match=r"another prompt than the one that the cache began with.*begin\(\) anew"):
        run(model, ids[:, :8], cache, **SHORT)
    assert run(model, ids, cache, **SHORT) == alone(model, ids)


@pytest.mark.parametrize("seed", range(3))
def test_any_calls_in_a_row_give_what_each_gives_alone(seed):
    model = make_model(["llama", "gemma3", "gpt2"][seed])
    cache, random = make_cache(model), torch.Generator().manual_seed(seed)

    def draw(count):
        return int(torch.randint(count, (), generator=random))

    text = prompts(1 + draw(3), 6 + draw(10), seed=seed)
    for step in range(12):
        rows = 1 + draw(3)
        choice = draw(6)
        if choice == 0 or text.shape[1] > 60:
            text = prompts(rows, 4 + draw(20), seed=draw(4))
        elif choice == 1:
            text = text[:, : 1 + draw(text.shape[1])]
        elif choice == 2:
            text = text[:rows]
        elif choice == 3:
            cache.crop(-min(draw(3), cache._generation.num_pending_columns))
        else:
            text = torch.cat([text, prompts(len(text), 1 + draw(4), seed=step)], dim=1)
        mask = None if draw(3) else left_padded(text, min(2, text.shape[1] - 1))
        options = [{}, {"num_beams": 2}, {"max_new_tokens": 1}, {"prefill_chunk_size": 4}][draw(4)]
        text = both_with(model, cache, text, mask, **options)


# ---- what is hung on the model


def test_generate_is_the_model_s_own_again_when_its_caches_are_gone():
    model = make_model("llama", seed=9)
    gc.collect()
    before = dict(vars(model))
    caches = [make_cache(model), make_cache(model)]
    assert model.generate.__name__ == "generate"
    caches.pop()
    gc.collect()
    assert "generate" in vars(model)
    caches.pop()
    gc.collect()
    assert vars(model).keys() == before.keys()


def test_a_deep_copy_of_a_model_generates_by_itself():
    model, ids = make_model("llama", seed=9), prompts(1, 8)
    cache = make_cache(model)
    expected = run(model, ids, cache, **SHORT)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_input_embeddings().weight.zero_()
    assert twin.generate.__self__ is twin
    assert twin.generate(ids, do_sample=False, **SHORT).tolist() != expected


def test_a_generate_that_the_model_was_given_before_is_called_and_comes_back():
    model, ids, calls = make_model("llama", seed=10), prompts(1, 8), []

    def generate(*arguments, **options):
        calls.append(sorted(options))
        return type(model).generate(model, *arguments, **options)

    model.generate = generate
    cache = make_cache(model)
    run(model, ids, cache, **SHORT)
    assert run(model, ids, cache, **SHORT) == alone(model, ids)
    assert len(calls) == 3
    del cache
    gc.collect()
    assert model.generate is generate
    del model.generate
