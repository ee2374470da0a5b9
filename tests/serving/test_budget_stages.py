"""Plans with pipeline stages, and with the checkpoint's own layers for further tokens as a draft."""

import json

import pytest

from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.models import read_model_config
from pagecore.models.parameters import count_parameters, mtp_specs, weight_format
from pagecore.serving.budget import DeviceOptions, reserved_bytes
from pagecore.serving.budget.stages import divide_layers, stages_of
from pagecore.serving.planner import plan_model
from tests.models.parameters.test_count import DEEPSEEK, LLAMA, RECORDED, config_of
from tests.serving.test_budget import GIB, SIX, total_of

V3 = config_of("deepseek-v3") | DEEPSEEK


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (32, 4, [8, 8, 8, 8]),
        (33, 4, [8, 8, 9, 8]),
        (34, 4, [8, 9, 9, 8]),
        (35, 4, [9, 9, 9, 8]),
        (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]),
        (3, 2, [2, 1]),
        (5, 1, [5]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_layers_are_divided_among_stages(layers, stages, expected):
    assert divide_layers(layers, stages) == expected


@pytest.mark.slow
def test_stages_of_every_model_have_all_its_parameters():
    for name in RECORDED:
        config = config_of(name)
        model = read_model_config(config, dtype="bfloat16")
        stages = 5 if model.num_layers >= 10 else 2
        if model.num_layers < 2 * stages or config["model_type"] in ("zamba", "zamba2"):
            continue
        parts = stages_of(model, stages)
        assert [part.layers.start for part in parts][1:] == [part.layers.stop for part in parts][:-1]
        counted = sum(count_parameters(config, layers=part.layers).total for part in parts)
        assert counted - total_of(name) in (0, tied_embedding(config)), name


def tied_embedding(config):
    """Return the parameters of an embedding, which a tied head copies to the last stage."""
    text = config.get("text_config") or config
    names = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model")
    return text["vocab_size"] * next(text[name] for name in names if text.get(name))


def test_the_worst_stage_is_planned():
    options = DeviceOptions(pipeline_stages=3)
    plan = plan_model(LLAMA, device_memory="24GiB", ranks=2, context=8192, options=options)
    device = plan.device
    # 10, 11 and 11 layers remain as 11, 11 and 10: the first has the embedding and one layer more than the last.
    sizes = [count_parameters(LLAMA, layers=layers) for layers in (range(11), range(11, 22), range(22, 32))]
    nbytes = [weight_format(LLAMA).nbytes(part, 2) for part in sizes]
    assert sum(part.total for part in sizes) == device.parameters == 8_030_261_248
    assert (device.stage, device.layers, device.pipeline_stages) == (0, (0, 11), 3)
    assert device.nbytes("weights") == nbytes[0] == max(nbytes)
    assert device.nbytes("activations") == reserved_bytes(options.preset(24 * GIB, 2), ranks=2, stages=3)
    assert plan.memory.groups[0].num_layers == 11
    assert plan.memory.memory == int(24 * GIB * device.static_fraction) - nbytes[0]
    assert [each.name for each in device.classes] == SIX
    assert json.loads(json.dumps(plan.as_json()))["device"]["layers"] == [0, 11]
    alone = plan_model(LLAMA, device_memory="24GiB", ranks=2, context=8192)
    assert plan.memory.num_tokens > 2.5 * alone.memory.num_tokens


def test_the_first_stage_has_the_encoder():
    config = config_of("whisper") | {"decoder_layers": 5}
    sizes = [count_parameters(config, layers=layers) for layers in (range(2), range(2, 4), range(4, 5))]
    whole = count_parameters(config)
    hidden, layer = config["d_model"], sizes[1].total // 2
    assert sum(size.total for size in sizes) == whole.total + config["vocab_size"] * hidden
    assert sizes[2].total == layer + 2 * hidden + config["vocab_size"] * hidden
    plan = plan_model(config, device_memory="4GiB", context=448, options=DeviceOptions(pipeline_stages=2))
    assert (plan.device.stage, plan.device.layers, plan.device.parameters) == (0, (0, 3), whole.total)
    assert [(group.is_cross, group.num_layers) for group in plan.memory.groups] == [(False, 3), (True, 3)]
    for layers in (range(6), range(0), range(0, 4, 2)):
        with pytest.raises(ShapeError, match="expected a range of one or more of the 5 layers of the model"):
            count_parameters(config, layers=layers)
    with pytest.raises(UnsupportedOption, match="has an encoder, and no layers for further tokens"):
        count_parameters(config, mtp=True)


def test_a_stage_without_the_embedding_can_be_the_worst():
    small = LLAMA | {"num_hidden_layers": 9, "vocab_size": 100}
    device = plan_model(small, device_memory="24GiB", options=DeviceOptions(pipeline_stages=4)).device
    assert (device.stage, device.layers) == (2, (4, 7))


def test_only_the_first_stage_takes_memory_for_images():
    config = config_of("qwen2.5-vl-7b")
    options = DeviceOptions(pipeline_stages=2, images=4)
    device = plan_model(config, device_memory="80GiB", options=options).device
    assert (device.stage, device.nbytes("pixels") > 0) == (0, True)
    text = config["text_config"] | {"num_hidden_layers": 4, "layer_types": None, "vocab_size": 100}
    less = config | {"text_config": text, "vision_config": config["vision_config"] | {"depth": 1}}
    device = plan_model(less, device_memory="80GiB", options=DeviceOptions(pipeline_stages=3)).device
    assert (device.stage, device.nbytes("pixels")) == (1, 0)


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "nemotron-h-8b", "zamba2-2.7b", "longcat-flash", "gemma-3-27b"])
def test_stages_of_hybrids_and_windows_are_planned(name):
    for stages in (2, 4, 7):
        options = DeviceOptions(pipeline_stages=stages)
        device = plan_model(config_of(name), device_memory="4TiB", dtype="bfloat16", options=options).device
        first, end = device.layers
        assert 0 <= first < end
        assert name != "longcat-flash" or first % 2 == end % 2 == 0


def test_layers_for_further_tokens_are_counted_as_a_draft():
    without = count_parameters(V3)
    with_draft = count_parameters(V3, mtp=True)
    added = with_draft.total - without.total
    expert, attention = (
        3 * 7168 * 2048,
        7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168,
    )
    norms = 2 * 7168 + 1536 + 512 + 3 * 7168
    assert added == 257 * expert + 256 * 7168 + attention + norms + 2 * 7168 * 7168
    assert round(added / 1e9, 1) == 11.6
    assert mtp_specs(V3, read_model_config(V3).layers) == read_model_config(V3).layers[-1:]


def test_a_draft_of_further_tokens_is_planned():
    options = DeviceOptions(draft="mtp", weights="fp8")
    plan = plan_model(V3, device_memory="141GiB", ranks=8, context=8192, options=options)
    alone = plan_model(V3, device_memory="141GiB", ranks=8, context=8192, options=DeviceOptions(weights="fp8"))
    assert plan.device.nbytes("activations") - alone.device.nbytes("activations") == 2 * GIB
    assert plan.device.parameters == count_parameters(V3, mtp=True).total
    more = weight_format(V3, "fp8").nbytes(count_parameters(V3, mtp=True), 8)
    assert plan.device.nbytes("weights") == more > alone.device.nbytes("weights")
    assert plan.memory.bytes_per_token == pytest.approx(alone.memory.bytes_per_token * 62 / 61)
    staged = DeviceOptions(draft="mtp", weights="fp8", pipeline_stages=4)
    last = plan_model(V3, device_memory="141GiB", ranks=4, context=8192, options=staged)
    assert last.device.parameters == plan.device.parameters


def test_the_draft_has_the_format_of_the_cache():
    plan = plan_model(
        config_of("glm-4.5-air") | {"num_nextn_predict_layers": 1},
        device_memory="141GiB",
        ranks=4,
        format="float8_e4m3fn",
        options=DeviceOptions(draft="mtp"),
    )
    assert [group.num_layers for group in plan.memory.groups] == [47]
    assert str(plan.memory.groups[0].spec.planes[0].dtype) == "float8_e4m3fn"


def test_qwen3_next_has_one_such_layer_with_full_attention():
    config = config_of("qwen3-next-80b-a3b")
    config.pop("num_nextn_predict_layers", None)
    (spec,) = mtp_specs(config, read_model_config(config).layers)
    assert (spec.num_kv_heads, spec.head_dim) == (2, 256)
    assert count_parameters(config, mtp=True).total > count_parameters(config).total


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LLAMA, "not known of llama, only of deepseek_v3"),
        (
            config_of("glm-4.5-air") | {"num_nextn_predict_layers": 0},
            "num_nextn_predict_layers is 0: the checkpoint has",
        ),
        (config_of("qwen3.5-35b-a3b"), "mtp_num_hidden_layers is missing: the checkpoint has no layers"),
    ],
)
def test_a_model_without_such_layers_is_refused(config, reason):
    if "missing" in reason:
        config = json.loads(json.dumps(config))
        config["text_config"].pop("mtp_num_hidden_layers", None)
    with pytest.raises(UnsupportedOption, match=reason):
        plan_model(config, device_memory="141GiB", ranks=2, options=DeviceOptions(draft="mtp"))


def test_too_many_stages_and_small_devices_are_refused():
    with pytest.raises(ShapeError, match="pipeline_stages is 33, but there are 32 layers to divide; use fewer stages"):
        plan_model(LLAMA, device_memory="80GiB", options=DeviceOptions(pipeline_stages=33))
    with pytest.raises(
        NotEnoughMemory, match=r"stage 1 of 2 \(layers 0 to 15\) of llama take 7.48 GiB: 3.48 GiB are missing"
    ):
        plan_model(LLAMA, device_memory="4GiB", options=DeviceOptions(pipeline_stages=2))
    for layers in (range(0), range(3, 2), range(0, 33), range(0, 8, 2), 5):
        with pytest.raises(ShapeError, match="expected a range of one or more of the 32 layers"):
            count_parameters(LLAMA, layers=layers)
