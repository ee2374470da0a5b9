"""Counts of dots.note with its encoders, compared with the modules that transformers builds."""

import pytest

from pagecore.models import ConfigError
from pagecore.models.parameters import count_parameters, vision_tower
from tests.capabilities import require
from tests.models.meta import on_meta_device

SIZES = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 40, "num_hidden_layers": 4}
SIZES |= {"adapter_in_dim": 48, "adapter_out_dim": 64, "moe_intermediate_size": 24}
SOUND = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40, "num_hidden_layers": 3}
SOUND |= {"feature_size": 20, "downsample_hidden_size": 8, "adapter_input_size": 32, "adapter_out_dim": 64}


def of_encoder(name, config):
    """Return the parameters of an encoder as transformers builds it."""
    require("transformers")
    from transformers.models.dots3_note import configuration_dots3_note, modeling_dots3_note

    made = getattr(configuration_dots3_note, f"Dots3Note{name}Config")(**config)
    with on_meta_device():
        model = getattr(modeling_dots3_note, f"Dots3Note{name}Model")(made)
    return made.to_dict(), sum(each.numel() for each in model.parameters())


def with_text(**encoders):
    """Return a config with a text model of transformers' default sizes."""
    text = require("transformers").AutoConfig.for_model("dots3_note").to_dict()["text_config"]
    return {"model_type": "dots3_note", "text_config": text, **encoders}


def added(**encoders):
    """Return the parameters that encoders add to a text model."""
    return count_parameters(with_text(**encoders)).total - count_parameters(with_text()).total


@pytest.mark.parametrize("experts", [[-1, -1, 3, 5], [-1] * 4, [2, 3, 4, 64]])
@pytest.mark.parametrize("has_bias", [False, True])
def test_images_pass_layers_with_more_and_more_experts(experts, has_bias):
    published = SIZES | {"pyramid_num_routed": experts, "use_bias": has_bias}
    written, expected = of_encoder("Vision", published)
    assert added(vision_config=published) == added(vision_config=written) == expected
    assert vision_tower(with_text(vision_config=written)).tokens(56) == 4


def test_experts_are_listed_for_each_layer():
    with pytest.raises(
        ConfigError, match=r"pyramid_num_routed is \[-1, 3\]; it must have an entry for each of 4 layers"
    ):
        added(vision_config=SIZES | {"pyramid_num_routed": [-1, 3]})


@pytest.mark.parametrize("has_bias", [False, True])
def test_sound_passes_layers_with_gated_mlps(has_bias):
    written, expected = of_encoder("Audio", SOUND | {"attention_bias": has_bias})
    assert added(audio_config=written | {"model_type": "dots3_note_audio_encoder"}) == expected
    whisper = {"d_model": 32, "encoder_ffn_dim": 40, "encoder_layers": 3, "num_mel_bins": 20}
    published = {"model_type": "dots3_note_audio_encoder", "whisper_config": whisper, "downsample_hidden_size": 8}
    published |= {"whisper_adapter_in_dim": 32, "whisper_adapter_out_dim": 64, "attention_bias": has_bias}
    assert added(audio_config=published) == expected
