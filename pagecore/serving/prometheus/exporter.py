"""Exporter: the metrics of a scheduler and its cache, read when Prometheus scrapes them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from pagecore.cache.inspect.block_life import BlockLives, DurationHistogram
from pagecore.errors import UnsupportedOption
from pagecore.serving.checks import as_instance
from pagecore.serving.metrics import TierSource
from pagecore.serving.prometheus.client import import_client
from pagecore.serving.prometheus.families import FAMILIES, Family, Reading, Value
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage.checks import as_float, shown

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["Exporter"]

LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
# Labels of metrics of their own.
RESERVED = {"le"} | {family.label for families in FAMILIES.values() for family in families if family.label is not None}


class Exporter:
    """Metrics of a scheduler and its cache for Prometheus.

    A scrape reads them, in the thread that answers it: the counts of the scheduler without a lock, and those of the
    cache under its lock. A step does nothing for the exporter except timing sampled blocks, see `BlockLives`.

    Parameters
    ----------
    scheduler : Scheduler
    registry : prometheus_client.CollectorRegistry, optional
        Registry of the metrics; that of the process by default. A registry takes one exporter.
    names : str or sequence of str
        Names of the metrics: any of "vllm", "sglang", whose dashboards then work, and "pagecore".
    labels : mapping of str to str, optional
        Labels of every metric, such as ``{"model_name": "llama", "engine": "0"}``, by which vLLM's dashboards select.
    tiers : optional
        Tiers of the cache: an object whose ``stats()`` has `hit_tokens`, the reused tokens by medium. The fields
        `host`, `requests` and `streams` of `TierStats` are exported if it has them.
    block_share : float
        Share of the blocks whose lives in the prefix cache are timed, 0 to 1; 0 times none.

    Raises
    ------
    UnsupportedOption
        prometheus-client is not installed, an argument is not of its kind, the registry has these metrics already, or
        another exporter times the blocks of this cache. Nothing is registered then.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        registry: CollectorRegistry | None = None,
        *,
        names: str | Sequence[str] = ("vllm", "sglang", "pagecore"),
        labels: Mapping[str, str] | None = None,
        tiers: TierSource | None = None,
        block_share: float = 0.01,
    ) -> None:
        as_instance("scheduler", scheduler, Scheduler)
        self._families = _chosen(names)
        self._labels = _checked_labels({} if labels is None else labels)
        self._tiers = tiers
        if self._tiers is not None and not callable(getattr(self._tiers, "stats", None)):
            raise UnsupportedOption(f"tiers is {shown(self._tiers)}; expected an object with a method stats")
        share = as_float("block_share", block_share)
        if not 0 <= share <= 1:
            raise UnsupportedOption(f"block_share is {share}; expected a number between 0 and 1")
        client = import_client("Exporter")
        self._core = client.core
        self._registry = client.REGISTRY if registry is None else registry
        if not isinstance(self._registry, client.CollectorRegistry):
            raise UnsupportedOption(f"registry is {shown(registry)}; expected a prometheus_client.CollectorRegistry")
        self.scheduler = scheduler
        self._is_open = True
        self._lives = BlockLives(scheduler.cache, share) if share and scheduler.cache.has_prefix_cache else None
        try:
            self._registry.register(self)
        except BaseException as error:
            self._stop_timing()
            if isinstance(error, ValueError):
                raise UnsupportedOption(
                    "the registry has these metrics already; close the other exporter, or use a registry of its own"
                ) from error
            raise

    def close(self) -> None:
        """Remove the metrics from the registry, and end the timing of blocks; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._registry.unregister(self)
            self._stop_timing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without values; the registry finds names that collide by them."""
        for family in self._families:
            yield self._made(family)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their values, without those that do not apply; from any thread."""
        reading = self._read()
        for family in self._families:
            value = family.value(reading)
            if value is not None:
                yield self._filled(family, value)

    def _read(self) -> Reading:
        tiers = None if self._tiers is None else self._tiers.stats()
        return Reading(
            figures=self.scheduler.figures(),
            stats=self.scheduler.cache.stats(),
            lives={} if self._lives is None else self._lives.read(),
            hit_tokens={} if tiers is None else dict(tiers.hit_tokens),
            host=getattr(tiers, "host", None),
            requests=getattr(tiers, "requests", None),
            streams=getattr(tiers, "streams", None),
        )

    def _made(self, family: Family) -> Any:
        labels = [*self._labels, *([] if family.label is None else [family.label])]
        kinds = {
            "gauge": self._core.GaugeMetricFamily,
            "counter": self._core.CounterMetricFamily,
            "histogram": self._core.HistogramMetricFamily,
        }
        return kinds[family.kind](family.name, family.help, labels=labels)

    def _filled(self, family: Family, value: Value) -> Metric:
        made = self._made(family)
        labels = list(self._labels.values())
        if isinstance(value, DurationHistogram):
            buckets = [("+Inf" if math.isinf(bound) else repr(bound), count) for bound, count in value.buckets]
            made.add_metric(labels, buckets, value.total_s)
        elif isinstance(value, Mapping):
            for name, number in value.items():
                made.add_metric([*labels, name], number)
        else:
            made.add_metric(labels, value)
        metric: Metric = made
        return metric

    def _stop_timing(self) -> None:
        if self._lives is not None:
            self._lives.close()


def _chosen(names: str | Sequence[str]) -> list[Family]:
    try:
        listed = [names] if isinstance(names, str) else list(names)
    except TypeError:
        raise UnsupportedOption(f"names is {shown(names)}; expected any of {', '.join(FAMILIES)}") from None
    if not listed:
        raise UnsupportedOption(f"names is empty; expected any of {', '.join(FAMILIES)}")
    for name in listed:
        if not isinstance(name, str) or name not in FAMILIES:
            raise UnsupportedOption(f"names has {name!r}; expected any of {', '.join(FAMILIES)}")
    return [family for name in dict.fromkeys(listed) for family in FAMILIES[name]]


def _checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(labels, Mapping):
        raise UnsupportedOption(f"labels is {shown(labels)}; expected a mapping of names to texts")
    for name, value in labels.items():
        if not isinstance(name, str) or LABEL.fullmatch(name) is None or name in RESERVED:
            raise UnsupportedOption(
                f"label {name!r} is not a name that Prometheus allows, or is one of {', '.join(sorted(RESERVED))}"
            )
        if not isinstance(value, str):
            raise UnsupportedOption(f"label {name!r} is {value!r}; expected a string")
    return dict(labels)
