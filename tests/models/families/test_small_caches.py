"""Specs of further families, compared with the caches and states that small models fill."""

import pytest

from pagecore import AttentionSpec, ConfigError, CrossSpec, LatentSpec, StateSpec, UnsupportedOption
from pagecore.models import read_model_config, specs_from_config
from pagecore.models.families.registry import FAMILIES
from pagecore.models.families.remote.code import REMOTE_CODE
from pagecore.models.families.speech import SPEECH
from pagecore.serving.planner import plan_model
from tests.capabilities import require
from tests.models.meta import config_for, on_meta_device
from tests.passing import passing
from tests.together import together

HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 3, "intermediate_size": 32}
GROUPED = {**HEADS, "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 101, "pad_token_id": 0}
EXPERTS = {"moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT = {**HEADS, **EXPERTS, "num_key_value_heads": 6, "q_lora_rank": 12, "kv_lora_rank": 16, "vocab_size": 101}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "pad_token_id": 0, "index_n_heads": 2}
LATENT |= {"index_head_dim": 8, "index_topk": 4, "num_hidden_layers": 7, "n_group": 1, "topk_group": 1}
# Modules of transformers, classes of a config and of its model, and the sizes of a small model.
FLOW = {"latent_dim": 8, "flow_head_config": {"condition_dim": 48, "latent_dim": 8, "hidden_size": 16}}
BARK = {"hidden_size": 48, "num_heads": 6, "num_layers": 3, "block_size": 32}
MIMI = {
    "model_type": "mimi",
    **GROUPED,
    "upsample_groups": 48,
    "num_filters": 4,
    "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8,
}
DEPTH = {**GROUPED, "backbone_hidden_size": 48}
CSM = {**GROUPED, "codec_config": MIMI, "depth_decoder_config": DEPTH, "audio_token_id": 8, "audio_eos_token_id": 9}
STEP = {**GROUPED, **EXPERTS, "share_expert_dim": 8, "sliding_window": 5, "num_sliding_attention_heads": 8}
STEP["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention"]
DECODERS = {
    "coarse_acoustics": ("bark", "BarkCoarseConfig", "BarkCoarseModel", BARK),
    "csm": ("csm", "CsmConfig", "CsmForConditionalGeneration", CSM),
    "csm_depth_decoder_model": ("csm", "CsmDepthDecoderConfig", "CsmDepthDecoderModel", DEPTH),
    "diffllama": ("diffllama", "DiffLlamaConfig", "DiffLlamaModel", GROUPED),
    "doge": ("doge", "DogeConfig", "DogeModel", GROUPED),
    "glm_image_text": (
        "glm_image",
        "GlmImageTextConfig",
        "GlmImageTextModel",
        {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 2]}},
    ),
    "gradium_phonon_tts": ("gradium_phonon_tts", "GradiumPhononTTSConfig", "GradiumPhononTTSModel", GROUPED | FLOW),
    "higgs_audio_v2": ("higgs_audio_v2", "HiggsAudioV2Config", "HiggsAudioV2Model", GROUPED | {"vocab_size": 128256}),
    "kyutai_speech_to_text": (
        "kyutai_speech_to_text",
        "KyutaiSpeechToTextConfig",
        "KyutaiSpeechToTextModel",
        {**GROUPED, "ffn_dim": 32, "sliding_window": 5, "vocab_size": 4001, "pad_token_id": 3},
    ),
    "moshi": ("moshi", "MoshiConfig", "MoshiModel", {**GROUPED, "ffn_dim": 32, "sliding_window": 5}),
    "musicgen_melody_decoder": (
        "musicgen_melody",
        "MusicgenMelodyDecoderConfig",
        "MusicgenMelodyModel",
        {**HEADS, "ffn_dim": 32},
    ),
    "pocket_tts": ("pocket_tts", "PocketTTSConfig", "PocketTTSModel", {**GROUPED, **FLOW, "vocab_size": 4004}),
    "semantic": ("bark", "BarkSemanticConfig", "BarkSemanticModel", BARK),
    "step3p5": ("step3p7", "Step3p7TextConfig", "Step3p7TextModel", STEP),
}


def small(module, config_class, model_class, sizes):
    """Return the config and the model of a family that the automatic classes may not know."""
    import importlib

    require("transformers")
    name = f"transformers.models.{module}"
    config = getattr(importlib.import_module(f"{name}.configuration_{module}"), config_class)(**sizes)
    return config, getattr(importlib.import_module(f"{name}.modeling_{module}"), model_class)(config).eval()


@pytest.mark.parametrize("model_type", DECODERS)
def test_specs_are_those_of_the_cache_of_a_small_model(model_type):
    transformers, torch = require("transformers"), require("torch")
    config, model = small(*DECODERS[model_type])
    cache = transformers.DynamicCache(config=config)
    arguments = {"inputs_embeds": torch.randn(2, 7, 48)}
    if model_type in ("coarse_acoustics", "semantic"):
        arguments = {"input_ids": torch.randint(1, 8, (2, 7))}
    with torch.no_grad():
        model(**arguments, **passing(cache), use_cache=True)
    written = config.to_dict()
    assert written["model_type"] == model_type
    assert [(spec.num_kv_heads, spec.head_dim, spec.window) for spec in specs_from_config(written)] == [
        (layer.keys.shape[1], layer.keys.shape[3], getattr(layer, "sliding_window", None)) for layer in cache.layers
    ]


def test_every_decoder_that_speaks_is_compared():
    assert {*SPEECH, "diffllama", "doge", "glm_image_text", "step3p5"} - {*DECODERS} == {"moshi_depth"}


@pytest.mark.parametrize("model_type", DECODERS)
def test_defaults_are_those_of_transformers(model_type):
    import importlib

    require("transformers")
    module, name, _, _ = DECODERS[model_type]
    written = getattr(importlib.import_module(f"transformers.models.{module}.configuration_{module}"), name)().to_dict()
    names = {"hidden_size", "num_hidden_layers", "num_attention_heads"}
    names |= {FAMILIES[model_type].aliases.get(each, each) for each in names} | {"model_type"}
    fewest = {each: value for each, value in written.items() if each in names}
    assert specs_from_config(fewest, dtype="float32") == specs_from_config(written, dtype="float32")


def test_unlimited_ocr_stores_every_key():
    config = require("transformers").AutoConfig.for_model("unlimited_ocr_text", **GROUPED).to_dict()
    expected = [(2, 8, None)] * 3
    assert [(spec.num_kv_heads, spec.head_dim, spec.window) for spec in specs_from_config(config)] == expected
    published = {key: value for key, value in config.items() if key not in ("layer_types", "sliding_window")}
    published |= {"model_type": "deepseek_v2", "use_mla": False}
    whole = {"model_type": "unlimited_ocr", "sliding_window": 128, "language_config": published}
    assert [(spec.num_kv_heads, spec.head_dim, spec.window) for spec in specs_from_config(whole)] == expected
    assert len(specs_from_config(config | {"model_type": "unlimited_ocr"})) == 3


# The published config.json of stepfun-ai/Step-3.5-Flash, whose layers are those of a draft, too.
STEP_FLASH = {
    "model_type": "step3p5",
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "head_dim": 128,
        "num_attention_groups": 8,
        "num_attention_heads": 96,
    },
    "head_dim": 128,
    "hidden_size": 4096,
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12,
    "max_position_embeddings": 262144,
    "num_attention_groups": 8,
    "num_attention_heads": 64,
    "num_hidden_layers": 45,
    "num_nextn_predict_layers": 3,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
}


def test_published_layers_of_step_have_other_heads_with_a_window():
    specs = specs_from_config(STEP_FLASH)
    assert len(specs) == 45
    assert [(spec.num_query_heads, spec.num_kv_heads, spec.window) for spec in specs[:2]] == [
        (64, 8, None),
        (96, 8, 512),
    ]
    assert plan_model(STEP_FLASH, "8GiB").memory.bytes_per_token == 45 * 2 * 8 * 128 * 2
    with pytest.raises(ConfigError, match="lists 48 layers, but num_hidden_layers is 44"):
        specs_from_config(STEP_FLASH | {"num_hidden_layers": 44})
    with pytest.raises(ConfigError, match=r"layer 1 has 5 key-value heads .* must divide"):
        specs_from_config(STEP_FLASH | {"attention_other_setting": {"num_attention_groups": 5}})


# -- latents -----------------------------------------------------------------------------------------------------------


def latent_modules(config):
    """Return the attention of each layer of a model on torch's meta device."""
    transformers = require("transformers")
    with on_meta_device():
        kind = transformers.AutoModelForCausalLM
        model = (kind if type(config) in kind._model_mapping else transformers.AutoModel).from_config(config)
    return [module for module in model.modules() if hasattr(module, "kv_b_proj")]


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("hy_v4", {}),
        ("hy_v4", {"indexer_types": ["full", "full", "shared", "full", "shared", "shared", "full"]}),
        ("hy_v4", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}}),
        ("hy_v4_vl_text", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 1, 0]}}),
        ("dots3_note_text", {}),
        (
            "dots3_note_text",
            {
                "use_dsa": False,
                "sliding_window": 9,
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 4,
                "swa_kv_lora_rank": 24,
                "swa_head_dim": 14,
                "swa_qk_nope_head_dim": 8,
            },
        ),
    ],
)
def test_latents_are_those_of_small_models(model_type, sizes):
    config = config_for(model_type, **LATENT, **sizes)
    specs, modules = specs_from_config(config.to_dict()), latent_modules(config)
    assert len(specs) == len(modules) == 7
    for spec, module in zip(specs, modules, strict=True):
        assert isinstance(spec, LatentSpec)
        assert (spec.latent_dim, spec.rope_dim) == (module.kv_lora_rank, module.qk_rope_head_dim)
        assert (spec.num_query_heads, spec.scale) == (module.num_heads, pytest.approx(module.scaling))
        assert spec.index_dim == (module.indexer.wk.out_features if module.indexer is not None else None)
        assert spec.window == getattr(module, "sliding_window", None)


def test_published_fields_of_dots_name_the_sizes_of_windows():
    own = {"model_type": "dots3_note_text", **LATENT, "swa_kv_lora_rank": 24, "sliding_window_size": 3}
    specs = specs_from_config({"model_type": "dots3_note", "text_config": own})
    assert [spec.window for spec in specs] == [None, None, 3, 3, 3, None, 3]
    assert [spec.latent_dim for spec in specs] == [16, 16, 24, 24, 24, 16, 24]
    for change, words in (
        ({"swa_head_dim": 100}, "layer 2.head_dim is 100; it must be above qk_nope_head_dim, 192"),
        ({"swa_num_key_value_heads": 2}, "num_key_value_heads is 2; it must equal num_attention_heads, 64"),
        ({"per_layer_config": []}, "per_layer_config is .*; it must be an object"),
        ({"layer_types": ["sliding_attention"]}, "it must list each of the 7 layers"),
    ):
        with pytest.raises(ConfigError, match=words):
            specs_from_config(own | change)
    with pytest.raises(UnsupportedOption, match=r"layer_types\[0\] is .mamba.; expected"):
        specs_from_config(own | {"layer_types": ["mamba"] * 7})


# -- images in place of tokens ---------------------------------------------------------------------------------------


def test_layers_of_mllama_attend_to_tokens_or_to_an_image():
    transformers, torch = require("transformers"), require("torch")
    text = {**GROUPED, "num_hidden_layers": 5, "cross_attention_layers": [1, 3], "num_key_value_heads": 2}
    del text["head_dim"]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.AutoConfig.for_model("mllama", text_config=text, vision_config={"image_size": 56})
    model = transformers.MllamaForCausalLM(config.text_config).eval()
    cache = transformers.DynamicCache(config=config.text_config)
    seen = {"cross_attention_states": torch.randn(2, 9, 48), "cross_attention_mask": torch.zeros(2, 1, 7, 9)}
    seen["full_text_row_masked_out_mask"] = torch.ones(2, 1, 7, 1)
    with torch.no_grad():
        model(input_ids=torch.randint(1, 30, (2, 7)), **passing(cache), use_cache=True, **seen)
    found = read_model_config(config.to_dict())
    assert [isinstance(spec, CrossSpec) for spec in found.layers] == [False, True, False, True, False]
    assert [layer.keys.shape[2] for layer in cache.layers] == [7, 9, 7, 9, 7]
    assert {(spec.num_kv_heads, spec.head_dim) for spec in found.layers} == {(2, 8)}
    assert found.specs_by_layer == ((0,), (1,), (2,), (3,), (4,))
    assert found.layers[1].max_tokens == (4 * 4 + 1) * 4
    assert specs_from_config(config.text_config.to_dict())[1].max_tokens is None


def test_llama_3_2_vision():
    text = {"hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8}
    vision = {"image_size": 560, "patch_size": 14, "max_num_tiles": 4}
    config = {"model_type": "mllama", "text_config": text, "vision_config": vision}
    specs = specs_from_config(config)
    assert [n for n, spec in enumerate(specs) if isinstance(spec, CrossSpec)] == [3, 8, 13, 18, 23, 28, 33, 38]
    assert specs[3].max_tokens == 6404
    plan = plan_model(config, "16GiB", context=4096).memory
    assert plan.bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert plan.contexts[0].blocks_per_request == (256, 401)
    with pytest.raises(ConfigError, match=r"cross_attention_layers is \[40\]; it must list layers from 0 to 39"):
        specs_from_config(config | {"text_config": text | {"cross_attention_layers": [40]}})


# -- states ------------------------------------------------------------------------------------------------------------


def test_states_of_rwkv():
    transformers, torch = require("transformers"), require("torch")
    config = transformers.AutoConfig.for_model("rwkv", hidden_size=48, num_hidden_layers=3, vocab_size=101)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        states = model(torch.randint(1, 30, (2, 7)), use_cache=True).state
    specs = specs_from_config(config.to_dict(), dtype="float32")
    assert len(specs) == 3
    conv, temporal = specs[0].planes
    assert conv.shape == (2, states[0].shape[1]) == (2, states[1].shape[1])
    assert temporal.shape == (3, states[2].shape[1])
    assert str(temporal.dtype) == str(states[2].dtype).removeprefix("torch.")
    assert conv.nbytes + temporal.nbytes == sum(state[0, :, 0].nbytes for state in states)


@pytest.mark.parametrize("sizes", [{}, {"num_heads": 2, "qk_dim_factor": 1.0, "v_dim_factor": 2.0}])
def test_states_of_xlstm(sizes):
    transformers = require("transformers")
    from transformers.models.xlstm.modeling_xlstm import xLSTMCache

    sizes = {"hidden_size": 128, "num_heads": 4, "num_hidden_layers": 2, "vocab_size": 101, **sizes}
    config = transformers.AutoConfig.for_model("xlstm", **sizes)
    states = xLSTMCache(config, 1).rnn_state[0]
    for spec in specs_from_config(config.to_dict()):
        assert isinstance(spec, StateSpec)
        assert [plane.shape for plane in spec.planes] == [tuple(state.shape[1:]) for state in states]
        assert {str(plane.dtype) for plane in spec.planes} == {"float32"}
        assert spec.chunk == config.chunk_size
    with pytest.raises(ConfigError, match="num_heads is 4096; it must be at most"):
        specs_from_config(config.to_dict() | {"num_heads": 4096})


@pytest.mark.parametrize("model_type", ["rwkv", "xlstm"])
def test_plans_of_models_without_attention(model_type):
    config = {"model_type": model_type, "hidden_size": 4096, "num_hidden_layers": 32}
    spec = specs_from_config(config)[0]
    plan = plan_model(config, "8GiB", context=2048).memory
    assert not plan.groups
    assert plan.states.bytes_per_slot == 32 * spec.nbytes
    halves = spec.split(ranks=2)
    assert sum(plane.nbytes for plane in halves) < spec.nbytes


def test_linear_layers_of_qwen_4():
    transformers = require("transformers")
    config = transformers.AutoConfig.for_model("qwen4_exp").to_dict()
    specs = specs_from_config(config)
    assert [isinstance(spec, AttentionSpec) for spec in specs] == [layer % 4 == 3 for layer in range(40)]


# -- families of remote code, with published sizes --------------------------------------------------------------------


@together(
    ("config", "heads"),
    [
        ({"model_type": "internlm2", "num_hidden_layers": 32, "num_key_value_heads": 8}, (32, 32, 8, 128)),
        ({"model_type": "baichuan", "num_hidden_layers": 32}, (32, 32, 32, 128)),
        ({"model_type": "bailing_moe", "num_hidden_layers": 28, "num_key_value_heads": 4}, (28, 32, 4, 128)),
        (
            {
                "model_type": "chatglm",
                "kv_channels": 128,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
                "num_layers": 40,
            },
            (40, 32, 2, 128),
        ),
        ({"model_type": "exaone", "head_dim": 128, "num_key_value_heads": 8, "num_layers": 32}, (32, 32, 8, 128)),
        ({"model_type": "deepseek", "num_hidden_layers": 28, "num_key_value_heads": 32}, (28, 32, 32, 128)),
        ({"model_type": "mimo", "num_hidden_layers": 36, "sliding_window": 32768}, (36, 32, 8, 128)),
        ({"model_type": "minicpm", "num_hidden_layers": 40, "num_key_value_heads": 8}, (40, 32, 8, 128)),
        ({"model_type": "qwen", "num_hidden_layers": 32, "kv_channels": 128, "seq_length": 8192}, (32, 32, 32, 128)),
        (
            {"model_type": "step3_text", "num_hidden_layers": 61, "num_attention_groups": 1, "share_q_dim": 2048},
            (61, 32, 1, 256),
        ),
    ],
)
def test_families_of_remote_code(config, heads):
    specs = specs_from_config({"hidden_size": 4096, "num_attention_heads": 32, **config})
    assert config["model_type"] in REMOTE_CODE
    assert (len(specs), specs[0].num_query_heads, specs[0].num_kv_heads, specs[0].head_dim) == heads


def test_the_first_chatglm_is_refused():
    config = {"model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 28}
    with pytest.raises(UnsupportedOption, match="position_encoding_2d is true, so prompts attend to later tokens"):
        specs_from_config(config | {"position_encoding_2d": True})


@pytest.mark.parametrize(
    ("model_type", "field"), [("internvl_chat", "llm_config"), ("deepseek_vl_v2", "language_config")]
)
def test_text_models_of_remote_code(model_type, field):
    text = {"model_type": "qwen2", **HEADS, "num_key_value_heads": 2}
    assert specs_from_config({"model_type": model_type, field: text}) == specs_from_config(text)
    with pytest.raises(ConfigError, match=f"{field} is missing"):
        specs_from_config({"model_type": model_type, "text_config": text})
