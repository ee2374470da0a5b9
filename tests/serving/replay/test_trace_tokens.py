"""Traces with token ids, as files and as lists of records."""

import json

import numpy as np
import pytest

from pagecore.serving.replay import ReplayOptions, replay
from pagecore.serving.replay.trace import TraceError, TraceUnits, read_trace
from pagecore.serving.whatif import WhatIfOptions, what_if
from tests.serving.prefixes import count_hits
from tests.together import together


@pytest.fixture
def records():
    """Requests whose prompts share random prefixes, in three namespaces."""
    random = np.random.default_rng(8)
    prompts, made = [random.integers(0, 50_000, 30)], []
    for number in range(80):
        base = prompts[random.integers(len(prompts))]
        kept = base[: random.integers(1, len(base) + 1)]
        prompts.append(np.concatenate([kept, random.integers(0, 50_000, random.integers(1, 40))]))
        record = {"timestamp": number, "token_ids": prompts[-1].tolist(), "output_length": int(random.integers(0, 4))}
        made.append(record | random.choice([{}, {"namespace": "a"}, {"namespace": "b"}]))
    return made


def expected_hits(records, block_size):
    """Return the hits of each namespace in a dictionary of prefixes, together."""
    texts = {}
    for record in records:
        texts.setdefault(record.get("namespace"), []).append((record["token_ids"],) * 2)
    return sum(count_hits(one, block_size)[1] for one in texts.values())


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_replay_finds_what_earlier_prompts_of_the_namespace_computed(tmp_path, records, block_size):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    options = ReplayOptions(blocks="unbounded", block_size=block_size, max_running=1, prefill_only=True)
    report = replay(path, options)
    assert report.prefix_hit_blocks == expected_hits(records, block_size) > 0
    assert replay(records, options).prefix_hit_blocks == report.prefix_hit_blocks
    sizes = WhatIfOptions(memory="1000..100000", points=2, bytes_per_token=1, block_sizes=(block_size,))
    assert what_if(records, sizes).curves[0].hit_tokens[-1] == report.prefix_hit_tokens


def test_answers_tiers_and_attention_work_with_token_ids(records):
    plain = replay(records, ReplayOptions(blocks=60, block_size=4, max_running=4))
    assert plain.generated_tokens == sum(record["output_length"] for record in records)
    tiers = replay(records, ReplayOptions(blocks=30, block_size=4, max_running=1, host="1GiB"))
    unbounded = replay(records, ReplayOptions(blocks="unbounded", block_size=4, max_running=1))
    assert tiers.prefix_hit_tokens == unbounded.prefix_hit_tokens
    assert tiers.tiers.hit_tokens["CPU"] > 0
    checked = replay(records, ReplayOptions(blocks=60, block_size=4, attend=True))
    assert checked.passed
    assert checked.rows_checked


def test_fields_have_other_names_and_arrays_do():
    ids = np.arange(5)
    for name in ("token_ids", "prompt_token_ids", "tokens"):
        (request,) = read_trace([{name: ids, "output_length": np.int64(2), "timestamp": 3}], units=TraceUnits(16, "s"))
        assert request.prompt().tolist() == [0, 1, 2, 3, 4]
        assert request.prompt().dtype == np.int32
        assert (request.timestamp_ms, request.input_length, request.output_length) == (3000, 5, 2)
    (request,) = read_trace([{"token_ids": (7,), "output_length": 0}])
    assert (request.timestamp_ms, request.namespace) == (0, None)


@together(
    ("change", "reason"),
    [
        ({"token_ids": []}, "token_ids is .*; expected a list of integers that is not empty"),
        ({"token_ids": [1, True]}, "expected a list of integers"),
        ({"token_ids": [1, 1.5]}, "expected a list of integers"),
        ({"token_ids": "12"}, "expected a list of integers"),
        ({"token_ids": np.ones((2, 2), int)}, "expected a list of integers"),
        ({"token_ids": [-1]}, "token_ids has an id outside 0 to 1073741823"),
        ({"token_ids": [2**30]}, "outside 0 to"),
        ({"output_length": None}, "output_length is None"),
        ({"timestamp": "x"}, "timestamp is 'x'"),
        ({"namespace": 5}, "namespace is 5; expected a string"),
    ],
)
def test_a_malformed_record_is_refused(change, reason):
    good = {"timestamp": 0, "token_ids": [1, 2], "output_length": 1}
    with pytest.raises(TraceError, match=f"record 2: .*{reason}"):
        replay([good, good | change])


def test_the_first_record_decides_the_format():
    good = {"timestamp": 0, "token_ids": [1, 2], "output_length": 1}
    hashed = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [3]}
    with pytest.raises(TraceError, match="record 2: field 'token_ids' is missing"):
        list(read_trace([good, hashed]))
    with pytest.raises(TraceError, match="record 2: field 'input_length' is missing"):
        list(read_trace([hashed, good]))
    with pytest.raises(TraceError, match="record 1: field 'output_length' is missing"):
        list(read_trace([{"token_ids": [1]}]))
