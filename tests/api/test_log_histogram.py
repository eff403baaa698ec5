"""The histogram of the log against the numbers themselves, sorted and counted by hand."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_comm.comms_log.histogram import (
    LARGEST,
    MOST_BUCKETS,
    RELATIVE_ERROR,
    SMALLEST,
    Histogram,
)
from deepspeed_comm.comms_log.summary import trimmed_mean

# At the edge of a bucket the logarithm may round to either side.
BOUND = RELATIVE_ERROR + 1e-9

numbers = st.lists(st.floats(SMALLEST, LARGEST / 2), min_size=1, max_size=200)
# As calls are: most alike, with some that waited.
latencies = st.lists(
    st.one_of(st.floats(0.004, 0.006), st.floats(0.001, 1000.0)), min_size=1, max_size=300
)


def histogram_of(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram


@settings(deadline=None)
@given(st.one_of(numbers, latencies), st.floats(0, 100))
def test_percentiles_are_within_error_bound(values: list[float], percent: float) -> None:
    ranked = sorted(values)
    exact = ranked[max(0, math.ceil(len(values) * percent / 100) - 1)]
    assert histogram_of(values).percentile(percent) == pytest.approx(exact, rel=BOUND)


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=99).filter(lambda v: len(v) % 2))
def test_median_matches_statistics_module(values: list[float]) -> None:
    median = histogram_of(values).percentile(50)
    assert median == pytest.approx(statistics.median(values), rel=BOUND)


@settings(deadline=None)
@given(st.one_of(numbers, latencies))
def test_means_are_within_error_bound(values: list[float]) -> None:
    histogram = histogram_of(values)
    assert (histogram.count, histogram.total) == (len(values), pytest.approx(sum(values)))
    assert histogram.trimmed_mean(0.1) == pytest.approx(trimmed_mean(values), rel=BOUND)
    assert histogram.trimmed_mean(0) == pytest.approx(statistics.fmean(values))


@settings(deadline=None)
@given(st.floats(SMALLEST, LARGEST / 2))
def test_numbers_differing_by_error_bound_are_distinguished(value: float) -> None:
    """p99 is one of the 1,000 equal numbers, p100 the one that is larger by the error bound."""
    above = value * (1 + BOUND)
    histogram = histogram_of([value] * 1000 + [above])
    assert histogram.percentile(99) == pytest.approx(value)
    assert histogram.percentile(100) == pytest.approx(above)


@settings(deadline=None)
@given(st.floats(SMALLEST, LARGEST / 2), st.integers(1, 50))
def test_statistics_of_equal_numbers_are_exact(value: float, count: int) -> None:
    histogram = histogram_of([value] * count)
    answers = [histogram.percentile(percent) for percent in (0, 50, 99, 100)]
    assert [*answers, histogram.trimmed_mean(0.1)] == pytest.approx([value] * 5, rel=1e-12)


def test_percentiles_match_numpy() -> None:
    numpy = pytest.importorskip("numpy", reason="an answer to compare with")
    values = numpy.random.default_rng(0).lognormal(0, 2, 4999)
    histogram = histogram_of(values.tolist())
    for percent in (0, 1, 25, 50, 90, 99, 99.9, 100):
        expected = numpy.percentile(values, percent, method="inverted_cdf")
        assert histogram.percentile(percent) == pytest.approx(expected, rel=BOUND)


def test_memory_is_bounded() -> None:
    histogram = Histogram()
    values = [2.0**exponent for exponent in range(-1000, 1000)]
    values += [0.0, -1.0, math.inf] + [1 + k / 100_000 for k in range(100_000)]
    for value in values:
        histogram.add(value)
    assert histogram.count == len(values)
    assert 100 < histogram.bucket_count() <= MOST_BUCKETS
    assert histogram.percentile(0) <= 0  # what is not positive comes first


def test_empty_histogram_returns_zero() -> None:
    assert Histogram().percentile(50) == Histogram().trimmed_mean(0.1) == 0.0
    with pytest.raises(ValueError, match="percent: expected 0 to 100, got 101"):
        Histogram().percentile(101)
