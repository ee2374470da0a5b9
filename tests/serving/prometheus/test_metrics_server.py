"""Arguments of the exporter and its server that are refused, scrapes while the scheduler runs, and the dashboard."""

import builtins
import json
import re
import socket
import threading
import urllib.request
from pathlib import Path

import pytest

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.serving.prometheus import Exporter, MetricsServer, PortError
from pagecore.serving.prometheus.families import FAMILIES
from tests.capabilities import missing, require
from tests.serving.prometheus.kit import SPEC, STATES, Tiers, samples, scheduler, scraped, used_scheduler
from tests.serving.runs import drain, request
from tests.together import together

client = require("prometheus_client")
parser = require("prometheus_client.parser")

DASHBOARD = Path(__file__).parents[3] / "examples/grafana_dashboard.json"


def test_a_registry_takes_one_exporter_until_it_is_closed():
    registry = client.CollectorRegistry()
    first = Exporter(scheduler(), registry)
    second = scheduler()
    with pytest.raises(UnsupportedOption, match="a registry of its own"):
        Exporter(second, registry)
    first.close()
    first.close()
    with Exporter(second, registry):  # the refused one left no trace
        assert samples(registry)
    assert samples(registry) == {}


def test_the_default_registry_is_that_of_the_process():
    made = used_scheduler()
    with Exporter(made):
        assert client.REGISTRY.get_sample_value("pagecore_running") == 1
    assert client.REGISTRY.get_sample_value("pagecore_running") is None


@together(
    ("options", "reason"),
    [
        ({"names": "sg"}, "names has 'sg'"),
        ({"names": []}, "names is empty"),
        ({"names": None}, "names is None"),
        ({"names": [["vllm"]]}, "names has"),
        ({"labels": True}, "labels is True; expected a mapping"),
        ({"labels": {"le": "1"}}, "label 'le'"),
        ({"labels": {"direction": "1"}}, "label 'direction'"),
        ({"labels": {"a-b": "1"}}, "label 'a-b'"),
        ({"labels": {"__name__": "1"}}, "label '__name__'"),
        ({"labels": {"engine": 0}}, "expected a string"),
        ({"tiers": 3}, "method stats"),
        ({"block_share": 1.5}, "between 0 and 1"),
        ({"block_share": float("nan")}, "between 0 and 1"),
        ({"registry": "r"}, "CollectorRegistry"),
    ],
)
def test_arguments_are_refused_with_a_reason(options, reason):
    made = scheduler()
    with pytest.raises(UnsupportedOption, match=reason):
        Exporter(made, **{"registry": client.CollectorRegistry()} | options)
    assert not made.cache._parts.prefix.is_watched


def test_what_is_not_a_scheduler_is_refused():
    with pytest.raises(UnsupportedOption, match="Scheduler"):
        Exporter(scheduler().cache)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    def refuse(name, *arguments):
        if name == "prometheus_client":
            raise ImportError(name)
        return imported(name, *arguments)

    imported = builtins.__import__
    made = scheduler()
    monkeypatch.setattr(builtins, "__import__", refuse)
    for make in (lambda: Exporter(made), lambda: MetricsServer(None, 0)):
        with pytest.raises(UnsupportedOption, match=r"pip install 'pagecore\[metrics\]'"):
            make()


def scrape(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def test_scrapes_from_other_threads_while_the_scheduler_runs():
    made = scheduler()
    registry = client.CollectorRegistry()
    done = threading.Event()
    failures, bodies = [], []

    def scrape_until_done(url):
        while not done.is_set():
            try:
                bodies.append(scrape(url))
            except Exception as error:
                failures.append(error)
                return

    with Exporter(made, registry, block_share=1), MetricsServer(registry, 0) as server:
        thread = threading.Thread(target=scrape_until_done, args=(server.url,))
        thread.start()
        try:
            for number in range(60):
                made.add(request(number, 24, 12, shared=12))
            finished = drain(made)
        finally:
            done.set()
            thread.join()
        last = scrape(server.url)
    assert len(finished) == 60
    assert failures == []
    assert f"vllm:num_preemptions_total {float(made.num_preemptions)}" in last
    made.check_invariants()
    made.cache.check_invariants()


def test_a_port_in_use_is_refused():
    registry = client.CollectorRegistry()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=f"port {port} of 127.0.0.1 .*: Address already in use; use another port"):
            MetricsServer(registry, port)


ADDRESSES = ["x" * 100, "\ud800", "127.0.0.1:80", "host.invalid", "192.0.2.1"]  # the last one is of no machine


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_is_not_of_this_machine_is_refused(address):
    with pytest.raises(PortError, match="; use an address of this machine, such as '127"):
        MetricsServer(client.CollectorRegistry(), 0, address)


def test_the_url_of_an_ipv6_address_has_brackets():
    try:
        server = MetricsServer(client.CollectorRegistry(), 0, "::1")
    except PortError as error:
        missing("ipv6", str(error))
    with server:
        assert server.url == f"http://[::1]:{server.port}/metrics"
        assert scrape(server.url) == ""


def test_a_server_leaves_no_thread_and_frees_its_port():
    threads = threading.active_count()
    server = MetricsServer(client.CollectorRegistry(), 0)
    assert scrape(server.url) == ""
    server.close()
    server.close()
    assert threading.active_count() == threads
    MetricsServer(client.CollectorRegistry(), server.port).close()


@pytest.mark.parametrize(("port", "error"), [(-1, ShapeError), (65536, ShapeError), ("9400", ShapeError)])
def test_ports_outside_their_range_are_refused(port, error):
    with pytest.raises(error, match="port"):
        MetricsServer(client.CollectorRegistry(), port)
    with pytest.raises(UnsupportedOption, match="registry"):
        MetricsServer(None, 0)


def metric_names(expression):
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", expression)
    return set(re.findall(r"\b(?:pagecore_|vllm:|sglang:)\w+", bare))


def test_every_metric_of_the_dashboard_exists():
    exported = {key[0] for key in scraped(scheduler([SPEC, STATES], num_states=9), tiers=Tiers(CPU=1))}
    targets = [target for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    queried = set().union(*(metric_names(target["expr"]) for target in targets))
    assert all(metric_names(target["expr"]) for target in targets)
    assert queried <= exported
    assert len(queried) >= 10


def test_names_of_families_are_unique_and_known():
    names = [family.name for families in FAMILIES.values() for family in families]
    assert len(names) == len(set(names))
    for name in (
        *("vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"),
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions"),
        *("sglang:token_usage", "sglang:cache_hit_rate", "sglang:new_token_ratio"),
        *("vllm:kv_block_lifetime_seconds", "vllm:kv_block_idle_before_evict_seconds"),
        *("vllm:kv_block_reuse_gap_seconds", "vllm:spec_decode_num_accepted_tokens_per_pos"),
        *("sglang:spec_accept_length", "sglang:spec_accept_rate"),
    ):
        assert name in names
