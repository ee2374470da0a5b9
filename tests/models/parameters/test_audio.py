"""Counts of parameters of models that listen, compared with small ones that transformers builds now."""

import importlib

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import ConfigError
from pagecore.models.parameters import Kind, count_parameters, vision_tower
from tests.capabilities import require
from tests.models.meta import on_meta_device

TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101}
NAMED = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4}
NAMED |= {"num_mel_bins": 20, "max_source_positions": 50}
WHISPER = {"d_model": 32, "encoder_ffn_dim": 72, "encoder_layers": 3, "encoder_attention_heads": 4}
WHISPER |= {"num_mel_bins": 20, "max_source_positions": 50, "downsample_hidden_size": 10, "output_dim": 64}
SEEING = {"depth": 2, "hidden_size": 32, "intermediate_size": 72, "num_heads": 4, "out_hidden_size": 64}
LISTENING = {
    "audioflamingo3": NAMED,
    "glmasr": NAMED | {"intermediate_size": 128},
    "qwen2_audio": WHISPER,
    "qwen3_asr": WHISPER,
    "voxtral": NAMED | {"intermediate_size": 128},
}
THINKERS = {
    "qwen2_5_omni": ("Qwen2_5Omni", {}),
    "qwen3_omni_moe": ("Qwen3OmniMoe", {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}),
}


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("model_type", LISTENING)
def test_counts_equal_those_of_models_that_listen(model_type):
    transformers = require("transformers")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers has no {model_type}")
    config = transformers.AutoConfig.for_model(model_type, text_config=TEXT, audio_config=LISTENING[model_type])
    names = ("SpeechSeq2Seq", "ImageTextToText", "MultimodalLM", "Seq2SeqLM")
    kinds = [getattr(transformers, f"AutoModelFor{name}") for name in names]
    kind = next(each for each in kinds if type(config) in each._model_mapping)
    with on_meta_device():
        model = kind.from_config(config)
    counted = count_parameters(config.to_dict())
    assert counted.total == parameters(model)
    encoders = [module for name, module in model.named_modules() if name.endswith(("audio_tower", "_projector"))]
    assert counted.of_kind(Kind.VISION) == sum(map(parameters, encoders))
    assert count_parameters(config.to_dict(), layers=range(1, 2)).of_kind(Kind.VISION) == 0


@pytest.mark.parametrize("model_type", THINKERS)
def test_counts_of_a_model_that_also_speaks_are_those_of_its_thinker(model_type):
    transformers = require("transformers")
    name, experts = THINKERS[model_type]
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    config = transformers.AutoConfig.for_model(
        f"{model_type}_thinker", text_config=TEXT | experts, audio_config=WHISPER, vision_config=SEEING
    )
    with on_meta_device():
        model = getattr(modeling, f"{name}ThinkerForConditionalGeneration")(config)
    thinker = config.to_dict()
    whole = {"model_type": model_type, "thinker_config": thinker, "talker_config": {}}
    assert count_parameters(thinker).total == count_parameters(whole).total == parameters(model)
    assert vision_tower(whole) == vision_tower(thinker)
    assert vision_tower(whole).layers == SEEING["depth"]


LEVELS = {"num_filters": 4, "downsampling_ratios": [2, 3], "depths": [1, 3, 2], "kernel_size": 5, "ffn_expansion": 3}
LEVELS |= {"channels": 2, "hidden_size": 12}
HEAD = {"num_hidden_layers": 3, "intermediate_size": 40, "frequency_embedding_size": 16, "mlp_bias": True}
ENCODER = LEVELS | {"model_type": "vibevoice_acoustic_tokenizer_encoder", "hidden_size": 10}
VIBEVOICE = {
    "vibevoice": {
        "audio_config": LEVELS | {"model_type": "vibevoice_acoustic_tokenizer"},
        "semantic_model_config": ENCODER,
        "diffusion_head_config": HEAD,
    },
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": LEVELS, "semantic_tokenizer_encoder_config": ENCODER},
}


@pytest.mark.parametrize("model_type", VIBEVOICE)
def test_small_models_of_vibevoice(model_type):
    transformers = require("transformers")
    config = transformers.AutoConfig.for_model(model_type, text_config=TEXT, **VIBEVOICE[model_type])
    name = {"vibevoice": "VibeVoice", "vibevoice_asr": "VibeVoiceAsr"}[model_type]
    with on_meta_device():
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    written = config.to_dict()
    assert count_parameters(written).total == parameters(model)
    part = next(iter(VIBEVOICE[model_type]))
    with pytest.raises(ConfigError, match=f"{part}.depths is .*; it must have one number more than downsampling"):
        count_parameters(written | {part: written[part] | {"depths": [1]}})


@pytest.mark.parametrize(
    ("sizes", "between", "norms"),
    [
        ({"projector_act": "gelu"}, 40, 8 * 32 + 64),
        ({"projector_ln_mid": True}, 20, 8 * 32 + 20),
        ({"stack_factor": 4}, 20, 4 * 32 + 64),
    ],
)
def test_ultravox_stacks_the_features_of_a_whisper(sizes, between, norms):
    llama = TEXT | {"model_type": "llama"}
    config = {"model_type": "ultravox", "text_config": llama, "hidden_size": 40, **sizes}
    whole = config | {"audio_config": WHISPER | {"model_type": "whisper"}}
    transformers = require("transformers")
    with on_meta_device():
        encoder = transformers.models.whisper.modeling_whisper.WhisperEncoder(transformers.WhisperConfig(**WHISPER))
    stack = 32 * sizes.get("stack_factor", 8)
    expected = count_parameters(llama).total + parameters(encoder) + stack * 40 + between * 64 + norms
    assert count_parameters(whole).total == expected
    for other in ({"model_type": "unheard_of"}, {"num_projector_layers": 2}):
        with pytest.raises(UnsupportedOption, match="whose projector of sound is unknown; expected minicpmo"):
            count_parameters(whole | other)


def test_encoders_of_an_unknown_type_are_refused():
    text = TEXT | {"model_type": "llama"}
    config = {"model_type": "voxtral", "text_config": text, "audio_config": {"model_type": "conformer"}}
    with pytest.raises(UnsupportedOption, match=r'audio_config.model_type is "conformer", an enc.*remove'):
        count_parameters(config)
    with pytest.raises(UnsupportedOption, match="encoder_config"):
        count_parameters({"model_type": "granite_speech", "text_config": text, "encoder_config": {}})


def test_an_encoder_without_a_size_is_refused_by_the_name_of_the_field():
    config = {"model_type": "voxtral", "text_config": TEXT | {"model_type": "llama"}}
    config["audio_config"] = {"model_type": "voxtral_encoder", "hidden_size": 32, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match=r"audio_config.intermediate_size is missing"):
        count_parameters(config)


@pytest.mark.parametrize("model_type", [None, [], {}, 7])
def test_a_type_that_is_not_text_has_no_vision_tower(model_type):
    assert vision_tower({"model_type": model_type}) is None
