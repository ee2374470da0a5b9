"""Prefix reuse of PagedCache: what later generations reuse, and passes that publish nothing."""

from __future__ import annotations

import pytest

from pagecore.errors import ShapeError, UnsupportedOption
from tests.interop.families import EOS, dynamic_cache, left_padded, make_cache, make_model, prompts, torch, transformers
from tests.interop.generations import WINDOWED, computed, expect, num_cached, run
from tests.passing import passing

# ---- prefix reuse


@WINDOWED
def test_a_second_generation_only_computes_new_columns(family):
    model, ids = make_model(family), prompts(1, 30)
    cache = make_cache(model)
    first = run(model, ids, cache)
    assert cache.begin(ids) == 28  # whole blocks of 4, without the last token
    with computed(model) as columns:
        assert run(model, ids, cache) == first
    assert columns == [2] + 7 * [1]
    longer = torch.tensor(first)
    longer = torch.cat([longer, prompts(1, 3, seed=1)], dim=1)
    assert cache.begin(longer) == 36
    assert run(model, longer, cache) == expect(model, longer)


@WINDOWED
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}])
def test_rows_with_equal_beginnings_share_their_blocks(family, options):
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
def test_padded_rows_begin_at_the_shortest_reused_prefix(family):
    """Rows reuse different numbers of blocks, and a window may no longer hold the keys of a shorter prefix."""
    model, ids = make_model(family), prompts(3, 26)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[1, :2] = 0, 0
    expected = expect(model, ids, mask, max_new_tokens=4)
    for seen in ([0], [2], [0, 1], [1, 2], [0, 1, 2]):
        cache = make_cache(model)
        for row in seen:
            one = ids[row][mask[row].bool()][None]
            cache.reset()
            run(model, one, cache, max_new_tokens=1)
        reused = cache.begin(ids, mask)
        assert reused > (2 if len(seen) == 3 else -1)
        assert run(model, ids, cache, mask, max_new_tokens=4) == expected
        cache.kv.check_invariants()


def test_equal_prompts_are_stored_once():
    model, ids = make_model("llama"), prompts(1, 16).repeat(5, 1)
    cache = make_cache(model)
    assert run(model, ids, cache, max_new_tokens=1) == expect(model, ids, max_new_tokens=1)
    assert cache.kv.stats().num_used_blocks == 4
    assert run(model, ids[:, :5], make_cache(model)) == expect(model, ids[:, :5])


def test_namespaces_share_no_blocks():
    model, ids = make_model("llama"), prompts(1, 20)
    cache = make_cache(model)
    cache.begin(ids, namespace="adapter a")
    run(model, ids, cache)
    assert cache.begin(ids, namespace="adapter b") == 0
    assert cache.begin(ids) == 0
    assert cache.begin(ids, namespace="adapter a") == 16


def test_clear_prefix_cache_also_removes_the_rows():
    model, ids = make_model("llama"), prompts(1, 20)
    cache = make_cache(model)
    run(model, ids, cache)
    assert cache.clear_prefix_cache() == 6  # 27 columns, in whole blocks of 4
    assert (cache.begin(ids), cache.kv.stats().num_cached_blocks) == (0, 0)
    assert make_cache(model, prefix_cache=False).clear_prefix_cache() == 0


def test_a_prompt_other_than_that_of_begin_raises():
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


def test_a_model_whose_keys_depend_on_the_length_has_no_prefix_cache():
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


# ---- keys that depend on more than ids are not published


@WINDOWED
def test_embeddings_publish_nothing(family):
    model, ids = make_model(family), prompts(2, 12)
    embeddings = model.get_input_embeddings()(ids).detach()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(inputs_embeds=embeddings, **passing(dynamic_cache(model)), **options)
    cache = make_cache(model)
    got = model.generate(inputs_embeds=embeddings, **passing(cache), **options)
    assert got.tolist() == expected.tolist()
    assert [sequence.num_tokens for sequence in cache._generation.rows.sequences] == [0, 0]
    if family == "llama":
        cache.crop(-3)
        assert cache.get_seq_length() == 12 + 7 - 3
    assert num_cached(cache) == 0
    cache.begin(ids)  # ids first, then embeddings instead of them
    assert model.generate(inputs_embeds=embeddings, **passing(cache), **options).tolist() == expected.tolist()
    assert num_cached(cache) == 0


def test_ids_after_embeddings_are_not_appended_to_the_sequence():
    model, ids = make_model("llama"), prompts(1, 16)
    cache = make_cache(model)
    with torch.no_grad():
        model(ids[:, :4], **passing(cache))
        model(inputs_embeds=model.get_input_embeddings()(ids[:, 4:8]), **passing(cache))
        got = model(ids[:, 8:], **passing(cache)).logits
        torch.testing.assert_close(got, model(ids).logits[:, 8:], rtol=1e-4, atol=1e-4)
    (sequence,) = cache._generation.rows.sequences
    assert (sequence.tokens.tolist(), sequence.num_computed_tokens) == (ids[0, :4].tolist(), 8)
    assert num_cached(cache) == 1


def test_rows_with_further_inputs_publish_nothing_and_are_not_merged():
    model, ids = make_model("gpt2"), prompts(1, 12).repeat(2, 1)
    types = torch.stack([torch.full((12,), 3), torch.full((12,), 4)])
    with torch.no_grad():
        expected = model(ids, token_type_ids=types, **passing(dynamic_cache(model))).logits
        cache = make_cache(model)
        got = model(ids, token_type_ids=types, **passing(cache)).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert num_cached(cache) == 0


def test_a_model_of_images_only_publishes_passes_of_text():
    """The base model gets ids, and the decoder inside it gets embeddings."""
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
    with torch.no_grad():  # some versions of generate pass arguments about images
        model.base_model(ids, **passing(cache))
    assert cache.begin(ids) == 8
    assert run(model, ids, cache) == expected
    pictured = ids.clone()
    pictured[:, 2:6] = EOS - 1
    images = {"pixel_values": torch.randn(2, 3, 28, 28)}
    expected = expect(model, pictured, **images)
    cache = make_cache(model)
    assert run(model, pictured, cache, **images) == expected
    assert num_cached(cache) == 0


def test_positions_that_do_not_count_tokens_publish_nothing_and_raise_after_a_reused_prefix():
    model, ids = make_model("llama"), prompts(1, 12)
    positions = 3 * torch.arange(12)[None]
    with torch.no_grad():
        expected = model(ids, position_ids=positions, **passing(dynamic_cache(model))).logits
        cache = make_cache(model)
        got = model(ids, position_ids=positions, **passing(cache)).logits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert num_cached(cache) == 0
        model(ids, **passing(cache))
        assert cache.begin(ids) == 8
        with pytest.raises(UnsupportedOption, match="position_ids that count"):
            model(ids[:, 8:], position_ids=positions[:, 8:], **passing(cache))
        model(ids[:, 8:], position_ids=torch.arange(8, 12)[None], **passing(cache))
    assert num_cached(cache) == 3


def test_padding_without_positions_publishes_nothing():
    """Without positions the model counts columns, so the keys of a padded row have other positions."""
    model, ids = make_model("llama"), prompts(1, 15)
    mask = left_padded(ids)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, **passing(dynamic_cache(model))).logits[:, 3:]
        cache = make_cache(model)
        got = model(ids, attention_mask=mask, **passing(cache)).logits[:, 3:]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert num_cached(cache) == 0
        model(ids[:, 3:], **passing(cache))
        assert cache.begin(ids, mask) == 3 + 8
        with pytest.raises(UnsupportedOption, match="padding"):
            model(ids[:, 11:], attention_mask=mask, **passing(cache))
