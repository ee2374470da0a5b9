"""Metrics for Prometheus: an exporter of a scheduler and its cache, and a server that answers scrapes.

They need prometheus-client, the extra "metrics", which is imported when one of them is made.
"""

from pagecore.serving.prometheus.exporter import Exporter
from pagecore.serving.prometheus.server import MetricsServer, PortError

__all__ = ["Exporter", "MetricsServer", "PortError"]
