"""Text of messages: values of callers are shown on one short line, whatever their repr does."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, specs_from_config
from pagecore.errors import PagecoreError, shown
from pagecore.models.parameters import weight_format
from pagecore.serving import ReplayOptions, WhatIfOptions, plan_model
from pagecore.tiers import EventPublisher, Fingerprint, HostTier, Tiers, lane_keys


class Silent:
    """An object whose repr fails."""

    def __repr__(self):
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("a\nb", r"'a\nb'"),
        (np.zeros((2, 2)), "array([[0., 0.], [0., 0.]])"),
        (10**5000, "<int without a short repr>"),
        (Silent(), "<Silent without a short repr>"),
    ],
    ids=["int", "text", "array", "digits", "failing"],
)
def test_a_value_is_shown_on_one_line(value, text):
    assert shown(value) == text


@pytest.mark.parametrize("value", [list(range(1000)), "x" * 1000, np.zeros((50, 3)), {"key": [0] * 99}], ids=type)
def test_a_long_value_is_cut(value):
    assert len(shown(value)) == 80
    assert shown(value).endswith("...")
    assert shown(value)[:5] == repr(value)[:5]


SPEC = AttentionSpec(2, 8)
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
CALLS = {
    "id": lambda cache, value: cache.add_sequence([1], id=value),
    "priority": lambda cache, value: cache.add_sequence([1], priority=value),
    "time_to_live": lambda cache, value: cache.add_sequence([1], time_to_live=value),
    "rank": lambda cache, value: cache.add_sequence([1], rank=value),
    "token": lambda cache, value: cache.evict_prefix([value]),
    "layout": lambda _, value: PagedKVCache(SPEC, num_blocks=9, layout=value),
    "blocks": lambda _, value: ReplayOptions(blocks=value),
    "memory": lambda _, value: ReplayOptions(memory=value),
    "disk": lambda _, value: ReplayOptions(disk=value),
    "remote": lambda _, value: ReplayOptions(remote=value),
    "bandwidth": lambda _, value: ReplayOptions(bandwidth=[value]),
    "numa_node": lambda cache, value: HostTier(cache, num_blocks=9, numa_node=value),
    "io": lambda cache, value: HostTier(cache, num_blocks=9, io=value),
    "write": lambda cache, value: Tiers(cache, HostTier(cache, num_blocks=9), write=value),
    "hash": lambda cache, value: Fingerprint.of(cache, model="m", hash=value),
    "endpoint": lambda cache, value: EventPublisher(cache, endpoint=value),
    "policies": lambda _, value: WhatIfOptions(policies=value),
    "block_sizes": lambda _, value: WhatIfOptions(block_sizes=value),
    "tiers": lambda _, value: WhatIfOptions(tiers=value),
    "options": lambda _, value: plan_model(LLAMA, device_memory="1GiB", options=value),
    "weights": lambda _, value: weight_format(LLAMA, weights=value),
    "chain": lambda _, value: lane_keys(value, 0),
    "format": lambda _, value: specs_from_config(LLAMA, format=value),
}
AWKWARD = {"array": np.zeros((40, 40)), "text": "x" * 5000, "list": ["y" * 3000], "int": 10**5000, "silent": Silent()}


@pytest.mark.parametrize("name", CALLS)
def test_awkward_values_are_refused_with_a_short_message(name):
    for kind in AWKWARD.keys() - ({"text", "int", "silent"} if name == "id" else set()):  # these name a sequence
        with pytest.raises(PagecoreError) as raised:
            CALLS[name](PagedKVCache(SPEC, num_blocks=9), AWKWARD[kind])
        assert len(str(raised.value)) < 400, kind
        assert "\n" not in str(raised.value), kind
