"""`use_in_generate_batch`: tokens and probabilities of `generate_batch` equal those of transformers' own attention."""

from __future__ import annotations

import copy
import inspect

import numpy as np
import pytest

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from tests.interop.families import make_model, torch, transformers

from pagecore.interop.transformers import use_in_generate_batch  # isort: skip  # after families, which skips
from pagecore.interop.transformers.generate_batch.layout import GATHER_BLOCK, GroupLayout, Requests, lay_out  # isort: skip

NEW = 10
# Windows are 8 tokens and pages 4. Prompts longer than 24 tokens are computed in chunks; two begin alike.
LENGTHS = (5, 8, 9, 30, 1, 47, 4)


# The name of the tokens of a block: "block_size" in transformers 5.17 and before.
FIELDS = inspect.signature(transformers.ContinuousBatchingConfig).parameters
PAGE_SIZE = "page_size" if "page_size" in FIELDS else "block_size"


def make_prompts():
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 90, (length,), generator=generator).tolist() for length in LENGTHS]
    return [*prompts, [*prompts[3][:20], 5, 6], prompts[3]]


def configs(page=4, max_batch_tokens=24, num_blocks=200, **options):
    generation = transformers.GenerationConfig(
        **{"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0} | options
    )
    batching = transformers.ContinuousBatchingConfig(
        **{PAGE_SIZE: page}, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, return_logprobs=True, seed=7
    )
    return {"generation_config": generation, "continuous_batching_config": batching}


def generate(model, prompts, **options):
    results = model.generate_batch(prompts, **configs(**options)).values()
    assert [result.error for result in results] == [None] * len(results)
    return [result.generated_tokens for result in results], [result.logprobs for result in results]


def fresh(family, dtype="float32", implementation="sdpa"):
    """Return a model that the test may change."""
    model = copy.deepcopy(make_model(family, dtype))
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize(
    ("family", "implementation", "page"),
    [
        ("llama", "sdpa", 4),
        ("mistral", "sdpa", 5),
        ("gemma3", "sdpa", 4),
        ("gpt_oss", "eager", 16),
        ("gpt2", "sdpa", 7),
    ],
)
def test_tokens_and_probabilities_equal_those_of_transformers(family, implementation, page):
    model, prompts = fresh(family, implementation=implementation), make_prompts()
    expected, probabilities = generate(model, prompts, page=page)
    with use_in_generate_batch(model):
        tokens, own = generate(model, prompts, page=page)
    assert tokens == expected
    for one, other in zip(own, probabilities, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-4)
    assert model.config._attn_implementation == implementation


def test_samples_share_their_prompt_and_equal_those_of_sdpa():
    model, prompts = fresh("gemma3"), make_prompts()[:4]
    options = {"do_sample": True, "num_return_sequences": 3, "temperature": 0.7}
    expected, _ = generate(model, prompts, **options)
    with use_in_generate_batch(model):
        tokens, _ = generate(model, prompts, **options)
    if PAGE_SIZE == "page_size":  # earlier versions make one sample
        assert len(tokens) == 12
        assert len({tuple(each) for each in tokens}) > 4
    assert tokens == expected


def test_a_cancelled_request_leaves_and_others_go_on():
    model, prompts = fresh("mistral"), make_prompts()
    (expected,), _ = generate(model, prompts[3:4], max_new_tokens=40)
    handle = use_in_generate_batch(model)
    manager = model.init_continuous_batching(**configs(max_new_tokens=10_000, num_blocks=4000))
    manager.start()
    try:
        cancelled = manager.add_request(prompts[5], streaming=True)
        kept = manager.add_request(prompts[3], max_new_tokens=40)
        while manager.get_result(timeout=10).request_id != cancelled:
            pass
        with pytest.raises(UnsupportedOption, match="hold blocks that only this attention can read; stop"):
            handle.close()
        manager.cancel_request(cancelled)
        result = next(each for each in iter(lambda: manager.get_result(timeout=10), None) if each.request_id == kept)
    finally:
        manager.stop(hard_stop=True)
        manager.destroy()
    assert result.generated_tokens == expected
    handle.close()
    handle.close()
    assert model.config._attn_implementation == "sdpa"


def test_other_calls_of_the_model_run_sdpa_meanwhile():
    model, ids = fresh("gemma3"), torch.tensor(make_prompts()[3:4])
    with torch.no_grad():
        expected = model(ids).logits
        with use_in_generate_batch(model):
            torch.testing.assert_close(model(ids).logits, expected)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("deepseek_v2", "layer 0 .*; call model.generate with a PagedCache"),
        ("llama4", "layer 0 is of type 'chunked_attention'.*PagedCache"),
    ],
)
def test_a_layer_that_cannot_be_stored_is_named(family, says):
    model = fresh(family)
    with pytest.raises(UnsupportedOption, match=says):
        use_in_generate_batch(model)
    assert model.config._attn_implementation == "sdpa"


def test_models_that_cannot_be_served_raise_with_the_remedy():
    model = fresh("llama")
    handle = use_in_generate_batch(model)
    with pytest.raises(UnsupportedOption, match="already serves this model; close"):
        use_in_generate_batch(model)
    handle.close()
    model.model.layers[1].self_attn.head_dim = 8
    with pytest.raises(UnsupportedOption, match=r"layer 1 has heads of dim 8.*stores 16"):
        use_in_generate_batch(model)
    with pytest.raises(UnsupportedDtype, match="float64; run it in float32"):
        use_in_generate_batch(fresh("llama").double())
    with pytest.raises(UnsupportedOption, match="expected a model of transformers"):
        use_in_generate_batch(torch.nn.Linear(2, 2))
    generate(kept := fresh("llama"), [[3, 4]])
    kept.generate_batch([[3, 4]], **configs(), persistent_manager=True)
    with pytest.raises(UnsupportedOption, match=r"call model\.destroy_cached_continuous_batching_manager"):
        use_in_generate_batch(kept)
    kept.destroy_cached_continuous_batching_manager()


def run_once(model):
    with use_in_generate_batch(model) as handle:
        results = model.generate_batch([[3, 4]], **configs()).values()
        # Transformers 5.16 leaves failed requests out.
        assert {result.error for result in results} <= {str(handle.error)}
        assert handle.error is not None


def test_an_error_of_a_pass_is_raised_when_the_context_ends():
    model = fresh("llama")
    attention = model.model.layers[1].self_attn
    attention.layer_idx = 9
    with pytest.raises(UnsupportedOption, match=r"layer 9 is beyond the 2 layers.*call model\.generate"):
        run_once(model)
    attention.layer_idx = 1
    attention.k_proj, attention.head_dim = torch.nn.Linear(64, 16), 16
    with pytest.raises(ShapeError, match=r"layer 1 computes keys of shape \(1, 1, 2, 16\); the cache"):
        run_once(model)
    assert model.config._attn_implementation == "sdpa"


# ---- the layout of a batch, against loops over tokens


def indices_of(layout, tables, past, count):
    """Return the read and write indices of a request as transformers lists them."""

    def at(slot):
        return int(tables[slot // layout.block_size]) * layout.stride + slot % layout.block_size

    if layout.window is None:
        return [at(position) for position in range(past + count)], [at(past + new) for new in range(count)]
    old = range(past - min(past, layout.window - 1), past)
    lost = max(0, count - layout.window)
    new = [-7] * lost + [at(position % layout.window) for position in range(past + lost, past + count)]
    return [at(position % layout.window) for position in old] + [1] * count, new


@pytest.mark.parametrize("seed", range(40))
def test_every_query_reads_the_positions_that_it_attends_to(seed):
    random = np.random.default_rng(seed)
    window = None if seed % 4 == 0 else int(random.integers(2, 14))
    layout = GroupLayout(int(random.integers(1, 7)), 50, window)
    counts = np.where(random.random(5) < 0.5, 1, random.integers(0, 20, 5))
    past = np.where(random.random(5) < 0.3, 0, random.integers(0, 40, 5)) * (counts > 0)
    pages = 60 // layout.block_size + 1
    tables = random.permutation(5 * pages).reshape(5, pages)
    lists = [indices_of(layout, *each) for each in zip(tables, past, counts, strict=True)]
    read, write = (np.concatenate([np.asarray(each[side], np.int64) for each in lists]) for side in (0, 1))
    starts = np.concatenate([[0], np.cumsum(counts)])
    read_starts = np.concatenate([[0], np.cumsum([len(each[0]) for each in lists])])
    if not past.any():
        read = read[:0]
    group = lay_out(layout, Requests(starts, past), read, read_starts, write)

    ring, temporary = {}, {}  # the (request, position) in each slot
    for request, position in ((i, p) for i in range(5) for p in range(past[i])):
        slot = position if window is None else position % window
        ring[int(tables[request, slot // layout.block_size]) * layout.block_size + slot % layout.block_size] = (
            request,
            position,
        )
    token_of = [(i, past[i] + new) for i in range(5) for new in range(counts[i])]
    seen = {}
    if group.gathered is not None:
        late = group.gathered
        for slot, target in zip(late.old_slots, late.old_targets, strict=True):
            temporary[int(target)] = ring[int(slot)]
        rows = range(len(token_of)) if late.part.tokens is None else late.part.tokens
        for row, target in zip(rows, late.new_targets, strict=True):
            temporary[int(target)] = token_of[row]
        assert max(temporary) < late.num_blocks * GATHER_BLOCK
    for token, slot in zip(token_of, group.slots, strict=True):
        if slot >= 0:
            ring[int(slot)] = token
    for part, block_size, stored in (
        (group.in_place, layout.block_size, ring),
        (group.gathered and group.gathered.part, GATHER_BLOCK, temporary),
    ):
        if part is None:
            continue
        rows = list(range(len(token_of)) if part.tokens is None else part.tokens)
        for i, (table, length) in enumerate(zip(part.block_table, part.seq_lens, strict=True)):
            keys = [stored[int(table[k // block_size]) * block_size + k % block_size] for k in range(length)]
            own = rows[part.cu_query_lens[i] : part.cu_query_lens[i + 1]]
            for new, row in enumerate(own):
                last = length - len(own) + new
                first = 0 if part.window is None else max(0, last - part.window + 1)
                assert row not in seen
                seen[row] = sorted(keys[first : last + 1])
    assert seen == {
        row: [(request, p) for p in range(0 if window is None else max(0, position - window + 1), position + 1)]
        for row, (request, position) in enumerate(token_of)
    }
