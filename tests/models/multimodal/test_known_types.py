"""Messages about model types that are not known."""

import pytest

from pagecore import UnsupportedOption
from pagecore.models import specs_from_config
from pagecore.models.multimodal.known_types import known_types


@pytest.mark.parametrize(
    ("model_type", "close"),
    [
        ("Qwen3Next", "'qwen3_next'"),
        ("llama3", "'llama'"),
        ("gemma-2", "'gemma2'"),
        ("yi", "'Yi'"),
        ("deepseek-v3", "'deepseek_v3'"),
    ],
)
def test_an_unknown_type_is_refused_with_the_closest_ones(model_type, close):
    with pytest.raises(UnsupportedOption) as caught:
        specs_from_config({"model_type": model_type})
    message = str(caught.value)
    assert f'model_type is "{model_type}", which is unknown; the closest known types are ' in message
    assert close in message.split("the closest known types are ")[1]
    assert f"'pagecore plan --families' list all {len(known_types())}" in message
    assert len(message) < 320


@pytest.mark.parametrize("model_type", ["zzzzzzzzzzzz", "", 7, None, ["llama"]])
def test_a_type_that_resembles_none_is_refused(model_type):
    with pytest.raises(UnsupportedOption, match=r"which is unknown; no known type resembles it; docs/models.md and"):
        specs_from_config({"model_type": model_type})


def test_known_types_are_sorted_and_read():
    known = known_types()
    assert known == sorted(set(known), key=lambda name: (name.lower(), name))
    assert {"llama", "llava", "t5", "qwen2_5_omni", "minicpmv"} <= set(known)
