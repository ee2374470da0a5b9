"""Histograms, series and metrics: precision and bounded memory."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagecore.errors import ShapeError
from pagecore.serving.metrics import Histogram, Metrics, Series


@given(values=st.lists(st.integers(0, 2**40), min_size=1), percent=st.sampled_from([0, 1, 50, 99, 100]))
def test_a_percentile_is_within_one_part_in_128(values, percent):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = int(np.percentile(values, percent, method="inverted_cdf"))
    assert exact <= histogram.percentile(percent) <= exact * (1 + 1 / 128)
    assert histogram.maximum == max(values) == histogram.percentile(100)
    assert histogram.count == len(values)


def test_percentiles_of_an_empty_histogram_are_zero():
    assert Histogram().percentile(50) == 0


@pytest.mark.parametrize("percent", [-1, 101])
def test_a_percentile_outside_its_range_is_refused(percent):
    with pytest.raises(ShapeError):
        Histogram().percentile(percent)


def test_the_memory_of_a_histogram_is_bounded():
    histogram = Histogram()
    for value in np.random.default_rng(0).integers(0, 2**36, 50_000):
        histogram.add(int(value))
    assert len(histogram._buckets) < 37 * 128


@given(values=st.lists(st.floats(0, 1), max_size=200), points=st.sampled_from([2, 4, 8]))
def test_a_series_holds_the_means_of_equal_spans(values, points):
    series = Series(points)
    for value in values:
        series.add(value)
    spans = [values[start : start + series.stride] for start in range(0, len(values), series.stride)]
    assert series.values() == pytest.approx([np.mean(span) for span in spans])
    assert len(series.values()) <= points


@pytest.mark.parametrize("points", [0, 1, 3])
def test_a_series_of_odd_size_is_refused(points):
    with pytest.raises(ShapeError):
        Series(points)


def test_metrics_without_steps_are_zero():
    metrics = Metrics()
    assert metrics.utilization_mean == metrics.fragmentation_mean == metrics.utilization_peak == 0


def observed(*steps):
    """Return metrics of steps: utilization, fragmentation, runs, and totals of evictions, prompt and hit tokens.

    A seventh number is that of the free state slots, of 10.
    """
    metrics = Metrics()
    for used, waste, running, evicted, queries, hits, *free in steps:
        stats = SimpleNamespace(
            utilization=used, fragmentation=waste, num_evicted_blocks=evicted, num_states=10 if free else 0,
            num_free_states=sum(free),
        )  # fmt: skip
        reuse = SimpleNamespace(prefix_query_tokens=queries, prefix_hit_tokens=hits)
        metrics.observe(stats, running=running, waiting=0, reuse=reuse)
    return metrics


def test_metrics_average_over_steps_and_keep_the_peak():
    metrics = observed((0.25, 0.5, 1, 0, 0, 0), (0.75, 0.0, 3, 0, 0, 0), (0.5, 0.1, 2, 0, 0, 0))
    assert metrics.steps == 3
    assert metrics.utilization_mean == pytest.approx(0.5)
    assert metrics.fragmentation_mean == pytest.approx(0.2)
    assert metrics.utilization_peak == 0.75
    assert metrics.running.values() == [1, 3, 2]


def test_metrics_follow_the_state_slots():
    metrics = observed((0, 0, 1, 0, 0, 0, 10), (0, 0, 1, 0, 0, 0, 3), (0, 0, 1, 0, 0, 0, 5))
    assert metrics.states.values() == [0, 0.7, 0.5]
    assert metrics.states_peak == 7
    without = observed((0.5, 0, 1, 0, 0, 0))
    assert (without.states.values(), without.states_peak) == ([0], 0)


def test_metrics_compute_hits_and_evictions_of_each_step_from_totals():
    metrics = observed((0, 0, 0, 3, 100, 0), (0, 0, 0, 3, 100, 0), (0, 0, 0, 10, 150, 40), (0, 0, 0, 11, 160, 50))
    assert metrics.evicted.values() == [3, 0, 7, 1]
    assert metrics.evicted_blocks == 11
    assert metrics.prefix_query.values() == [100, 0, 50, 10]
    assert metrics.prefix_hit_rates() == [0, None, 0.8, 1]


def test_the_hit_rate_of_a_span_weights_tokens_equally():
    steps = [(0, 0, 0, 0, 10 * n, 4 * n) for n in range(1, 257)] + [
        (0, 0, 0, 0, 2560 + 90, 1024),
        (0, 0, 0, 0, 2660, 1124),
    ]
    rates = observed(*steps).prefix_hit_rates()
    assert rates[:-1] == [pytest.approx(0.4)] * 128
    assert rates[-1] == pytest.approx(1.0)
