"""One cache for many calls of `generate`: the tokens equal those of a new cache for each call."""

from __future__ import annotations

import copy
import gc

import pytest

from pagecore.errors import ShapeError
from tests.interop.families import (
    EOS,
    PAD,
    dynamic_cache,
    left_padded,
    make_cache,
    make_model,
    prompts,
    torch,
    transformers,
)
from tests.interop.generations import WINDOWED, computed, expect, run
from tests.passing import passing

SHORT = {"max_new_tokens": 3}
LONGER = {"max_new_tokens": 5}  # some drafts are accepted


def alone(model, ids, mask=None, **options):
    """Return the tokens of a call with a new cache."""
    return expect(model, ids, mask, **SHORT | options)


def check_equal(model, cache, ids, mask=None, **options):
    """Assert that `cache` does not change the tokens, and return them."""
    expected = alone(model, ids, mask, **options)
    assert run(model, ids, cache, mask, **SHORT | options) == expected
    cache.kv.check_invariants()
    return torch.tensor(expected)


@WINDOWED
def test_repeated_and_other_prompts_begin_a_new_generation(family):
    model, ids = make_model(family), prompts(2, 14)
    cache = make_cache(model)
    for prompt in (ids, ids, prompts(2, 14, seed=1), ids[:, :3], ids[:, 3:], prompts(2, 60, seed=2), ids, ids[:1]):
        check_equal(model, cache, prompt)


@WINDOWED
@pytest.mark.parametrize("column", [0, 9, 15])
def test_a_longer_prompt_continues_only_if_it_starts_with_every_token(family, column):
    model, ids = make_model(family), prompts(2, 14)
    cache = make_cache(model)
    text = torch.cat([check_equal(model, cache, ids), prompts(2, 6, seed=1)], dim=1)
    with computed(model) as columns:
        run(model, text, cache, **SHORT)
    assert columns[0] == 7  # the last token of the answer, and the new ones
    cache.reset()
    run(model, ids, cache, **SHORT)
    text[1, column] = (text[1, column] + 1) % EOS
    check_equal(model, cache, text)


def test_the_shared_prefix_of_two_prompts_is_computed_once():
    model, ids = make_model("llama"), prompts(1, 30)
    cache = make_cache(model)
    check_equal(model, cache, ids)
    other = torch.cat([ids[:, :22], prompts(1, 8, seed=3)], dim=1)
    with computed(model) as columns:
        run(model, other, cache, **SHORT)
    assert columns[0] == 10  # whole blocks of 4 are shared


@WINDOWED
def test_padding_is_compared_with_the_prompt(family):
    model, ids = make_model(family), prompts(2, 12)
    cache, mask = make_cache(model), left_padded(ids)
    text = check_equal(model, cache, ids, mask)
    longer = torch.cat([text, prompts(2, 3, seed=1)], dim=1)
    seen = torch.cat([mask, torch.ones(2, 6, dtype=torch.long)], dim=1)
    check_equal(model, cache, longer, seen)
    check_equal(model, cache, ids, mask)
    check_equal(model, cache, longer)  # equal ids without padding
    check_equal(model, cache, ids, mask.flip(0))
    changed = ids.clone()
    changed[0, 0] += 1  # under the padding
    check_equal(model, cache, torch.cat([changed, longer[:, 12:]], dim=1), seen)


def test_the_mask_that_generate_infers_from_padding_tokens_is_used():
    model, ids = make_model("llama"), prompts(2, 12)
    ids[0, :4] = PAD
    options = {"do_sample": False} | SHORT
    expected = model.generate(ids, **passing(dynamic_cache(model)), **options).tolist()
    cache = make_cache(model)
    for _ in range(2):
        assert model.generate(ids, **passing(cache), **options).tolist() == expected
    text = torch.cat([torch.tensor(expected), prompts(2, 3, seed=1)], dim=1)
    expected = model.generate(text, **passing(dynamic_cache(model)), **options).tolist()
    model.set_attn_implementation("pagecore")
    with computed(model) as columns:
        assert model.generate(inputs=text, **passing(cache), **options).tolist() == expected
    assert columns[0] == 4


@pytest.mark.parametrize("options", [{"pad_token_id": 5}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_a_generation_config_may_be_the_second_argument(options):
    """It decides which columns are padding, how many rows there are, and whether the first pass gets the prompt."""
    model, ids = make_model("llama"), torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    config = transformers.GenerationConfig(**{"do_sample": False, "pad_token_id": PAD} | LONGER | options)
    cache = make_cache(model)
    text = model.generate(
        ids, transformers.GenerationConfig(do_sample=False, pad_token_id=PAD, **SHORT), **passing(cache)
    )
    longer = torch.cat([text, ids], dim=1)
    got = model.generate(longer, config, **passing(cache)).tolist()
    assert got == model.generate(longer, config, **passing(dynamic_cache(model))).tolist()


@WINDOWED
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
def test_a_chat_with_beams_gives_equal_tokens(family, options):
    """The cache ends with the rows of all beams, but only the best beam continues."""
    model = make_model(family)
    cache, text = make_cache(model), prompts(2, 9)
    for turn in range(3):
        text = check_equal(model, cache, text, **options)[:2]
        text = torch.cat([text, prompts(len(text), 3, seed=turn)], dim=1)
    check_equal(model, cache, text)


def test_several_answers_continue_together_and_alone():
    model, ids = make_model("llama"), prompts(1, 10)
    cache = make_cache(model)
    torch.manual_seed(0)
    answers = torch.tensor(run(model, ids, cache, do_sample=True, num_return_sequences=3, **SHORT))
    text = torch.cat([answers, prompts(3, 4, seed=1)], dim=1)
    with computed(model) as columns:
        got = run(model, text, cache, **SHORT)
    assert (got, columns[0]) == (alone(model, text), 5)
    check_equal(model, cache, text[1:2])
    check_equal(model, cache, text)


@WINDOWED
def test_a_prompt_need_not_start_with_cropped_columns(family):
    model, ids = make_model(family), prompts(2, 14)
    cache = make_cache(model)
    text = check_equal(model, cache, ids, max_new_tokens=1)
    cache.crop(-3)
    changed = torch.cat([ids[:, :11], prompts(2, 4, seed=1)], dim=1)
    with computed(model) as columns:
        got = run(model, changed, cache, **SHORT)
    assert (got, columns[0]) == (alone(model, changed), 4)
    check_equal(model, cache, text)


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 3}], ids=" ".join)
@WINDOWED
def test_generation_modes_with_a_cache_of_other_prompts(family, options):
    model, ids = make_model(family), prompts(1, 14)
    cache = make_cache(model)
    text = ids
    for prompt in (ids, ids, prompts(1, 14, seed=1), ids[:, :9]):
        text = torch.tensor(alone(model, prompt, **LONGER))
        assert run(model, prompt, cache, **LONGER | options) == text.tolist()
    text = torch.cat([text, prompts(1, 4, seed=2)], dim=1)
    assert run(model, text, cache, **LONGER | options) == alone(model, text, **LONGER)
    cache.begin(ids)
    assert run(model, ids, cache, **LONGER | options) == alone(model, ids, **LONGER)
    cache.kv.check_invariants()


def test_assisted_generation_with_a_cache_of_other_prompts():
    model, assistant = make_model("llama"), make_model("llama", seed=3)
    cache, text = make_cache(model), prompts(1, 14)
    for turn in range(3):
        expected = alone(model, text, **LONGER)
        assert run(model, text, cache, assistant_model=assistant, **LONGER) == expected
        text = torch.cat([torch.tensor(expected), prompts(1, 4, seed=turn)], dim=1)
    check_equal(model, cache, prompts(1, 14, seed=5))


def test_generate_continues_a_prompt_that_direct_calls_computed():
    model, ids = make_model("llama"), prompts(2, 14)
    cache = make_cache(model)
    with torch.no_grad():
        model(ids[:, :6], **passing(cache))
        model(ids[:, 6:10], **passing(cache))
    with computed(model) as columns:
        got = run(model, ids, cache, **SHORT)
    assert (got, columns[0]) == (alone(model, ids), 4)
    with torch.no_grad():
        cache.reset()
        model(prompts(2, 6, seed=1), **passing(cache))
    check_equal(model, cache, ids)


def test_a_direct_call_continues_as_with_a_dynamic_cache():
    model, ids = make_model("llama"), prompts(2, 14)
    logits = []
    with torch.no_grad():
        for cache in (dynamic_cache(model), make_cache(model)):
            model.set_attn_implementation("pagecore" if logits else "eager")
            model(ids, **passing(cache))
            logits.append(model(ids, **passing(cache)).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_embeddings_begin_a_new_generation_if_all_columns_are_computed():
    model, ids = make_model("llama"), prompts(2, 12)
    cache = make_cache(model)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False} | SHORT
    for seed in (0, 0, 1):
        embeddings = model.get_input_embeddings()(prompts(2, 12, seed=seed)).detach()
        expected = model.generate(inputs_embeds=embeddings, **passing(dynamic_cache(model)), **options)
        model.set_attn_implementation("pagecore")
        got = model.generate(inputs_embeds=embeddings, **passing(cache), **options)
        assert got.tolist() == expected.tolist()
    check_equal(model, cache, ids)
    assert cache._generation.rows.sequences[0].num_tokens > 0


def test_new_tokens_with_the_mask_of_the_whole_text_continue():
    model, ids = make_model("llama"), prompts(2, 14)
    mask = left_padded(ids)
    expected = alone(model, ids, mask)
    cache = make_cache(model)
    with torch.no_grad():
        model(ids[:, :9], attention_mask=mask[:, :9], **passing(cache))
    got = model.generate(ids[:, 9:], attention_mask=mask, **passing(cache), do_sample=False, **SHORT)
    assert got[:, 5:].tolist() == [row[14:] for row in expected]


def test_new_generations_stay_in_their_namespace():
    model, ids = make_model("llama"), prompts(1, 21)
    cache = make_cache(model)
    cache.begin(ids, namespace="adapter")
    check_equal(model, cache, ids)
    check_equal(model, cache, prompts(1, 21, seed=1))
    check_equal(model, cache, prompts(1, 21, seed=1), prompt_lookup_num_tokens=2)
    check_equal(model, cache, ids)
    assert cache.begin(ids) == 0
    assert cache.begin(prompts(1, 21, seed=1)) == 0
    assert cache.begin(prompts(1, 21, seed=1), namespace="adapter") == 20
    cache.reset()
    check_equal(model, cache, prompts(1, 21, seed=2))
    assert cache.begin(prompts(1, 21, seed=2)) == 20


@pytest.mark.parametrize("column", [2, 11, 13])
def test_a_prompt_that_differs_from_that_of_begin_raises(column):
    model, ids = make_model("llama"), prompts(2, 14)
    cache = make_cache(model)
    run(model, ids, cache, **SHORT)
    assert cache.begin(ids) == 12
    other = ids.clone()
    other[1, column] = (other[1, column] + 1) % EOS
    with pytest.raises(ShapeError, match=r"prompt that was passed to begin\(\).*; call begin\(\) with these tokens"):
        run(model, other, cache, **SHORT)
    with pytest.raises(ShapeError, match=r"differs from the prompt that was passed to begin\(\).*; call begin\(\)"):
        run(model, ids[:, :8], cache, **SHORT)
    assert run(model, ids, cache, **SHORT) == alone(model, ids)


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_equal_calls_with_a_new_cache(seed):
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
        text = check_equal(model, cache, text, mask, **options)


# ---- the replaced method generate


def test_generate_is_restored_when_the_last_cache_is_deleted():
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


def test_a_deep_copy_of_a_model_has_its_own_generate():
    model, ids = make_model("llama", seed=9), prompts(1, 8)
    cache = make_cache(model)
    expected = run(model, ids, cache, **SHORT)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_input_embeddings().weight.zero_()
    assert twin.generate.__self__ is twin
    assert twin.generate(ids, do_sample=False, **SHORT).tolist() != expected


def test_an_earlier_replacement_of_generate_is_called_and_restored():
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
