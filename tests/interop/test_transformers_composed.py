"""Tokens of SeamlessM4T, T5Gemma and models made of two others, compared with those of transformers' own cache."""

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import specs_from_config
from tests.interop.families import torch, transformers
from tests.models.encoders.test_cross_attention import BERT, GEMMA, GPT_2, SIDES, SMALL_VIT
from tests.passing import passing

from pagecore.interop.transformers import PagedEncoderDecoderCache  # isort: skip  # after families, which skips

IDS = {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def composed(name, encoder, decoder):
    """Return a small model made of two others."""
    parts = [transformers.AutoConfig.for_model(**part) for part in (encoder, decoder)]
    config = getattr(transformers, f"{name}Config").from_encoder_decoder_configs(*parts)
    model = getattr(transformers, f"{name}Model")(config=config)
    model.generation_config = transformers.GenerationConfig(**IDS)
    return model


def build(kind):
    """Return a small model and the inputs of `generate`."""
    torch.manual_seed(0)
    ids = torch.randint(3, 90, (2, 9))
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "seamless_m4t":
        config = transformers.AutoConfig.for_model(kind, **SIDES | IDS)
        return transformers.SeamlessM4TForTextToText(config), text
    if kind == "encoder-decoder":
        return composed("EncoderDecoder", BERT, BERT), text
    decoder = {name: value for name, value in GPT_2.items() if name != "add_cross_attention"}
    return composed("VisionEncoderDecoder", SMALL_VIT, decoder), {"pixel_values": torch.randn(2, 3, 40, 40)}


@pytest.mark.parametrize("kind", ["seamless_m4t", "encoder-decoder", "vision-encoder-decoder"])
@pytest.mark.parametrize("beams", [1, 3])
def test_tokens_are_those_of_transformers(kind, beams):
    model, inputs = build(kind)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    expected = model.eval().generate(**inputs, **options)
    model.set_attn_implementation("pagecore")
    cache = PagedEncoderDecoderCache(model, num_blocks=64)
    assert torch.equal(model.generate(**inputs, **options, **passing(cache)), expected)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_decoder_with_windows_takes_their_specs(softcap, beams):
    torch.manual_seed(0)
    decoder = {**GEMMA, "head_dim": 16, "attn_logit_softcapping": softcap}
    sides = {"encoder": decoder, "decoder": decoder}
    config = transformers.AutoConfig.for_model("t5gemma", **sides, vocab_size=101, initializer_range=0.3)
    model = transformers.T5GemmaForConditionalGeneration(config).eval()
    model.generation_config = transformers.GenerationConfig(decoder_start_token_id=1, pad_token_id=0)
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 90, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "num_beams": beams}
    expected = model.generate(ids, **options)
    model.set_attn_implementation("pagecore")
    if softcap:
        model.get_encoder().set_attn_implementation("eager")
    cache = PagedEncoderDecoderCache(model, layers=specs_from_config(config.to_dict(), dtype="float32"), num_blocks=64)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **options, **passing(cache)), expected)


def test_other_families_need_layers():
    config = transformers.AutoConfig.for_model("moonshine", hidden_size=48, vocab_size=101, pad_token_id=0)
    model = transformers.MoonshineForConditionalGeneration(config).eval()
    model.set_attn_implementation("pagecore")
    with pytest.raises(
        UnsupportedOption, match=r"model_type is 'moonshine'; expected one of .*: for another model pass"
    ):
        PagedEncoderDecoderCache(model, num_blocks=64)
