"""Traces: the requests that are read, and the errors of malformed lines."""

import gzip
import json
import os
import sys

import numpy as np
import pytest

from pagecore.errors import PagecoreError, ShapeError, UnsupportedOption
from pagecore.serving.replay.trace import TraceError, TraceUnits, read_trace, scan_trace
from pagecore.serving.whatif.requests import read_requests
from tests.capabilities import require
from tests.together import together

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 9]}


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.fixture
def trace(tmp_path):
    return tmp_path / "trace.jsonl"


def test_requests_are_read_in_order_with_their_fields(trace):
    write(trace, GOOD, "", {**GOOD, "timestamp": 5.5, "output_length": 0, "type": "text"}, GOOD | {"timestamp": 5.5})
    first, second, _ = read_trace(trace)
    assert (first.number, first.line, first.timestamp_ms) == (0, 1, 5.0)
    assert (first.input_length, first.output_length, first.hash_ids) == (600, 3, (7, 9))
    assert (second.number, second.line, second.output_length) == (1, 3, 0)


def test_equal_hash_ids_give_equal_tokens(trace):
    write(trace, GOOD, {**GOOD, "hash_ids": [7, 3], "input_length": 1024})
    first, second = (request.prompt() for request in read_trace(trace))
    assert first.dtype == np.int32
    assert first.tolist() == [*range(7 * 512, 8 * 512), *range(9 * 512, 9 * 512 + 88)]
    assert second[:512].tolist() == first[:512].tolist()
    assert second[512:].tolist() == list(range(3 * 512, 4 * 512))


def test_the_largest_hash_id_still_fits_int32(trace):
    write(trace, {**GOOD, "hash_ids": [2**22 - 1], "input_length": 512})
    (request,) = read_trace(trace)
    assert request.prompt()[-1] == 2**31 - 1


def test_lines_after_the_limit_are_not_read(trace):
    write(trace, GOOD, GOOD, "not JSON")
    assert len(list(read_trace(trace, limit=2))) == 2
    assert list(read_trace(trace, limit=0)) == []
    assert scan_trace(trace, limit=2).num_requests == 2


def test_a_scan_sums_the_requests_of_a_trace(trace):
    write(
        trace, GOOD, {**GOOD, "input_length": 10, "output_length": 700, "hash_ids": [7]}, {**GOOD, "output_length": 0}
    )
    summary = scan_trace(trace)
    assert (summary.num_requests, summary.max_length) == (3, 710)
    assert summary.num_computed_tokens == (600 + 2) + (10 + 699) + 600


MALFORMED = [
    ("{", "; expected one JSON object on each line"),
    ("[1, 2]", "expected a JSON object, got"),
    ("null", "expected a JSON object, got"),
    ("[" * 100_000, "nested"),
    ('{"timestamp": ' + "9" * 5000 + "}", "not JSON"),
    ("\x00", "not JSON"),
    *[({key: value for key, value in GOOD.items() if key != name}, f"'{name}' is missing") for name in GOOD],
    *[
        ({**GOOD, "timestamp": bad}, "timestamp is")
        for bad in (-1, "0", None, True, [], float("nan"), float("inf"), 10**400)
    ],
    *[({**GOOD, "input_length": bad}, "input_length is") for bad in (0, -1, 2**31, 10**30, 1.5, "600", True, None)],
    *[({**GOOD, "output_length": bad}, "output_length is") for bad in (-1, 2**31, 0.0, "3", False, None)],
    ({**GOOD, "input_length": 1, "output_length": 2**24}, "a request has at most 16777216 tokens"),
    *[({**GOOD, name: 2**24 + 1}, f"{name} is 16777217") for name in ("input_length", "output_length")],
    *[
        ({**GOOD, "hash_ids": [0] * count}, f"hash_ids has {count} ids; an input of 600 tokens has 2, one for each 512")
        for count in (0, 1, 3, 38, 32769)
    ],
    ({**GOOD, "hash_ids": [0] * 3}, "pass hash_block if an id names another number of tokens"),
    *[({**GOOD, "hash_ids": bad}, "expected a list of integers") for bad in (None, 7, "79", {"7": 9})],
    *[({**GOOD, "hash_ids": [7, bad]}, "hash_ids contains") for bad in (-1, 2**22, 10**400, 1.0, "9", None, True)],
    ({**GOOD, "timestamp": 4}, "the request is 1 ms earlier than a previous one"),
]


@pytest.mark.parametrize(("line", "reason"), MALFORMED)
def test_a_malformed_line_is_reported_by_number_and_reason(trace, line, reason):
    write(trace, GOOD, "", line, GOOD)
    requests = read_trace(trace)
    next(requests)
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 3: ") as raised:
        next(requests)
    assert reason in str(raised.value)
    assert len(str(raised.value)) < 400
    assert isinstance(raised.value, PagecoreError)
    assert isinstance(raised.value, ValueError)
    with pytest.raises(TraceError, match="line 3"):
        scan_trace(trace)


def test_text_that_is_not_utf8_is_reported_by_line(trace):
    trace.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(TraceError, match="line 2: not UTF-8"):
        list(read_trace(trace))


def test_compressed_traces_are_read(tmp_path):
    zstandard = require("zstandard")
    content = json.dumps(GOOD).encode()
    for name, packed in (("trace.gz", gzip.compress(content)), ("trace.zst", zstandard.compress(content))):
        path = tmp_path / name
        path.write_bytes(packed)
        assert next(read_trace(path)).hash_ids == (7, 9)
        assert scan_trace(path).num_requests == 1
        path.write_bytes(packed[:-10])
        with pytest.raises(TraceError, match=f"{name} cannot be read: Compressed file ended before"):
            list(read_trace(path))
        path.write_bytes(content)
        with pytest.raises(TraceError, match=f"{name} cannot be read"):
            list(read_trace(path))
    damaged = bytearray(gzip.compress(content))
    damaged[10] ^= 0xFF
    (tmp_path / "trace.gz").write_bytes(damaged)
    with pytest.raises(TraceError, match=r"trace\.gz cannot be read"):
        list(read_trace(tmp_path / "trace.gz"))


@pytest.mark.slow
def test_zstandard_files_of_several_frames_are_read_to_their_ends(tmp_path):
    zstandard = require("zstandard")
    content = "".join(json.dumps({**GOOD, "timestamp": 10 + i}) + "\n" for i in range(9000)).encode()
    parts = [content[:700], b"", content[700 : 1 << 18], content[1 << 18 :]]
    packed = b"\x50\x2a\x4d\x18\x04\0\0\0skip".join(map(zstandard.compress, parts))
    path = tmp_path / "TRACE.ZST"
    path.write_bytes(packed)
    assert scan_trace(path).num_requests == 9000
    ends = np.cumsum([len(zstandard.compress(part)) + 12 for part in parts]) - 12
    for cut in (1, ends[0] - 1, ends[2] - 1, ends[2] + 9, len(packed) - 1):
        path.write_bytes(packed[:cut])
        with pytest.raises(TraceError, match=r"TRACE\.ZST cannot be read: Compressed file ended before"):
            scan_trace(path)


def test_a_compressed_trace_of_another_name_is_refused_with_the_remedy(trace):
    trace.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    with pytest.raises(TraceError, match="line 1: not UTF-8 text; decompress it first, or pass '-'"):
        list(read_trace(trace))


@pytest.mark.parametrize("hash_block", [1, 16, 24, 500, 4096])
def test_hash_ids_name_a_given_number_of_tokens(trace, hash_block):
    length = 3 * hash_block
    write(trace, {**GOOD, "timestamp": 1.5, "input_length": length, "hash_ids": [4, 2, 4]})
    (request,) = read_trace(trace, units=TraceUnits(hash_block, "s"))
    part = [np.arange(hash_block) + each * hash_block for each in (4, 2, 4)]
    assert request.prompt().tolist() == np.concatenate(part).tolist()
    assert request.timestamp_ms == 1500
    write(trace, {**GOOD, "input_length": length + 1, "output_length": 0, "hash_ids": [4, 2, 4]})
    with pytest.raises(TraceError, match=f"has 4, one for each {hash_block} tokens"):
        list(read_trace(trace, units=TraceUnits(hash_block)))


def test_the_largest_hash_id_depends_on_its_tokens(trace):
    largest = 2**27 - 1
    write(trace, {**GOOD, "input_length": 16, "hash_ids": [largest]}, {**GOOD, "input_length": 1, "hash_ids": [2**27]})
    requests = read_trace(trace, units=TraceUnits(16))
    assert next(requests).prompt()[-1] == 2**31 - 1
    with pytest.raises(TraceError, match=f"between 0 and {largest}; renumber the ids"):
        next(requests)


def test_ids_of_the_answer_are_left_out(trace):
    write(trace, {**GOOD, "input_length": 512, "output_length": 513, "hash_ids": [1, 2, 3]})
    (request,) = read_trace(trace)
    assert request.hash_ids == (1,)
    write(trace, {**GOOD, "input_length": 512, "output_length": 512, "hash_ids": [1, 2, 3]})
    with pytest.raises(TraceError, match="hash_ids has 3 ids; an input of 512 tokens has 1"):
        list(read_trace(trace))


@pytest.mark.parametrize("wrong", [8, 12, 15, 17, 24, 32, 64, 512])
def test_a_wrong_hash_block_is_refused_at_the_first_length_that_does_not_fit(trace, wrong):
    lines = [{**GOOD, "input_length": n, "hash_ids": [*range(-(-n // 16))]} for n in (7, 40, 1000)]
    write(trace, *lines)
    assert [len(request.hash_ids) for request in read_trace(trace, units=TraceUnits(16))] == [1, 3, 63]
    first = next(i for i, line in enumerate(lines) if -(-line["input_length"] // wrong) != len(line["hash_ids"]))
    with pytest.raises(TraceError, match=f"line {first + 1}: hash_ids has .* pass hash_block"):
        list(read_trace(trace, units=TraceUnits(wrong)))


def test_hash_ids_of_16_tokens_and_seconds_are_those_of_a_qwen_bailian_trace(trace):
    bailian = {"timestamp": 0.07, "input_length": 502, "output_length": 1494, "hash_ids": [*range(32)]}
    write(trace, bailian)
    with pytest.raises(TraceError, match="hash_ids has 32 ids"):
        list(read_trace(trace))
    (request,) = read_trace(trace, units=TraceUnits(16, "s"))
    assert (len(request.hash_ids), request.timestamp_ms) == (32, 70)
    named = {"chat_id": 159, "parent_chat_id": -1, "type": "text", "turn": 1} | bailian
    write(trace, named, {**named, "timestamp": 60.5})
    assert list(read_trace(trace, units=TraceUnits(16, "s"))) == list(read_trace(trace))
    assert [request.timestamp_ms for request in read_trace(trace)] == [70, 60_500]
    assert [request.timestamp_ms for request in read_trace(trace, units=TraceUnits(time_unit="ms"))] == [0.07, 60.5]
    with pytest.raises(TraceError, match="hash_ids has 32 ids; an input of 502 tokens has 1, one for each 512 tokens"):
        list(read_trace(trace, units=TraceUnits(512)))


SHARE_GPT = {"id": "a", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}
EVENTS = [1700000000.5, [{"type": "BlockStored", "block_hashes": [1]}], 0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            json.dumps(SHARE_GPT),
            "line 1: field 'conversations' is text, .*; write a line with token_ids, output_length",
        ),
        (json.dumps({"messages": [], "model": "m"}), "line 1: field 'messages' is text"),
        (json.dumps([SHARE_GPT]), "line 1: an array of objects; expected one JSON object on each line: jq -c '.\\[]'"),
        (json.dumps([SHARE_GPT], indent=1), "line 1: not JSON: .*; expected one JSON object on each line: jq -c"),
        (json.dumps(EVENTS), "line 1: a batch of KV events, .*; pass the trace to pagecore whatif"),
    ],
)
def test_other_formats_are_refused_with_the_way_to_convert_them(trace, text, reason):
    trace.write_text(text)
    with pytest.raises(TraceError, match=reason):
        list(read_trace(trace))
    if not text.startswith("[17"):
        with pytest.raises(TraceError, match=reason):
            list(read_requests(trace))


def test_ids_under_another_name_are_not_called_text(trace):
    write(trace, {"prompt": [1, 2, 3], "output_length": 2})
    for read in (read_trace, read_requests):
        with pytest.raises(TraceError, match=r"^(?!.*text)"):
            list(read(trace))


@pytest.mark.parametrize("hash_block", [0, -1, 65537, 1.5, "16"])
def test_a_hash_block_out_of_range_is_refused(hash_block):
    with pytest.raises(ShapeError, match="hash_block is"):
        TraceUnits(hash_block)


@pytest.mark.parametrize("unit", ["us", "", 0, 1, ["s"]])
def test_an_unknown_time_unit_is_refused(unit):
    with pytest.raises(UnsupportedOption, match=r"time_unit is .*; expected 'ms' or 's'"):
        TraceUnits(time_unit=unit)


def test_an_endless_line_is_refused_without_being_read_whole(trace, monkeypatch):
    monkeypatch.setattr("pagecore.serving.replay.trace.LINE_BYTES_MAX", 100)
    trace.write_bytes(b"{" * 10_000)
    with pytest.raises(TraceError, match="line 1: longer than 100 bytes"):
        list(read_trace(trace))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_trace_is_refused(trace, content):
    trace.write_text(content)
    with pytest.raises(TraceError, match="contains no request"):
        list(read_trace(trace))


@pytest.mark.parametrize("read", [scan_trace, lambda path: list(read_trace(path))])
def test_an_unreadable_trace_is_a_trace_error(tmp_path, read):
    with pytest.raises(TraceError, match=r"missing.jsonl cannot be read: No such file"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(TraceError, match="Is a directory"):
        read(tmp_path)


class Input:
    """Standard input backed by a pipe."""

    def __init__(self, content):
        reading, writing = os.pipe()
        self.buffer = os.fdopen(reading, "rb")
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(content)


def test_the_standard_input_is_read_once_and_not_closed(monkeypatch):
    monkeypatch.setattr("sys.stdin", Input(json.dumps(GOOD).encode() + b"\n{"))
    assert scan_trace("-") is None
    requests = read_trace("-")
    assert next(requests).hash_ids == (7, 9)
    with pytest.raises(TraceError, match="trace -, line 2: not JSON"):
        next(requests)
    sys.stdin.buffer.close()


def test_a_missing_standard_input_is_a_trace_error(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(TraceError, match="standard input is not open as bytes"):
        next(read_trace("-"))


@pytest.mark.parametrize("read", [scan_trace, lambda path: next(read_trace(path))], ids=["scan", "read"])
def test_a_fifo_and_a_device_are_refused_without_waiting(tmp_path, read):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(TraceError, match=r"fifo cannot be read: it is a FIFO; .* or '-' for the standard input"):
        read(tmp_path / "fifo")
    with pytest.raises(TraceError, match="/dev/zero cannot be read: it is a device"):
        read("/dev/zero")


@together("path", [None, 5, 1.5, b"\0", "\0", {"a": 1}, iter([GOOD]), object()])
@together("read", [scan_trace, lambda path: next(read_trace(path))])
def test_an_invalid_path_is_a_trace_error(read, path):
    with pytest.raises(TraceError, match="expected the path of a trace"):
        read(path)


@pytest.mark.parametrize("limit", [-1, 1.5, "2", [1]])
def test_a_limit_that_is_not_a_count_is_refused(trace, limit):
    write(trace, GOOD)
    with pytest.raises(ShapeError, match="limit is"):
        next(read_trace(trace, limit))


@pytest.mark.slow
def test_the_prompt_of_one_line_takes_at_most_64_mib(trace):
    """A line has a few bytes for each 512 tokens, so a short file could require much memory."""
    ids = [0] * 2**15
    write(trace, {**GOOD, "input_length": 2**24, "output_length": 0, "hash_ids": ids})
    assert os.path.getsize(trace) < 100_000
    (request,) = read_trace(trace)
    assert request.prompt().nbytes == 2**26
    write(trace, {**GOOD, "input_length": 2**30, "output_length": 0, "hash_ids": [0] * 2**21})
    with pytest.raises(TraceError, match="line 1: input_length is 1073741824; expected an integer between 1 and"):
        next(read_trace(trace))
    write(trace, {**GOOD, "input_length": 2**24, "output_length": 0, "hash_ids": [0] * 2**8})
    assert next(read_trace(trace, units=TraceUnits(2**16))).prompt().nbytes == 2**26
