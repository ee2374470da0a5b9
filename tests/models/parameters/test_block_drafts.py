"""Drafts that predict a block at once (DFlash, DFlash 2, DSpark), and Medusa heads: parameters and windows."""

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.models import ConfigError, specs_from_config
from pagecore.models.parameters import count_medusa, count_parameters
from pagecore.serving.planner import DeviceOptions, plan_model
from tests.models.published import PUBLISHED

# Published configs: z-lab/Qwen3.8-27B-DFlash2 and XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash.
DFLASH_2 = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 248070,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": ["sliding_attention"] * 5,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 248320,
}
MIMO = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 5,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "dflash_config": {
        "target_layer_ids": [0, 15, 31, 47, 69],
        "mask_token_id": 151669,
        "use_swa": True,
        "swa_window_size": 1024,
        "attention_sink_bias": True,
    },
    "vocab_size": 152064,
    "sliding_window": 1024,
}
LLAMA = PUBLISHED["llama-3-8b"]


def windows(config):
    return [spec.window for spec in specs_from_config(config)]


def test_dflash_2_has_the_parameters_of_its_checkpoint():
    assert count_parameters(DFLASH_2).total == 1_924_404_480
    plain = DFLASH_2 | {"dflash_config": {"target_layer_ids": [5, 19, 33, 47, 61]}}
    convolutions = 5 * 2 * (2 * 2 * 5120 + 5120 * 2 * 2 * 320)
    assert count_parameters(plain).total == 1_924_404_480 - convolutions - (2 * 248320 + 5120) * 256


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        ({}, {}, [1024] * 5),
        ({"sliding_window": None}, {}, [1024] * 5),
        ({"use_sliding_window": False}, {"swa_window_size": 64}, [64] * 5),
        ({}, {"swa_window_size": None}, [1024] * 5),
        ({"layer_types": ["full_attention"] * 5}, {}, [1024] * 5),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]}, {"swa_window_size": 7}, 7),
        ({}, {"use_swa": False}, [None] * 5),
        ({}, {"use_swa": None}, [None] * 5),
    ],
)
def test_use_swa_gives_each_layer_a_window_unless_some_are_listed(change, options, expected):
    config = MIMO | change | {"dflash_config": MIMO["dflash_config"] | options}
    expected = [None, expected, None, expected, None] if isinstance(expected, int) else expected
    assert windows(config) == expected


def test_listed_windows_of_a_draft_stay():
    assert windows(DFLASH_2) == [2048] * 5
    assert windows(DFLASH_2 | {"dflash_config": {}, "layer_types": None}) == [None] * 5


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"swa_window_size": None}, "dflash_config.use_swa is true, but dflash_config.swa_window_size is missing"),
        ({"swa_window_size": 0}, "dflash_config.swa_window_size is 0; it must be an integer"),
        ({"use_swa": "yes"}, "dflash_config.use_swa is .yes.; it must be true or false"),
    ],
)
def test_a_draft_without_a_valid_window_is_refused_by_name(options, reason):
    config = MIMO | {"sliding_window": None, "dflash_config": MIMO["dflash_config"] | options}
    with pytest.raises(ConfigError, match=reason):
        specs_from_config(config)


def test_drafts_with_windows_are_planned_as_layers_of_the_cache():
    plan = plan_model(LLAMA, device_memory="80GiB", options=DeviceOptions(draft_model=MIMO))
    assert [group.window for group in plan.memory.groups] == [None, 1024]


# deepseek-ai/dspark_qwen3_8b_block7 has such fields.
DSPARK = {**DFLASH_2, "dflash_config": None, "target_layer_ids": [1, 9, 17, 25, 33], "markov_rank": 256}
VOCABULARY, HIDDEN = 248320, 5120


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({}, 2 * VOCABULARY * 256),
        ({"enable_confidence_head": True}, 2 * VOCABULARY * 256 + HIDDEN + 1),
        (
            {"enable_confidence_head": True, "confidence_head_with_markov": True},
            2 * VOCABULARY * 256 + HIDDEN + 256 + 1,
        ),
        ({"markov_head_type": "gated"}, 2 * VOCABULARY * 256 + (HIDDEN + 256) * 256 + 256),
        ({"markov_head_type": "rnn"}, 2 * VOCABULARY * 256 + (HIDDEN + 512) * 768 + 768),
        ({"draft_vocab_size": 32000}, (VOCABULARY + 32000) * 256 + 32000 * HIDDEN),
    ],
)
def test_dspark_drafts_have_a_head_for_transitions(change, more):
    plain = DFLASH_2 | {"dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]}}
    assert count_parameters(DSPARK | change).total == count_parameters(plain).total + more


@pytest.mark.parametrize("kind", ["tree", ["gated"]])
def test_an_unknown_head_for_transitions_is_refused(kind):
    with pytest.raises(UnsupportedOption, match=r"markov_head_type is .*; expected vanilla, gated, rnn"):
        count_parameters(DSPARK | {"markov_head_type": kind})


def test_drafts_in_the_format_of_speculators_count_like_others():
    layers = {name: value for name, value in DFLASH_2.items() if name not in ("architectures", "dflash_config")}
    whole = {"model_type": "speculator_model", "transformer_layer_config": layers, "draft_vocab_size": VOCABULARY}
    whole |= {"aux_hidden_state_layer_ids": [6, 20, 34, 48, 62], "mask_token_id": 1}
    options = {name: DFLASH_2["dflash_config"][name] for name in ("conv_kernel_size", "conv_group_size")}
    for kind, more, expected in (
        ("dflash", {}, DFLASH_2 | {"dflash_config": {"target_layer_ids": [1] * 5}}),
        ("dflash2", options | {"selector_rank": 256}, DFLASH_2),
        ("dspark", {"markov_rank": 256}, DSPARK),
    ):
        assert count_parameters(whole | {"speculators_model_type": kind} | more) == count_parameters(expected)


# FasterDecoding/medusa-vicuna-7b-v1.3: its file has 1,478,533,120 bytes of float16.
MEDUSA = {"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
VICUNA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
VICUNA |= {"num_attention_heads": 32, "vocab_size": 32000}


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (MEDUSA, 1_478_533_120 // 2),
        (MEDUSA | {"vocab_size": 100, "hidden_size": 10}, 5 * (110 + 1000)),
        ({"model_type": "medusa", "num_heads": 3, "hidden_size": 10, "vocab_size": 100}, 3 * (100 + 1000)),
        ({"num_heads": 3, "num_hidden_layers": 2, "hidden_size": 10, "vocab_size": 100}, 3 * (200 + 1000)),
        ({"num_heads": 3, "hidden_size": 10, "vocab_size": 100, "truncated_vocab_size": 20}, 3 * (100 + 200)),
        ({"num_heads": 3, "hidden_size": 10, "vocab_size": 100, "original_lm_head": True}, 3 * 100 + 1000),
        ({"num_heads": 3, "hidden_size": 10, "vocab_size": 100, "medusa_fc_bias": True}, 3 * (110 + 1000)),
    ],
)
def test_medusa_heads_are_counted_in_both_formats(heads, expected):
    assert count_medusa(heads, VICUNA).total == expected


def test_medusa_heads_take_the_reserve_and_store_nothing():
    plain = plan_model(VICUNA, device_memory="24GiB", options=DeviceOptions(draft="ngram"))
    plan = plan_model(VICUNA, device_memory="24GiB", options=DeviceOptions(draft="medusa", draft_model=MEDUSA))
    assert (plan.model, len(plan.memory.groups)) == (plain.model, 1)
    assert plan.device.nbytes("activations") - plain.device.nbytes("activations") == 1_478_533_120
    assert plan.memory.num_tokens < plain.memory.num_tokens
    halves = plan_model(
        VICUNA, device_memory="24GiB", ranks=2, options=DeviceOptions(draft="medusa", draft_model=MEDUSA)
    )
    plain = plan_model(VICUNA, device_memory="24GiB", ranks=2, options=DeviceOptions(draft="ngram"))
    heads = 5 * 2 * (4096 * 4097 + 16000 * 4096)
    assert halves.device.nbytes("activations") - plain.device.nbytes("activations") == heads


@pytest.mark.parametrize(
    ("heads", "error", "reason"),
    [
        (None, UnsupportedOption, "draft is 'medusa', which needs the config of the heads; pass it as draft_model"),
        ({"medusa_num_layers": 1}, ConfigError, "medusa_num_heads is missing"),
        ({"medusa_num_heads": 0}, ConfigError, "medusa_num_heads is 0; it must be"),
    ],
)
def test_medusa_without_a_number_of_heads_is_refused(heads, error, reason):
    with pytest.raises(error, match=reason):
        plan_model(VICUNA, device_memory="24GiB", options=DeviceOptions(draft="medusa", draft_model=heads))
