"""Invalid options of the prefix cache are refused and change nothing."""

import pytest

from pagecore import (
    OutOfRows,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from tests.cache.caches import make
from tests.cache.prefixes import ALIKE, computed, kept
from tests.together import together


@together(
    ("options", "error", "match"),
    [
        ({"namespace": []}, UnsupportedDtype, "not hashable"),
        ({"namespace": float("nan")}, UnsupportedDtype, "not equal to itself"),
        ({"spans": [(0, 4, b"a"), (3, 5, b"b")]}, ShapeError, "give disjoint spans"),
        ({"spans": [(0, 4, None)]}, UnsupportedDtype, "digest"),
        ({"max_tokens": -1}, ShapeError, "max_tokens"),
        ({"max_tokens": "4"}, (ShapeError, UnsupportedDtype), "max_tokens"),
        ({"priority": 50}, UnsupportedOption, "'priority'"),
        ({"rank": 1.0}, UnsupportedOption, "'rank'"),
        ({"time_to_live": 5}, UnsupportedOption, "time_to_live"),
    ],
)
def test_invalid_options_are_refused_and_change_nothing(options, error, match):
    cache = make()
    kept(cache, ALIKE[:12])
    before = cache.stats()
    with pytest.raises(error, match=match):
        cache.add_sequence(ALIKE, id="new", **options)
    assert cache.stats() == before
    cache.check_invariants()
    cache.add_sequence(ALIKE, id="new")


def test_missing_rows_are_refused_before_anything_counts_as_used():
    cache = make(max_sequences=1)
    computed(cache, ALIKE[:9])
    before = cache.stats()
    with pytest.raises(OutOfRows):
        cache.add_sequence(ALIKE)
    assert cache.stats() == before
    cache.check_invariants()


@together("spans", [5, [5], [(0, 4)], [(0, 4, None)], [(4, 0, 1)]])
@together("prefix_cache", [True, False])
def test_invalid_spans_are_refused_with_and_without_a_prefix_cache(spans, prefix_cache):
    cache = make(prefix_cache=prefix_cache)
    for call in (cache.add_sequence, cache.match_length):
        with pytest.raises((ShapeError, UnsupportedDtype), match="span"):
            call(ALIKE, spans=spans)
