"""Metrics of a replay on a port."""

import importlib.util
import re
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest

from pagecore.serving import replay as package
from tests.capabilities import require
from tests.cli.command_line import call, refused

# A program that waits for its standard input between the last step of a replay and its report.
PAUSE = """
def report(self):
    print("served", file=sys.stderr, flush=True)
    sys.stdin.readline()
    return end(self)
r._Replay._report = report
from pagecore.cli import main
sys.exit(main())
"""

parser = require("prometheus_client.parser")


def test_a_replay_is_scraped_while_it_runs(capsys, monkeypatch, trace):
    scrapes = []

    def replay_and_scrape(path, options, progress, watchers):
        (url,) = re.findall(r"^metrics at (http://127\.0\.0\.1:\d+/metrics)$", capsys.readouterr().err, re.MULTILINE)

        def scrape(scheduler, metrics):
            with urllib.request.urlopen(url, timeout=60) as answer:
                text = answer.read().decode()
            families = parser.text_string_to_metric_families(text)
            values = {sample.name: sample.value for family in families for sample in family.samples}
            assert values["pagecore_running"] == values["vllm:num_requests_running"] == scheduler.num_running
            assert values["vllm:prefix_cache_queries_total"] == scheduler.reuse.prefix_query_tokens
            scrapes.append(values)

        report = replayed(path, options, progress, [*watchers, scrape])
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert f"pagecore_preemptions_total {float(report.preemptions)}" in answer.read().decode()
        return report

    replayed = package.replay
    monkeypatch.setattr(package, "replay", replay_and_scrape)
    threads = threading.active_count()
    code, out, _ = call(capsys, "replay", trace, "--blocks", 24, "--metrics-port", 0)
    assert code == 0
    assert "prompt tokens" in out
    assert len(scrapes) > 8
    assert scrapes[-1]["pagecore_evicted_blocks_total"] > 0
    assert threading.active_count() == threads


def test_hits_of_tiers_are_served(capsys, monkeypatch, trace):
    pages = []

    def replay_and_scrape(path, options, progress, watchers):
        (url,) = re.findall(r"^metrics at (\S+)$", capsys.readouterr().err, re.MULTILINE)

        def scrape(scheduler, metrics):
            with urllib.request.urlopen(url, timeout=60) as answer:
                pages.append(answer.read().decode())

        return replayed(path, options, progress, [*watchers, scrape])

    replayed = package.replay
    monkeypatch.setattr(package, "replay", replay_and_scrape)
    assert call(capsys, "replay", trace, "--blocks", 24, "--host", "64MiB", "--metrics-port", 0)[0] == 0
    assert 'pagecore_tier_hit_tokens_total{medium="CPU"}' in pages[-1]


@pytest.mark.slow
def test_a_replay_in_a_process_of_its_own_is_scraped_at_the_given_port(trace):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pagecore", "replay", str(trace), "--blocks", "24", "--metrics-port", str(port)]
    code = f"import time, sys, runpy; import pagecore.serving.replay.replayer as r; end = r._Replay._report\n{PAUSE}"
    command[1:3] = ["-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr.readline().decode() == f"metrics at http://127.0.0.1:{port}/metrics\n"
        assert process.stderr.readline() == b"served\n"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        out, _ = process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
    assert b"prompt tokens" in out
    for name in ("vllm:kv_cache_usage_perc", "sglang:token_usage", "pagecore_prefix_hit_tokens_total"):
        assert re.search(rf"^{name} [0-9.e+-]+$", text, re.MULTILINE)
    assert float(re.search(r"^vllm:prefix_cache_queries_total (\S+)$", text, re.MULTILINE)[1]) > 0


def test_a_port_in_use_is_refused_before_the_replay(capsys, monkeypatch, trace):
    monkeypatch.setattr(package, "replay", lambda *arguments: pytest.fail("it was replayed"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = refused(capsys, "replay", trace, "--metrics-port", port)
    assert f"port {port} of 127.0.0.1 cannot be opened: Address already in use; use another port" in error


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_outside_their_range_are_refused(capsys, trace, port):
    assert f"port is {port}" in refused(capsys, "replay", trace, "--metrics-port", port)


def test_without_the_package_the_error_names_the_extra(capsys, monkeypatch, trace):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "prometheus_client" else found(name))
    error = refused(capsys, "replay", trace, "--metrics-port", 0)
    assert "--metrics-port needs prometheus_client" in error
    assert "pip install 'pagecore[metrics]'" in error
