"""Layers for the prediction of further tokens of a checkpoint: their parameters, computed by hand, and their specs."""

import pytest

from pagecore.models import ConfigError, specs_from_config
from pagecore.models.parameters import count_parameters, mtp_specs

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
SIZES |= {
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_routed_experts": 6,
    "num_shared_experts": 1,
    "head_dim": 16,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
SIZES |= {"first_k_dense_replace": 1, "num_dense_layers": 1, "num_hidden_layers": 3, "num_nextn_predict_layers": 2}


@pytest.mark.parametrize("model_type", ["glm_ocr_text", "hy_v3", "pangu_ultra_moe"])
def test_layers_of_a_checkpoint_for_further_tokens_are_those_of_the_model_with_a_projection(model_type):
    config = SIZES | {"model_type": model_type} | (LATENT if model_type == "pangu_ultra_moe" else {})
    draft = count_parameters(config, mtp=True).total - count_parameters(config).total
    layers = count_parameters(config | {"num_hidden_layers": 5}).total - count_parameters(config).total
    assert draft == layers + 2 * (2 * 64 * 64 + 3 * 64)
    assert len(mtp_specs(config, specs_from_config(config))) == 2


WINDOWED = SIZES | {
    "num_nextn_predict_layers": 1,
    "num_local_experts": 6,
    "sliding_window": 9,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(("listed", "window"), [({}, 9), ({"mtp_layer_types": ["full_attention"]}, None)])
def test_the_draft_of_exaone_has_a_window_and_an_mlp(listed, window):
    config = WINDOWED | listed | {"model_type": "exaone_moe", "sliding_window_pattern": 2}
    draft = count_parameters(config, mtp=True).total - count_parameters(config).total
    attention = 2 * 64 * 4 * 16 + 2 * 64 * 2 * 16 + 2 * 16
    assert draft == attention + 3 * 64 * 72 + 2 * 64 + 2 * 64 * 64 + 3 * 64
    (spec,) = mtp_specs(config, specs_from_config(config))
    assert spec.window == window


# The model card has 0.33B parameters for one.
def test_the_draft_of_mimo_v2_flash_has_a_window_and_an_mlp():
    config = {"model_type": "mimo_v2_flash", "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4}
    config |= {"head_dim": 192, "v_head_dim": 128, "intermediate_size": 16384, "moe_intermediate_size": 2048}
    config |= {"num_hidden_layers": 48, "n_routed_experts": 256, "vocab_size": 152576, "swa_num_key_value_heads": 8}
    draft = count_parameters(config, mtp=True).total - count_parameters(config).total
    attention = 4096 * (64 * (192 + 128) + 8 * (192 + 128)) + 64
    assert draft == attention + 3 * 4096 * 16384 + 2 * 4096 + 2 * 4096**2 + 3 * 4096
    assert round(draft / 1e9, 2) == 0.33
    (spec,) = mtp_specs(config, specs_from_config(config))
    assert (spec.num_kv_heads, spec.head_dim, spec.window) == (8, 192, 129)


# The model card has 196B parameters, and 0.81B for one of the layers, which have heads of their own.
def test_the_draft_of_step_3_5_flash_has_windows_and_heads():
    config = {"model_type": "step3p5", "hidden_size": 4096, "intermediate_size": 11264, "num_attention_heads": 64}
    config |= {"num_hidden_layers": 45, "num_nextn_predict_layers": 3, "vocab_size": 128896, "head_dim": 128}
    config |= {"num_attention_groups": 8, "sliding_window": 512, "moe_num_experts": 288, "n_routed_experts": 288}
    config |= {"moe_intermediate_size": 1280, "share_expert_dim": 1280}
    config["moe_layers_enum"] = ",".join(map(str, range(3, 45)))
    config["layer_types"] = (["full_attention"] + ["sliding_attention"] * 3) * 12
    config["attention_other_setting"] = {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
    }
    draft = count_parameters(config, mtp=True).total - count_parameters(config).total
    attention = 2 * 4096 * 128 * (96 + 8) + 96 * 4096 + 2 * 128
    ends = 2 * 4096**2 + 3 * 4096 + 128896 * 4096
    assert draft == 3 * (attention + 3 * 4096 * 11264 + 2 * 4096 + ends)
    assert round(draft / 3e9, 2) == 0.81
    assert [spec.window for spec in mtp_specs(config, specs_from_config(config))] == [512] * 3


NEMOTRON = {"model_type": "nemotron_h", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
NEMOTRON |= {"head_dim": 16, "hybrid_override_pattern": "ME*E", "n_groups": 1, "mamba_num_heads": 8, "vocab_size": 101}
NEMOTRON |= {"mamba_head_dim": 16, "ssm_state_size": 16, "conv_kernel": 4, "n_routed_experts": 6, "use_conv_bias": True}
NEMOTRON |= {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 12}
NEMOTRON |= {"num_hidden_layers": 4, "num_nextn_predict_layers": 1, "use_bias": False, "mlp_bias": False}


@pytest.mark.parametrize(
    ("parts", "attending", "experts"),
    [
        ({}, 1, 1),
        ({"mtp_hybrid_override_pattern": "*E"}, 1, 1),
        ({"mtp_hybrid_override_pattern": "*E*E"}, 2, 2),
        ({"mtp_layers_block_type": ["attention", "full_attention", "moe"]}, 2, 1),
    ],
)
def test_the_draft_of_nemotron_h_has_layers_of_both_kinds(parts, attending, experts):
    config = NEMOTRON | parts
    draft = count_parameters(config, mtp=True).total - count_parameters(config).total
    attention = 2 * 64 * 4 * 16 + 2 * 64 * 2 * 16 + 64
    moe = 2 * 64 * 12 + 6 * 2 * 12 * 24 + 6 * 64 + 2 * 64 * 48 + 64
    assert draft == attending * attention + experts * moe + 2 * 64 * 64 + 3 * 64
    assert len(mtp_specs(config, specs_from_config(config))) == attending


@pytest.mark.parametrize("parts", ["*M", 3, [2], [["moe"]]])
def test_the_draft_of_nemotron_h_keeps_no_states(parts):
    config = NEMOTRON | {"mtp_hybrid_override_pattern": parts}
    with pytest.raises(ConfigError, match=r"mtp_hybrid_override_pattern is .*; its parts must be \*, E, attention"):
        count_parameters(config, mtp=True)
