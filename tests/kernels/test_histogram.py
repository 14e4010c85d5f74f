"""The histogram against lists: exact buckets, and percentiles within their width."""

from __future__ import annotations

import bisect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.kernels.histogram import histogram_bucket, histogram_midpoint, histogram_percentile
from tests import oracle

SUB_BUCKETS = 1 << layout.HISTOGRAM_SUB_BUCKET_BITS
BOUNDS = oracle.bucket_bounds(SUB_BUCKETS, layout.HISTOGRAM_BUCKETS // SUB_BUCKETS - 1)
LARGEST = 2**32 - 1

# As many small values as large ones, and all of an octave's edges.
VALUES = st.integers(0, 31).flatmap(lambda bits: st.integers(max(2**bits - 2, 0), min(2 ** (bits + 1), LARGEST)))


def test_buckets_cover_what_the_layout_has_room_for() -> None:
    assert len(BOUNDS) == layout.HISTOGRAM_BUCKETS
    assert BOUNDS[-1] < 2**32 <= 2 * BOUNDS[-1]
    for bucket, bound in enumerate(BOUNDS):
        assert histogram_bucket(bound) == bucket
        assert bucket == 0 or histogram_bucket(bound - 1) == bucket - 1


@given(VALUES)
def test_bucket_is_the_one_whose_range_holds_the_value(value: int) -> None:
    assert histogram_bucket(value) == bisect.bisect_right(BOUNDS, value) - 1


@given(st.integers(2**32, 2**63 - 1))
def test_what_is_too_large_goes_into_the_last_bucket(value: int) -> None:
    assert histogram_bucket(value) == layout.HISTOGRAM_BUCKETS - 1


@given(st.integers(-(2**63), -1))
def test_what_went_back_in_time_goes_into_the_first_bucket(value: int) -> None:
    assert histogram_bucket(value) == 0


def test_midpoint_lies_in_the_middle_of_its_bucket() -> None:
    for bucket, (low, high) in enumerate(zip(BOUNDS, [*BOUNDS[1:], 2**32], strict=True)):
        assert histogram_midpoint(bucket) == low + (high - low) // 2
        assert histogram_bucket(histogram_midpoint(bucket)) == bucket


@given(st.lists(VALUES, min_size=1, max_size=200), st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.99, 0.999, 1.0]))
def test_percentile_is_within_3_percent(values: list[int], fraction: float) -> None:
    counts = np.zeros(layout.HISTOGRAM_BUCKETS, np.int64)
    for value in values:
        counts[histogram_bucket(value)] += 1
    exact = oracle.percentile(values, fraction)
    assert histogram_percentile(counts, fraction) == pytest.approx(exact, rel=0.032, abs=0.5)


def test_percentile_of_nothing_is_zero() -> None:
    assert histogram_percentile(np.zeros(layout.HISTOGRAM_BUCKETS, np.int64), 0.5) == 0


def test_percentile_of_many_is_exact_in_rank() -> None:
    counts = np.zeros(layout.HISTOGRAM_BUCKETS, np.int64)
    counts[1] = 10**12 - 1
    counts[2] = 10**12 + 1
    assert histogram_percentile(counts, 0.5) == 2
    counts[1] += 1
    assert histogram_percentile(counts, 0.49) == 1
