"""CSV traces, which hold lengths only, and traces that are lists of records."""

import csv
import gzip
import random
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest

from pagecore.errors import UnsupportedOption
from pagecore.serving.replay import ReplayOptions, replay
from pagecore.serving.replay.trace import TraceError, TraceUnits, read_trace, scan_trace
from pagecore.serving.tables import replay_rows
from pagecore.serving.whatif import WhatIfOptions, read_requests, what_if
from pagecore.serving.whatif.tables import summary_rows
from tests.capabilities import require

BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
45.5,ChatGPT,17,0,17,"API log, failed"
"""
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:16:01.5,396,109\r\n"
)
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 23:59:59.750000+00:00,2162,5
2024-05-11 00:00:00.000000+00:00,1,16
"""
ZONES = "timestamp,ContextTokens,GeneratedTokens\n2024-05-10T07:00:00+02:00,5,6\n2024-05-10T05:00:01Z,7,8\n"


@pytest.fixture
def trace(tmp_path):
    return tmp_path / "trace.csv"


def rows(path, **options):
    return [(one.timestamp_ms, one.input_length, one.output_length) for one in read_trace(path, **options)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BURST, [(5000, 472, 18), (45000, 1087, 230), (45500, 17, 0)]),
        (AZURE, [(0, 374, 44), (14819.41, 396, 109)]),
        (AZURE_2024, [(0, 2162, 5), (250, 1, 16)]),
        ("\ufeff" + AZURE_2024, [(0, 2162, 5), (250, 1, 16)]),
        ('\n"output_length", "Input Length",user,Arrived_At\n\n3,9,x,1.5\n', [(1500, 9, 3)]),
        ("num_decode_tokens,num_prefill_tokens,arrived_at\n3,9,1e1\n", [(10000, 9, 3)]),
        (ZONES, [(0, 5, 6), (1000, 7, 8)]),
    ],
)
def test_columns_are_found_by_the_header(trace, text, expected):
    trace.write_bytes(text.encode())
    assert rows(trace) == expected
    summary = scan_trace(trace)
    assert (summary.num_requests, summary.max_length) == (len(expected), max(n + m for _, n, m in expected))


def test_random_rows_are_read_as_by_the_csv_module(trace):
    choice = random.Random(3)
    names = ["Session ID", "timestamp", "Request tokens", "note", "Response tokens"]
    choice.shuffle(names)
    seconds, expected = 0.0, []
    with trace.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for _ in range(200):
            seconds += choice.random()
            lengths = [choice.randint(1, 5000), choice.randint(0, 700)]
            row = {"timestamp": seconds, "Request tokens": lengths[0], "Response tokens": lengths[1]}
            writer.writerow(row | {"note": choice.choice(["", "a, b", 'say "no"', "1"]), "Session ID": 5})
            expected.append((seconds * 1000, *lengths))
    assert rows(trace) == expected
    assert rows(trace, limit=7) == expected[:7]


def test_times_are_seconds_unless_the_unit_is_given(trace):
    trace.write_text(BURST)
    assert rows(trace, units=TraceUnits(time_unit="ms"))[0] == (5, 472, 18)
    assert rows(trace, units=TraceUnits(time_unit="s"))[0] == (5000, 472, 18)
    trace.write_text(AZURE_2024)
    assert rows(trace, units=TraceUnits(time_unit="ms")) == rows(trace)


def test_compressed_files_and_other_names_are_read(tmp_path):
    packed = {"a.csv": BURST.encode(), "a.gz": gzip.compress(BURST.encode()), "burst": BURST.encode()}
    packed["a.csv.zst"] = require("zstandard").compress(BURST.encode())
    for name, content in packed.items():
        (tmp_path / name).write_bytes(content)
        assert rows(tmp_path / name) == [(5000, 472, 18), (45000, 1087, 230), (45500, 17, 0)]
        (chunk,) = read_requests(tmp_path / name)
        assert chunk.tokens.tolist() == [472, 1087, 17]
        assert chunk.seconds.tolist() == [5, 45, 45.5]


def test_prompts_share_nothing(trace):
    lines = [f"{i},{length},{3}" for i, length in enumerate([300, 300, 16, 33, 1, 300])]
    trace.write_text("timestamp,input_length,output_length\n" + "\n".join(lines))
    prompts = [request.prompt() for request in read_trace(trace)]
    assert [len(prompt) for prompt in prompts] == [300, 300, 16, 33, 1, 300]
    assert all(prompt.dtype == np.int32 for prompt in prompts)
    assert len({int(prompt[0]) for prompt in prompts}) == 6
    for block_size in (1, 16):
        report = replay(trace, ReplayOptions(blocks="unbounded", block_size=block_size))
        assert (report.prefix_hit_tokens, report.prompt_tokens, report.generated_tokens) == (0, 950, 18)
        options = WhatIfOptions(memory="512..4096", points=3, bytes_per_token=1, block_sizes=(block_size,))
        result = what_if(trace, options)
        assert result.curves[0].hit_tokens == [0, 0, 0]
        assert (result.num_requests, result.prompt_tokens, result.unbounded_hit_rate) == (6, 950, 0)
    checked = replay(trace, ReplayOptions(blocks=40, attend=True))
    assert checked.passed
    assert checked.rows_checked


def test_rows_without_prompt_tokens_are_skipped_and_counted(trace):
    rest = "0,0,3\n2,50,4\n2,0,0\n3,50,0\n1,0,7\n5,bad,1\n"
    trace.write_text("timestamp,input_length,output_length\n" + rest)
    assert rows(trace, limit=2) == [(2000, 50, 4), (3000, 50, 0)]
    report = replay(trace, ReplayOptions(blocks=40, requests=2))
    assert (report.requests_total, report.requests_finished, report.requests_skipped) == (2, 2, 2)
    assert (report.prompt_tokens, report.generated_tokens) == (100, 4)
    assert ("rows skipped", "2, without prompt tokens") in replay_rows(report)
    for sample in (1, 0.5):
        result = what_if(trace, WhatIfOptions(memory="1GiB", requests=2, sample=sample, block_sizes=(16, 32)))
        assert (result.num_requests, result.prompt_tokens, result.num_skipped) == (2, 100, 2)
        assert ("rows skipped", "2, without prompt tokens") in summary_rows(result)


def test_a_replay_with_a_clock_waits_for_the_rows(trace):
    trace.write_text(AZURE)
    clock = replay(trace, ReplayOptions(blocks=100, prefill_rate=1000, step_ms=10)).clock
    assert clock.first_token_s["max"] == pytest.approx(0.406, abs=1e-6)
    assert clock.duration_s == pytest.approx(14.81941 + 0.406 + 108 * 0.011, abs=1e-6)


HEADER = "Timestamp,Model,Request tokens,Response tokens"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([HEADER, "5,a,1"], "line 2: 3 fields; the header names 4"),
        ([HEADER, "5,a,1,2", "", "6,a,b,1,2"], "line 4: 5 fields; the header names 4"),
        ([HEADER, "5,a,-0,2"], "line 2: Request tokens is '-0'; expected an integer between 0 and"),
        ([HEADER, "5,a,0,x"], "line 2: Response tokens is 'x'; expected an integer between 0 and"),
        ([HEADER, "x,a,0,2"], "line 2: Timestamp is 'x'; expected a number of seconds"),
        ([HEADER, "5,a,0,2", "6,a,0,0"], "contains no request"),
        ([HEADER, "5,a,1.5,2"], "line 2: Request tokens is '1.5'; expected an integer"),
        ([HEADER, "5,a,,2"], "Request tokens is ''"),
        ([HEADER, "5,a,1_0,2"], "Request tokens is '1_0'"),
        ([HEADER, "5,a,٣,2"], "Request tokens is"),
        ([HEADER, "5,a," + "9" * 5000 + ",2"], "Request tokens is '9999"),
        ([HEADER, "5,a,1,-2"], "line 2: Response tokens is '-2'; expected an integer between 0 and"),
        ([HEADER, "5,a,16777216,1"], "Request tokens + Response tokens is 16777217"),
        ([HEADER, ",a,1,2"], "line 2: Timestamp is ''; expected a number of seconds, 0 or more, or an ISO 8601 time"),
        ([HEADER, "nan,a,1,2"], "Timestamp is 'nan'"),
        ([HEADER, "inf,a,1,2"], "Timestamp is 'inf'"),
        ([HEADER, "-1,a,1,2"], "Timestamp is '-1'"),
        ([HEADER, "10:30,a,1,2"], "Timestamp is '10:30'"),
        ([HEADER, "2024-13-01,a,1,2"], "Timestamp is '2024-13-01'"),
        ([HEADER, "5,a,1,2", "4,a,1,2"], "line 3: the request is 1000 ms earlier than a previous one"),
        ([HEADER, "2024-05-10,a,1,2", "2024-05-09,a,1,2"], "line 3: the request is 8.64e+07 ms earlier"),
        ([HEADER, "5,a,1,2", "2024-05-09,a,1,2"], "line 3: Timestamp is '2024-05-09', but the first time .* is 5.0"),
        ([HEADER, "2024-05-09,a,1,2", "5,a,1,2"], "'5', but the first time of the trace is 2024-05-09"),
        ([HEADER, "2024-05-09,a,1,2", "2024-05-10T00Z,a,1,2"], "give all times in one form"),
        ([HEADER, '5,"a,1,2'], "line 2: not CSV"),
        (["Timestamp,Response tokens", "1,2"], "line 1: no column has the prompt of a request; .* ContextTokens"),
        (["Request tokens,Response tokens", "1,2"], "line 1: no column has the time of a request; .* Timestamp"),
        (["Timestamp,ContextTokens", "1,2"], "line 1: no column has the answer of a request"),
        ([HEADER + ",input_length", "1,a,2,3,4"], "line 1: 2 columns have the prompt of a request"),
        (["a,b,c", "1,2,3"], "line 1: no column has the time of a request"),
        ([HEADER], "contains no request"),
    ],
)
def test_a_malformed_row_is_reported_by_line_and_reason(trace, lines, reason):
    trace.write_text("\n".join(lines))
    for read in (scan_trace, lambda path: list(read_requests(path)), replay, what_if):
        if "earlier" in reason and read not in (scan_trace, replay):
            continue
        with pytest.raises(TraceError, match=reason.replace("+", r"\+")) as raised:
            read(trace)
        assert len(str(raised.value)) < 400


def test_rows_that_are_not_utf8_are_reported_by_line(trace):
    trace.write_bytes(HEADER.encode() + b"\n5,\xff,1,2\n")
    with pytest.raises(TraceError, match="line 2: not UTF-8 text"):
        list(read_trace(trace))


def test_a_date_counts_from_the_first_request(trace):
    choice, now = random.Random(4), datetime(2024, 2, 28, 23, tzinfo=timezone(timedelta(hours=-5)))
    times = [now := now + timedelta(microseconds=choice.randint(0, 10**10)) for _ in range(50)]
    trace.write_text(HEADER + "\n" + "\n".join(f"{time.isoformat(' ')},m,8,1" for time in times))
    assert [one[0] for one in rows(trace)] == [(time - times[0]) / timedelta(milliseconds=1) for time in times]


RECORDS = [
    {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 9]},
    {"timestamp": np.float64(6), "input_length": np.int64(600), "output_length": np.int32(2), "hash_ids": np.r_[7, 3]},
    {"timestamp": 6, "input_length": 512, "output_length": 0, "hash_ids": (np.int64(7),), "session": object()},
]


def test_a_list_of_records_is_a_trace():
    requests = list(read_trace(RECORDS))
    assert [(one.number, one.line, one.timestamp_ms) for one in requests] == [(0, 1, 5), (1, 2, 6), (2, 3, 6)]
    assert [one.hash_ids for one in requests] == [(7, 9), (7, 3), (7,)]
    assert scan_trace(RECORDS).num_requests == 3
    report = replay(tuple(RECORDS), ReplayOptions(blocks="unbounded", block_size=256, max_running=1))
    assert (report.prefix_hit_tokens, report.prompt_tokens) == (512 + 256, 1712)
    options = WhatIfOptions(memory="2048..4096", points=2, bytes_per_token=1, block_sizes=(256, 128))
    result = what_if(RECORDS, options)
    assert [curve.hit_tokens for curve in result.curves] == [[768, 768], [896, 896]]
    assert result.trace == "3 records"


def test_records_with_token_ids_are_read_by_a_what_if():
    records = [{"token_ids": np.arange(40), "timestamp": 1}, {"token_ids": [*range(30)], "timestamp": 2}]
    (chunk,) = read_requests(records, 10)
    assert chunk.blocks.tolist() == [0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "trace of 0 records contains no request"),
        (["a"], "trace of 1 record, record 1: expected a JSON object, got 'a'"),
        ([RECORDS[0], RECORDS[0] | {"input_length": 1e3}], "trace of 2 records, record 2: input_length is 1000.0"),
        ([RECORDS[0] | {"timestamp": np.bool_(True)}], "record 1: timestamp is"),
        ([RECORDS[0] | {"hash_ids": np.array([[7, 9]])}], "record 1: hash_ids has 1 ids"),
        ([RECORDS[1], RECORDS[0]], "record 2: the request is 1 ms earlier than a previous one"),
        (iter(RECORDS), "expected the path of a trace"),
    ],
)
def test_a_malformed_record_is_reported_by_number_and_reason(records, reason):
    with pytest.raises(TraceError, match=reason):
        scan_trace(records)
    with pytest.raises(TraceError):
        what_if(records)


def test_a_list_has_no_default_units_of_its_own():
    assert next(read_trace(RECORDS, units=TraceUnits(time_unit="s"))).timestamp_ms == 5000
    with pytest.raises(UnsupportedOption):
        next(read_trace(RECORDS, units="s"))
