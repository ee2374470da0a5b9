"""Text models inside multimodal configs, whose files have only the fields that differ from the default model."""

import copy
import json

import pytest

from pagecore import AttentionSpec, ConfigError
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
    for name, size in sizes_of(model_type, "llava").items():
        assert written.get(names.get(name, name), written.get(name)) == size, name
    nested = {"model_type": "llava", "text_config": {"model_type": model_type}}
    whole = {"model_type": "llava", "text_config": written | {"dtype": None}}
    assert specs_from_config(nested) == specs_from_config(whole)


# Fields that files leave out if they are those of the default model.
OF_A_TOWER = (
    "attention_bias",
    "deepstack_visual_indexes",
    "merge_kernel_size",
    "merge_size",
    "num_position_embeddings",
)
OF_A_TOWER += ("patch_temporal", "spatial_merge_size", "temporal_patch_size")
OF_A_WHOLE = ("downsample_factor", "downsample_ratio", "scale_factor", "spatial_merge_size")
LEFT_OUT = [("", each) for each in OF_A_WHOLE] + [("vision_config", each) for each in OF_A_TOWER]
WITH_TOWERS = (
    "aya_vision cohere2_vision cohere_compass cosmos3_edge cosmos3_omni ernie4_5_vl_moe exaone4_5 glm46v glm4v"
)
WITH_TOWERS += " glm4v_moe glm5_next glm_ocr hunyuan_vl idefics3 internvl kimi_k25 lfm2_vl lfm3_vl lighton_ocr mistral3"
WITH_TOWERS += " minimax_m3_vl muse_glimmer muse_spark nemotron_h_omni paddleocr_vl qianfan_ocr qwen2_5_omni_thinker"
WITH_TOWERS += " qwen2_vl qwen2_5_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp smolvlm"
TEXT_SIZES = ("head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
TEXT_SIZES += ("num_key_value_heads", "vocab_size")
OF_TEXT = [("text_config", each) for each in TEXT_SIZES]
MISSING = dict.fromkeys(WITH_TOWERS.split(), LEFT_OUT) | dict.fromkeys(("glmasr", "voxtral"), OF_TEXT)
MISSING["voxtral_realtime"] = [("text_config", "head_dim"), ("text_config", "sliding_window")]
MISSING |= {each: [("", "attention_bias")] for each in ("glm", "glm4")}
MISSING |= {each: [("", "num_layers"), ("", "feed_forward_proj")] for each in ("mt5", "pop2piano", "udop", "umt5")}
MISSING |= {"longcat_flash": [("", "zero_expert_num")], "minicpm3": [("", "tie_word_embeddings")]}
MISSING["switch_transformers"] = [("", "num_layers")]


@pytest.mark.parametrize("model_type", MISSING)
def test_a_missing_field_has_the_value_that_transformers_gives_it(model_type):
    config_class = require("transformers").CONFIG_MAPPING[model_type]
    written = json.loads(json.dumps(config_class().to_dict()))
    tried = 0
    for part, name in MISSING[model_type]:
        fields = written[part] if part else written
        if name in fields:
            left = {key: value for key, value in fields.items() if key != name}
            config = written | {part: left} if part else left
            filled = config_class.from_dict(copy.deepcopy(config)).to_dict()
            assert count_parameters(config).total == count_parameters(filled).total, name
            assert [(each.num_kv_heads, each.head_dim) for each in attending(config)] == [
                (each.num_kv_heads, each.head_dim) for each in attending(filled)
            ]
            tried += 1
    assert tried


def attending(config):
    return [each for each in specs_from_config(config) if isinstance(each, AttentionSpec)]


def test_a_whole_model_needs_its_sizes():
    with pytest.raises(ConfigError, match="num_hidden_layers is missing"):
        specs_from_config({"model_type": "llama"})
    with pytest.raises(ConfigError, match=r"text_config\.hidden_size is 0"):
        specs_from_config({"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 0}})
