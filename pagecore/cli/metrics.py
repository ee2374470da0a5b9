"""Metrics of a replay for Prometheus."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pagecore.cli.output import require

if TYPE_CHECKING:
    from pagecore.serving.metrics import Metrics
    from pagecore.serving.pictures import Watcher
    from pagecore.serving.scheduling.scheduler import Scheduler


@contextmanager
def served_metrics(port: int | None) -> Iterator[list[Watcher]]:
    """Open a port for the metrics of a replay, and yield the watchers that fill them; none without a port.

    Scrapes are answered from the first step until the end of the replay.
    """
    if port is None:
        yield []
        return
    require("--metrics-port", "prometheus_client", "metrics")
    from prometheus_client import CollectorRegistry

    from pagecore.serving.prometheus import Exporter, MetricsServer

    registry = CollectorRegistry()
    exporters: list[Exporter] = []

    def attach(scheduler: Scheduler, metrics: Metrics) -> None:
        if not exporters:
            exporters.append(Exporter(scheduler, registry, tiers=metrics.tiers))

    with MetricsServer(registry, port) as server:
        print(f"metrics at {server.url}", file=sys.stderr)
        try:
            yield [attach]
        finally:
            for exporter in exporters:
                exporter.close()
