"""Checkpoints of hybrid models: prompts continue from states that earlier ones left in the prefix cache."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pagecore.errors import OutOfBlocks, ShapeError, UnsupportedOption
from tests.interop import generations
from tests.interop.families import dynamic_cache, left_padded, make_cache, prompts, torch
from tests.interop.generations import computed
from tests.interop.hybrids import HYBRIDS, make_hybrid
from tests.interop.test_transformers_hybrids import assert_close, logits, states
from tests.thinning import in_turn

from pagecore.interop.transformers.states.running import Checkpoints, plan_segments  # isort: skip  # after families, which skips

# A state that is wrong changes the first tokens.
run = partial(generations.run, max_new_tokens=3)
expect = partial(generations.expect, max_new_tokens=3)

EVERY_FAMILY = pytest.mark.parametrize("family", HYBRIDS)
WITHOUT_WINDOWS = ["qwen3_next", "falcon_h1", "lfm2", "jamba"]
KINDS = pytest.mark.parametrize("family", [*WITHOUT_WINDOWS, "zaya"])


def make(model, **options):
    """Return a cache with checkpoints at multiples of 8 tokens in prompts, and of 16 afterwards."""
    return make_cache(model, **{"chunk": 8, "interval": 16} | options)


def endings(base, *columns):
    """Return prompts that begin with `base` and end with other ids."""
    return [torch.cat([base, prompts(len(base), count, seed=9 + count)], dim=1) for count in columns]


@pytest.mark.parametrize(
    ("family", "options"),
    in_turn(HYBRIDS, over=[[{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}]]),
    ids=str,
)
def test_worked_example_d11_prompts_with_other_endings_continue_from_a_checkpoint(family, options):
    """The state after 32 of 40 tokens, and the tokens of a run from scratch."""
    model, base = make_hybrid(family), prompts(1, 32)
    first, second, third = endings(base, 8, 9, 10)
    expected = [expect(model, each) for each in (first, second, third)]
    cache = make(model)
    assert run(model, first, cache) == expected[0]
    assert cache.begin(second) == 32  # of 40 tokens: an equal prompt computes its last token, and begins there, too
    assert run(model, second, cache) == expected[1]
    assert cache.begin(third) == 32
    with computed(model) as columns:
        assert run(model, third, cache) == expected[2]
    assert columns[0] == 10
    both = torch.cat([endings(base, 12)[0], endings(base, 7)[0].repeat(1, 2)[:, :44]])
    torch.manual_seed(2)
    wanted = expect(model, both, **options)
    assert cache.begin(both) >= 32
    torch.manual_seed(2)
    assert run(model, both, cache, **options) == wanted
    cache.reset()
    cache.kv.check_invariants()


@EVERY_FAMILY
def test_a_checkpoint_is_the_state_after_its_tokens(family):
    model, ids = make_hybrid(family), prompts(1, 21)
    reference = dynamic_cache(model)
    logits(model, ids[:, :16], reference)
    cache = make(model)
    logits(model, ids, cache)  # 16 tokens are in one segment, 5 in the next
    cache.reset()
    assert cache.begin(ids) == 16
    logits(model, ids[:, 16:17], cache)  # reads the checkpoint
    kv = cache.kv
    slot = int(np.from_dlpack(cache._generation._forward.batch.host.states.state_read)[0])
    specs = [kv.spec(place) for place in range(kv.num_layers)]
    places = [
        (place, plane.name) for place, spec in enumerate(specs) for plane in spec.planes if plane.per == "sequence"
    ]
    for (place, name), expected in zip(places, states(reference), strict=True):
        assert_close(torch.from_dlpack(kv.plane(name, place))[slot], expected[0])


@KINDS
def test_decoding_keeps_checkpoints(family):
    model, ids = make_hybrid(family), prompts(1, 12)
    cache = make(model)
    text = torch.tensor(run(model, ids, cache, max_new_tokens=30, eos_token_id=None))
    longer = torch.cat([text[:, :40], prompts(1, 3, seed=4)], dim=1)
    expected = expect(model, longer)
    assert cache.begin(longer) == 32
    assert run(model, longer, cache) == expected


@KINDS
def test_rows_of_a_batch_keep_checkpoints_at_columns_of_their_own(family):
    model, ids = make_hybrid(family), prompts(3, 30)
    mask = left_padded(ids, 3)
    mask[1, :11] = 0
    expected = expect(model, ids, mask)
    cache = make(model)
    assert run(model, ids, cache, mask) == expected
    for row, cached in ((0, 24), (1, 16), (2, 24)):
        one = ids[row : row + 1][:, mask[row].bool()]
        longer = torch.cat([one, prompts(1, 5, seed=7)], dim=1)
        wanted = expect(model, longer)
        assert cache.begin(longer) == cached
        assert run(model, longer, cache) == wanted


@KINDS
def test_rows_that_begin_later_start_from_zeros(family):
    model = make_hybrid(family)
    long = prompts(1, 35)
    cache = make(model)
    run(model, long, cache)
    ids = torch.cat([endings(long[:, :32], 10)[0], prompts(1, 42, seed=3)])
    mask = torch.ones_like(ids)
    mask[1, :34] = 0
    expected = expect(model, ids, mask)
    assert cache.begin(ids, mask) == 32
    assert run(model, ids, cache, mask) == expected


@KINDS
def test_rows_whose_states_end_at_different_columns_start_together(family):
    model, first = make_hybrid(family), prompts(2, 40)
    cache = make(model)
    run(model, first[:1, :33], cache)  # checkpoint after 32 tokens
    run(model, first[1:, :25], cache)  # checkpoint after 24 tokens
    assert cache.begin(first[:1]) == 32
    assert cache.begin(first[1:]) == 24
    expected = expect(model, first)
    assert cache.begin(first) == 0
    assert run(model, first, cache) == expected


@KINDS
def test_prompts_of_unequal_lengths_continue_from_checkpoints(family):
    model, ids = make_hybrid(family), prompts(2, 40)
    mask = left_padded(ids, 0)
    mask[0, :8] = 0
    mask[1, :16] = 0
    cache = make(model)
    for row, dropped in ((0, 8), (1, 16)):
        run(model, ids[row : row + 1, dropped:33], cache)  # the last token is computed after the checkpoint
    for columns in (40, 38):
        expected = expect(model, ids[:, :columns], mask[:, :columns])
        assert cache.begin(ids[:, :columns], mask[:, :columns]) == 32
        assert run(model, ids[:, :columns], cache, mask[:, :columns]) == expected
    shifted = torch.cat([ids[:, :1], ids[:, :37]], dim=1)  # states after tokens at other columns of the two rows
    mask = torch.cat([mask[:, :1] * 0, mask[:, :37]], dim=1)
    mask[1, :16] = 0
    expected = expect(model, shifted, mask)
    cache.begin(shifted, mask)
    assert run(model, shifted, cache, mask) == expected


@KINDS
def test_begin_refuses_right_padding_and_goes_on(family):
    model, ids = make_hybrid(family), prompts(2, 20)
    reference = dynamic_cache(model)
    logits(model, ids, reference)
    wanted = logits(model, ids[:, :1], reference)
    cache = make(model)
    logits(model, ids, cache)
    for column in (19, 4):
        mask = torch.ones_like(ids)
        mask[1, column] = 0
        with pytest.raises(UnsupportedOption, match=f"column {column} of row 1 is padding after tokens"):
            cache.begin(ids, mask)
        assert cache.get_seq_length() == 20
    assert_close(logits(model, ids[:, :1], cache), wanted)


@pytest.mark.parametrize("family", WITHOUT_WINDOWS)
def test_crop_returns_to_a_checkpoint(family):
    model, ids = make_hybrid(family), prompts(2, 21)
    expected = logits(model, ids, dynamic_cache(model))
    model.set_attn_implementation("pagecore")
    cache = make(model)
    logits(model, ids, cache)
    with pytest.raises(UnsupportedOption, match="16"):
        cache.crop(-3)
    assert cache.get_seq_length() == 21
    cache.crop(-5)
    assert cache.get_seq_length() == 16
    positions = torch.arange(16, 21)[None]
    assert_close(logits(model, ids[:, 16:], cache, position_ids=positions), expected[:, 16:])
    cache.reset()
    cache.kv.check_invariants()


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "kimi_linear", "zaya"])
def test_random_generations_give_the_tokens_from_scratch(family):
    """Prompts with shared beginnings, padding, beams and answers, with few blocks and slots."""
    model, rng = make_hybrid(family), np.random.default_rng(3)
    base = prompts(2, 40, seed=8)
    cache = make(model, num_blocks=120, num_states=28, max_sequences=8)
    reused = 0
    for turn in range(10):
        rows, shared, fresh = int(rng.integers(1, 4)), int(rng.integers(0, 41)), int(rng.integers(1, 12))
        tail = torch.from_numpy(rng.integers(2, 90, (rows, fresh)))
        ids = torch.cat([base[rng.integers(0, 2, rows), :shared], tail], dim=1)
        mask = torch.ones_like(ids)
        if rng.random() < 0.4:
            mask[0, : int(rng.integers(0, ids.shape[1]))] = 0
        options = [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}][int(rng.integers(3))]
        torch.manual_seed(turn)
        expected = expect(model, ids, mask, max_new_tokens=4, **options)
        if rng.random() < 0.7:
            reused += cache.begin(ids, mask)
        torch.manual_seed(turn)
        assert run(model, ids, cache, mask, max_new_tokens=4, **options) == expected, turn
        cache.kv.check_invariants()
    cache.reset()
    cache.kv.check_invariants()
    assert reused > 20


def test_slots_that_are_short_are_reported_before_anything_changes():
    model, ids = make_hybrid("qwen3_next"), prompts(4, 9)
    cache = make(model, num_states=3)
    with pytest.raises(OutOfBlocks, match="slot"):
        logits(model, ids, cache)
    assert cache.get_seq_length() == 0
    cache.kv.check_invariants()
    assert_close(logits(model, ids[:2], cache), logits(model, ids[:2], dynamic_cache(model)))
    model.set_attn_implementation("pagecore")


def test_a_cache_without_prefixes():
    model, ids = make_hybrid("qwen3_next"), prompts(2, 33)
    expected = expect(model, ids)
    cache = make(model, prefix_cache=False)
    for _ in range(2):
        assert cache.begin(ids) == 0
        assert run(model, ids, cache) == expected


def test_namespaces_share_no_states():
    model, ids = make_hybrid("qwen3_next"), prompts(1, 33)
    cache = make(model)
    run(model, ids, cache)
    assert cache.begin(ids, namespace="adapter") == 0
    assert cache.begin(ids) == 32
    cache.clear_prefix_cache()
    assert cache.begin(ids) == 0


def test_positions_that_do_not_count_tokens_leave_no_checkpoint_for_others():
    model, ids = make_hybrid("qwen3_next"), prompts(1, 33)
    cache = make(model)
    run(model, ids, cache)
    cache.begin(ids)
    with pytest.raises(UnsupportedOption, match="do not continue the reused prefix"):
        logits(model, ids[:, 32:], cache, position_ids=torch.tensor([[90]]))
    fresh = prompts(1, 33, seed=2)
    positions = torch.arange(33)[None] * 2
    cache.reset()
    logits(model, fresh, cache, position_ids=positions)
    assert cache.begin(fresh) == 0


def test_an_interval_that_is_not_a_multiple_of_the_chunk_is_refused():
    with pytest.raises(ShapeError, match="interval is 20, which is not a multiple of the chunk of 8 tokens"):
        make(make_hybrid("qwen3_next"), interval=20)


def test_segments_end_where_rows_keep_checkpoints():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows, columns = int(rng.integers(1, 5)), int(rng.integers(1, 12))
        padding = rng.integers(0, columns + 1, rows)
        is_token = np.arange(columns) >= padding[:, None]
        before = np.where(padding > 0, 0, rng.integers(0, 6, rows))
        slots = rng.permutation(20)[:rows] * (rng.random(rows) < 0.7)
        lengths = before + rng.integers(0, columns + 2, rows)
        segments = plan_segments(before, is_token, Checkpoints(slots, lengths, slots), torch.device("cpu"))
        kept = {}
        for row in range(rows):
            length = before[row]
            for column in range(columns):
                length += is_token[row, column]
                if is_token[row, column] and length == lengths[row] and slots[row]:
                    kept.setdefault(column + 1, []).append((row, slots[row]))
        assert [each.end for each in segments] == sorted({*kept, columns})
        for each in segments:
            pairs = [] if each.rows is None else list(zip(each.rows.tolist(), each.slots.tolist(), strict=True))
            assert pairs == kept.get(each.end, [])
            blank = [row for row in range(rows) if before[row] == 0 and not is_token[row, : each.end].any()]
            assert ([] if each.blank is None else each.blank.tolist()) == blank
