"""Config files as they are released, with fields that no default has, and their sizes.

Bytes are those of a token in all layers that attend. Parameters are recorded counts, which a change must not move;
those of Grok-1, Kimi and Laguna are derived below. They leave out the biases by which DeepSeek and GLM choose experts,
which transformers keeps as buffers.
"""

import json
from pathlib import Path

import pytest

from pagecore import ConfigError, LatentSpec, StateSpec
from pagecore.models import read_model_config, specs_from_config
from pagecore.models.parameters import Kind, count_parameters, vision_tower, weight_format
from tests.capabilities import require
from tests.models.meta import on_meta_device
from tests.together import together

RELEASED = json.loads(Path(__file__).with_name("released.json").read_text())
GROK_LAYER = 4 * 6144 + 2 * 6144 * (6144 + 1024) + 8 * 6144 + 8 * 3 * 6144 * 32768
# MoonViT: patches, positions, two norms; layers; the projector of Kimi-VL.
MOON_ENDS = (3 * 14**2 + 1) * 1152 + 64 * 64 * 1152 + 2 * 1152 + 2 * 1152 + 4608 * 4609 + 2048 * 4609
MOON_LAYER = 4 * 1152 * 1153 + 4 * 1152 + 2 * 1152 * 4304 + 4304 + 1152
KIMI_ATTENTION = 2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048 + 2 * 2048
KIMI_TEXT = 2 * 163840 * 2048 + 2048 + 27 * KIMI_ATTENTION + 3 * 2048 * 11264 + 26 * (66 * 3 * 1408 + 64) * 2048
# Kimi-K2: latents in 61 layers, the first of which has no experts.
K2_ATTENTION = 7168 * 1536 + 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 + 512 * 64 * 256 + 64 * 128 * 7168
K2_TEXT = 2 * 163840 * 7168 + 7168 + 61 * (K2_ATTENTION + 2 * 7168) + 3 * 7168 * 18432
K2_TEXT += 60 * 7168 * (385 * 3 * 2048 + 384)
# Kimi K3: 69 layers with Kimi delta attention, whose output gate has full rank, and 24 with latents; experts read 3584
# features; each layer has two queries of the blocks before it.
K3_WIDTH = 96 * 128
K3_STATE = 5 * 7168 * K3_WIDTH + 12 * K3_WIDTH + 128 * (7168 + K3_WIDTH) + 96 * 7168 + K3_WIDTH + 96 + 128
K3_LATENT = 7168 * 1536 + 1536 + 1536 * 96 * 192 + 7168 * 576 + 512 + 512 * 96 * 256 + 2 * K3_WIDTH * 7168
K3_EXPERTS = 896 * 3 * 3584 * 3072 + 896 * 7168 + 2 * 7168 * 3584 + 3584 + 2 * 3 * 7168 * 3072
K3_TEXT = 2 * 163840 * 7168 + 3 * 7168 + 93 * 6 * 7168 + 69 * K3_STATE + 24 * K3_LATENT + 92 * K3_EXPERTS
K3_TEXT += 3 * 7168 * 33792
# Laguna: 12 layers of 48 query heads and 36 of 72, with a gate of each head and a bias of each expert.
LAGUNA = 2 * 100352 * 3072 + 3072 + 48 * (2 * 3072 * 1024 + 2 * 128 + 2 * 3072) + 3 * 3072 * 12288
LAGUNA += (12 * 48 + 36 * 72) * (2 * 3072 * 128 + 3072) + 47 * (257 * 3 * 3072 * 1024 + 256 * 3073)
# Layers that attend, key-value heads and head dim; parameters; the format of the weights.
EXPECTED = {
    "llama-3.1-405b": ((126, 8, 128), 405_853_388_800, "fp8"),
    "llama-3.3-70b": ((80, 8, 128), 70_553_706_496, "bfloat16"),
    "llama-3.2-3b": ((28, 8, 128), 3_212_749_824, "bfloat16"),
    "yi-1.5-34b": ((60, 8, 128), 34_388_917_248, "bfloat16"),
    "falcon3-7b": ((28, 4, 256), 7_455_550_464, "bfloat16"),
    "smollm2-1.7b": ((24, 32, 64), 1_711_376_384, "bfloat16"),
    "qwen2.5-7b": ((28, 4, 128), 7_615_616_512, "bfloat16"),
    "qwen2.5-72b-awq": ((80, 8, 128), 72_706_203_648, "int4"),
    "qwen3-8b": ((36, 8, 128), 8_190_735_360, "bfloat16"),
    "qwen3-235b-a22b": ((94, 4, 128), 235_093_634_560, "fp8"),
    "mistral-7b-v0.3": ((32, 8, 128), 7_248_023_552, "bfloat16"),
    "mistral-large-2407": ((88, 8, 128), 122_610_069_504, "bfloat16"),
    "mistral-small-24b": ((40, 8, 128), 23_572_403_200, "bfloat16"),
    "ministral-8b-2410": ((36, 8, 128), 8_019_808_256, "bfloat16"),
    "mixtral-8x22b": ((56, 8, 128), 140_630_071_296, "bfloat16"),
    "gemma-3-270m": ((18, 1, 256), 268_098_176, "bfloat16"),
    "gemma-3-12b": ((48, 8, 256), 12_187_325_040, "bfloat16"),
    "phi-3.5-mini": ((32, 32, 96), 3_821_079_552, "bfloat16"),
    "phi-3.5-moe": ((32, 8, 128), 41_873_153_344, "bfloat16"),
    "phi-4-mini": ((32, 8, 128), 3_836_021_760, "bfloat16"),
    "deepseek-v3-0324": ((61, 1, 288), 671_026_404_352, "fp8"),
    "glm-4.5": ((92, 8, 128), 352_797_814_784, "fp8"),
    "gpt-oss-20b": ((24, 8, 64), 20_914_757_184, "mxfp4"),
    "nemotron-nano-9b-v2": ((4, 8, 128), 8_888_227_328, "bfloat16"),
    "nemotron-3-nano-30b-a3b": ((6, 2, 128), 31_577_937_344, "bfloat16"),
    "command-a": ((64, 8, 128), 111_057_580_032, "bfloat16"),
    "exaone-4.0-32b": ((64, 8, 128), 32_003_216_384, "bfloat16"),
    "exaone-4.0-1.2b": ((30, 8, 64), 1_279_391_488, "bfloat16"),
    "smollm3-3b": ((36, 4, 128), 3_075_098_624, "bfloat16"),
    "ernie-4.5-21b-a3b": ((28, 4, 128), 21_825_437_888, "bfloat16"),
    "stablelm-2-1_6b": ((24, 32, 64), 1_644_515_328, "bfloat16"),
    "internlm2_5-7b": ((32, 8, 128), 7_737_708_544, "bfloat16"),
    "internlm3-8b": ((48, 2, 128), 8_804_241_408, "bfloat16"),
    "baichuan2-13b": ((40, 40, 128), 13_896_668_160, "bfloat16"),
    "starcoder2-15b": ((40, 4, 128), 15_655_899_136, "bfloat16"),
    "olmo-2-7b": ((32, 32, 128), 7_298_617_344, "float32"),
    "falcon-h1-0.5b": ((36, 2, 64), 521_411_104, "bfloat16"),
    "jamba-1.5-mini": ((4, 8, 128), 51_570_323_328, "bfloat16"),
    "granite-4.0-micro": ((40, 8, 64), 3_402_836_480, "bfloat16"),
    "granite-3.3-8b": ((40, 8, 128), 8_170_864_640, "bfloat16"),
    "minimax-m1": ((10, 8, 128), 456_089_655_296, "bfloat16"),
    "grok-1": ((64, 8, 128), 131072 * 6144 + 6144 + 64 * GROK_LAYER, "bfloat16"),
    "kimi-vl-a3b": ((27, 1, 288), KIMI_TEXT + MOON_ENDS + 27 * MOON_LAYER, "bfloat16"),
    "kimi-k2.5": ((61, 1, 288), K2_TEXT + MOON_ENDS + 4608 * (7168 - 2048) + 7168 - 2048 + 27 * MOON_LAYER, "int4"),
    "kimi-k3 without its tower": ((24, 1, 288), K3_TEXT, "bfloat16"),
    "laguna-s-2.1-fp8": ((48, 8, 128), LAGUNA, "fp8"),
}


def test_every_released_config_is_expected():
    assert EXPECTED.keys() == RELEASED.keys()


@together("name", EXPECTED)
def test_sizes_of_a_released_config(name):
    (layers, kv_heads, dim), parameters, weights = EXPECTED[name]
    specs = [spec for spec in read_model_config(RELEASED[name]).layers if not isinstance(spec, StateSpec)]
    stored = sum(
        spec.dtype.itemsize
        * (
            spec.latent_dim + spec.rope_dim
            if isinstance(spec, LatentSpec)
            else spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
        )
        for spec in specs
    )
    assert len(specs) == layers
    assert stored == layers * 2 * kv_heads * dim * specs[0].dtype.itemsize
    assert count_parameters(RELEASED[name]).total == parameters
    assert weight_format(RELEASED[name]).name == weights


def test_windows_of_released_configs():
    windows = {
        name: [spec.window for spec in specs_from_config(RELEASED[name])] for name in RELEASED if "exaone" in name
    }
    assert windows["exaone-4.0-32b"] == [4096, 4096, 4096, None] * 16
    assert windows["exaone-4.0-1.2b"] == [None] * 30
    spelled = {name: value for name, value in RELEASED["exaone-4.0-32b"].items() if name != "layer_types"}
    assert [spec.window for spec in specs_from_config(spelled)] == windows["exaone-4.0-32b"]
    with pytest.raises(ConfigError, match='sliding_window_pattern is "LLX"; it must be an integer'):
        specs_from_config(spelled | {"sliding_window_pattern": "LLX"})
    for name, window in {"qwen2.5-7b": None, "ministral-8b-2410": 32768, "phi-4-mini": 262144}.items():
        assert {spec.window for spec in specs_from_config(RELEASED[name])} == {window}


def test_scores_of_grok_are_multiplied_and_capped():
    spec = specs_from_config(RELEASED["grok-1"])[0]
    assert spec.scale == pytest.approx(128**-0.5)
    assert spec.softcap == 30.0


def test_text_models_whose_fields_are_at_the_top_level():
    ernie = {"model_type": "ernie4_5_moe_vl", "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20}
    ernie |= {"num_key_value_heads": 4, "moe_num_experts": [64, 64], "moe_intermediate_size": [1536, 512]}
    dots = {"model_type": "dots_ocr", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12}
    dots |= {"num_key_value_heads": 2, "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28}
    phi = {"model_type": "phi4mm", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 24}
    phi |= {"num_key_value_heads": 8, "sliding_window": 262144}
    found = [
        (len(specs), specs[0].num_kv_heads, specs[0].head_dim, specs[0].window)
        for specs in map(specs_from_config, (ernie, dots, phi))
    ]
    assert found == [(28, 4, 128, None), (28, 2, 128, None), (32, 8, 128, 262144)]


VISION = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 3}
VISION |= {"intermediate_size": 80, "patch_size": 8, "position_embedding_size": 100}
AUDIO = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "subsampling_conv_channels": [16, 8]}
AUDIO |= {"conv_kernel_size": 3, "output_proj_dims": 40}


@pytest.mark.parametrize(("vision", "audio"), [({}, {}), (VISION, None), (None, AUDIO), (VISION, AUDIO)])
def test_encoders_of_gemma_4(vision, audio):
    transformers = require("transformers")
    if "gemma4" not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers has no gemma4")
    text = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "vocab_size_per_layer_input": 64}
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.AutoConfig.for_model("gemma4", text_config=text, vision_config=vision, audio_config=audio)
    with on_meta_device():
        model = transformers.AutoModelForImageTextToText.from_config(config)
    written = config.to_dict()
    counted = count_parameters(written)
    assert counted.total == sum(each.numel() for each in model.parameters())
    assert counted.of_kind(Kind.VISION) > 0
    tower = vision_tower(written)
    if vision is not None:
        assert (tower.tokens(960), tower.merge) == (280, 3)
        assert count_parameters(written | {"vision_config": vision}).total == counted.total
    if audio:
        with pytest.raises(ConfigError, match="subsampling_conv_channels is 3; it must be a list of two integers"):
            count_parameters(written | {"audio_config": written["audio_config"] | {"subsampling_conv_channels": 3}})
