"""`pagecore replay`: options that reach the replay, its reports, and files that it cannot read or write."""

import json
import os
import subprocess
import sys
import types

import pytest

from pagecore.cache import PagedKVCache
from pagecore.cli.outcomes import UnwritableFileError
from pagecore.cli.output import write_json
from tests.cli.command_line import call, refused, write_trace

pytestmark = pytest.mark.slow


KEYS = {
    "requests_finished",
    "preemptions",
    "steps",
    "index_us_p50",
    "index_us_p99",
    "index_us_max",
    "utilization_mean",
    "utilization_peak",
    "fragmentation_mean",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "prefix_query_blocks",
    "prefix_hit_blocks",
    "saved_prefill_tokens",
    "evicted_blocks",
    "prefix_hit_series",
    "wall_s",
}


def test_replay_reports_in_a_table_and_in_json(capsys, tmp_path, trace):
    code, out, err = call(capsys, "replay", trace, "--memory", "2GiB", "--json", tmp_path / "out.json")
    assert (code, err) == (0, "")
    assert "8 of 8" in out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report.keys() >= KEYS
    assert report["requests_finished"] == 8
    assert not {"rows_checked", "max_relative_error"} & report.keys()


def test_replay_with_attention_reports_what_was_checked(capsys, tmp_path, trace):
    code, out, _ = call(capsys, "replay", trace, "--blocks", 30, "--attend", "--json", tmp_path / "out.json")
    assert code == 0
    assert "against float64" in out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["rows_checked"] > 0
    assert report["max_relative_error"] < 1e-5


def test_every_option_reaches_the_replay(capsys, tmp_path, trace):
    options = (
        "--blocks 90 --block-size 4 --max-tokens-per-step 32 --max-running 2 --requests 5 --seed 3 --bytes-per-token 1"
    )
    code, _, _ = call(capsys, "replay", trace, *options.split(), "--json", tmp_path / "out.json")
    assert code == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["num_blocks"], report["block_size"], report["requests_total"]) == (90, 4, 5)
    assert max(report["running_series"]) <= 2
    assert report["steps"] >= report["computed_tokens"] / 32


def test_the_order_of_admission_reaches_the_replay(capsys, tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 1025, "output_length": 1, "hash_ids": [*head, n]}
        for n, head in enumerate([[100, 101], [200, 201], [100, 102], [200, 202]])
    ]
    trace = write_trace(tmp_path / "heads.jsonl", lines)
    hits = {}
    for policy in ("fcfs", "lpm"):
        options = f"--blocks 4 --block-size 512 --max-running 4 --policy {policy} --json {tmp_path / 'out.json'}"
        assert call(capsys, "replay", trace, *options.split())[0] == 0
        hits[policy] = json.loads((tmp_path / "out.json").read_text())["prefix_hit_blocks"]
    # Three blocks hold one prompt: by arrival, each finds the head of the other family.
    assert hits == {"fcfs": 0, "lpm": 2}


def test_the_units_of_a_trace_reach_replay_and_what_if(capsys, tmp_path):
    line = {"timestamp": 0.5, "input_length": 40, "output_length": 2, "hash_ids": [5, 6, 7]}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(line) + "\n" + json.dumps(line | {"timestamp": 1.5, "hash_ids": [5, 6, 8]}))
    units = ("--hash-block", 16, "--time-unit", "s", "--json", tmp_path / "out.json")
    options = "--blocks 9 --block-size 8 --prefill-rate 1000 --step-ms 10"
    assert call(capsys, "replay", trace, *options.split(), *units)[0] == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["prefix_hit_tokens"] == 32
    assert report["clock"]["duration_s"] > 1
    assert call(capsys, "whatif", trace, "--memory", "1GiB", "--block-size", 8, *units)[0] == 0
    assert json.loads((tmp_path / "out.json").read_text())["curves"][0]["hit_tokens"] == [32]
    assert "time-unit: invalid choice" in refused(capsys, "replay", trace, "--time-unit", "us")
    assert "hash_block is 0" in refused(capsys, "whatif", trace, "--hash-block", 0)


def test_unbounded_blocks_eviction_policy_and_prefill_only_reach_the_replay(capsys, tmp_path):
    lines = [{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, n]} for n in range(2, 6)]
    trace = write_trace(tmp_path / "shared.jsonl", lines)
    options = "--blocks unbounded --block-size 512 --max-running 1 --prefill-only"
    code, out, err = call(capsys, "replay", trace, *options.split(), "--json", tmp_path / "out.json")
    assert (code, err) == (0, "")
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["prefix_query_blocks"], report["prefix_hit_blocks"]) == (8, 6)
    assert (report["prefix_query_tokens"], report["prefix_hit_tokens"]) == (4400, 3072)
    assert (report["num_blocks"], report["generated_tokens"], report["evicted_blocks"]) == (13, 0, 0)
    assert "6 of 8 (75.0%)" in out
    assert "3,072 of 4,400 prompt tokens (69.8%)" in out
    assert "0 blocks (policy lru)" in out
    code, out, _ = call(
        capsys, "replay", trace, "--blocks", 75, "--evict", "fifo", "--max-running", 1, "--json", tmp_path / "out.json"
    )
    report = json.loads((tmp_path / "out.json").read_text())
    assert (code, report["evict"]) == (0, "fifo")
    assert report["evicted_blocks"] > 0
    assert f"{report['evicted_blocks']} blocks (policy fifo)" in out
    code, out, _ = call(capsys, "replay", trace, "--evict", "none")
    assert code == 0
    assert "prefix hits" not in out


def test_unbounded_blocks_are_refused_for_the_standard_input(capsys):
    assert "standard input, which cannot be scanned" in refused(capsys, "replay", "-", "--blocks", "unbounded")


def test_a_fifo_without_a_reader_is_refused_without_waiting(capsys, tmp_path, trace):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "it is a FIFO" in refused(capsys, "replay", fifo)
    assert "it is a FIFO" in refused(capsys, "replay", trace, "--model", fifo)
    assert "it is a FIFO" in refused(capsys, "plan", fifo, "--memory", "1GiB")
    (tmp_path / "config.json").mkdir()
    assert "Is a directory" in refused(capsys, "plan", tmp_path, "--memory", "1GiB")
    for option in ("--json", "--plot"):
        assert f"{option} {fifo} is a FIFO without a reader" in refused(capsys, "replay", trace, option, fifo)


def test_a_trace_is_read_from_the_standard_input(trace):
    command = f'"{sys.executable}" -m pagecore replay - --blocks 100 < "{trace}"'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "8 of 8" in done.stdout


def test_a_report_is_written_to_a_fifo_with_a_reader(capsys, tmp_path, trace):
    fifo = tmp_path / "report.json"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        code, _, err = call(capsys, "replay", trace, "--blocks", 100, "--json", fifo)
        assert (code, err) == (0, "")
        assert json.loads(os.read(reading, 1 << 20))["requests_finished"] == 8
    finally:
        os.close(reading)


def test_a_fifo_that_has_lost_its_reader_is_named_once(tmp_path):
    fifo = tmp_path / "report.json"
    os.mkfifo(fifo)
    with pytest.raises(UnwritableFileError) as caught:
        write_json(fifo, types.SimpleNamespace(as_json=dict))
    assert str(caught.value) == f"--json {fifo} is a FIFO without a reader; start the reader first"


def test_the_swap_space_is_reported(capsys, tmp_path, trace):
    options = "--blocks 16 --block-size 8 --bytes-per-token 100 --swap-memory 64KiB --max-tokens-per-step 64"
    code, out, _ = call(capsys, "replay", trace, *options.split(), "--json", tmp_path / "out.json")
    assert code == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["num_swap_blocks"] == 65536 // 800
    assert report["swaps"] == report["preemptions"]
    assert "80 blocks, at most" in out
    call(capsys, "replay", trace, "--blocks", "16", "--json", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["swaps"] == 0
    assert not {"num_swap_blocks", "swapped_blocks_peak"} & report.keys()


def test_refused_requests_are_reported_and_not_counted_as_finished(capsys, trace):
    code, out, err = call(capsys, "replay", trace, "--blocks", 8)
    assert code == 0
    assert "5 of 8" in out
    assert "3 requests were refused; the first: line 6: request 5 needs 113 slots" in err


def test_a_replay_that_serves_no_request_exits_with_2(capsys, trace):
    code, out, err = call(capsys, "replay", trace, "--blocks", 2)
    assert code == 2
    assert "0 of 8" in out
    assert "8 requests were refused" in err


def test_a_negative_seed_is_refused(capsys, trace):
    assert "seed is -1" in refused(capsys, "demo", "--seed", -1)
    assert "seed is -1" in refused(capsys, "replay", trace, "--seed", -1)


def test_wrong_attention_is_a_failure(capsys, trace, monkeypatch):
    write = PagedKVCache.write
    monkeypatch.setattr(PagedKVCache, "write", lambda self, layer, k, v, batch: write(self, layer, 0 * k, 0 * v, batch))
    code, _, err = call(capsys, "replay", trace, "--blocks", 30, "--attend")
    assert code == 1
    assert "differs from float64" in err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--block-size", "0"], "block_size is 0"),
        (["--blocks", "-1"], "blocks is -1"),
        (["--blocks", "many"], "'many' is neither a number nor 'unbounded'"),
        (["--blocks", "1.5"], "'1.5' is neither a number nor 'unbounded'"),
        (["--memory", "1GiB", "--blocks", "unbounded"], "not allowed with"),
        (["--max-running", "0"], "max_running is 0"),
        (["--requests", "-5"], "requests is -5"),
        (["--memory", "1GiB", "--blocks", "5"], "not allowed with"),
        (["--memory", "12 parsecs"], "12 parsecs"),
        (["--memory", "1"], "two blocks"),
        (["--swap-memory", "1"], "two blocks"),
        (["--swap-memory", "a lot"], "a lot"),
        (["--bytes-per-token", "-1"], "bytes_per_token is -1"),
        (["--evict", "random"], "evict is 'random'; use one of lru"),
        (["--evict", "priority"], "evict is 'priority'"),
        (["--evict", "slru:2"], "evict is 'slru:2'; the share after 'slru:' is a number from 0 to 1"),
    ],
)
def test_bad_options_are_refused_in_one_line(capsys, trace, options, reason):
    assert reason in refused(capsys, "replay", trace, *options)


def test_a_bad_trace_is_refused_in_one_line(capsys, tmp_path):
    assert "No such file" in refused(capsys, "replay", tmp_path / "none.jsonl")
    assert "Is a directory" in refused(capsys, "replay", tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0}\n')
    assert "line 1: field 'input_length' is missing" in refused(capsys, "replay", bad)


def test_a_report_that_cannot_be_written_is_refused_before_the_replay(capsys, tmp_path, trace, monkeypatch):
    monkeypatch.setattr("pagecore.serving.replay.replay", lambda *arguments: pytest.fail("it was replayed"))
    assert "is a folder" in refused(capsys, "replay", trace, "--json", tmp_path)
    assert "does not exist; create it first" in refused(capsys, "replay", trace, "--json", tmp_path / "no" / "out.json")
    for option in ("--json", "--plot"):
        for name in ("\0", "\ud800"):
            assert f"{option} {name!r} is not a valid path" in refused(capsys, "replay", trace, option, name)
