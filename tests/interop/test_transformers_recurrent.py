"""Models without attention (Mamba, Mamba 2, Falcon Mamba) with a PagedCache, which then has slots and no blocks."""

from __future__ import annotations

import pytest

from pagecore.errors import UnsupportedOption
from tests.interop.families import left_padded, prompts, torch
from tests.interop.generations import computed
from tests.interop.hybrids import RECURRENT, make_hybrid
from tests.passing import passing
from tests.thinning import interleaved

from pagecore.interop.transformers import PagedCache  # isort: skip  # after families, which skips

MODES = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


def generated(model, ids, mask=None, **options):
    torch.manual_seed(1)
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 6, "do_sample": False} | options
    return model.generate(ids, attention_mask=mask, **options).tolist()


def make_cache(model, **options):
    model.set_attn_implementation("pagecore")
    return PagedCache(model, **{"block_size": 4, "chunk": 4, "interval": 8, "max_sequences": 8} | options)


@pytest.mark.parametrize(("family", "mode"), interleaved(RECURRENT, MODES))
def test_tokens_are_those_of_the_models_own_cache(family, mode):
    model, ids = make_hybrid(family), prompts(2, 11)
    mask = left_padded(ids)
    expected = generated(model, ids, mask, **MODES[mode])
    cache = make_cache(model)
    assert generated(model, ids, mask, **passing(cache), **MODES[mode]) == expected
    assert (cache.kv.num_groups, cache.kv.num_blocks) == (0, ())
    cache.reset()
    cache.kv.check_invariants()


@pytest.mark.parametrize("option", ["format", "value_format"])
def test_a_format_of_keys_is_refused_because_there_are_none(option):
    model = make_hybrid(next(iter(RECURRENT)))
    with pytest.raises(UnsupportedOption, match=f"{option} is .int8_token., but .* no keys and values; leave it out"):
        make_cache(model, **{option: "int8_token"})


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_a_prompt_continues_from_a_checkpoint(family, name):
    model, ids = make_hybrid(family), prompts(2, 16)
    expected = generated(model, ids)
    cache = make_cache(model)
    generated(model, ids[:, :11], **passing(cache))
    assert cache.begin(ids) == 8
    with computed(model) as columns:
        assert generated(model, ids, **{name: cache}) == expected
    assert columns[0] == 8
    assert columns[1:] == [1] * (len(columns) - 1)


def test_a_prompt_continues_from_a_quantised_checkpoint():
    model, ids = make_hybrid(next(iter(RECURRENT))), prompts(2, 16)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    cache = make_cache(model, checkpoint_format="int8")
    generated(model, ids[:, :11], **passing(cache))
    assert cache.begin(ids) == 8
    options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    got = model.generate(ids, attention_mask=torch.ones_like(ids), **passing(cache), **options).logits[0]
    assert not torch.equal(got, expected)  # the state is rounded
    torch.testing.assert_close(got, expected, rtol=0, atol=0.05 * expected.abs().max().item())
    cache.kv.check_invariants()


@pytest.mark.parametrize("family", RECURRENT)
def test_passes_of_several_columns_give_the_logits_of_one(family):
    model, ids = make_hybrid(family), prompts(2, 13)
    with torch.no_grad():
        expected = model(ids).logits
        cache = make_cache(model)
        got = [model(ids[:, a:b], **passing(cache, model)).logits for a, b in ((0, 7), (7, 12), (12, 13))]
    torch.testing.assert_close(torch.cat(got, dim=1), expected, rtol=1e-3, atol=1e-4)
