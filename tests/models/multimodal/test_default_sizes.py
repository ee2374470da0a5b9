"""Text models inside multimodal configs, whose files have only the fields that differ from the default model."""

import pytest

from pagecore import ConfigError
from pagecore.models import read_model_config, specs_from_config
from pagecore.models.families.registry import FAMILIES
from pagecore.models.multimodal.default_sizes import _SIZES, sizes_of
from pagecore.models.parameters import count_parameters
from tests.capabilities import require

# The published config.json files of llava-hf/llava-1.5-7b-hf and mistral-community/pixtral-12b.
LLAVA = {
    "model_type": "llava",
    "torch_dtype": "float16",
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
}
PIXTRAL = {
    "model_type": "llava",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "max_position_embeddings": 1024000,
        "model_type": "mistral",
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"head_dim": 64, "image_size": 1024, "model_type": "pixtral", "patch_size": 16},
}


def test_published_files_leave_sizes_out():
    llava = read_model_config(LLAVA)
    assert (len(llava.layers), llava.layers[0].num_kv_heads, llava.layers[0].head_dim) == (32, 32, 128)
    assert llava.max_length == 4096
    assert count_parameters(LLAVA).total == 7_063_427_072
    pixtral = specs_from_config(PIXTRAL)
    assert {(spec.num_query_heads, spec.num_kv_heads, spec.head_dim) for spec in pixtral} == {(32, 8, 128)}
    assert count_parameters(PIXTRAL).total == 12_682_739_712


@pytest.mark.parametrize("model_type", sorted(_SIZES.keys() - {"moondream3_text"}))
def test_sizes_are_those_of_transformers(model_type):
    transformers = require("transformers")
    written, names = transformers.AutoConfig.for_model(model_type).to_dict(), FAMILIES[model_type].aliases
    for name, size in sizes_of(model_type).items():
        assert written.get(names.get(name, name), written.get(name)) == size, name
    nested = {"model_type": "llava", "text_config": {"model_type": model_type}}
    whole = {"model_type": "llava", "text_config": written | {"dtype": None}}
    assert specs_from_config(nested) == specs_from_config(whole)


def test_a_whole_model_needs_its_sizes():
    with pytest.raises(ConfigError, match="num_hidden_layers is missing"):
        specs_from_config({"model_type": "llama"})
    with pytest.raises(ConfigError, match=r"text_config\.hidden_size is 0"):
        specs_from_config({"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 0}})
