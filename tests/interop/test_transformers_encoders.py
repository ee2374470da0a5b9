"""PagedEncoderDecoderCache: Whisper, T5 and BART give the tokens that they give with their own cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagecore import CrossSpec, ShapeError, UnsupportedOption
from tests.interop.encoders import CONFIGS, inputs_of, make_model
from tests.interop.families import make_model as make_decoder
from tests.interop.families import torch, transformers
from tests.passing import passing

from pagecore.interop.transformers import PagedCache, PagedEncoderDecoderCache  # isort: skip  # after families

DynamicCache, EncoderDecoderCache = transformers.DynamicCache, transformers.EncoderDecoderCache

EVERY_FAMILY = pytest.mark.parametrize("family", CONFIGS)


def own_cache():
    """Return the cache of transformers; the one that a T5 makes has the number of layers of its encoder."""
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def generate(model, cache, inputs, **options):
    torch.manual_seed(3)
    options = {"max_new_tokens": 9, "do_sample": False} | options
    with torch.no_grad():
        return model.generate(**inputs, **passing(cache), **options).tolist()


def both(family, inputs=None, **options):
    """Return the tokens with the model's own cache, the tokens with a paged cache, and the paged cache."""
    inputs = inputs_of(family) if inputs is None else inputs
    model = make_model(family)
    expected = generate(model, own_cache(), inputs, **options)
    model.set_attn_implementation("pagecore")
    cache = PagedEncoderDecoderCache(model, num_blocks=200, block_size=4)
    got = generate(model, cache, inputs, **options)
    cache.kv.check_invariants()
    return expected, got, cache


@EVERY_FAMILY
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 5},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True},
        {"num_beams": 2, "do_sample": True},
    ],
    ids=str,
)
def test_generation_gives_equal_tokens(family, options):
    expected, got, _ = both(family, max_new_tokens=16, **options)
    assert got == expected
    assert len({token for row in got for token in row}) > 3, "random weights, not one token"
    assert got[0] != got[-1], "the tokens depend on the encoder"


@EVERY_FAMILY
def test_without_a_paged_cache_attention_is_sdpa(family):
    model, inputs = make_model(family), inputs_of(family)
    expected = generate(model, own_cache(), inputs)
    model.set_attn_implementation("pagecore")
    assert generate(model, own_cache(), inputs) == expected


@EVERY_FAMILY
def test_a_decoder_prompt_gives_equal_tokens(family):
    prompt = torch.tensor([[2, 7, 9, 11, 5], [2, 7, 9, 30, 6]])
    expected, got, _ = both(family, decoder_input_ids=prompt, num_beams=2)
    assert got == expected


@EVERY_FAMILY
def test_beams_share_the_blocks_of_one_encoder_output(family):
    inputs = inputs_of(family)
    _, _, cache = both(family, inputs, num_beams=3)
    lengths = [50, 50] if family == "whisper" else inputs["attention_mask"].sum(dim=1).tolist()
    held = cache.kv.block_map(1)
    assert (held.holders > 0).sum() == sum(-(-length // 4) for length in lengths), "encoder padding takes no blocks"
    assert held.holders.max() == 3
    cache.reset()
    assert cache.kv.stats().num_used_blocks == 0


@EVERY_FAMILY
def test_equal_inputs_share_their_blocks(family):
    inputs = {name: value[:1].repeat(3, *[1] * (value.ndim - 1)) for name, value in inputs_of(family).items()}
    expected, got, cache = both(family, inputs)
    assert got == expected
    assert cache.kv.block_map(1).holders.max() == 3


@EVERY_FAMILY
def test_a_cache_serves_one_generation_after_another(family):
    model = make_model(family)
    first, second = (inputs_of(family, seed=seed) for seed in (1, 2))
    expected = [generate(model, own_cache(), inputs) for inputs in (first, second)]
    model.set_attn_implementation("pagecore")
    cache = PagedEncoderDecoderCache(model, num_blocks=200, block_size=4)
    for inputs, tokens in zip((first, second), expected, strict=True):
        assert generate(model, cache, inputs) == tokens
    assert cache.kv.num_sequences == 2


def test_each_segment_of_a_long_input_begins_anew():
    model = make_model("whisper")
    torch.manual_seed(5)
    inputs = {"input_features": torch.randn(1, 8, 250), "attention_mask": torch.ones(1, 250, dtype=torch.long)}
    model.generation_config.no_timestamps_token_id = 59
    options = {"return_timestamps": True, "max_new_tokens": 8}
    expected = generate(model, None, inputs, **options)
    model.set_attn_implementation("pagecore")
    cache = PagedEncoderDecoderCache(model, num_blocks=200, block_size=4)
    assert generate(model, cache, inputs, **options) == expected
    cache.kv.check_invariants()


@pytest.mark.parametrize("option", [{"return_dict_in_generate": True}, {"logprob_threshold": -9.0}])
def test_options_for_which_a_whisper_copies_its_cache_are_refused(option):
    model, inputs = make_model("whisper"), inputs_of("whisper")
    expected = generate(model, own_cache(), inputs)
    model.set_attn_implementation("pagecore")
    cache = PagedEncoderDecoderCache(model, num_blocks=200, block_size=4)
    with pytest.raises(UnsupportedOption, match="a tensor of its keys, which are in blocks; use transformers'"):
        model.generate(**inputs, **passing(cache), do_sample=False, max_new_tokens=3, **option)
    assert generate(model, cache, inputs) == expected


@EVERY_FAMILY
def test_formats_store_the_encoder_s_keys(family):
    model = make_model(family)
    model.set_attn_implementation("pagecore")
    specs = PagedEncoderDecoderCache(model, num_blocks=200, block_size=4).kv
    layers = [specs.spec(layer) for layer in range(6)]
    assert [isinstance(spec, CrossSpec) for spec in layers] == [False] * 3 + [True] * 3
    layers[3:] = [spec.with_format("int8_token") for spec in layers[3:]]
    cache = PagedEncoderDecoderCache(model, layers=layers, num_blocks=200, block_size=4)
    inputs = inputs_of(family)
    start = torch.tensor([[2, 5, 7]] * 2)
    with torch.no_grad():
        expected = model(**inputs, decoder_input_ids=start).logits
        found = model(**inputs, decoder_input_ids=start, **passing(cache)).logits
    assert 0 < (found - expected).norm() < 2e-2 * expected.norm()


@EVERY_FAMILY
def test_a_failed_pass_changes_nothing(family):
    model, inputs = make_model(family), inputs_of(family)
    expected = generate(model, own_cache(), inputs)
    model.set_attn_implementation("pagecore")
    cache = PagedEncoderDecoderCache(model, num_blocks=200, block_size=4)

    def fail(*_):
        raise RuntimeError("stop")

    decoder = model.get_decoder()
    hook = (decoder.block if family == "t5" else decoder.layers)[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        generate(model, cache, inputs)
    hook.remove()
    cache.kv.check_invariants()
    assert cache.kv.stats().num_used_blocks == 0
    assert generate(model, cache, inputs) == expected


def test_bad_models_and_layers_are_refused_by_name():
    whisper, t5, decoder = make_model("whisper"), make_model("t5"), make_decoder("llama")
    for model in (whisper, t5, decoder):
        model.set_attn_implementation("pagecore")
    with pytest.raises(UnsupportedOption, match=r"has an encoder; .* PagedEncoderDecoderCache"):
        PagedCache(whisper, num_blocks=8)
    with pytest.raises(UnsupportedOption, match="has no encoder; use a PagedCache"):
        PagedEncoderDecoderCache(decoder, num_blocks=8)
    with pytest.raises(UnsupportedOption, match="adds a bias"):
        PagedEncoderDecoderCache(t5, num_blocks=8, format="float8_e4m3fn")
    read = PagedEncoderDecoderCache(t5, num_blocks=8).kv
    specs = [read.spec(layer) for layer in range(read.num_layers)]
    specs[0] = replace(specs[0], key_rotation="hadamard")
    with pytest.raises(UnsupportedOption, match=r"a format or rotation is given, .* adds a bias"):
        PagedEncoderDecoderCache(t5, layers=specs, num_blocks=8)
    with pytest.raises(ShapeError, match="layers has 1 specs"):
        PagedEncoderDecoderCache(t5, layers=[CrossSpec(4, 8)], num_blocks=8)
    with pytest.raises(UnsupportedOption, match="layers is a CrossSpec; expected a list with two specs for each layer"):
        PagedEncoderDecoderCache(t5, layers=CrossSpec(4, 8), num_blocks=8)
    with pytest.raises(UnsupportedOption, match="device is 'cuda', but the cache of a model is on its device, cpu"):
        PagedEncoderDecoderCache(t5, num_blocks=8, device="cuda")
    cache = PagedEncoderDecoderCache(whisper, num_blocks=200)
    with torch.no_grad(), pytest.raises(UnsupportedOption, match="no encoder_hidden_states"):
        whisper.get_decoder()(torch.tensor([[2]]), **passing(cache))
    mask = inputs_of("bart")
    bart = make_model("bart")
    bart.set_attn_implementation("pagecore")
    cache = PagedEncoderDecoderCache(bart, num_blocks=200)
    mask["attention_mask"][0] = 0
    with pytest.raises(ShapeError, match="has no token"):
        generate(bart, cache, mask)
