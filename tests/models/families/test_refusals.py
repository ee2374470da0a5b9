"""Errors of configs: the message names field, value and remedy."""

import numpy as np
import pytest

from pagecore.errors import PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.models import ConfigError, read_model_config, specs_from_config
from tests.models.published import PUBLISHED
from tests.together import together

LLAMA = PUBLISHED["llama-3-8b"]
VALUES = (None, True, -1, 0, 3, 2**70, 1.5, float("nan"), "x", "\ud800", b"x", [], [None], {}, object())
REQUIRED = ["model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"]


def refusal(name, changes, error=ConfigError):
    with pytest.raises(error) as caught:
        specs_from_config(PUBLISHED[name] | changes)
    return str(caught.value)


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(field):
    config = {name: value for name, value in LLAMA.items() if name != field}
    with pytest.raises(ConfigError, match=f"config: {field} is missing"):
        specs_from_config(config)


@together("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"])
@together("value", [0, -1, True, "8", 8.0, 1.5, [8], 2**31, 10**30, {}])
def test_a_count_that_is_not_a_positive_integer_raises(field, value):
    assert f"{field} is " in refusal("llama-3-8b", {field: value})


@together(
    ("name", "changes", "reason"),
    [
        (
            "llama-3-8b",
            {"num_key_value_heads": 7},
            "num_key_value_heads is 7; it must divide num_attention_heads",
        ),
        ("llama-3-8b", {"num_key_value_heads": 64}, "it must divide num_attention_heads, which is 32"),
        ("llama-3-8b", {"hidden_size": 4100}, "hidden_size is 4100, not a multiple of num_attention_heads 32"),
        ("llama-3-8b", {"head_dim": -64}, "head_dim is -64"),
        ("glm4_moe without head_dim", {"num_attention_heads": 4104}, "hidden_size is 4096, not a multiple of"),
        (
            "laguna with heads by layer",
            {"num_attention_heads_per_layer": [16, 24, 12, 8]},
            "which means 8; it must divide num_attention_heads, which is 12",
        ),
        (
            "laguna with heads by layer",
            {"num_attention_heads_per_layer": [16, 24, 0, 8]},
            "it must list a positive integer for each of num_hidden_layers, 4",
        ),
        ("laguna with heads by layer", {"num_attention_heads_per_layer": [16]}, "for each of num_hidden_layers, 4"),
        (
            "jetmoe-8b",
            {"num_attention_heads": 16},
            "num_attention_heads is 16; it must be 32, num_key_value_heads times",
        ),
        (
            "k-exaone",
            {"layer_types": None, "sliding_window_pattern": "LLXG"},
            'sliding_window_pattern is "LLXG"',
        ),
        ("llama-3-8b", {"max_position_embeddings": "8k"}, 'max_position_embeddings is "8k"'),
        ("llama-3-8b", {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        ("gemma-2-9b", {"head_dim": None}, "head_dim is null"),
        ("gemma-2-9b", {"sliding_window": None}, "layer 0 is 'sliding_attention', but sliding_window is null"),
        ("gemma-2-9b", {"sliding_window": 0}, "sliding_window is 0"),
        (
            "gemma-2-9b",
            {"layer_types": ["full_attention"] * 41},
            "lists 41 layers, but num_hidden_layers is 42",
        ),
        ("gemma-2-9b", {"layer_types": "full_attention"}, "one entry for each layer"),
        ("gemma-2-9b", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma-2-9b", {"model_type": "vaultgemma", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma-2-9b", {"query_pre_attn_scalar": "256"}, 'query_pre_attn_scalar is "256"'),
        ("gemma-2-9b", {"query_pre_attn_scalar": True}, "query_pre_attn_scalar is true"),
        ("gemma-2-9b", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is null"),
        ("gemma-2-9b", {"query_pre_attn_scalar": float("nan")}, "query_pre_attn_scalar is NaN"),
        ("gemma-2-9b", {"attn_logit_softcapping": -50.0}, "attn_logit_softcapping is -50.0"),
        ("gemma-2-9b", {"attn_logit_softcapping": float("inf")}, "attn_logit_softcapping is Infinity"),
        ("gemma-3-1b", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("gemma-3-4b", {"text_config": None}, "text_config is null"),
        ("kimi-k2.5", {"text_config": {"num_hidden_layers": 3}}, "text_config.num_attention_heads is missing"),
        ("qwen2-7b", {"use_sliding_window": "yes"}, 'use_sliding_window is "yes"'),
        ("qwen2-with-its-window-on", {"max_window_layers": -1}, "max_window_layers is -1"),
        ("qwen2-with-its-window-on", {"sliding_window": None}, "layer 20 is 'sliding_attention', but sliding_window"),
        ("qwen2-7b", {"layer_types": ["sliding_attention"] * 28}, "but use_sliding_window is false"),
        ("mistral-7b-v0.1", {"sliding_window": -1}, "sliding_window is -1"),
        ("deepseek-v3", {"kv_lora_rank": None}, "kv_lora_rank is null"),
        ("deepseek-v3", {"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0"),
        (
            "deepseek-v3",
            {"num_key_value_heads": 16},
            "num_key_value_heads is 16; it must equal num_attention_heads, 128",
        ),
        ("deepseek-v3", {"rope_scaling": "yarn"}, 'rope_scaling is "yarn"; it must be an object'),
        ("deepseek-v2", {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}}, "rope_scaling.factor is missing"),
        (
            "deepseek-v2",
            {"rope_scaling": {"type": "yarn", "mscale_all_dim": -1.0}},
            "rope_scaling.mscale_all_dim is -1.0",
        ),
    ],
)
def test_invalid_and_contradictory_fields_are_named(name, changes, reason):
    message = refusal(name, changes)
    assert reason in message
    assert message.startswith("config: ")


@together(
    ("name", "changes", "reason"),
    [
        ("llama-3-8b", {"model_type": "canine"}, 'model_type is "canine", which is unknown; the closest known types'),
        ("llama-3-8b", {"model_type": ["llama"]}, 'model_type is ["llama"]'),
        ("llama-3-8b", {"model_type": None}, "model_type is null"),
        ("gemma-3-4b", {"text_config": {"model_type": "llama"}}, 'text_config.model_type is "llama"'),
        ("gemma-2-9b", {"layer_types": ["linear_attention"] * 42}, 'layer_types[0] is "linear_attention"'),
        ("gemma-2-9b", {"layer_types": [["full_attention"]] * 42}, "layer_types[0] is "),
        # Fields that would change attention if the family read them.
        ("llama-3-8b", {"sliding_window": 4096}, "sliding_window is 4096, but llama attends as if it were null"),
        ("llama-3-8b", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0"),
        ("llama-3-8b", {"query_pre_attn_scalar": 100}, "query_pre_attn_scalar is 100"),
        ("llama-3-8b", {"attention_chunk_size": 8192}, "attention_chunk_size is 8192"),
        ("llama-3-8b", {"is_causal": False}, "is_causal is false"),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("mistral-7b-v0.1", {"use_sliding_window": False}, "use_sliding_window is false"),
        ("mistral-7b-v0.1", {"layer_types": ["full_attention"] * 32}, "layer_types is "),
        ("deepseek-v3", {"sliding_window": 4096}, "sliding_window is 4096, but deepseek_v3 attends as if it were null"),
        ("deepseek-v3", {"index_topk": 2048}, "index_topk is 2048, but deepseek_v3 attends as if it were null"),
        ("deepseek-v3", {"linear_attn_config": {"kda_layers": [1]}}, "which has linear-attention states"),
        ("kimi-k2.5", {"text_config": {"model_type": "deepseek_v2"}}, 'text_config.model_type is "deepseek_v2"'),
        ("pythia-1.4b", {"num_key_value_heads": 4}, "num_key_value_heads is 4, but gpt_neox attends as if it were 16"),
        ("pythia-1.4b", {"head_dim": 64}, "head_dim is 64, but gpt_neox attends as if it were 128"),
    ],
)
def test_unsupported_attention_raises_by_name(name, changes, reason):
    assert reason in refusal(name, changes, UnsupportedOption)


@pytest.mark.parametrize("model_type", ["blt", "cpmant", "prophetnet", "xlnet"])
def test_models_whose_layers_cannot_be_stored_are_refused_by_kind(model_type):
    with pytest.raises(UnsupportedOption, match=f'model_type is "{model_type}", which has .*; pagecore only supports'):
        specs_from_config({"model_type": model_type, "hidden_size": 64})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_lora_rank": 512}, "latent attention (kv_lora_rank = 512)"),
        ({"linear_num_value_heads": 32}, "linear-attention states (linear_num_value_heads = 32)"),
        ({"linear_attn_config": {"kda_layers": [1, 2]}}, "linear-attention states (linear_attn_config = ...)"),
        ({"mamba_d_state": 16}, "recurrent states (mamba_d_state = 16)"),
        ({"attn_type_list": [1, 0]}, "linear-attention states (attn_type_list[1] = 0)"),
        ({"sparse_attention_config": {"a": 1}}, "sparse attention to blocks of keys (sparse_attention_config = ...)"),
    ],
)
def test_a_known_family_with_a_field_of_other_attention_raises(fields, reason):
    for name in ("llama-3-8b", "gpt2", "glm-4-9b-0414"):
        assert f"which has {reason}" in refusal(name, fields, UnsupportedOption)
    vision = PUBLISHED["qwen3-vl-4b"]
    with pytest.raises(UnsupportedOption, match="qwen3_vl_text"):
        specs_from_config(vision | {"text_config": vision["text_config"] | fields})
    assert specs_from_config(LLAMA | dict.fromkeys(fields)) == specs_from_config(LLAMA)


@pytest.mark.parametrize("model_type", ["xlnet", "bark"])
def test_a_model_type_alone_reveals_its_attention(model_type):
    with pytest.raises(UnsupportedOption, match=rf'model_type is "{model_type}", which has (a memory|three)'):
        specs_from_config({"model_type": model_type, "hidden_size": 64, "num_attention_heads": 4})


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        (["full_attention", "linear_attention"], "linear-attention states (layer_types[1] = 'linear_attention')"),
        (["chunked_attention", "full_attention"], "chunked attention (layer_types[0] = 'chunked_attention')"),
        (["conv", "full_attention"], "convolution states (layer_types[0] = 'conv')"),
        (["attention", "mamba"], "recurrent states (layer_types[1] = 'mamba')"),
    ],
)
def test_layer_types_reveal_the_attention_of_an_unknown_model(kinds, reason):
    with pytest.raises(UnsupportedOption) as refused:
        specs_from_config({"model_type": "unheard_of", "layer_types": kinds})
    assert reason in str(refused.value)


def test_an_unknown_model_with_attention_layers_only_is_not_called_recurrent():
    config = {"model_type": "unheard_of", "mamba_d_state": 128, "layer_types": ["attention"] * 40}
    with pytest.raises(UnsupportedOption, match='"unheard_of", which is unknown'):
        specs_from_config(config)
    with pytest.raises(UnsupportedOption, match=r"recurrent states \(mamba_d_state = 128\)"):
        specs_from_config(config | {"layer_types": None})


def test_a_family_with_aliases_accepts_both_names():
    own = PUBLISHED["gpt2-xl"]
    usual = {"model_type": "gpt2", "hidden_size": 1600, "num_attention_heads": 25, "num_hidden_layers": 48}
    assert specs_from_config(own) == specs_from_config(usual) == specs_from_config(own | {"hidden_size": 1600})
    assert read_model_config(own).max_length == 1024
    assert "n_embd is 1600, but hidden_size is 64; leave one of them out" in refusal("gpt2-xl", {"hidden_size": 64})
    assert "n_head is 7" in refusal("gpt2-xl", {"n_head": 7}) or "n_head 7" in refusal("gpt2-xl", {"n_head": 7})
    assert "n_layer is null" in refusal("gpt2-xl", {"n_layer": None})
    assert "n_layer is missing" in refusal_of({name: value for name, value in own.items() if name != "n_layer"})


def test_the_scale_of_gpt_2_may_depend_on_the_layer():
    scales = [spec.scale for spec in specs_from_config(PUBLISHED["gpt2-small-of-stanford"])]
    assert scales == pytest.approx([64**-0.5 / (layer + 1) for layer in range(12)], rel=1e-12)
    plain = specs_from_config(PUBLISHED["gpt2"] | {"scale_attn_weights": False})
    assert {spec.scale for spec in plain} == {1.0}
    assert "add_cross_attention is true" in refusal("gpt2", {"add_cross_attention": True}, UnsupportedOption)


def test_flat_and_nested_files_of_qwen_2_vl_are_equal():
    flat = PUBLISHED["qwen2-vl-7b"]
    outer = ("architectures", "model_type", "vision_config")
    text = {name: value for name, value in flat.items() if name not in outer}
    nested = {"model_type": "qwen2_vl", "text_config": text | {"model_type": "qwen2_vl_text"}}
    assert read_model_config(nested) == read_model_config(flat)


def test_unread_fields_that_agree_with_the_family_are_accepted():
    same = {"num_key_value_heads": 16, "head_dim": 128, "sliding_window": None, "layer_types": ["full_attention"] * 24}
    assert specs_from_config(PUBLISHED["pythia-1.4b"] | same) == specs_from_config(PUBLISHED["pythia-1.4b"])


def test_a_contradiction_with_a_default_names_the_default():
    config = {name: value for name, value in PUBLISHED["qwen2-7b"].items() if name != "num_key_value_heads"}
    with pytest.raises(ConfigError, match=r"num_key_value_heads is missing, which means 32; it must divide .* 28"):
        specs_from_config(config)


@pytest.mark.parametrize("value", ["float8_e4m3fn", "int8", 16, "auto"])
def test_a_model_dtype_that_no_cache_has_raises_unless_dtype_is_passed(value):
    message = refusal("llama-3-8b", {"torch_dtype": value}, UnsupportedDtype)
    assert "torch_dtype is " in message
    assert "pass dtype=" in message
    assert specs_from_config(LLAMA | {"torch_dtype": value}, dtype="float16")[0].dtype == "float16"


def test_two_different_dtypes_raise():
    assert 'dtype is "float16", but torch_dtype is "bfloat16"' in refusal("llama-3-8b", {"dtype": "float16"})


def test_equal_dtypes_may_have_two_spellings():
    same = {"dtype": "torch.bfloat16", "torch_dtype": "bfloat16"}
    assert specs_from_config(LLAMA | same)[0].dtype == "bfloat16"


def test_the_argument_dtype_overrides_that_of_the_model():
    assert {spec.dtype for spec in specs_from_config(LLAMA, dtype=np.float32)} == {"float32"}
    assert {spec.dtype for spec in specs_from_config(PUBLISHED["gemma-3-4b"] | {"torch_dtype": "float16"})} == {
        "float16"
    }
    assert specs_from_config(LLAMA | {"torch_dtype": "torch.float16"})[0].dtype == "float16"
    for dtype in ("int8", "float8_e4m3fn", None, 7):
        with pytest.raises(UnsupportedDtype):
            specs_from_config(LLAMA, dtype=dtype)


@pytest.mark.parametrize(
    ("sinks", "reason"),
    [
        ([[0.0] * 64] * 23, "sinks has 23 rows of 64 numbers; expected 24 rows"),
        ([[0.0] * 8] * 24, "rows of 8 numbers"),
        ([], "sinks has 0 rows of no numbers"),
        (0.0, "sinks is a float"),
        ([0.0] * 24, "sinks is a list"),
        ([[float("nan")] * 64] * 24, "a sink is nan"),
        ([["a"] * 64] * 24, "a sink is 'a'"),
    ],
)
def test_invalid_sinks_raise(sinks, reason):
    with pytest.raises(ShapeError, match=reason):
        specs_from_config(PUBLISHED["gpt-oss-20b"], sinks=sinks)


def test_sinks_may_be_an_array():
    sinks = np.arange(24 * 64, dtype=np.float32).reshape(24, 64)
    assert specs_from_config(PUBLISHED["gpt-oss-20b"], sinks=sinks)[1].sinks == tuple(range(64, 128))


def test_numbers_may_be_numpy_scalars():
    assert specs_from_config(LLAMA | {"hidden_size": np.int32(4096)}) == specs_from_config(LLAMA)


def fields_by_config():
    """Return the fields of each config that no earlier config of its type has."""
    seen, found = set(), {}
    for name, config in PUBLISHED.items():
        fields = [*config, "dtype", "layer_types", "head_dim", "sliding_window", "text_config"]
        new = [field for field in dict.fromkeys(fields) if (config.get("model_type"), field) not in seen]
        seen.update((config.get("model_type"), field) for field in new)
        if new:
            found[name] = new
    return found


FIELDS = fields_by_config()


@pytest.mark.parametrize("name", FIELDS)
def test_any_value_of_any_field_is_valid_or_raises_a_typed_error(name):
    """Every value of a field is either accepted or raises an error that names the field."""
    circular = []
    circular.append(circular)
    for field in FIELDS[name]:
        for value in (*VALUES, circular):
            reason = refusal_of(PUBLISHED[name] | {field: value})
            assert reason is None or field in reason or field in ("model_type", "text_config")


def refusal_of(config):
    try:
        specs_from_config(config)
    except PagecoreError as error:
        return str(error)
    return None
