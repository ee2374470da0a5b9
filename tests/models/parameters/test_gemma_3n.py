"""Parameters of Gemma 3n with its encoders, compared with the published checkpoints."""

import pytest

from pagecore import UnsupportedOption
from pagecore.models import ConfigError
from pagecore.models.parameters import Kind, count_parameters, vision_tower
from pagecore.serving.planner import plan_model


def gemma_3n(layers, width, shared):
    text = {"model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": layers, "intermediate_size": width}
    text |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 262400}
    text |= {"vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "altup_num_inputs": 4}
    text |= {"laurel_rank": 64, "num_kv_shared_layers": shared}
    audio = {"model_type": "gemma3n_audio", "hidden_size": 1536, "conf_num_hidden_layers": 12, "vocab_size": 128}
    vision = {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc", "hidden_size": 2048}
    return {"model_type": "gemma3n", "text_config": text, "audio_config": audio, "vision_config": vision}


@pytest.mark.parametrize(
    ("layers", "width", "shared", "published"), [(30, 8192, 10, 5_439_438_272), (35, 16384, 15, 7_849_978_192)]
)
def test_counts_equal_the_checkpoints_without_keys_and_values_that_no_layer_uses(layers, width, shared, published):
    unused = shared * (2 * 2048 * 2 * 256 + 256)
    assert count_parameters(gemma_3n(layers, width, shared)).total == published - unused


def test_encoders_are_counted_as_such_and_the_network_has_no_layers_that_attend():
    config = gemma_3n(30, 8192, 10)
    encoders = count_parameters(config).of_kind(Kind.VISION)
    assert encoders == count_parameters(config).total - count_parameters(config["text_config"]).total
    assert vision_tower(config) is None
    assert plan_model(config, device_memory="24GiB").device.parameters == count_parameters(config).total


def test_another_network_and_wrong_sizes_are_refused():
    config = gemma_3n(30, 8192, 10)
    with pytest.raises(UnsupportedOption, match=r'vision_config.architecture is "resnet18".*expected mobilenetv5_300m'):
        count_parameters(config | {"vision_config": {"architecture": "resnet18"}})
    with pytest.raises(ConfigError, match=r"audio_config.conf_num_hidden_layers is -1"):
        count_parameters(config | {"audio_config": config["audio_config"] | {"conf_num_hidden_layers": -1}})
