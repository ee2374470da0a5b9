"""Types of fields that readers take as they are."""

import contextlib
import copy
import json
import math
import random
from pathlib import Path

import pytest

from pagecore import errors
from pagecore.models import ConfigError, specs_from_config
from pagecore.models.config_files.field_types import FIELD_TYPES
from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters import count_parameters, vision_tower
from tests.models.hybrids import HYBRIDS
from tests.models.published import PUBLISHED
from tests.together import together

WRONG = (object(), {1: 2}, [[["x"]]], math.nan, math.inf)
RIGHT = {
    "true or false": [True, False],
    "an integer": [0, 5],
    "a list of integers": [[], [1, 2], (3,)],
    "an integer or a list of integers": [-2, [3, -1]],
    "a finite number": [0.5, 2],
    "an object with fields": [{}, {"a": 1}],
    "a text": ["", "gated-gelu"],
    "a text, or true or false": ["per-head", True],
    "a list of texts": [[], ["sparse"]],
    "an integer or a list of integers or of true and false": [1, [0, 1], [True, False]],
    "a list of pairs of integers": [[[1, 2], [2, 1]]],
}


@together("name", FIELD_TYPES)
def test_values_of_another_type_are_refused_by_the_name_of_the_field(name):
    expected = FIELD_TYPES[name].expected
    for value in WRONG:
        if isinstance(value, dict) and expected == "an object with fields":
            continue
        fields = Fields({name: value, f"attn_config.{name}": value}, "config.json")
        for read in (fields.given, fields.value):
            with pytest.raises(ConfigError, match=rf"^config.json: {name} is .*; it must be {expected}$"):
                read(name)
            with pytest.raises(ConfigError, match=rf"attn_config.{name} is "):
                read(f"attn_config.{name}")


@together("name", FIELD_TYPES)
def test_values_of_the_type_null_and_missing_fields_are_accepted(name):
    for value in RIGHT[FIELD_TYPES[name].expected]:
        assert Fields({name: value}, "config.json").given(name) == value
    assert Fields({name: None}, "config.json").given(name) is None
    assert Fields({}, "config.json").given(name) is None


VALUES = ["x", "", 3.5, -1, 0, 1 << 40, math.inf, math.nan, None, [], {}, [None], True, [1, 2], [[["x"]]], "12"]
SAMPLE = {
    name: PUBLISHED[name] for name in ("deepseek-v3.2", "gemma-3-4b", "glm-4.5-air", "gpt2", "llama-3-8b", "mpt-7b")
}
SAMPLE |= {
    name: HYBRIDS[name] for name in ("kimi-linear-48b-a3b", "nemotron-h-8b", "qwen3-next-80b-a3b", "zamba2-2.7b")
}
SAMPLE |= {
    f"small {case['config']['model_type']}": case["config"]
    for case in json.loads(Path(__file__).parents[1].joinpath("encoders.json").read_text())
}
PAGECORE = tuple(kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception))


def places(config, path=()):
    """Yield the path of every field of a config."""
    for name, value in config.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from places(value, (*path, name))


@pytest.mark.parametrize("name", SAMPLE)
def test_no_value_of_a_field_raises_an_error_of_another_kind(name):
    draw = random.Random(name)
    for path in places(SAMPLE[name]):
        config = copy.deepcopy(SAMPLE[name])
        part = config
        for inner in path[:-1]:
            part = part[inner]
        value = draw.choice([*VALUES, ...])
        if value is ...:
            del part[path[-1]]
        else:
            part[path[-1]] = value
        for read in (specs_from_config, count_parameters, vision_tower):
            with contextlib.suppress(*PAGECORE):
                read(config)
