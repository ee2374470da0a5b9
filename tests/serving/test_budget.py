"""Budgets of a device's memory: presets, reserves, the six classes, and advice."""

import json
from functools import cache
from pathlib import Path

import pytest

from pagecore.errors import NotEnoughMemory, PagecoreError, ShapeError, UnsupportedOption
from pagecore.models import ConfigError
from pagecore.models.parameters import count_parameters, weight_format
from pagecore.serving.budget import (
    DeviceOptions,
    Preset,
    preset_for,
    reserved_bytes,
    static_fraction,
    vision_factor,
)
from pagecore.serving.planner import plan_memory, plan_model
from tests.models.parameters.test_count import RECORDED, config_of
from tests.together import together

GIB, MIB = 1 << 30, 1 << 20
LLAMA = json.loads((Path(__file__).parents[1] / "models" / "llama-3.1-8b.json").read_text())
SIX = ["weights", "KV", "activations", "vision activations", "pixels", "multimodal embeddings"]


@together(
    ("gib", "chunk", "few", "many"),
    [
        (16, 2048, 8, 8),
        (20, 2048, 24, 80),
        (34.9, 2048, 24, 80),
        (35, 4096, 32, 160),
        (60, 8192, 256, 512),
        (90, 8192, 256, 512),
        (159.9, 8192, 256, 512),
        (160, 16384, 512, 512),
        (288, 16384, 512, 512),
    ],
)
def test_worked_example_20_presets_by_device_memory(gib, chunk, few, many):
    for ranks, batch in ((1, few), (3, few), (4, many), (16, many)):
        assert preset_for(int(gib * GIB), ranks) == Preset(chunk, batch)


@together(
    ("gib", "options", "fraction"),
    [
        (16, {}, 0.772461),
        (24, {}, 0.847005),
        (40, {}, 0.832813),
        (80, {}, 0.835938),
        (80, {"ranks": 4}, 0.825),
        (80, {"ranks": 8}, 0.81875),
        (80, {"ranks": 8, "data_parallel": 8}, 0.66875),
        (80, {"draft": "standalone"}, 0.760938),
        (141, {}, 0.906915),
        (192, {}, 0.866537),
        (80, {"preset": Preset(1024, 256)}, 0.948438),
    ],
)
def test_worked_example_21_static_fractions(gib, options, fraction):
    assert static_fraction(gib * GIB, **options) == pytest.approx(fraction, abs=1e-6)


@pytest.mark.parametrize(
    ("layers", "hidden", "factor"),
    [
        (24, 1024, 0.95),
        (48, 1024, 0.855),
        (72, 1024, 0.76),
        (240, 1024, 0.76),
        (12, 1024, 0.9975),
        (12, 768, 0.9975),
        (27, 1152, 0.909736),
    ],
)
def test_worked_example_22_factors_of_vision_towers(layers, hidden, factor):
    assert vision_factor(layers, hidden) == pytest.approx(factor, abs=1e-6)


@together("gib", [16, 24, 40, 80, 141, 192])
@together("ranks", [1, 4, 8])
@together("groups", [1, 8])
@together("draft", [None, "standalone", "eagle", "ngram"])
def test_reserves_equal_the_formula(gib, ranks, groups, draft):
    preset = preset_for(gib * GIB, ranks)
    chunk, batch = preset.chunked_prefill_size, preset.graph_batch
    mib = 512 + 1.5 * max(chunk, 2048) + 2 * batch + ranks * 2 / 8 * 1024 + (batch * groups * 3 if groups > 1 else 0)
    mib += {None: 0, "standalone": 6144, "eagle": 2048, "ngram": 0}[draft]
    assert reserved_bytes(preset, ranks=ranks, stages=2, data_parallel=groups, draft=draft) == mib * MIB


def test_a_memory_below_the_reserves_has_a_fraction_of_0():
    assert static_fraction(2 * GIB) == 0


def test_six_classes_of_llama_on_four_ranks():
    plan = plan_model(LLAMA, device_memory="80GiB", ranks=4)
    device = plan.device
    assert [each.name for each in device.classes] == SIX
    weights = weight_format(LLAMA).nbytes(count_parameters(LLAMA), 4)
    static = int(80 * GIB * 0.825)
    assert device.nbytes("weights") == weights
    assert device.nbytes("KV") == plan.memory.memory == static - weights
    assert device.nbytes("activations") == 14336 * MIB
    assert [device.nbytes(name) for name in SIX[3:]] == [0, 0, 0]
    assert (device.free, device.advice, device.parameters) == (0, (), 8_030_261_248)
    assert plan.memory == plan_memory(
        plan.model.layers,
        static - weights,
        ranks=4,
        context=[2048, 8192, 32768, 131072],
        max_tokens=131072,
    )
    report = json.loads(json.dumps(plan.as_json()))
    assert report["device"]["classes"][0]["nbytes"] == weights
    assert plan_model(LLAMA, "1GiB").as_json()["device"] is None


def test_data_parallel_attention_splits_heads_over_a_group():
    plan = plan_model(LLAMA, device_memory="80GiB", ranks=8, options=DeviceOptions(data_parallel=4))
    assert plan.memory.ranks == 2
    assert plan.memory.groups[0].spec.num_kv_heads == 4
    assert plan.device.nbytes("weights") == weight_format(LLAMA).nbytes(count_parameters(LLAMA), 8, 4)
    assert plan.device.nbytes("activations") == (14848 + 512 * 4 * 3) * MIB


def test_a_draft_model_has_keys_and_values_of_its_own():
    small = LLAMA | {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    alone = plan_model(LLAMA, device_memory="80GiB", context=100)
    plan = plan_model(LLAMA, device_memory="80GiB", context=100, options=DeviceOptions(draft_model=small))
    assert plan.device.nbytes("activations") - alone.device.nbytes("activations") == 6 * GIB
    assert plan.memory.bytes_per_token == alone.memory.bytes_per_token + 4 * 8 * 128 * 2 * 2
    large = plan_model(LLAMA, device_memory="80GiB", context=100, options=DeviceOptions(draft_model=LLAMA))
    assert large.device.nbytes("activations") - alone.device.nbytes("activations") == 2 * 8_030_261_248


def test_images_of_a_vision_model():
    config = config_of("qwen2.5-vl-7b")
    options = DeviceOptions(images=3, image_size=448, embedding_cache="1MiB")
    device = plan_model(config, device_memory="80GiB", options=options).device
    assert device.vision_factor == vision_factor(32, 1280)
    assert device.static_fraction == pytest.approx(0.8359375 * device.vision_factor)
    patches = 3 * (448 // 14) ** 2
    assert device.nbytes("vision activations") == patches * (2 * 1280 + 2 * 3420) * 2
    assert device.nbytes("pixels") == patches * 14 * 14 * 3 * 4 * 2, "an image is repeated for two frames"
    assert device.nbytes("multimodal embeddings") == patches // 4 * 3584 * 2 + MIB
    assert device.free > 0
    assert device.advice == ()


def fits(config, device, options):
    """Return True if the plan with a change of options fits."""
    return plan_model(config, device_memory=device.device_memory, options=options).device.free >= 0


def test_advice_follows_the_order_of_the_guide():
    config = config_of("qwen2.5-vl-7b")
    few = plan_model(config, device_memory="80GiB", options=DeviceOptions(images=110)).device
    assert few.free < 0
    (chunk,) = few.advice
    assert (chunk.option, chunk.suffices) == ("chunked_prefill_size", True)
    fraction = few.static_fraction
    assert fits(config, few, DeviceOptions(images=110, chunked_prefill_size=chunk.value, static_fraction=fraction))
    more = plan_model(config, device_memory="80GiB", options=DeviceOptions(images=200)).device
    assert [each.option for each in more.advice] == ["chunked_prefill_size", "static_fraction"]
    assert [each.suffices for each in more.advice] == [False, True]
    chunk, lower = (each.value for each in more.advice)
    assert fits(config, more, DeviceOptions(images=200, chunked_prefill_size=chunk, static_fraction=lower))
    most = plan_model(config, device_memory="80GiB", options=DeviceOptions(images=1000)).device
    assert [each.option for each in most.advice] == ["chunked_prefill_size", "static_fraction", "images"]
    chunk, lower, images = (each.value for each in most.advice)
    assert 0 < images < 1000
    assert fits(config, most, DeviceOptions(images=images, chunked_prefill_size=chunk, static_fraction=lower))
    assert not fits(config, most, DeviceOptions(images=images + 2, chunked_prefill_size=chunk, static_fraction=lower))


def test_a_longest_request_that_does_not_fit_is_advised():
    device = plan_model(LLAMA, device_memory="36GiB", context=[100, 131072]).device
    assert [each.option for each in device.advice] == ["chunked_prefill_size"]
    assert plan_model(
        LLAMA, device_memory="36GiB", context=131072, options=DeviceOptions(chunked_prefill_size=2048)
    ).memory.contexts[0].best_requests == int(device.advice[0].suffices)
    device = plan_model(LLAMA, device_memory="24GiB", context=131072).device
    assert [each.option for each in device.advice] == ["ranks"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"device_memory": "8GiB"}, r"take 14.96 GiB: 6.96 GiB are missing for the weights alone; use more ranks"),
        ({"device_memory": "16GiB"}, r"of 12.36 GiB that the reserves leave: 2.60 GiB are missing"),
        ({"device_memory": "8GiB", "ranks": 2, "options": DeviceOptions(weights="9GiB")}, "take 9.00 GiB on each of 2"),
        ({"device_memory": 0}, "are missing for the weights alone"),
        (
            {"device_memory": "15GiB", "options": DeviceOptions(graph_batch=9000)},
            r"but the reserves take 21\.\d\d GiB; use a graph_batch below 9000, or a device with more memory",
        ),
        (
            {"device_memory": "24GiB", "options": DeviceOptions(graph_batch=6000, chunked_prefill_size=4096)},
            "the cache needs more; use a chunked_prefill_size of 2048 and a graph_batch below 6000; use more ranks",
        ),
    ],
)
def test_a_device_smaller_than_the_weights_is_refused_with_what_is_missing(arguments, reason):
    with pytest.raises(NotEnoughMemory, match=reason):
        plan_model(LLAMA, **arguments)


@together(
    ("arguments", "error", "reason"),
    [
        ({}, ShapeError, "give exactly one of them"),
        ({"memory": "1GiB", "device_memory": "80GiB"}, ShapeError, "give exactly one of them"),
        (
            {"memory": "1GiB", "options": DeviceOptions()},
            ShapeError,
            r"without device_memory \(all have their defaults",
        ),
        ({"memory": "1GiB", "options": DeviceOptions(weights="fp8", images=2)}, ShapeError, r"\(weights, images\)"),
        ({"device_memory": 0.5}, ShapeError, "device_memory is 0.5; give bytes"),
        ({"device_memory": "lots"}, ShapeError, "device_memory is 'lots'"),
        ({"device_memory": "80GiB", "ranks": 4, "options": DeviceOptions(data_parallel=3)}, ShapeError, "must divide"),
        ({"device_memory": "80GiB", "options": DeviceOptions(weights="fp7")}, UnsupportedOption, "fp7"),
        ({"device_memory": "80GiB", "options": DeviceOptions(weights="9 lots")}, ShapeError, "weights is '9 lots'"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, reason):
    with pytest.raises(error, match=reason):
        plan_model(LLAMA, **arguments)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"static_fraction": 1.5}, ShapeError, "static_fraction is 1.5; it must be above 0 and below 1"),
        ({"static_fraction": "most"}, ShapeError, "static_fraction"),
        ({"draft": "oracle"}, UnsupportedOption, "draft is 'oracle'; use one of standalone, eagle, ngram"),
        ({"draft": "ngram", "draft_model": LLAMA}, UnsupportedOption, "needs no draft_model"),
        ({"images": -1}, ShapeError, "images is -1"),
        ({"chunked_prefill_size": 0}, ShapeError, "chunked_prefill_size is 0"),
        ({"embedding_cache": "much"}, ShapeError, "embedding_cache is 'much'"),
    ],
)
def test_bad_options_are_refused(options, error, reason):
    with pytest.raises(error, match=reason):
        DeviceOptions(**options)


def test_a_config_without_a_size_is_refused_by_name_and_weights_in_bytes_need_none():
    config = {name: value for name, value in LLAMA.items() if name != "intermediate_size"}
    with pytest.raises(ConfigError, match="intermediate_size is missing"):
        plan_model(config, device_memory="80GiB")
    plan = plan_model(config, device_memory="80GiB", options=DeviceOptions(weights="15GiB"))
    assert (plan.device.nbytes("weights"), plan.device.parameters) == (15 * GIB, None)


STRANGE = [None, 0, -1, 1.5, "1", "many", b"1", [], object(), float("nan"), True, 2**31, 10**400, {"a": 1}]


@together("name", ["device_memory", "ranks", *DeviceOptions.__dataclass_fields__])
@together("value", STRANGE)
def test_foreign_values_are_accepted_or_raise_our_errors(name, value):
    try:
        if name in ("device_memory", "ranks"):
            plan_model(LLAMA, **{"device_memory": "80GiB", name: value})
        else:
            plan_model(LLAMA, device_memory="80GiB", options=DeviceOptions(**{name: value}))
    except PagecoreError:
        pass


@cache
def total_of(name):
    return count_parameters(config_of(name)).total


@pytest.mark.slow
@pytest.mark.parametrize("options", [None, DeviceOptions(data_parallel=8, weights="int4", draft="eagle")])
def test_every_recorded_model_is_planned_on_a_device(options):
    for name in RECORDED:
        ranks = 1 if options is None else 8
        plan = plan_model(config_of(name), device_memory="4TiB", dtype="bfloat16", ranks=ranks, options=options)
        device = plan.device
        assert [each.name for each in device.classes] == SIX
        assert sum(each.nbytes for each in device.classes) + device.free == 4 << 40
        assert device.parameters == total_of(name)
        json.dumps(plan.as_json())
