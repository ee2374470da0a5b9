"""Hybrid models with a PagedCache: attention layers store blocks, recurrent layers a state for each row."""

from __future__ import annotations

import copy
import gc
import pickle
from functools import partial

import pytest

from pagecore import AttentionSpec
from pagecore.errors import ShapeError, UnsupportedOption
from tests.interop import generations
from tests.interop.families import dynamic_cache, left_padded, make_cache, prompts, torch, transformers
from tests.interop.generations import Failure, compiled, computed, failing
from tests.interop.hybrids import HYBRIDS, make_hybrid
from tests.passing import passing
from tests.thinning import interleaved

from pagecore.interop.transformers.states.specs import layer_kinds  # isort: skip  # after families, which skips

# A state that is wrong changes the first tokens.
run = partial(generations.run, max_new_tokens=5)
expect = partial(generations.expect, max_new_tokens=5)

EVERY_FAMILY = pytest.mark.parametrize("family", HYBRIDS)
KINDS = pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm2", "jamba"])
BEAMS = {"num_beams": 3, "num_return_sequences": 2}
MODES = {"greedy": {}, "beams": BEAMS, "samples": {"do_sample": True, "num_return_sequences": 2}}


def logits(model, ids, cache, **options):
    with torch.no_grad():
        return model(ids, **passing(cache), **options).logits


def states(cache):
    """Return the states of all recurrent layers, in the order of the layers."""
    layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    return [each for layer in layers for each in (layer.conv_states[0], layer.recurrent_states[0]) if each is not None]


def assert_close(got, expected):
    # A prompt in one pass and in chunks differs by 4e-4 in transformers itself, with logits up to 5.
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("family", "mode"), interleaved(HYBRIDS, MODES))
def test_tokens_are_those_of_dynamic_cache(family, mode):
    options = MODES[mode]
    model, ids = make_hybrid(family), prompts(2, 11)
    mask, cache = left_padded(ids, 5), make_cache(model)
    torch.manual_seed(1)
    expected = expect(model, ids, mask, **options)
    torch.manual_seed(1)
    assert run(model, ids, cache, mask, **options) == expected
    cache.reset()
    cache.kv.check_invariants()


@EVERY_FAMILY
def test_states_and_logits_are_those_of_dynamic_cache(family):
    model, ids = make_hybrid(family), prompts(2, 14)

    def computed(cache, begin, end):
        # Bamba numbers the columns of each pass from 0 unless it gets their positions.
        return logits(model, ids[:, begin:end], cache, position_ids=torch.arange(begin, end)[None])

    reference = dynamic_cache(model)
    # transformers loses the state of Jamba and Zamba before a pass of several columns, so the reference has only one.
    expected = [computed(reference, 0, 12), computed(reference, 12, 13), computed(reference, 13, 14)]
    cache = make_cache(model)
    got = [computed(cache, begin, end) for begin, end in ((0, 7), (7, 12), (12, 13))]
    before = [each.data_ptr() for each in states(cache)]
    got.append(computed(cache, 13, 14))
    assert_close(torch.cat(got, dim=1), torch.cat(expected, dim=1))
    assert len(states(cache)) == len(states(reference)) > 0
    for own, other in zip(states(cache), states(reference), strict=True):
        assert own.dtype == other.dtype
        assert_close(own, other)
    assert [each.data_ptr() for each in states(cache)] == before  # a decoding step works in place


@EVERY_FAMILY
def test_chunks_of_a_prompt_give_the_tokens_of_one_pass(family):
    model, ids = make_hybrid(family), prompts(2, 11)
    mask = left_padded(ids, 5)
    expected = expect(model, ids, mask)
    assert run(model, ids, make_cache(model), mask, prefill_chunk_size=4) == expected
    # The last chunk is one column, and the first four chunks of the first row are padding.
    got = run(model, ids, make_cache(model), mask, prefill_chunk_size=1, max_new_tokens=2)
    assert got == [row[: 11 + 2] for row in expected]


@EVERY_FAMILY
def test_left_padding_does_not_change_states(family):
    model, ids = make_hybrid(family), prompts(1, 9)
    cache = make_cache(model)
    logits(model, ids, cache)
    expected = [each.clone() for each in states(cache)]
    padded = torch.cat([torch.zeros(1, 5, dtype=ids.dtype), ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :5] = 0
    cache.reset()
    logits(model, padded, cache, attention_mask=mask)
    for own, other in zip(states(cache), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_worked_example_d11_padding():
    """Five columns of padding on the left do not change the states of Qwen3-Next; on the right they do."""
    model, ids = make_hybrid("qwen3_next"), prompts(2, 12)
    cache = make_cache(model)
    logits(model, ids, cache)
    conv, recurrent = expected = states(cache)[:2]
    assert conv.shape == (2, 2 * 2 * 8 + 4 * 12, 4)
    assert recurrent.shape == (2, 4, 8, 12)
    assert recurrent.dtype == torch.float32
    padding = torch.zeros(2, 5, dtype=ids.dtype)
    ones, zeros = torch.ones_like(ids), torch.zeros_like(padding)
    cache.reset()
    logits(model, torch.cat([padding, ids], 1), cache, attention_mask=torch.cat([zeros, ones], 1))
    for own, other in zip(states(cache), expected, strict=False):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)
    reference = dynamic_cache(model)
    logits(model, torch.cat([ids, padding], 1), reference, attention_mask=torch.cat([ones, zeros], 1))
    assert all((own - other).abs().max() > 0.1 for own, other in zip(states(reference), expected, strict=False))


@KINDS
def test_right_padding_is_refused_before_anything_changes(family):
    model, ids = make_hybrid(family), prompts(2, 9)
    cache = make_cache(model)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with pytest.raises(UnsupportedOption, match=r"column 7 of row 1 is padding after tokens, .* pad prompts on the le"):
        logits(model, ids, cache, attention_mask=mask)
    assert cache.get_seq_length() == 0
    first = logits(model, ids[:, :7], cache)
    with pytest.raises(UnsupportedOption, match="column 0 of row 1"):
        logits(model, ids[:, 7:], cache, attention_mask=mask)
    got = torch.cat([first, logits(model, ids[:, 7:], cache)], dim=1)
    assert_close(got, logits(model, ids, dynamic_cache(model)))


@KINDS
def test_rows_are_repeated_and_selected_with_their_states(family):
    model, ids = make_hybrid(family), prompts(3, 9)
    chosen = [2, 0, 0, 2, 1]
    more = prompts(5, 3, seed=1)
    expected = logits(model, torch.cat([ids[chosen], more], dim=1), dynamic_cache(model))[:, 9:]
    cache = make_cache(model)
    logits(model, ids, cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([4, 0, 1, 5, 2, 3]))
    cache.batch_select_indices(torch.tensor([0, 1, 2, 3, 5]))
    cache.kv.check_invariants()
    # Rows of the prompts 2 0 0 2 1 1 after the order, of which the last is left out.
    cache.batch_select_indices(torch.tensor([0, 1, 2, 3, 4]))
    assert_close(logits(model, more, cache), expected)


@KINDS
def test_equal_rows_are_stored_once_and_have_states_each(family):
    model, ids = make_hybrid(family), prompts(2, 12)[[0, 1, 0]]
    more = prompts(3, 2, seed=3)
    cache = make_cache(model)
    logits(model, ids, cache)
    used = cache.kv.stats().num_used_blocks
    got = logits(model, more, cache)
    assert_close(got, logits(model, torch.cat([ids, more], dim=1), dynamic_cache(model))[:, 12:])
    model.set_attn_implementation("pagecore")
    assert used == 2 * 3


@KINDS
def test_a_failed_pass_loses_the_rows_and_says_so(family):
    model, ids = make_hybrid(family), prompts(2, 9)
    expected = expect(model, ids)
    cache = make_cache(model)
    logits(model, ids[:, :6], cache)
    with failing(model, Failure, layer=-1), pytest.raises(Failure):
        logits(model, ids[:, 6:], cache)
    assert cache.get_seq_length() == 0
    with pytest.raises(UnsupportedOption, match="the last forward pass failed and left the states of the recurrent"):
        logits(model, ids[:, 6:], cache)
    cache.kv.check_invariants()
    assert run(model, ids, cache) == expected
    cache.reset()
    with failing(model, Failure, layer=-1), pytest.raises(Failure):
        logits(model, ids, cache)
    assert_close(logits(model, ids, cache), logits(model, ids, dynamic_cache(model)))


@KINDS
def test_columns_before_the_last_checkpoint_cannot_be_cropped(family):
    model, ids = make_hybrid(family), prompts(2, 9)
    cache = make_cache(model)
    assert not cache.is_croppable
    first = logits(model, ids[:, :7], cache)
    cache.crop(0)
    with pytest.raises(UnsupportedOption):
        cache.crop(-2)
    got = torch.cat([first, logits(model, ids[:, 7:], cache)], dim=1)
    assert_close(got, logits(model, ids, dynamic_cache(model)))
    model.set_attn_implementation("pagecore")
    cache.crop(-9)
    assert_close(logits(model, ids, cache), got)


def test_assisted_generation_is_refused():
    model, ids = make_hybrid("lfm2"), prompts(1, 9)
    with pytest.raises(UnsupportedOption, match="without an assistant model and without prompt lookup"):
        run(model, ids, make_cache(model), prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("format", ["int8_token", "float8_e4m3fn"])
def test_attention_layers_in_a_quantised_format(format):
    model, ids = make_hybrid("qwen3_next"), prompts(2, 30)
    expected = logits(model, ids, dynamic_cache(model))
    cache = make_cache(model, format=format)
    assert cache.kv.spec(2).format == format
    error = (logits(model, ids, cache) - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.05


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "lfm2", "jamba"])
def test_models_of_half_precision(family, dtype):
    model, ids = make_hybrid(family, dtype), prompts(2, 9)
    expected, cache = logits(model, ids, dynamic_cache(model)).float(), make_cache(model)
    positions = torch.arange(9)[None]
    parts = [logits(model, ids[:, i], cache, position_ids=positions[:, i]) for i in (slice(0, 6), slice(6, 9))]
    got = torch.cat(parts, dim=1).float()
    assert (got - expected).norm() / expected.norm() < 0.05


def test_specs_of_the_attention_layers():
    model = make_hybrid("granitemoehybrid")
    spec = AttentionSpec(2, 16, num_query_heads=4, dtype="float32")
    with pytest.raises(
        ShapeError, match="layers has 4 specs; expected 1, one for each layer of the model that attends"
    ):
        make_cache(model, layers=[spec] * 4)
    ids = prompts(2, 9)
    assert run(model, ids, make_cache(model, layers=[spec])) == expect(model, ids)


REFUSED = {
    "minimax": ("MiniMax", {}, "the minimax has recurrent layers with states that its own cache class holds"),
    "recurrent_gemma": ("RecurrentGemma", {}, "the recurrent_gemma has recurrent layers with states that its modules"),
    "xlstm": ("xLSTM", {"num_heads": 4}, "the xlstm has recurrent layers with states that its own cache class holds"),
}


def test_a_recurrent_layer_with_other_arguments_is_refused_by_name(monkeypatch):
    model = make_hybrid("lfm2")
    modules = "pagecore.interop.transformers.states.specs.recurrent_modules"
    monkeypatch.setattr(modules, lambda _: {0: torch.nn.Linear(1, 1)})
    with pytest.raises(UnsupportedOption, match=r"the Linear of layer 0 takes input; .* attention_mask or conv_mask,"):
        make_cache(model)


def test_layers_with_states_of_other_kinds_are_refused_by_name():
    config = copy.copy(make_hybrid("zaya").config)
    config.attention_bias = True
    with pytest.raises(UnsupportedOption, match="the zaya has attention_bias = True, so a text begins with biases"):
        layer_kinds(config)
    config = copy.copy(make_hybrid("lfm2").config)
    config.number_of_conv_states = 2
    with pytest.raises(UnsupportedOption, match="layer 0 of the lfm2 has 2 states"):
        layer_kinds(config)


@pytest.mark.parametrize("name", ["Qwen4ExpText", "Glm5NextText"])
def test_hybrids_that_select_keys_with_an_indexer_are_refused_by_name(name):
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=2, layer_types=["linear_attention", "indexed_attention"]
    )
    with pytest.raises(UnsupportedOption, match=r"layer 1 of the .* selects keys with an indexer"):
        layer_kinds(config)


# Models of images and text around a hybrid text model.
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1}
VISION |= {"num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 64, "embed_dim": 32}
MULTIMODAL = {
    "qwen3_5": ("Qwen3_5", VISION),
    "qwen3_5_moe": ("Qwen3_5Moe", VISION),
    "lfm2": ("Lfm2Vl", {"model_type": "siglip2_vision_model"} | VISION),
}


@pytest.mark.parametrize(("family", "mode"), [("qwen3_5", "greedy"), ("qwen3_5_moe", "beams"), ("lfm2", "samples")])
def test_a_text_model_within_a_model_of_images_is_served(family, mode):
    name, vision = MULTIMODAL[family]
    fields = {"model_type": family} if family == "lfm2" else {}
    fields |= HYBRIDS[family][1] | {"initializer_range": 0.2, "tie_word_embeddings": False}
    config = getattr(transformers, f"{name}Config")(text_config=fields, vision_config=vision)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    ids, cache = prompts(2, 21), make_cache(model, chunk=8)
    for mask in (left_padded(ids, 3), None, None):  # the last begins with the checkpoint of the one before
        torch.manual_seed(1)
        expected = expect(model, ids, mask, **MODES[mode])
        cache.reset()
        assert mask is not None or cache.begin(ids) in (0, 16)
        torch.manual_seed(1)
        assert run(model, ids, cache, mask, **MODES[mode]) == expected
    # Qwen3.5 computes three positions for each token, which a prefix of ids does not name.
    assert (cache.kv.stats().prefix_hit_tokens > 0) == (family == "lfm2")
    cache.kv.check_invariants()


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_keep_their_states_elsewhere_are_refused_by_name(family):
    name, fields, says = REFUSED[family]
    base = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = getattr(transformers, f"{name}Config")(**base | {"num_attention_heads": 4} | fields)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with pytest.raises(UnsupportedOption, match=says):
        make_cache(model)


def test_gradients_are_refused():
    model, ids = make_hybrid("qwen3_next"), prompts(1, 5)
    cache = make_cache(model)
    with pytest.raises(UnsupportedOption, match="require grad, and a paged cache has no gradients"):
        model(ids, **passing(cache))


def test_a_recurrent_layer_outside_of_a_pass_is_refused():
    model = make_hybrid("qwen3_next")
    cache = make_cache(model)
    with torch.no_grad(), pytest.raises(UnsupportedOption, match="outside of a forward pass of the cache's model"):
        model.model.layers[0].linear_attn(torch.zeros(1, 1, 64), **passing(cache, model.model.layers[0].linear_attn))


@KINDS
def test_another_model_cannot_change_the_states(family):
    model, ids = make_hybrid(family), prompts(2, 9)
    cache = make_cache(model)
    other = make_hybrid(family, seed=1)
    other.set_attn_implementation("pagecore")
    first = logits(model, ids[:, :7], cache)
    for columns in (slice(7, 8), slice(7, 9)):
        with pytest.raises(UnsupportedOption, match="outside of a forward pass of the model of the cache"):
            logits(other, ids[:, columns], cache)
    got = torch.cat([first, logits(model, ids[:, 7:], cache)], dim=1)
    assert_close(got, logits(model, ids, dynamic_cache(model)))


def test_a_replaced_module_is_noticed():
    model, ids = copy.deepcopy(make_hybrid("qwen3_next")), prompts(1, 5)
    cache = make_cache(model)
    module = model.model.layers[1].linear_attn
    del module.forward
    with pytest.raises(UnsupportedOption, match="recurrent layer 1 of the model did not update its state"):
        logits(model, ids, cache)


def test_modules_are_called_as_before_when_the_caches_are_gone():
    model, ids = copy.deepcopy(make_hybrid("qwen3_next")), prompts(1, 5)
    module = model.model.layers[0].linear_attn
    caches = [make_cache(model), make_cache(model)]
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model.model.layers[0].linear_attn))
    assert "forward" in vars(module)
    caches.pop()
    gc.collect()
    assert "forward" in vars(module)
    expected = logits(model, ids, caches.pop())
    gc.collect()
    assert "forward" not in vars(module)
    column = torch.zeros(1, 1, 64)
    for each in (copied.model.layers[0].linear_attn, loaded):
        assert torch.equal(each(column), module(column))
    assert_close(logits(copied, ids, dynamic_cache(copied)), expected)
    assert_close(logits(copied, ids, make_cache(copied)), expected)


def test_a_compiled_model_gives_equal_tokens():
    """A Llama compiles passes of several columns, too: each number of columns is traced for seconds."""
    model, ids = copy.deepcopy(make_hybrid("falcon_h1")), prompts(2, 9)
    expected, cache = expect(model, ids), make_cache(model)
    logits(model, ids[:, :-1], cache)
    with compiled(model), computed(model) as columns:
        assert run(model, ids, cache) == expected
    assert columns == [1] * 5
