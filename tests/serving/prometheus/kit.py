"""Schedulers with something to report, and the samples of an exporter."""

from types import SimpleNamespace

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec
from pagecore.serving.prometheus import Exporter
from pagecore.serving.scheduling.scheduler import Scheduler
from tests.capabilities import require
from tests.serving.runs import drain, request

client = require("prometheus_client")
parser = require("prometheus_client.parser")

SPEC = AttentionSpec(1, 8, dtype="float32")
STATES = StateSpec((Plane("state", (1,), "int32", per="sequence"),), chunk=4, interval=8)


class Tiers:
    def __init__(self, **hits):
        self.hits = hits

    def stats(self):
        return SimpleNamespace(hit_tokens=self.hits)


def scheduler(layers=SPEC, num_blocks=24, **options):
    cache = PagedKVCache(layers, block_size=4, num_blocks=num_blocks, max_sequences=8, **options)
    return Scheduler(cache, max_running=8, max_tokens_per_step=64)


def used_scheduler(**options):
    """Return a scheduler after requests that hit, evict and preempt, with one run that has not ended."""
    made = scheduler(**options)
    for number in range(12):
        made.add(request(number, 24, 20, shared=12))
    drain(made)
    made.add(request(99, 20, 30))
    step = made.schedule()
    made.commit(step)
    return made


def samples(registry):
    """Return the value of each sample of an exposition by name and labels."""
    found = {}
    for family in parser.text_string_to_metric_families(client.generate_latest(registry).decode()):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def scraped(made, **options):
    registry = client.CollectorRegistry()
    with Exporter(made, registry, **options):
        return samples(registry)
