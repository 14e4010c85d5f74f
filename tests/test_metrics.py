"""The snapshot of all rows, against numpy and plain sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.kernels.histogram import histogram_bucket
from ironbatch.metrics import snapshot

NS_PER_S = 1_000_000_000
FIRST_KEYS = ["elapsed_secs", "tokens_generated", "requests_completed", "tokens_per_sec", "ttft_p50_ms", "ttft_p99_ms"]
LATER_KEYS = [
    "kv_blocks_cached",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "prefix_evicted_blocks",
    "copied_blocks",
    "audits",
    "audit_failures",
    "waited_step_us",
    "waited_slots_us",
    "waited_tokens_us",
    "waited_blocks_us",
    "waited_device_us",
    "requests_timed_out",
    "pieces_without_id",
]
HISTOGRAMS = ("ttft_us", "inter_token_us")
COUNTERS = [name for name in layout.METRICS.names or () if name not in HISTOGRAMS]


def rows(workers: int = 2) -> np.ndarray:  # type: ignore[type-arg]
    return np.zeros(1 + workers, layout.METRICS)


def count(metrics: np.ndarray, row: int, name: str, values_us: list[int]) -> None:  # type: ignore[type-arg]
    for value in values_us:
        metrics[row][name][histogram_bucket(value)] += 1


def test_the_first_keys_in_their_order_and_all_whole() -> None:
    found = snapshot(rows(), NS_PER_S)
    assert list(found)[:6] == FIRST_KEYS
    assert all(type(value) is int for value in found.values())
    assert len(found) == len(set(found))


def test_what_came_later_is_at_the_end() -> None:
    assert list(snapshot(rows(), NS_PER_S))[-len(LATER_KEYS) :] == LATER_KEYS


def test_of_nothing() -> None:
    assert set(snapshot(rows(), 0).values()) == {0}


@given(
    st.lists(st.lists(st.integers(0, 2**53), min_size=len(COUNTERS), max_size=len(COUNTERS)), min_size=2, max_size=6)
)
def test_gauges_are_the_schedulers_and_counters_the_workers_sum(values: list[list[int]]) -> None:
    metrics = rows(len(values) - 1)
    for row, counters in zip(metrics, values, strict=True):
        for name, value in zip(COUNTERS, counters, strict=True):
            row[name] = value
    found = snapshot(metrics, NS_PER_S)
    for name in COUNTERS:
        if name not in found:
            continue
        column = [counters[COUNTERS.index(name)] for counters in values]
        is_workers = (name.startswith("requests_") and name != "requests_lost") or name.endswith("_delivered")
        assert found[name] == (sum(column[1:]) if is_workers else column[0]), name
    assert set(COUNTERS) <= found.keys(), "a counter that nobody can see"


@given(st.integers(0, 2**50), st.integers(0, 2**62))
def test_the_rate_is_over_the_whole_time(tokens: int, elapsed_ns: int) -> None:
    metrics = rows()
    metrics[0]["tokens_generated"] = tokens
    found = snapshot(metrics, elapsed_ns)
    assert found["elapsed_secs"] == elapsed_ns // NS_PER_S
    assert found["tokens_per_sec"] == tokens * NS_PER_S // max(elapsed_ns, 1)


def test_the_rate_has_no_part_of_a_second_less() -> None:
    metrics = rows()
    metrics[0]["tokens_generated"] = 3000
    assert snapshot(metrics, 1_500_000_000)["tokens_per_sec"] == 2000
    assert snapshot(metrics, 500_000_000)["tokens_per_sec"] == 6000


latencies = st.lists(st.integers(0, 2**31) | st.integers(0, 5000), max_size=60)


@settings(max_examples=60)
@given(st.lists(latencies, min_size=1, max_size=4), st.sampled_from(HISTOGRAMS))
def test_percentiles_are_numpys_over_all_workers_together(per_worker: list[list[int]], name: str) -> None:
    metrics = rows(len(per_worker))
    for row, values in enumerate(per_worker, 1):
        count(metrics, row, name, values)
    found = snapshot(metrics, NS_PER_S)
    everything = [value for values in per_worker for value in values]
    shown = name.removesuffix("_us")
    for percent in (50, 90, 99):
        value = found[f"{shown}_p{percent}_us"]
        if not everything:
            assert value == 0
            continue
        exact = int(np.percentile(everything, percent, method="inverted_cdf"))
        assert abs(value - exact) <= exact / 64 + 1, "half a bucket, 1/64 of the value"
    if name == "ttft_us":
        for percent in (50, 99):
            assert found[f"ttft_p{percent}_ms"] == math.floor(found[f"ttft_p{percent}_us"] / 1000 + 0.5)


def test_the_other_histogram_does_not_leak_in() -> None:
    metrics = rows()
    count(metrics, 1, "inter_token_us", [7000] * 10)
    found = snapshot(metrics, NS_PER_S)
    assert found["ttft_p99_ms"] == found["ttft_p50_ms"] == 0
    assert found["inter_token_p50_us"] == pytest.approx(7000, rel=1 / 64)


@pytest.mark.parametrize(("us", "ms"), [(0, 0), (400, 0), (600, 1), (1400, 1), (10_000, 10)])
def test_milliseconds_are_rounded_to_the_nearest(us: int, ms: int) -> None:
    metrics = rows()
    count(metrics, 2, "ttft_us", [us])
    assert snapshot(metrics, 1)["ttft_p50_ms"] == ms


def test_beyond_the_last_bucket_it_is_over_an_hour_whatever_it_was() -> None:
    metrics = rows()
    count(metrics, 2, "ttft_us", [2**40])
    assert snapshot(metrics, 1)["ttft_p50_ms"] == pytest.approx(2**32 / 1000, rel=0.02)


def test_the_schedulers_row_counts_no_latency() -> None:
    metrics = rows()
    count(metrics, 0, "ttft_us", [9000])
    assert snapshot(metrics, 1)["ttft_p50_ms"] == 0


def test_the_rows_are_not_changed() -> None:
    metrics = rows()
    count(metrics, 1, "ttft_us", [5, 500, 50_000])
    before = metrics.tobytes()
    snapshot(metrics, NS_PER_S)
    assert metrics.tobytes() == before
