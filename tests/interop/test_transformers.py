"""Parity of PagedCache and DynamicCache on real model code: equal tokens in float32, close logits in bfloat16."""

from __future__ import annotations

import pytest

from tests.interop.families import (
    FAMILIES,
    dynamic_cache,
    left_padded,
    make_cache,
    make_model,
    prompts,
    torch,
    transformers,
)
from tests.interop.generations import compiled
from tests.passing import passing
from tests.thinning import interleaved

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
# Full attention; alternating windows; learned positions; latents.
SOME = ["llama", "gemma3", "gpt2", "deepseek_v3"]
SOME_FAMILIES = pytest.mark.parametrize("family", SOME)
LONG = 14  # new tokens, with which the shorter rows are longer than two windows


def generate(model, ids, cache, **options):
    """Return the tokens, of which at least two blocks have several passes, and more windows than one."""
    has_windows = any(getattr(model.config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    new = {"max_new_tokens": LONG if has_windows else 6}
    options = new | {"do_sample": False, "attention_mask": torch.ones_like(ids)} | options
    torch.manual_seed(3)
    return model.generate(ids, **passing(cache), **options).tolist()


def both(model, ids, **options):
    """Return the tokens with a DynamicCache, the tokens with a paged cache, and the paged cache."""
    expected = generate(model, ids, dynamic_cache(model), **options)
    cache = make_cache(model)
    got = generate(model, ids, cache, **options)
    cache.kv.check_invariants()
    return expected, got, cache


@EVERY_FAMILY
def test_padded_prompts_give_equal_tokens(family):
    ids = prompts()
    expected, got, _ = both(make_model(family), ids, attention_mask=left_padded(ids))
    assert got == expected


# Every second family, and one of each kind: beams reorder the rows of the cache, which know no family.
@pytest.mark.parametrize("family", dict.fromkeys([*SOME, *list(FAMILIES)[::2]]))
def test_beam_search_gives_equal_tokens(family):
    ids = prompts()
    expected, got, cache = both(make_model(family), ids, attention_mask=left_padded(ids), num_beams=3)
    assert got == expected
    assert cache.kv.num_sequences == 6


@EVERY_FAMILY
def test_logits_agree_in_bfloat16(family):
    model, ids = make_model(family, "bfloat16"), prompts(columns=30)
    mask = left_padded(ids)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, **passing(dynamic_cache(model))).logits.float()
        got = model(ids, attention_mask=mask, **passing(make_cache(model))).logits.float()
    error = (got - expected)[mask.bool()].norm() / expected[mask.bool()].norm()
    assert error < 2e-2


MODES = [
    {"do_sample": True, "num_return_sequences": 3},
    {"do_sample": True, "top_k": 5, "temperature": 0.7},
    {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True},
    {"guidance_scale": 1.5},
    {"num_beams": 2, "do_sample": True},
    {"repetition_penalty": 1.3, "min_new_tokens": 5},
]


@pytest.mark.parametrize(("family", "options"), interleaved(SOME, MODES), ids=str)
def test_generation_modes_give_equal_tokens(family, options):
    expected, got, _ = both(make_model(family), prompts(), **options)
    assert got == expected


@SOME_FAMILIES
@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 3}], ids=" ".join)
def test_prompt_lookup_and_chunked_prefill_give_equal_tokens(family, options):
    """Rejected drafts are cropped. With sliding windows, DynamicCache cannot crop in every version of transformers."""
    model, ids = make_model(family), torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    expected = generate(model, ids, dynamic_cache(model), max_new_tokens=LONG)
    assert generate(model, ids, make_cache(model), max_new_tokens=LONG, **options) == expected


@pytest.mark.parametrize(
    ("family", "seed"), [("llama", 0), ("llama", 1), ("gemma3", 1)], ids=["good drafts", "bad drafts", "windows"]
)
def test_assisted_generation_gives_equal_tokens(family, seed):
    model, assistant, ids = make_model(family), make_model("llama", seed=seed), prompts(1)
    expected = generate(model, ids, dynamic_cache(model), max_new_tokens=LONG)
    cache = make_cache(model)
    make_cache(assistant)  # generate makes a DynamicCache for the assistant, which also attends with "pagecore"
    assert generate(model, ids, cache, max_new_tokens=LONG, assistant_model=assistant) == expected


@SOME_FAMILIES
@pytest.mark.parametrize("block_size", [1, 16])
def test_every_block_size_gives_equal_tokens(family, block_size):
    model, ids = make_model(family), prompts(3)
    expected = generate(model, ids, dynamic_cache(model), max_new_tokens=LONG)
    assert generate(model, ids, make_cache(model, block_size=block_size), max_new_tokens=LONG) == expected


@SOME_FAMILIES
def test_padding_may_be_anywhere(family):
    """The reference is each row on its own: DynamicCache continues right-padded rows at other positions."""
    model, ids = make_model(family), prompts(3)
    mask = torch.ones_like(ids)
    mask[0, 4:], mask[1, 2:4] = 0, 0
    cache = make_cache(model)
    got = generate(model, ids, cache, attention_mask=mask)
    for row in range(1, 3):  # the first token comes from the last column, which is padding in row 0
        alone = ids[row][mask[row].bool()][None]
        cache.reset()
        expected = generate(model, alone, cache)
        assert got[row][7:] == expected[0][alone.shape[1] :]


@SOME_FAMILIES
@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        (prompts(1, 1), None),
        (prompts(1).expand(3, -1), None),
        (prompts(), left_padded(prompts()).bool()),
        (prompts(), left_padded(prompts()).float()),
    ],
    ids=["one token", "expanded", "bool mask", "float mask"],
)
def test_prompts_and_masks_of_every_dtype_and_stride(family, ids, mask):
    mask = torch.ones_like(ids) if mask is None else mask
    expected, got, _ = both(make_model(family), ids, attention_mask=mask, max_new_tokens=6)
    assert got == expected


@SOME_FAMILIES
def test_padding_on_the_right_does_not_change_logits(family):
    model, ids = make_model(family), prompts()
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, **passing(dynamic_cache(model))).logits
        got = model(ids, attention_mask=mask, **passing(make_cache(model))).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


@SOME_FAMILIES
def test_a_chat_of_several_turns_gives_equal_tokens(family):
    model, ids = make_model(family), prompts()
    answers = []
    for cache in (dynamic_cache(model), make_cache(model)):
        model.set_attn_implementation("pagecore" if answers else "eager")
        text = ids
        for turn in range(3):
            text = torch.tensor(generate(model, text, cache, max_new_tokens=6))
            text = torch.cat([text, prompts(columns=4, seed=turn)], dim=1)
        answers.append(text.tolist())
    assert answers[0] == answers[1]


@SOME_FAMILIES
def test_several_passes_equal_one_pass(family):
    model, ids = make_model(family), prompts(columns=24)
    with torch.no_grad():
        whole = model(ids, **passing(dynamic_cache(model))).logits
        cache = make_cache(model)
        parts = [model(ids[:, a:b], **passing(cache)).logits for a, b in ((0, 10), (10, 11), (11, 20), (20, 24))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_generate_takes_the_cache_under_every_name(name):
    model, ids = make_model("llama"), prompts()
    expected = generate(model, ids, dynamic_cache(model))
    cache = make_cache(model)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert model.generate(ids, **{name: cache}, **options).tolist() == expected
    assert cache.get_seq_length() == len(expected[0]) - 1


class BaseModel(transformers.LlamaPreTrainedModel):
    """A base model that is not called itself: the head calls its decoder, as in OPT."""

    def __init__(self, config):
        super().__init__(config)
        self.decoder = transformers.LlamaModel(config)


class WithHead(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = BaseModel(config)

    def forward(self, input_ids, **options):
        hidden = self.model.decoder(input_ids, **options).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden))


def test_a_model_that_calls_only_its_decoder():
    model, ids = WithHead(make_model("llama").config).eval(), prompts(columns=12)
    with torch.no_grad():
        whole = model(ids, **passing(dynamic_cache(model))).logits
        cache = make_cache(model)
        parts = [model(some, **passing(cache)).logits for some in ids.split(4, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
    assert cache.begin(ids) == 8


def test_a_compiled_model_gives_equal_tokens():
    model, ids = make_model("llama", seed=5), prompts()
    expected = generate(model, ids, dynamic_cache(model), max_new_tokens=4)
    cache = make_cache(model)
    with compiled(model):
        assert generate(model, ids, cache, max_new_tokens=4) == expected


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_without_a_paged_cache_attention_is_sdpa(family):
    model, ids = make_model(family), prompts()
    mask = left_padded(ids)
    model.set_attn_implementation("sdpa")
    expected = generate(model, ids, None, attention_mask=mask)
    make_cache(model)
    assert generate(model, ids, None, attention_mask=mask) == expected
    own = transformers.DynamicCache(config=model.config)
    assert generate(model, ids, own, attention_mask=mask) == expected


def test_a_window_that_is_in_no_mask_but_in_the_caches_of_transformers():
    sizes = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    config = transformers.MoshiConfig(vocab_size=97, sliding_window=8, eos_token_id=None, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    model, ids = transformers.MoshiForCausalLM(config).eval(), prompts()
    expected, got, cache = both(model, ids)
    assert got == expected
    assert all(cache.kv.held_from(sequence) > 0 for sequence in cache.kv.sequences.values())
